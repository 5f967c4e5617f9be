"""One suite for both stores of routers' signals: one value of each that lives, kept for its time."""

import asyncio

from readyplane_router.store import Store

TTL_S = 0.2


async def test_of_each_router_that_lives_its_last_word_is_kept_for_its_time(
    shared_store: Store,
) -> None:
    assert await shared_store.signals() == {}
    await shared_store.put_signals("a", b"not attended", ttl_s=60.0)
    assert await shared_store.signals() == {}, "it does not live"
    await shared_store.attend("a", ttl_s=60.0)
    await shared_store.attend("b", ttl_s=60.0)
    await shared_store.put_signals("a", b"\x00one", ttl_s=60.0)
    await shared_store.put_signals("a", b"\x00two", ttl_s=30.0)
    kept = await shared_store.signals()
    assert kept.keys() == {"a", "b"} and kept["b"] is None, "it has not told yet"
    told = kept["a"]
    assert told is not None and told[0] == b"\x00two" and 25.0 < told[1] <= 30.0
    await shared_store.put_signals("a", b"three", ttl_s=TTL_S)
    await shared_store.attend("b", ttl_s=TTL_S)
    await asyncio.sleep(2 * TTL_S)
    assert await shared_store.signals() == {"a": None}, (
        "its value has run out, the other one has gone"
    )
    assert await shared_store.attend("a", ttl_s=0.0) == 0
    assert await shared_store.signals() == {}, "it has ended"
