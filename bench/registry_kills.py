"""A registry killed with SIGKILL again and again while it is written to: what was accepted is there.

Owns the kills: a fresh registry on the same ports and stores each time, killed at a random moment
of its work. Handed to `bench.registry`; `bench.registry_writers` keeps the account.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from bench.own_services import Own
from bench.registry_writers import PREFIX, Accepted, Findings, Writer, compare
from readyplane.core.errors import ReadyplaneError
from readyplane.kit.signing import SigningKey
from readyplane_lab.up.local_server import free_port

READY_S_MAX = 60.0
POLL_S = 0.005
LIFE_S = (0.0, 0.6)
WRITERS = 4


@dataclass
class Kills:
    """What came of it.

    Attributes:
        kills: registries that were killed while they ran.
        accepted: writes that were acknowledged; unknown: calls that were cut off.
    """

    kills: int
    accepted: int
    unknown: int
    findings: Findings
    seconds: float


class Nursery:
    """See `bench.registry_nursery`; one registry at a time."""

    def __init__(
        self, process: asyncio.subprocess.Process, arguments: list[str], ready: Path, log: Path
    ) -> None:
        self._process, self._arguments, self._ready, self._log = process, arguments, ready, log
        self.pid = 0

    async def start(self) -> None:
        """Start a registry and wait until it serves."""
        self._ready.unlink(missing_ok=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(self._arguments).encode() + b"\n")
        await self._process.stdin.drain()
        self.pid = int(await self._process.stdout.readline())
        until_s = time.monotonic() + READY_S_MAX
        while not self._ready.exists():
            if not _alive(self.pid) or time.monotonic() > until_s:
                raise SystemExit(f"the registry did not start:\n{self.log_tail()}")
            await asyncio.sleep(POLL_S)

    def log_tail(self) -> str:
        """The end of what registries logged."""
        return self._log.read_text()[-4000:]

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone and its ports are free."""
        os.kill(self.pid, signal.SIGKILL)
        while _alive(self.pid):
            await asyncio.sleep(POLL_S)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.asynccontextmanager
async def _nursery(own: Own, folder: Path, grpc: int, http: int) -> AsyncIterator[Nursery]:
    ready = folder / "run" / "registry-kills.ready"
    arguments = ["--grpc-port", str(grpc), "--http-port", str(http), "--ready-file", str(ready)]
    arguments += ["--blob-dir", str(folder / "kill-blobs"), "--log-level", "error"]
    path = folder / "logs" / "registry-kills.log"
    with path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.registry_nursery"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=dict(own.environment),
        )
        made = Nursery(process, arguments, ready, path)
        try:
            yield made
        finally:
            if made.pid and _alive(made.pid):
                await made.kill()
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


async def kill_while_writing(own: Own, folder: Path, kills: int, *, seed: int = 1) -> Kills:
    """Kill `kills` registries while `WRITERS` publish, then compare what is there."""
    rng, told, began_s = random.Random(seed), Accepted(), time.monotonic()
    port, http = free_port(), free_port()
    # Named twice: clients of several addresses share no connection, so that one made anew does not
    # wait as long as one that has failed before.
    grpc = f"127.0.0.1:{port},127.0.0.1:{port}"
    key = SigningKey.new(folder / "run" / "kills.pem")
    (folder / "kill-files").mkdir()
    writers = [
        Writer(
            f"{PREFIX}{n}",
            grpc=grpc,
            http=f"http://127.0.0.1:{http}",
            folder=folder / "kill-files",
            key=key,
            told=told,
        )
        for n in range(WRITERS)
    ]
    async with _nursery(own, folder, port, http) as nursery:
        for n in range(kills):
            await nursery.start()
            tasks = [asyncio.create_task(writer.write()) for writer in writers]
            await asyncio.sleep(rng.uniform(*LIFE_S))
            await nursery.kill()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if (n + 1) % 50 == 0:
                print(f"{n + 1} kills, {told.count} writes accepted", flush=True)
        await nursery.start()
        try:
            findings = await compare(told, grpc=f"127.0.0.1:{grpc}", blob_dir=folder / "kill-blobs")
        except ReadyplaneError:
            print(nursery.log_tail(), flush=True)
            raise
    return Kills(kills, told.count, told.unknown, findings, time.monotonic() - began_s)
