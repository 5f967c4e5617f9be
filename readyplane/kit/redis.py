"""One way to connect to Redis or Valkey, and the check that it never evicts what is alive.

Hands a client with bounded waits to the stores; the stores turn its errors into `Unavailable`. One
server, a master found by Sentinel, or a cluster: what the address says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, cast
from urllib.parse import SplitResult, unquote, urlsplit

import redis.asyncio
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from readyplane.core.errors import InvalidField, Refused, Unavailable
from readyplane.kit.clock import Clock, SystemClock
from readyplane.kit.telemetry import mask_url

CONNECT_TIMEOUT_S = 2.0
CALL_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 64
LATE_S, EXTENDED_MAX = 0.05, 3
PORT, SENTINEL_PORT = 6379, 26379
REMEDY = (
    "write redis://host:port/0, rediss://…, unix://path, redis+sentinel://host:port,…/master/0 or "
    "redis+cluster://host:port,… (rediss+… with TLS)"
)


def connect(url: str) -> redis.asyncio.Redis:
    """A client for what `url` names; connects at the first command.

    Values come back as bytes. A command waits `CALL_TIMEOUT_S` at most, so a blocking read
    (`XREAD BLOCK`) must ask for less than that.

    Args:
        url: `redis://`, `rediss://` or `unix://` for one server;
            `redis+sentinel://user:password@host:port,host:port/master/0` for the master that those
            Sentinels name; `redis+cluster://user:password@host:port,host:port` for a cluster, by
            some of its nodes. `rediss+sentinel`, `rediss+cluster`: with TLS.

    Raises:
        InvalidField: `redis_url` is empty or malformed.
    """
    if not url:
        raise InvalidField("redis_url", url, REMEDY)
    try:
        scheme = urlsplit(url).scheme
        if scheme in ("redis+sentinel", "rediss+sentinel"):
            return _by_sentinel(urlsplit(url), _options())
        if scheme in ("redis+cluster", "rediss+cluster"):
            return _of_cluster(urlsplit(url), _options())
        return redis.asyncio.Redis.from_url(url, max_connections=CONNECTIONS_MAX, **_options())
    except ValueError as error:
        raise InvalidField("redis_url", mask_url(url), f"{REMEDY} ({error})") from error


def is_cluster(client: redis.asyncio.Redis) -> bool:
    """Whether keys of different slots may be on different servers."""
    return isinstance(client, RedisCluster)


def _options() -> dict[str, Any]:
    return {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": CALL_TIMEOUT_S,
        "socket_keepalive": True,
        "health_check_interval": 15,
        # A command whose answer was lost may have been done: whoever knows whether it may be
        # done twice repeats it. (A connection found closed is replaced before it is used.)
        "retry": Retry(NoBackoff(), 0),
        "client_name": "readyplane",
    }


class _OfSentinel(redis.asyncio.Redis):
    """A client of the master of the moment; it closes what asks for it, too."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close the connections to master and Sentinels."""
        await super().aclose(close_connection_pool)
        manager = self.connection_pool.sentinel_manager  # type: ignore[attr-defined]
        for sentinel in manager.sentinels:
            await sentinel.aclose()


def _by_sentinel(url: SplitResult, options: dict[str, Any]) -> redis.asyncio.Redis:
    parts = [part for part in url.path.split("/") if part]
    if not 1 <= len(parts) <= 2:
        message = "name the master that the Sentinels watch, then the database"
        raise ValueError(message)
    login = _login(url) | ({"ssl": True} if url.scheme.startswith("rediss") else {})
    shared = {k: v for k, v in options.items() if k.startswith("socket_") or k == "retry"}
    manager = Sentinel(  # type: ignore[no-untyped-call]
        _hosts(url, SENTINEL_PORT),
        sentinel_kwargs=shared | login,
        **options,
        **login,
        db=int(parts[1]) if len(parts) > 1 else 0,
        max_connections=CONNECTIONS_MAX,
    )
    return cast("redis.asyncio.Redis", manager.master_for(parts[0], redis_class=_OfSentinel))


def _of_cluster(url: SplitResult, options: dict[str, Any]) -> redis.asyncio.Redis:
    if url.path not in ("", "/", "/0"):
        message = "a cluster has database 0 only"
        raise ValueError(message)
    nodes = [ClusterNode(host, port) for host, port in _hosts(url, PORT)]
    made = RedisCluster(
        startup_nodes=nodes,
        ssl=url.scheme.startswith("rediss"),
        max_connections=CONNECTIONS_MAX,
        **options,
        **_login(url),
    )
    return cast("redis.asyncio.Redis", made)  # the same commands, sent to the node of the key


def _login(url: SplitResult) -> dict[str, Any]:
    given = {"username": url.username, "password": url.password}
    return {name: unquote(value) for name, value in given.items() if value}


def _hosts(url: SplitResult, port: int) -> list[tuple[str, int]]:
    out = []
    for part in url.netloc.rpartition("@")[2].split(","):
        parsed = urlsplit(f"//{part}")
        if not parsed.hostname:
            message = f"{part!r} names no host"
            raise ValueError(message)
        out.append((parsed.hostname, parsed.port or port))
    return out


class Bounded:
    """`asyncio.timeout`, which does not take this process's own lateness for the store's silence.

    When the loop was too busy to look in time, the answer may lie there unread: so long as that is
    so, and `EXTENDED_MAX` times at most, there is as much time again.
    """

    __slots__ = ("_clock", "_due_s", "_extended", "_loop", "_seconds", "_timeout", "_timer")

    def __init__(self, seconds: float, clock: Clock | None = None) -> None:
        self._seconds, self._extended = seconds, 0
        self._clock = clock or SystemClock()
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        """Time runs from here."""
        await self._timeout.__aenter__()
        self._wait()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raises TimeoutError where it has run out."""
        self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _wait(self) -> None:
        self._due_s = self._clock.monotonic_s() + self._seconds
        self._timer = self._loop.call_later(self._seconds, self._over)

    def _over(self) -> None:
        late_s = self._clock.monotonic_s() - self._due_s
        if late_s > LATE_S and self._extended < EXTENDED_MAX:
            self._extended += 1
            self._wait()
        else:
            self._timeout.reschedule(0.0)  # now


@contextlib.contextmanager
def redis_errors(what: str = "Redis") -> Iterator[None]:
    """Turn an unreachable or refusing store into `Unavailable`, with its own words."""
    try:
        yield
    except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
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
        found = await facts_of(client, "memory")
    policies = {str(memory.get("maxmemory_policy", "noeviction")) for memory in found}
    for policy in policies - {"noeviction"}:
        raise Refused(
            "Redis as the store of leases",
            [f"its maxmemory-policy is {policy}, which evicts live keys when memory is full"],
            "set maxmemory-policy to noeviction",
        )


async def facts_of(client: redis.asyncio.Redis, section: str) -> list[dict[str, Any]]:
    """A section of INFO from each server that is written to, in a fixed order."""
    if not is_cluster(client):
        return [await client.info(section)]
    found = await client.info(section, target_nodes=RedisCluster.PRIMARIES)
    one = not isinstance(next(iter(found.values()), None), dict)
    return [found] if one else [found[name] for name in sorted(found)]
