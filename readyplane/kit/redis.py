"""One way to connect to Redis or Valkey, and the check that it never evicts what is alive.

Hands a client with bounded waits to the stores; the stores turn its errors into `Unavailable`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from readyplane.core.errors import InvalidField, Refused, Unavailable
from readyplane.kit.telemetry import mask_url

CONNECT_TIMEOUT_S = 2.0
CALL_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 64


def connect(url: str) -> redis.asyncio.Redis:
    """A client for `redis://`, `rediss://` or `unix://`; connects at the first command.

    Values come back as bytes. A command waits `CALL_TIMEOUT_S` at most, so a blocking read
    (`XREAD BLOCK`) must ask for less than that.

    Raises:
        InvalidField: `redis_url` is empty or malformed.
    """
    remedy = "write redis://host:port/0, rediss://… or unix://path"
    if not url:
        raise InvalidField("redis_url", url, remedy)
    try:
        return redis.asyncio.Redis.from_url(
            url,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=CALL_TIMEOUT_S,
            socket_keepalive=True,
            health_check_interval=15,
            max_connections=CONNECTIONS_MAX,
            # A command whose answer was lost may have been done: whoever knows whether it may be
            # done twice repeats it. (A connection found closed is replaced before it is used.)
            retry=Retry(NoBackoff(), 0),
            client_name="readyplane",
        )
    except ValueError as error:
        raise InvalidField("redis_url", mask_url(url), f"{remedy} ({error})") from error


@contextlib.contextmanager
def redis_errors(what: str = "Redis") -> Iterator[None]:
    """Turn an unreachable or refusing store into `Unavailable`, with its own words."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise Unavailable(
            f"{what} does not answer ({type(error).__name__}: {mask_url(str(error))})",
            "check that it runs and that redis_url points at it",
        ) from error


async def check_eviction(client: redis.asyncio.Redis) -> None:
    """Refuse a store that may throw leases and reservations away (field report B151).

    Raises:
        Refused: `maxmemory-policy` is anything but `noeviction`.
        Unavailable: the store cannot be reached.
    """
    with redis_errors():
        memory = await client.info("memory")
    policy = memory.get("maxmemory_policy", "noeviction")
    policy = policy.decode() if isinstance(policy, bytes) else str(policy)
    if policy != "noeviction":
        raise Refused(
            "Redis as the store of leases",
            [f"its maxmemory-policy is {policy}, which evicts live keys when memory is full"],
            "set maxmemory-policy to noeviction",
        )
