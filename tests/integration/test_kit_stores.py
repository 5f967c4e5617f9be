"""Migrations at once, a newer schema, an evicting Redis, and stores that are away."""

import asyncio
import sys
from pathlib import Path

import pytest
import redis.asyncio
from sqlalchemy import text

from readyplane.core.errors import Conflict, InvalidField, Refused, Unavailable
from readyplane.kit.database import async_engine, migrate
from readyplane.kit.redis import check_eviction, connect, redis_errors

FIRST = """
from alembic import op
import sqlalchemy as sa
revision = "0001"
down_revision = None
def upgrade():
    op.create_table("thing", sa.Column("id", sa.Integer, primary_key=True))
    op.execute("INSERT INTO thing VALUES (1)")
"""
SECOND = """
from alembic import op
revision = "0002"
down_revision = "0001"
def upgrade():
    op.execute("INSERT INTO thing VALUES (2)")
"""
BROKEN = """
from alembic import op
revision = "0003"
down_revision = "0002"
def upgrade():
    op.execute("INSERT INTO thing VALUES (3)")
    op.execute("INSERT INTO thing VALUES (3)")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"readyplane_thing_{abs(hash(tmp_path)) % 10**8}"
    versions = tmp_path / name / "migrations" / "versions"
    versions.mkdir(parents=True)
    (tmp_path / name / "__init__.py").write_text("")
    (versions / "0001_first.py").write_text(FIRST)
    (versions / "0002_second.py").write_text(SECOND)
    monkeypatch.syspath_prepend(tmp_path)
    return name


async def rows(url: str, statement: str) -> list[object]:
    engine = async_engine(url)
    try:
        async with engine.connect() as connection:
            return [row[0] for row in await connection.execute(text(statement))]
    finally:
        await engine.dispose()


async def drop(url: str, package: str) -> None:
    engine = async_engine(url)
    table = f"alembic_version_{package.removeprefix('readyplane_')}"
    async with engine.begin() as connection:
        await connection.execute(text(f"DROP TABLE IF EXISTS thing, {table}"))
    await engine.dispose()


async def test_several_processes_may_migrate_at_once(
    database_url: str, package: str, tmp_path: Path
) -> None:
    program = (
        "import asyncio, sys\n"
        "from readyplane.kit.database import migrate\n"
        "asyncio.run(migrate(sys.argv[1], sys.argv[2]))\n"
    )
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, database_url, package,
            env={"PYTHONPATH": str(tmp_path), "PATH": ""}, stderr=asyncio.subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        tasks = [migrate(database_url, package) for _ in range(3)]
        await asyncio.gather(*tasks)
        for process in processes:
            _, said = await process.communicate()
            assert process.returncode == 0, said.decode()
        table = f"alembic_version_{package.removeprefix('readyplane_')}"
        assert await rows(database_url, "SELECT id FROM thing ORDER BY id") == [1, 2]
        assert await rows(database_url, f"SELECT version_num FROM {table}") == ["0002"]
    finally:
        await drop(database_url, package)


async def test_a_newer_schema_is_named(database_url: str, package: str, tmp_path: Path) -> None:
    await migrate(database_url, package)
    (tmp_path / package / "migrations" / "versions" / "0002_second.py").unlink()
    try:
        with pytest.raises(Conflict, match="newer version") as caught:
            await migrate(database_url, package)
        assert (caught.value.expected, caught.value.found) == ("0001", "0002")
    finally:
        await drop(database_url, package)


async def test_a_migration_that_fails_leaves_nothing(
    database_url: str, package: str, tmp_path: Path
) -> None:
    broken = tmp_path / package / "migrations" / "versions" / "0003_broken.py"
    broken.write_text(BROKEN)
    with pytest.raises(Exception, match="duplicate key"):
        await migrate(database_url, package)
    assert await rows(database_url, "SELECT to_regclass('thing')") == [None]
    broken.unlink()
    try:
        await migrate(database_url, package)
        assert await rows(database_url, "SELECT count(*) FROM thing") == [2]
    finally:
        await drop(database_url, package)


async def test_a_database_that_is_away(free_port: int, package: str) -> None:
    url = f"postgresql://someone:secret@127.0.0.1:{free_port}/x"
    with pytest.raises(Unavailable, match="database_url") as caught:
        await migrate(url, package)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "mysql://u:secret@h/x", "nonsense"])
def test_a_database_url_that_is_none(url: str) -> None:
    with pytest.raises(InvalidField, match="database_url") as caught:
        async_engine(url)
    assert "secret" not in str(caught.value)


async def test_b151_an_evicting_redis_is_refused(redis_client: redis.asyncio.Redis) -> None:
    """B151: under memory pressure the store evicted lock keys."""
    await check_eviction(redis_client)
    for policy in ("allkeys-lru", "volatile-ttl"):
        await redis_client.config_set("maxmemory-policy", policy)
        try:
            with pytest.raises(Refused, match=policy):
                await check_eviction(redis_client)
        finally:
            await redis_client.config_set("maxmemory-policy", "noeviction")


async def test_each_test_begins_with_an_empty_redis(redis_client: redis.asyncio.Redis) -> None:
    assert await redis_client.dbsize() == 0
    await redis_client.set("left", b"\xff\x00")
    assert await redis_client.get("left") == b"\xff\x00"


async def test_and_the_next_one_too(redis_client: redis.asyncio.Redis) -> None:
    assert await redis_client.dbsize() == 0


async def test_a_redis_that_is_away(free_port: int) -> None:
    client = connect(f"redis://:secret@127.0.0.1:{free_port}/0")
    with pytest.raises(Unavailable, match="redis_url") as caught, redis_errors():
        await client.get("x")
    assert "secret" not in str(caught.value)
    await client.aclose()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://x",
        "redis://h:port/0",
        "redis+sentinel://h:1",  # which master?
        "redis+sentinel://h:1/fleet/0/1",
        "redis+cluster://:secret@h:1,:2",
        "redis+cluster://h:1/3",
    ],
)
def test_a_redis_url_that_is_none(url: str) -> None:
    with pytest.raises(InvalidField, match="redis_url"):
        connect(url)
