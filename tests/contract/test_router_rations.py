"""One suite for both stores of an order of admission: one for each model, kept for its time."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from readyplane.kit.clock import SystemClock
from readyplane.kit.redis import connect
from readyplane_router.ration_store import RationStore
from readyplane_router.redis import RedisStore
from readyplane_router.store import MemoryStore

TTL_S = 0.2


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[RationStore]:
    if request.param == "memory":
        yield MemoryStore(SystemClock(), shared=True)
        return
    client = connect(request.getfixturevalue("redis_url"))
    await client.flushall()
    made = RedisStore(client, call_timeout_s=5.0)
    yield made
    await made.aclose()


async def test_an_order_is_kept_for_its_time_and_the_newest_takes_its_place(
    store: RationStore,
) -> None:
    assert await store.ration("demo") is None
    await store.put_ration("demo", b"one", ttl_s=60.0)
    await store.put_ration("demo", b"two", ttl_s=30.0)
    kept = await store.ration("demo")
    assert kept is not None and kept[0] == b"two" and 25.0 < kept[1] <= 30.0
    assert await store.ration("other") is None
    await store.put_ration("demo", b"three", ttl_s=TTL_S)
    await asyncio.sleep(2 * TTL_S)
    assert await store.ration("demo") is None
