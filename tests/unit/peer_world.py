"""Peers that give chunks over real connections, and one load from them: what tests of R9 share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from readyplane.core.startup import WeightTier
from readyplane.kit.clock import SystemClock
from readyplane.ports import RankedSource, Source
from readyplane_agent.arena import Arena
from readyplane_agent.loader import Loader
from readyplane_agent.reading import Reader
from readyplane_agent.source_use import Fetched
from readyplane_agent.trace import StartTrace
from readyplane_agent.transfer import TransferServer
from tests.unit.agent_twins import Artifact, TwinRegistry, source

CLOCK = SystemClock()


def put(arena: Arena, art: Artifact, path: str, index: int) -> None:
    start, size = arena.span(path, index)
    with arena.window(path, index) as window:
        window[:] = art.files[path][start : start + size]
    arena.mark(path, index)


@asynccontextmanager
async def peer(
    art: Artifact, name: str, *, chunks: int | None = None, **more: Any
) -> AsyncIterator[tuple[TransferServer, Arena, Source]]:
    """A peer that holds its first `chunks` chunks, all of them without a number."""
    arena = Arena(art.manifest)
    for path, index in arena.chunks[:chunks]:
        put(arena, art, path, index)
    server = TransferServer(incarnation=f"{name}-x", clock=CLOCK, **more)
    await server.start()
    server.offer(arena)
    told = source(
        f"{server.url}/v1/chunks/{art.manifest.digest}",
        f"peer:{name}",
        WeightTier.L1_HOST,
        worker_id=name,
        incarnation=f"{name}-x",
        partial=not arena.complete,
    )
    try:
        yield server, arena, told
    finally:
        await server.stop()
        arena.close()


def make(
    art: Artifact, registry: TwinRegistry, *sources: Source, **more: Any
) -> tuple[Loader, Arena, Any]:
    registry.sources = list(sources)
    arena = Arena(art.manifest)
    load = Loader(
        arena,
        registry=registry,  # type: ignore[arg-type]
        clock=CLOCK,
        reader=Reader("w9", "w9-x", "n"),
        trace=StartTrace(CLOCK, process_start_s=CLOCK.monotonic_s()),
        limit_s=20.0,
        **more,
    )
    return load, arena, [RankedSource(s, 1.0, "") for s in sources]


def given_by(fetched: Fetched) -> dict[str, int]:
    found: dict[str, int] = {}
    for use in fetched.uses:
        found[use.source_id] = found.get(use.source_id, 0) + use.bytes_read
    return found
