"""What every test may rely on: marks by folder, seeded properties, stores, and absent programs."""

import asyncio
import concurrent.futures
import os
import re
import secrets
import shutil
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from tests.left_running import nothing_left
from tests.sharing_out import put_in_order

if TYPE_CHECKING:
    import redis.asyncio

T = TypeVar("T")

TESTS = Path(__file__).parent

# A property runs the same examples every time; `HYPOTHESIS_PROFILE=search` looks for new ones.
settings.register_profile(
    "repeat",
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("search", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))

# Of a test that starts processes, with its fixtures. Waits inside have bounds of their own; this one
# is for a machine with a load of 20, where a dozen processes take a minute to begin.
PROCESSES_S_MAX = 400


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test in tests/integration or tests/engine carries that mark, and a bound, without saying so."""
    for item in items:
        if TESTS not in item.path.parents:
            continue
        layer = item.path.relative_to(TESTS).parts[0]
        if layer in {"integration", "engine"}:
            item.add_marker(layer)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(PROCESSES_S_MAX))
    put_in_order(items)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Of `--dist loadfile` ours; any other distribution is pytest-xdist's own."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.sharing_out import LongFirst

    return LongFirst(config, log)


@pytest.fixture(scope="session", autouse=True)
def _everything_is_stopped() -> Iterator[None]:
    """Set up first, so that the stores and systems of this session are stopped before it looks."""
    with nothing_left():
        yield


def _program(name: str, package: str) -> Path:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on PATH (Debian: apt-get install {package})")
    return Path(found)


@pytest.fixture(scope="session")
def chromium() -> Path:
    """The browser for Playwright's `executable_path`; skips the test where there is none."""
    return _program("chromium", "chromium")


@pytest.fixture(scope="session")
def prometheus() -> Path:
    """A real Prometheus server; skips the test where there is none."""
    return _program("prometheus", "prometheus")


@pytest.fixture(scope="session")
def promtool() -> Path:
    """Prometheus's checker of rules; skips the test where there is none."""
    return _program("promtool", "prometheus")


# --------------------------------------------------------------------------- stores
# Each test process (of pytest-xdist, too) has servers of its own, started when first asked for.
# Imported where they are used: most tests need no server, and should not wait for its client.


class _Loop:
    """A loop in a thread of its own: a server outlives the loops of the tests that use it."""

    START_S_MAX = 90.0

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(self.START_S_MAX)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()


@pytest.fixture(scope="session")
def _stores_loop() -> Iterator[_Loop]:
    loop = _Loop()
    yield loop
    loop.close()


def _running(loop: _Loop, server: AbstractAsyncContextManager[T]) -> Iterator[T]:
    started = loop.call(server.__aenter__())
    try:
        yield started
    finally:
        loop.call(server.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def postgres_url(_stores_loop: _Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real PostgreSQL of this test process; ask for `database_url` to have an empty database."""
    from readyplane_lab.up.postgres_server import EmbeddedPostgres

    server = EmbeddedPostgres(tmp_path_factory.mktemp("postgres"), fsync=False)
    for started in _running(_stores_loop, server):
        yield started.url


@pytest.fixture(scope="module")
def database_url(
    postgres_url: str, _stores_loop: _Loop, request: pytest.FixtureRequest
) -> Iterator[str]:
    """A fresh, empty database of this test module; dropped afterwards."""
    import asyncpg

    words = re.sub(r"\W+", "_", request.module.__name__.rpartition(".")[2]).lower()
    name = f"{words[:40]}_{secrets.token_hex(4)}"
    server = postgres_url.replace("+asyncpg", "")

    async def run(*statements: str) -> None:
        connection = await asyncpg.connect(server, timeout=10)
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    _stores_loop.call(run(f'CREATE DATABASE "{name}" TEMPLATE template0'))
    yield postgres_url.rpartition("/")[0] + f"/{name}"
    _stores_loop.call(run(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'))


@pytest.fixture(scope="session")
def redis_url(_stores_loop: _Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Redis-protocol server of this test process, empty at the start of every test."""
    from readyplane_lab.up.redis_server import EmbeddedRedis

    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    for started in _running(_stores_loop, server):
        yield started.url


@pytest.fixture(autouse=True)
def _empty_redis(request: pytest.FixtureRequest) -> None:
    if "redis_url" not in request.fixturenames:
        return
    url: str = request.getfixturevalue("redis_url")
    loop: _Loop = request.getfixturevalue("_stores_loop")

    loop.call(_flush(url))


async def _flush(url: str) -> None:
    from readyplane.kit.redis import connect

    client = connect(url)
    await client.flushall()
    await client.aclose()


@pytest.fixture
async def redis_client(redis_url: str) -> "AsyncIterator[redis.asyncio.Redis]":
    """A client of the kit, connected to an empty store."""
    from readyplane.kit.redis import connect

    await _flush(redis_url)
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    from readyplane.kit.free_ports import free_ports

    return free_ports("127.0.0.1", 1)[0]


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 server of this test process; skips where its wheel is not installed."""
    from tests.object_server import s3_server

    with s3_server(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture
def s3_url(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place on it as `--blob-store` takes it; credentials lie in the environment."""
    from tests.object_server import ACCESS_KEY, SECRET_KEY

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    prefix = secrets.token_hex(6)
    return f"s3://blobs/{prefix}?endpoint={s3_endpoint}&region=us-east-1"
