"""Chunks over NIXL, where an environment has it, and what is said and done where it has not.

`READYPLANE_TEST_NIXL_PYTHON` names an interpreter that can import NIXL (its UCX backend works
without a GPU); the tests that need it are skipped without one.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from readyplane.core.errors import InvalidField
from readyplane.core.startup import WeightTier
from readyplane.ports import Source
from readyplane_agent import pacing
from readyplane_agent import settings as settings_module
from readyplane_agent.arena import Arena
from readyplane_agent.loader import Loader
from readyplane_agent.nixl_way import Ended, GivingWay, Transport
from readyplane_agent.reading import Reader
from readyplane_agent.trace import StartTrace
from readyplane_agent.transfer import TransferServer
from tests.unit.agent_twins import Artifact, TwinRegistry, artifact, serving, source
from tests.unit.peer_world import CLOCK, given_by, peer

PYTHON = os.environ.get("READYPLANE_TEST_NIXL_PYTHON", "")
needs_nixl = pytest.mark.skipif(
    not PYTHON, reason="skipped: READYPLANE_TEST_NIXL_PYTHON names no interpreter with NIXL"
)


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self,sm")
    monkeypatch.setenv("NIXL_LOG_LEVEL", "ERROR")


@asynccontextmanager
async def giver(
    art: Artifact, name: str, transport: Transport
) -> AsyncIterator[tuple[TransferServer, Arena, Source]]:
    async with peer(art, name) as (server, arena, told):
        server.nixl = await asyncio.to_thread(
            GivingWay, arena, transport=transport, name=f"give:{name}"
        )
        yield server, arena, told


def loader(
    art: Artifact, registry: TwinRegistry, transport: Transport, *sources: Source
) -> tuple[Loader, Arena]:
    registry.sources = list(sources)
    arena = Arena(art.manifest)
    return Loader(
        arena,
        registry=registry,  # type: ignore[arg-type]
        clock=CLOCK,
        reader=Reader("w9", f"w9-{time.monotonic_ns()}", "n"),
        trace=StartTrace(CLOCK, process_start_s=CLOCK.monotonic_s()),
        limit_s=30.0,
        transport=transport,
    ), arena


def same(arena: Arena, art: Artifact) -> bool:
    return all(bytes(arena.view(p)) == d for p, d in art.files.items())


def ended(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


# ---------------------------------------------------------------------------- without NIXL


def test_the_words_of_transport() -> None:
    given = [
        *("--worker-id", "w", "--role", "prefill", "--model", "m", "--router", "r:1"),
        *("--work-dir", "/x", "--registry", "r:2"),
    ]
    assert settings_module.parse(given, {}).transport == "tcp"
    assert settings_module.parse([*given, "--transport", "auto"], {}).transport == "auto"
    with pytest.raises(InvalidField, match="--transport"):
        settings_module.parse([*given, "--transport", "rdma"], {})


@pytest.mark.parametrize(("wish", "level"), [("auto", "INFO"), ("nixl", "WARNING")])
async def test_a_source_without_nixl_is_read_over_tcp_and_that_is_said(
    wish: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    art = artifact()
    async with peer(art, "w1") as (server, _, told):
        with caplog.at_level(logging.INFO, logger="agent.loader"):
            load, arena = loader(art, TwinRegistry(), Transport(wish), told)
            fetched = await load.run(await load._plan())
    assert same(arena, art) and server.nixl_bytes == 0
    assert "over TCP (dead: the source answered 404, it has no NIXL)" in fetched.uses[0].text()
    said = [r for r in caplog.records if "over TCP, not NIXL" in r.message]
    assert [r.levelname for r in said] == [level]
    arena.close()


def test_an_interpreter_without_nixl_says_why() -> None:
    arena = Arena(artifact().manifest)
    with pytest.raises(Ended, match="No module named"):
        GivingWay(arena, transport=Transport("auto", sys.executable), name="give:x")
    with pytest.raises(Ended, match="No such file"):
        GivingWay(arena, transport=Transport("auto", "/nowhere/python"), name="give:x")
    arena.close()


# ---------------------------------------------------------------------------- with NIXL


@needs_nixl
async def test_a_load_over_nixl_is_hashed_leased_and_paced_like_any_other() -> None:
    art, registry, transport = artifact(floats=400_000), TwinRegistry(), Transport("nixl", PYTHON)
    async with giver(art, "w1", transport) as (server, theirs, told):
        load, arena = loader(art, registry, transport, told)
        fetched = await load.run(await load._plan())
        assert same(arena, art)
        assert server.nixl_bytes == server.bytes_served == art.manifest.size_bytes
        assert "over NIXL" in fetched.uses[0].text()
        assert registry.released == [("t-peer:w1", art.manifest.size_bytes, "")]
        arena.seal()  # nobody maps it writable any more
        arena.close()
        theirs.seal()  # the giving side never did

        server.pace = replace(server.pace, bytes_per_s=0.0, paused_s=CLOCK.monotonic_s())
        load, arena = loader(art, TwinRegistry(), transport, told)
        running = asyncio.create_task(load.run(await load._plan()))
        await asyncio.sleep(2.0)
        assert server.nixl_bytes == art.manifest.size_bytes, "paused: no address is told"
        load.stop()
        server.observe(pacing.Foreground(), given_bytes_per_s=0.0)
        await asyncio.wait([running])
        arena.close()


@needs_nixl
async def test_wrong_bytes_over_nixl_are_never_verified() -> None:
    art, registry, transport = artifact(), TwinRegistry(), Transport("nixl", PYTHON)
    async with giver(art, "w1", transport) as (_, theirs, told):
        path, index = theirs.chunks[-1]
        at = theirs.offsets[path] + theirs.span(path, index)[0]
        theirs.memory.view[at : at + 4] = b"ruin"
        with serving(art.files) as store:
            load, arena = loader(art, registry, transport, told, source(store.url))
            await load.run(await load._plan())
        assert same(arena, art)
    assert any(failure.startswith("corrupt") for *_, failure in registry.released)
    arena.close()


@needs_nixl
@pytest.mark.parametrize("victim", ["giving", "reading"])
async def test_a_killed_process_is_a_fault_of_the_source_and_the_next_goes_on(
    victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    art, transport = artifact(floats=2_000_000), Transport("nixl", PYTHON)
    async with giver(art, "w1", transport) as (server, _, told):
        server.policy = replace(server.policy, ceiling_bytes_per_s=8e6)
        server.pace = pacing.begin(server.policy, now_s=CLOCK.monotonic_s())
        with serving(art.files) as store:
            load, arena = loader(
                art, TwinRegistry(), transport, told, source(store.url, tier=WeightTier.L4_OBJECT)
            )
            running = asyncio.create_task(load.run(await load._plan()))
            while server.nixl_bytes < art.manifest.size_bytes // 4:
                await asyncio.sleep(0.02)
            assert server.nixl is not None
            pids = subprocess.run(
                ["pgrep", "-P", str(os.getpid()), "-f", "nixl_child"],
                capture_output=True, text=True, check=True,
            ).stdout.split()  # fmt: skip
            readers = [int(p) for p in pids if int(p) != server.nixl.pid]
            os.kill(server.nixl.pid if victim == "giving" else readers[0], signal.SIGKILL)
            fetched = await running
            told_bytes = sum(end - start for _, start, end in store.asked)
    assert same(arena, art)
    given = given_by(fetched)
    assert given["peer:w1"] >= art.manifest.size_bytes // 8, "what had come was kept"
    assert given["storage:1"] == told_bytes == art.manifest.size_bytes - given["peer:w1"]
    assert all(map(ended, readers)), "none of its processes is left"
    arena.close()
