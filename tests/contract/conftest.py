"""Both stores that routers share, by the real clock: what one suite plays on each."""

from collections.abc import AsyncIterator

import pytest

from readyplane.kit.clock import SystemClock
from readyplane.kit.redis import connect
from readyplane_router.redis import RedisStore
from readyplane_router.store import MemoryStore, Store


@pytest.fixture(params=["memory", "redis"])
async def shared_store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore(SystemClock(), shared=True)
        return
    client = connect(request.getfixturevalue("redis_url"))
    await client.flushall()
    made = RedisStore(client, call_timeout_s=5.0)
    yield made
    await made.aclose()
