"""One suite for both stores of routers' signals: one value of each that lives, kept for its time."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from readyplane.kit.clock import SystemClock
from readyplane.kit.redis import connect
from readyplane_router.redis import RedisStore
from readyplane_router.store import MemoryStore, Store

TTL_S = 0.2


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore(SystemClock(), shared=True)
        return
    client = connect(request.getfixturevalue("redis_url"))
    await client.flushall()
    made = RedisStore(client, call_timeout_s=5.0)
    yield made
    await made.aclose()


async def test_of_each_router_that_lives_its_last_word_is_kept_for_its_time(store: Store) -> None:
    assert await store.signals() == {}
    await store.put_signals("a", b"not attended", ttl_s=60.0)
    assert await store.signals() == {}, "it does not live"
    await store.attend("a", ttl_s=60.0)
    await store.attend("b", ttl_s=60.0)
    await store.put_signals("a", b"\x00one", ttl_s=60.0)
    await store.put_signals("a", b"\x00two", ttl_s=30.0)
    kept = await store.signals()
    assert kept.keys() == {"a", "b"} and kept["b"] is None, "it has not told yet"
    told = kept["a"]
    assert told is not None and told[0] == b"\x00two" and 25.0 < told[1] <= 30.0
    await store.put_signals("a", b"three", ttl_s=TTL_S)
    await store.attend("b", ttl_s=TTL_S)
    await asyncio.sleep(2 * TTL_S)
    assert await store.signals() == {"a": None}, "its value has run out, the other one has gone"
