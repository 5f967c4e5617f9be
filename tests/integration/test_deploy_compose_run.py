"""What docker-compose.yml starts works together: its own commands and variables, as processes here.

No container: each service gets a loopback address of its own for its name, and the stores are those
of the test. What containers add (images, mounts, networks) is not tried here.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from readyplane_planner.actuators import ADVISORY
from tests import deploy_files
from tests.deploy_files import Service

NAMES = ("registry", "publish", "router", "planner", "gateway", "prefill-1", "decode-1")
START_S_MAX = 120.0
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="needs more than one loopback address"
)


class Names:
    """Rewrites the compose file's names into addresses, and its folders into one of ours."""

    def __init__(self, folder: Path, database_url: str, redis_url: str) -> None:
        self._folder = folder
        self._stores = (database_url, redis_url)
        self.addresses = {name: f"127.0.7.{11 + n}" for n, name in enumerate(NAMES)}

    def here(self, text: str, service: Service) -> str:
        """One argument or variable as it must be on this machine."""
        if text.startswith("postgresql"):
            return self._stores[0]
        if text.startswith("redis://"):
            return self._stores[1]
        text = text.replace("/etc/readyplane/", str(deploy_files.ROOT / "deploy") + "/")
        text = text.replace("/var/lib/readyplane", str(self._folder / service.name))
        for name, address in self.addresses.items():
            text = re.sub(rf"(?<![\w-]){name}(?=:\d)", address, text)
        return text

    def variable(self, name: str, value: str, service: Service) -> str:
        """A variable: a host's bare name is an address as well; elsewhere it is a word."""
        if name == "READYPLANE_HOST":
            return self.addresses[service.name]
        return self.here(value, service)


class Running:
    """One started service."""

    def __init__(self, service: Service, names: Names, folder: Path) -> None:
        self.service = service
        self.log = folder / f"{service.name}.log"
        self._names = names
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        """Its command line, with its variables only."""
        words = [self._names.here(w, self.service) for w in self.service.command]
        if self.service.name == "publish":
            words += ["--model-mb", "32"]  # as good as a large one here, and quicker
        programs = Path(sys.executable).parent
        words[0] = str(programs / words[0])
        keep = {k: os.environ[k] for k in ("PATH", "LANG", "HOME") if k in os.environ}
        own = {
            k: self._names.variable(k, v, self.service) for k, v in self.service.environment.items()
        }
        with self.log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                *words, env={**keep, **own}, stdout=log, stderr=log
            )

    async def end(self) -> None:
        """SIGTERM, as a container's end."""
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), 60)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()

    async def healthy(self) -> None:
        """Until the compose file's own health check passes."""
        words = [
            w.replace("127.0.0.1", self.address).replace("{socket.gethostname()}", self.address)
            for w in self.service.document["healthcheck"]["test"][1:]
        ]
        words[0] = sys.executable
        async with asyncio.timeout(START_S_MAX):
            while True:
                assert self.process.returncode is None, self.tail()
                check = await asyncio.create_subprocess_exec(
                    *words, stderr=asyncio.subprocess.DEVNULL
                )
                if await check.wait() == 0:
                    return
                await asyncio.sleep(1.0)

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._names.addresses[self.service.name]

    def tail(self) -> str:
        """What it said last."""
        return f"{shlex.join(self.service.command)}\n{self.log.read_text()[-3000:]}"


@asynccontextmanager
async def up(folder: Path, database_url: str, redis_url: str) -> AsyncIterator[dict[str, Running]]:
    services = deploy_files.compose()
    names = Names(folder, database_url, redis_url)
    running = {name: Running(services[name], names, folder) for name in NAMES}

    async def begin(name: str) -> None:
        (folder / name / "cache").mkdir(parents=True, exist_ok=True)
        await running[name].start()
        rooms.push_async_callback(running[name].end)

    async with AsyncExitStack() as rooms:
        for name in ("registry", "router"):
            await begin(name)
        await asyncio.gather(*(running[name].healthy() for name in ("registry", "router")))
        await begin("publish")
        async with asyncio.timeout(START_S_MAX):
            assert await running["publish"].process.wait() == 0, running["publish"].tail()
        for name in ("planner", "gateway", "prefill-1", "decode-1"):
            await begin(name)
        yield running


async def state_when(
    session: aiohttp.ClientSession, url: str, holds: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    state: dict[str, Any] = {}
    async with asyncio.timeout(START_S_MAX):
        while True:
            try:
                async with session.get(url) as answer:
                    state = await answer.json() if answer.status == 200 else {}
            except aiohttp.ClientError:
                state = {}
            if state and holds(state):
                return state
            await asyncio.sleep(0.5)


def pair_is_ready(state: dict[str, Any]) -> bool:
    return all(pool["ready"] == 1 for pool in state["pools"].values())


async def test_its_services_serve_a_request(
    tmp_path: Path, database_url: str, redis_url: str
) -> None:
    headers = {"authorization": "Bearer a-token"}
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8}
    async with (
        up(tmp_path, database_url, redis_url) as running,
        aiohttp.ClientSession(headers=headers) as session,
    ):
        planner, gateway = (f"http://{running[n].address}:7080" for n in ("planner", "gateway"))
        later = ("planner", "gateway", "prefill-1", "decode-1")
        await asyncio.gather(*(running[name].healthy() for name in later))
        state = await state_when(session, f"{planner}/v1/state", pair_is_ready)
        assert state["degraded"] == ADVISORY
        assert {w["node"] for w in state["workers"]} == {"prefill-1", "decode-1"}
        async with session.post(f"{gateway}/v1/completions", json=body) as answer:
            said = await answer.json()
            assert answer.status == 200, said
        assert said["choices"][0]["text"] and said["usage"]["completion_tokens"] > 0
        state = await state_when(
            session, f"{planner}/v1/state", lambda s: s["counters"]["finished"] == 1
        )
        assert state["counters"]["handovers"] == 1
        for name in ("registry", "router", "planner", "gateway", "prefill-1", "decode-1"):
            async with session.get(f"http://{running[name].address}:7080/metrics") as answer:
                assert "# TYPE readyplane_" in await answer.text(), name
        await running["prefill-1"].end()
        assert running["prefill-1"].process.returncode == 0, "drained workers end well"
