"""The port suite on groups of two ranks: for whoever asks, they are engines like any other."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from readyplane.core.errors import Unavailable
from readyplane.kit.clock import SystemClock
from readyplane_agent.engines.choice import engine_for
from readyplane_agent.engines.modelled.communicator import SILENCE_LIMIT_S
from readyplane_agent.engines.modelled.group import ModelledGroup
from readyplane_agent.engines.offers import NotOffered, SleepDepth, Sleeps, StandsBy, offered
from readyplane_agent.engines.port import EnginePort, EngineSpec, arena_layout
from readyplane_agent.engines.ranks import LOST_STATUS, HasRanks, RankSpec, first_gone
from readyplane_agent.group_arena import GroupArena
from readyplane_agent.group_plan import plan_group
from readyplane_agent.ranks import blamed
from tests.engine import port_suite
from tests.engine.engine_world import ModelledFactory, modelled_factory

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class GroupFactory(ModelledFactory):
    """Groups of two ranks over one small demo model."""

    arenas: list[GroupArena] = field(default_factory=list)

    def group_spec(
        self, name: str, *, alter: Callable[[bytearray], None] | None = None, **options: Any
    ) -> EngineSpec:
        """As `spec`, with the weights in the memory of two ranks."""
        spec = self.spec(name, alter=alter, **options)
        layout, weights = arena_layout(self.manifest), spec.arena_path.read_bytes()
        arena = GroupArena(self.manifest, plan_group(self.manifest, tp=2))
        self.arenas.append(arena)
        for path, index in arena.missing():
            start, size = arena.span(path, index)
            at = layout.file_offsets.get(path)
            data = (self.demo.folder / path).read_bytes() if at is None else weights[at:]
            with arena.window(path, index) as window:
                window[:] = data[start : start + size]
            arena.mark(path, index)
        arena.seal()
        tables = [spec.work_dir / f"tensors-{rank}.json" for rank in (0, 1)]
        for told, table in zip(tables, arena.tables(), strict=True):
            told.write_text(json.dumps(table))
        other = RankSpec(1, arena.rank_paths[1], tables[1])
        return replace(spec, arena_path=arena.path, tensor_table_path=tables[0], ranks=(other,))

    @asynccontextmanager
    async def start(
        self, name: str, *, alter: Callable[[bytearray], None] | None = None, **options: Any
    ) -> AsyncIterator[EnginePort]:
        """A ready group, stopped at the end."""
        engine = ModelledGroup()
        await engine.start(self.group_spec(name, alter=alter, **options))
        try:
            await engine.wait_ready(stall_s=30.0, limit_s=60.0)
            yield engine
        finally:
            await engine.stop(grace_s=5.0)
            assert engine.returncode is not None
            assert all(rank.returncode is not None for rank in engine.ranks())


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    plain = modelled_factory(tmp_path_factory.mktemp("groups"))
    made = GroupFactory(plain.folder, plain.demo, plain.manifest, plain.traits)
    yield made
    for arena in made.arenas:
        arena.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(factory: GroupFactory) -> AsyncIterator[port_suite.World]:
    async with AsyncExitStack() as stack:
        one, p, d = await asyncio.gather(
            *(stack.enter_async_context(factory.start(name)) for name in ("one", "p", "d"))
        )
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield port_suite.World(one, p, d, factory.traits, http, factory, count(1))


@pytest.mark.parametrize(
    "check", port_suite.CHECKS, ids=[f"{c.area}-{c.run.__name__}" for c in port_suite.CHECKS]
)
async def test_port(world: port_suite.World, check: port_suite.Check) -> None:
    await check.run(world)


async def test_a_flipped_bit_in_one_ranks_part_changes_the_answer(factory: GroupFactory) -> None:
    """Each rank's bytes are in the group's answer: the last tensor's second half is rank 1's."""
    layout = arena_layout(factory.manifest)
    last = layout.tensors[-1]

    def flip(arena: bytearray) -> None:
        arena[last.offset_bytes + last.size_bytes - 1] ^= 1

    with pytest.raises(Unavailable, match="the known answer is"):
        async with factory.start("flipped", alter=flip):
            pass


async def test_a_rank_that_is_killed_is_the_one_that_is_named(factory: GroupFactory) -> None:
    engine = ModelledGroup()
    await engine.start(factory.group_spec("killed"))
    await engine.wait_ready(stall_s=30.0, limit_s=60.0)
    psutil.Process(engine.ranks()[1].pid).send_signal(signal.SIGKILL)
    async with asyncio.timeout(60.0):
        while any(rank.returncode is None for rank in engine.ranks()):
            await asyncio.sleep(0.02)
    found = first_gone(engine.ranks())
    assert found is not None and (found.rank, found.returncode) == (1, -signal.SIGKILL)
    assert engine.ranks()[0].returncode == LOST_STATUS
    assert engine.returncode == -signal.SIGKILL
    assert engine.log_tail(3).startswith("rank 1: ended with -9")
    await engine.stop()


async def test_a_rank_that_is_stopped_is_blamed_though_its_process_is_there(
    factory: GroupFactory,
) -> None:
    """SIGSTOP of an engine that serves: the other rank ends, and says whom it has lost (R17.1)."""

    async def stopped(victim: int) -> None:
        engine = ModelledGroup()
        await engine.start(factory.group_spec(f"stopped-{victim}"))
        await engine.wait_ready(stall_s=30.0, limit_s=60.0)
        assert blamed(engine) == 0, "nobody is gone"
        hung = psutil.Process(engine.ranks()[victim].pid)
        hung.suspend()
        try:
            async with asyncio.timeout(SILENCE_LIMIT_S + 8.0):
                while engine.returncode is None:
                    await asyncio.sleep(0.05)
            assert engine.returncode == LOST_STATUS
            assert engine.ranks()[victim].returncode is None
            assert blamed(engine) == victim
            told = engine.log_tail(3)
            assert told.startswith(f"rank {victim}: it hangs"), told
            assert "cannot start" not in told
        finally:
            await engine.stop(grace_s=0.2)
        assert not hung.is_running()

    await asyncio.gather(stopped(0), stopped(1))


class MixedGroup(ModelledGroup):
    """Rank 1 was started with another revision."""

    async def _start_rank(self, spec: EngineSpec, rank: RankSpec) -> asyncio.subprocess.Process:
        return await super()._start_rank(replace(spec, manifest_digest="sha256:other"), rank)


async def test_a_rank_of_another_revision_is_named_before_the_canary(factory: GroupFactory) -> None:
    engine = MixedGroup()
    await engine.start(factory.group_spec("mixed"))
    with pytest.raises(Unavailable, match=r"rank 1: manifest sha256:other != sha256:"):
        await engine.wait_ready(stall_s=30.0, limit_s=60.0)
    assert {rank.step for rank in engine.ranks()} == {"connected"}
    await engine.stop()


async def test_what_a_group_cannot_is_refused(factory: GroupFactory) -> None:
    made = engine_for("modelled", clock=SystemClock(), tp=2)
    assert isinstance(made, ModelledGroup) and isinstance(made, HasRanks)
    with pytest.raises(NotOffered, match="several ranks"):
        await made.stand_by(factory.spec("bare"))
    with pytest.raises(NotOffered, match="several ranks"):
        await made.sleep(SleepDepth.WEIGHTS_IN_HOST)
    for what in (StandsBy, Sleeps):
        with pytest.raises(NotOffered, match="a standby by engine modelled in several ranks"):
            offered(made, what, "modelled", "a standby")
    assert made.ranks() == ()
