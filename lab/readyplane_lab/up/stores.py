"""Postgres and Redis for a local stack: those that were given by address, else our own.

Owns the choice between the two, and the check of what was given. Hands two URLs to `readyplane up`,
and what must be stopped afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import asyncpg
import redis.asyncio
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError, ResponseError
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from readyplane.core.errors import InvalidField, Unavailable
from readyplane.kit.database import async_engine
from readyplane.kit.redis import check_eviction, connect
from readyplane.kit.telemetry import mask_url
from readyplane_lab.up.postgres_server import EmbeddedPostgres
from readyplane_lab.up.redis_server import EmbeddedRedis

__all__ = [
    "EmbeddedPostgres",
    "EmbeddedRedis",
    "Stores",
    "check_database",
    "check_redis",
    "connect_or_embed",
]

REDIS_OLDEST = (7, 0)
GIVEN_ANSWERS_S_MAX = 10.0
POLL_EVERY_S = 0.2
REVIVALS_MAX = 20
REVIVAL_TRIES_MAX = 5
REVIVAL_PAUSE_S = 0.5
LOG_FILES = ("postgres.log", "redis.log")
SQLSTATE_STARTING = "57P03"  # cannot_connect_now

log = logging.getLogger(__name__)


class Stores:
    """Both stores of a run: `database_url` and `redis_url`, whoever serves them.

    `postgres` and `redis` are None where an address was given. An embedded server that ends by
    itself is started again at the same address, a bounded number of times, and each time with
    `REVIVAL_TRIES_MAX` tries; Redis comes back empty. Beyond that, `gave_up` is called with a sentence.
    """

    def __init__(
        self,
        postgres: EmbeddedPostgres | str,
        redis: EmbeddedRedis | str,
        *,
        gave_up: Callable[[str], None] | None = None,
    ) -> None:
        self.postgres = None if isinstance(postgres, str) else postgres
        self.redis = None if isinstance(redis, str) else redis
        self.database_url = postgres if isinstance(postgres, str) else ""
        self.redis_url = redis if isinstance(redis, str) else ""
        self._gave_up = gave_up
        self._revivals: dict[str, int] = {}
        self._reviving: set[asyncio.Task[None]] = set()
        for server in self._servers():
            server.on_exit = self._ended

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Bring both up side by side; if one fails, the other is stopped as well."""
        tasks = (
            asyncio.ensure_future(self._start_postgres()),
            asyncio.ensure_future(self._start_redis()),
        )
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop what was started here, side by side; what was given stays as it is."""
        for task in list(self._reviving):
            task.cancel()
        await asyncio.gather(*self._reviving, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in self._servers()))

    async def whole(self) -> None:
        """Return when no server is being started again; bounded, as those starts are."""
        while self._reviving:
            await asyncio.wait(set(self._reviving))

    def _servers(self) -> list[EmbeddedPostgres | EmbeddedRedis]:
        return [server for server in (self.postgres, self.redis) if server is not None]

    async def _start_postgres(self) -> None:
        if self.postgres is None:
            await check_database(self.database_url)
        else:
            await self.postgres.start()
            self.database_url = self.postgres.url

    async def _start_redis(self) -> None:
        if self.redis is None:
            await check_redis(self.redis_url)
        else:
            await self.redis.start()
            self.redis_url = self.redis.url

    def _ended(self, name: str, returncode: int) -> None:
        times = self._revivals[name] = self._revivals.get(name, 0) + 1
        if times > REVIVALS_MAX:
            self._tell(f"{name} ended {times} times, the last time with code {returncode}")
            return
        log.warning("%s ended with code %d and is started again", name, returncode)
        server = self.postgres if name == "postgres" else self.redis
        assert server is not None, name
        task = asyncio.get_running_loop().create_task(self._revive(name, server))
        self._reviving.add(task)
        task.add_done_callback(self._reviving.discard)

    async def _revive(self, name: str, server: EmbeddedPostgres | EmbeddedRedis) -> None:
        url, tries = server.url, 0
        while True:
            try:
                await server.start()
                break
            except (InvalidField, Unavailable) as error:
                tries += 1
                # What a start refuses by the name of a field is the same the next time.
                if isinstance(error, InvalidField) or tries >= REVIVAL_TRIES_MAX:
                    self._tell(f"{name} ended and does not start again: {error}")
                    return
                log.warning("%s: start %d of %d failed: %s", name, tries, REVIVAL_TRIES_MAX, error)
            await asyncio.sleep(REVIVAL_PAUSE_S * tries)
        if server.url != url:
            self._tell(f"{name} ended and its port was taken by another process")

    def _tell(self, sentence: str) -> None:
        log.error("%s", sentence)
        if self._gave_up is not None:
            self._gave_up(sentence)


async def connect_or_embed(
    postgres_dir: Path,
    redis_dir: Path,
    *,
    database_url: str | None = None,
    redis_url: str | None = None,
    fsync: bool = True,
    logs_dir: Path | None = None,
    gave_up: Callable[[str], None] | None = None,
) -> Stores:
    """Running stores; `stop()` them or use them as an async context manager.

    Args:
        postgres_dir, redis_dir: folders of the embedded servers, used where no address is given.
        database_url, redis_url: servers to be used instead; they are checked, never changed.
        fsync: False is for tests.
        logs_dir: where the servers write `postgres.log` and `redis.log`; beside the data by default.
        gave_up: told when an embedded server cannot be kept running.
    """
    logs = {name: None if logs_dir is None else logs_dir / name for name in LOG_FILES}
    stores = Stores(
        database_url or EmbeddedPostgres(postgres_dir, fsync=fsync, log_path=logs["postgres.log"]),
        redis_url or EmbeddedRedis(redis_dir, log_path=logs["redis.log"]),
        gave_up=gave_up,
    )
    await stores.start()
    return stores


# -- what was given -------------------------------------------------------------------------------


async def check_database(url: str, *, within_s: float = GIVEN_ANSWERS_S_MAX) -> None:
    """Return when the PostgreSQL at the URL has answered a query; one that is starting is waited for.

    Raises:
        InvalidField: field `database_url`, not an address of PostgreSQL.
        Unavailable: nobody answers within `within_s`, or the log-in is refused.
    """
    engine = async_engine(url)
    seen: Exception | None = None
    try:
        async with asyncio.timeout(within_s):
            while True:
                try:
                    async with engine.connect() as session:
                        await session.execute(text("SELECT 1"))
                    return
                except OSError as error:
                    seen = error
                except (DBAPIError, asyncpg.PostgresError) as error:
                    cause = getattr(error, "orig", None) or error
                    if getattr(cause, "sqlstate", None) != SQLSTATE_STARTING:
                        raise _silent("PostgreSQL", url, cause) from error
                    seen = error
                await asyncio.sleep(POLL_EVERY_S)
    except TimeoutError as error:
        raise _silent("PostgreSQL", url, seen or f"no word for {within_s:.0f} s") from error
    finally:
        await engine.dispose()


async def check_redis(url: str, *, within_s: float = GIVEN_ANSWERS_S_MAX) -> str:
    """Name and version of what answers at the URL, if it can hold leases.

    Raises:
        InvalidField: field `redis_url` (no address of a Redis), `redis.version` or `redis.role`.
        Refused: it may throw keys away when its memory is full, and leases would be among them.
        Unavailable: nobody answers within `within_s`, or the log-in is refused.
    """
    client = connect(url)
    seen: Exception | None = None
    try:
        async with asyncio.timeout(within_s):
            while True:
                try:
                    return await _checked(client, await client.info())
                except (AuthenticationError, ResponseError) as error:
                    if not isinstance(error, BusyLoadingError):
                        raise _silent("Redis", url, error) from error
                    seen = error
                except (RedisError, OSError) as error:
                    seen = error
                await asyncio.sleep(POLL_EVERY_S)
    except TimeoutError as error:
        raise _silent("Redis", url, seen or f"no word for {within_s:.0f} s") from error
    finally:
        await client.aclose()


async def _checked(client: redis.asyncio.Redis, facts: dict[str, Any]) -> str:
    version = str(facts.get("redis_version", "unknown"))
    name = f"Valkey {facts['valkey_version']}" if "valkey_version" in facts else f"Redis {version}"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers and numbers < REDIS_OLDEST:
        raise InvalidField("redis.version", version, "use Redis 7.0 or newer, or any Valkey")
    role = str(facts.get("role", "master"))
    if role not in {"master", "primary"}:
        raise InvalidField("redis.role", role, "give the address of the primary")
    await check_eviction(client)
    return name


def _silent(what: str, url: str, why: object) -> Unavailable:
    return Unavailable(
        f"{what} at {mask_url(url)} does not answer: {mask_url(str(why))}",
        "check the address, user and password, and that the server runs",
    )
