"""One agent with everything around it, as twins: what tests of whole lives share."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from readyplane.core.startup import SegmentName
from readyplane.core.worker import Role
from readyplane.kit.clock import SystemClock
from readyplane.profiles import load as load_profile
from readyplane_agent import engine_end
from readyplane_agent.cache import WeightCache
from readyplane_agent.life import Life
from readyplane_agent.lifecycle import ExitCode, State
from readyplane_agent.settings import AgentSettings
from readyplane_agent.trace import StartTrace
from tests.unit.agent_twins import (
    Artifact,
    TwinEngine,
    TwinRegistry,
    TwinRouter,
    artifact,
    serving,
    source,
)

ART = artifact()


class World:
    """One agent with everything around it."""

    def __init__(self, tmp_path: Path, **more: Any) -> None:
        self.tmp = tmp_path
        self.router, self.engine = TwinRouter(), TwinEngine()
        self.registry = TwinRegistry(ART.manifest)
        self.cache = WeightCache(tmp_path / "cache", bytes_max=2**30)
        work = tmp_path / "w1"
        work.mkdir()
        self.settings = AgentSettings(
            worker_id="w1",
            role=Role.PREFILL,
            model="tiny",
            router="r:1",
            registry="g:1",
            work_dir=work,
            manifest=ART.manifest.digest,
            worker_class="h200-slow10",
            scale_decision_id="d-1",
            **more,
        )
        self.life = self._life("w1-abc")

    def _life(self, incarnation: str) -> Life:
        clock = SystemClock()
        now_s = clock.monotonic_s()
        trace = StartTrace(clock, process_start_s=now_s - 0.05, ordered_at_s=now_s - 0.1)
        trace.add(SegmentName.RUNTIME_IMPORT, now_s - 0.05, now_s)
        return Life(
            self.settings,
            incarnation=incarnation,
            registry=self.registry,  # type: ignore[arg-type]
            router=self.router,  # type: ignore[arg-type]
            engine=self.engine,
            profile=load_profile("h200-slow10"),
            cache=self.cache,
            clock=clock,
            trace=trace,
            random=lambda: 0.5,
        )


@asynccontextmanager
async def living(tmp_path: Path, art: Artifact = ART, **more: Any) -> AsyncIterator[World]:
    """A world with a byte store and a running life, which is ended whatever happens."""
    with serving(art.files) as store, patch.object(engine_end, "END_AWAITED_S_MAX", 0.2):
        world = World(tmp_path, **more)
        world.registry.sources = [source(store.url)]
        yield world
        running = getattr(world, "running", None)
        if running is not None and not running.done():
            running.cancel()
            await asyncio.wait({running})


def begin(world: World) -> asyncio.Task[ExitCode]:
    world.running = asyncio.create_task(world.life.run())  # type: ignore[attr-defined]
    return world.running  # type: ignore[attr-defined, no-any-return]


async def until(true: Callable[[], bool], *, limit_s: float = 8.0) -> None:
    async with asyncio.timeout(limit_s):
        while not true():
            await asyncio.sleep(0.01)


async def ready(world: World) -> asyncio.Task[ExitCode]:
    running = begin(world)
    await until(lambda: world.life.state is State.READY or running.done())
    assert world.life.state is State.READY, world.life.trace.failure
    return running
