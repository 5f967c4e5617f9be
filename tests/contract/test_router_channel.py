"""Many calls over one connection: each gets its own answer, whatever becomes of the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from readyplane.kit.redis import Bounded, connect
from readyplane_router.channel import Channel


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    found = connect(redis_url)
    yield found
    await found.aclose()


@pytest.fixture
async def channel(client: Redis) -> AsyncIterator[Channel]:
    found = Channel(client, silent_s=2.0)
    yield found
    await found.aclose()


async def test_calls_under_way_together_get_their_own_answers(channel: Channel) -> None:
    words = [f"word {n}" for n in range(200)]
    calls = [channel.call("ECHO", word) for word in words]
    refused = channel.call("NO-SUCH-COMMAND")
    answers = await asyncio.gather(*calls[:100], refused, *calls[100:], return_exceptions=True)
    error = answers.pop(100)
    assert isinstance(error, ResponseError)
    assert answers == [word.encode() for word in words]


async def test_an_answer_that_nobody_waits_for_goes_to_nobody_else(channel: Channel) -> None:
    await channel.call("PING")
    given_up = asyncio.create_task(channel.call("ECHO", "given up"))
    await asyncio.sleep(0)
    given_up.cancel()
    assert await channel.call("ECHO", "wanted") == b"wanted"
    assert given_up.cancelled()


async def test_a_lost_connection_fails_its_calls_and_the_next_one_opens_another(
    channel: Channel, client: Redis
) -> None:
    number = await channel.call("CLIENT", "ID")
    waiting = asyncio.create_task(channel.call("BLPOP", "never-there", "0"))
    await asyncio.sleep(0.05)
    await client.client_kill_filter(_id=str(number))
    with pytest.raises((RedisError, OSError)):
        await waiting
    assert await channel.call("CLIENT", "ID") > number


async def test_a_silent_connection_is_given_up(client: Redis) -> None:
    channel = Channel(client, silent_s=0.2)
    number = await channel.call("CLIENT", "ID")
    silent = asyncio.create_task(channel.call("BLPOP", "never-there", "0"))
    behind = asyncio.create_task(channel.call("PING"))
    await asyncio.wait([silent, behind])
    assert isinstance(silent.exception(), TimeoutError)
    assert isinstance(behind.exception(), TimeoutError | RedisError)
    assert await channel.call("CLIENT", "ID") > number
    await channel.aclose()
    assert await channel.call("PING") == b"PONG"
    await channel.aclose()


async def test_a_server_in_another_life_is_not_called(client: Redis, redis_url: str) -> None:
    """A store that was restarted is first told who is alive; until then it compares with nothing."""
    channel = Channel(client, silent_s=2.0)
    channel.life = "another"
    with pytest.raises(RedisError, match="another life"):
        await channel.call("PING")
    channel.life = (await client.info("server"))["run_id"]
    assert await channel.call("PING") == b"PONG"
    await channel.aclose()


async def test_a_busy_process_does_not_take_its_own_lateness_for_silence() -> None:
    """The answer lies there, unread: a router that is starved has not lost its store."""
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with Bounded(0.1):
            await asyncio.sleep(5.0)
    assert time.monotonic() - began_s < 2.0
    async with Bounded(0.1):  # late itself: as much time again
        loop = asyncio.get_running_loop()
        loop.call_soon(time.sleep, 0.3)
        await asyncio.sleep(0.32)
