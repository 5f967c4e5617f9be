"""One suite for both stores of an order of admission: one for each model, kept for its time."""

import asyncio

from readyplane_router.ration_store import RationStore

TTL_S = 0.2


async def test_an_order_is_kept_for_its_time_and_the_newest_takes_its_place(
    shared_store: RationStore,
) -> None:
    assert await shared_store.ration("demo") is None
    await shared_store.put_ration("demo", b"one", ttl_s=60.0)
    await shared_store.put_ration("demo", b"two", ttl_s=30.0)
    kept = await shared_store.ration("demo")
    assert kept is not None and kept[0] == b"two" and 25.0 < kept[1] <= 30.0
    assert await shared_store.ration("other") is None
    await shared_store.put_ration("demo", b"three", ttl_s=TTL_S)
    await asyncio.sleep(2 * TTL_S)
    assert await shared_store.ration("demo") is None
