"""What a modelled engine offers beyond the port, as a process: graphs later, standing by, sleep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from readyplane.core.errors import IdentityMismatch, InvalidField, Refused, Unavailable, Unsupported
from readyplane.core.startup import SegmentName, StartMode
from readyplane.kit.clock import SystemClock
from readyplane_agent.engines.attached import AttachedEngine
from readyplane_agent.engines.layout import read_tensor_table
from readyplane_agent.engines.modelled.adapter import ModelledEngine
from readyplane_agent.engines.offers import (
    CaptureState,
    Graphs,
    SleepDepth,
    Sleeps,
    StagesGraphs,
    StandsBy,
    offered,
)
from tests.engine.engine_world import ModelledFactory, modelled_factory

DEVICE = ("--device-bytes", str(4 * 2**30))
QUICK = ("--modelled-segments", "compile=0.2,cuda_graph=0.4")
PROMPT = tuple(range(10, 42))


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> ModelledFactory:
    return modelled_factory(tmp_path_factory.mktemp("offers"))


@asynccontextmanager
async def staged(factory: ModelledFactory, name: str, *extra: str) -> AsyncIterator[ModelledEngine]:
    engine = ModelledEngine()
    spec = factory.spec(name, extra=(*DEVICE, *QUICK, *extra))
    await engine.start(replace(spec, graph_stages=True))
    try:
        await engine.wait_ready(stall_s=30.0, limit_s=60.0)
        yield engine
    finally:
        await engine.stop()


async def captured(engine: ModelledEngine) -> Graphs:
    async with asyncio.timeout(120):
        while (found := await engine.graphs()).state is CaptureState.RUNNING:
            await asyncio.sleep(0.05)
    return found


async def test_graphs_come_later_take_kv_and_change_no_token(factory: ModelledFactory) -> None:
    async with staged(factory, "later") as engine:
        first = await engine.graphs()
        begun = {segment.name for segment in engine.startup_segments()}
        assert not begun & {SegmentName.COMPILE, SegmentName.CUDA_GRAPH}, "that is to come"
        assert (first.used, first.captured, first.state) == ((), (), CaptureState.IDLE)
        assert first.kv_total_blocks == engine.serving().kv_total_blocks > first.kv_blocks_after
        assert not first.complete
        before = await engine.generate(PROMPT, max_tokens=12)
        running = asyncio.create_task(engine.generate(PROMPT[:9], max_tokens=300, ignore_eos=True))
        await engine.capture()
        await engine.capture()  # again changes nothing
        with pytest.raises(InvalidField, match="nothing is captured"):
            await engine.use_captured()
        done = await captured(engine)
        assert done.state is CaptureState.DONE and done.captured == done.wanted and not done.used
        assert done.kv_total_blocks == done.kv_blocks_after == first.kv_blocks_after
        lost = (first.kv_total_blocks - done.kv_total_blocks) * engine.memory_account()[
            "block_bytes"
        ]
        assert lost >= done.graph_bytes > 0, "graph memory is counted once, and is no KV any more"
        assert (await engine.answer_captured(PROMPT, max_tokens=12)).token_ids == before.token_ids
        used = await engine.use_captured()
        assert used.complete and used.used == done.wanted
        assert (await engine.generate(PROMPT, max_tokens=12)).token_ids == before.token_ids
        alone = await engine.generate(PROMPT[:9], max_tokens=300, ignore_eos=True)
        assert (await running).token_ids == alone.token_ids, "nothing changes under way"
        load = await engine.load_report()
        assert load.kv_total_blocks == done.kv_total_blocks and load.preemptions_total == 0
        dropped = await engine.drop_captured()
        assert dropped == first


async def test_a_capture_that_fails_is_told_and_taken_back(factory: ModelledFactory) -> None:
    async with staged(factory, "fails", "--plant", "graph_fails") as engine:
        first = await engine.graphs()
        await engine.capture()
        failed = await captured(engine)
        assert failed.state is CaptureState.FAILED and "out of memory" in failed.failure
        assert failed.kv_total_blocks < first.kv_total_blocks
        assert await engine.drop_captured() == first


async def test_graphs_that_answer_otherwise_are_seen_before_anybody_runs_with_them(
    factory: ModelledFactory,
) -> None:
    async with staged(factory, "tokens", "--plant", "graph_tokens") as engine:
        before = await engine.generate(PROMPT, max_tokens=12)
        await engine.capture()
        await captured(engine)
        other = await engine.answer_captured(PROMPT, max_tokens=12)
        assert other.token_ids != before.token_ids
        assert (await engine.generate(PROMPT, max_tokens=12)).token_ids == before.token_ids


async def test_a_whole_start_has_no_stages_and_an_eager_one_never_gets_them(
    factory: ModelledFactory,
) -> None:
    async with factory.start("whole") as engine:
        assert isinstance(engine, ModelledEngine)
        with pytest.raises(InvalidField, match="started whole"):
            await engine.graphs()
    spec = replace(factory.spec("eager", mode=StartMode.EAGER), graph_stages=True)
    other = ModelledEngine()
    await other.start(spec)
    with pytest.raises(Unavailable, match="an eager engine never has graphs"):
        await other.wait_ready(stall_s=30.0)


async def test_a_process_stands_by_with_nothing_and_is_told_what_to_load(
    factory: ModelledFactory,
) -> None:
    engine = ModelledEngine()
    spec = factory.spec("bare")
    arena, hidden = spec.arena_path, spec.arena_path.with_name("not-yet")
    for path in (arena, spec.tensor_table_path, spec.config_path):
        path.rename(hidden.with_name(f"{path.name}.not-yet"))
    try:
        waits = await engine.stand_by(replace(spec, model="any"))
        assert waits.pid == engine.pid > 0 and waits.device_bytes == 0
        assert waits.ready_s > waits.start_s and (waits.resident_bytes or 0) > 2**20
        opened = Path(f"/proc/{waits.pid}/maps").read_text()
        assert str(arena) not in opened
        await asyncio.sleep(0.2)
        assert engine.returncode is None
        for path in (arena, spec.tensor_table_path, spec.config_path):
            hidden.with_name(f"{path.name}.not-yet").rename(path)
        await engine.start(spec)
        await engine.wait_ready(stall_s=30.0)
        assert engine.pid == waits.pid
        (imports, *_) = [
            s for s in engine.startup_segments() if s.name is SegmentName.RUNTIME_IMPORT
        ]
        assert imports.saved_s == pytest.approx(waits.ready_s - waits.start_s, abs=0.01)
        assert imports.start_s >= waits.ready_s + 0.2, "the wait is no part of the start"
        canary = factory.traits.canary
        golden = canary.golden_token_ids
        answer = await engine.generate(canary.prompt_token_ids, max_tokens=len(golden))
        assert answer.token_ids == golden
    finally:
        await engine.stop()


async def test_a_process_that_stands_by_and_dies_is_named(factory: ModelledFactory) -> None:
    engine = ModelledEngine()
    spec = factory.spec("dies")
    await engine.stand_by(spec)
    await engine.stop(grace_s=2.0)
    with pytest.raises(Unavailable, match="ended with"):
        await engine.start(spec)


async def test_b129_an_engine_wakes_only_with_the_weights_it_had(factory: ModelledFactory) -> None:
    async with factory.start("sleeper") as engine:
        assert isinstance(engine, ModelledEngine)
        before = await engine.generate(PROMPT, max_tokens=8)
        busy = asyncio.create_task(engine.generate(PROMPT[:5], max_tokens=400, ignore_eos=True))
        await asyncio.sleep(0.2)
        with pytest.raises(Refused, match="requests run"):
            await engine.sleep(SleepDepth.WEIGHTS_IN_HOST)
        await busy
        await engine.sleep(SleepDepth.WEIGHTS_IN_HOST)
        with pytest.raises(Unavailable, match="asleep"):
            await engine.generate(PROMPT, max_tokens=8)
        await engine.wake()
        again = await engine.generate(PROMPT, max_tokens=8)
        assert again.token_ids == before.token_ids and again.cached_tokens == 0, "its KV was gone"
        assert engine._spec is not None
        arena, away = engine._spec.arena_path, engine._spec.arena_path.with_name("away")
        await engine.sleep(SleepDepth.WEIGHTS_GONE)
        arena.rename(away)
        with pytest.raises(IdentityMismatch, match="weights_missing"):
            await engine.wake()
        with pytest.raises(Unavailable, match="weights_missing"):
            await engine.generate(PROMPT, max_tokens=8)
        spoilt = bytearray(away.read_bytes())
        slots, _size = read_tensor_table(engine._spec.tensor_table_path.read_bytes())
        spoilt[slots[0].offset_bytes] ^= 1
        arena.write_bytes(spoilt)
        with pytest.raises(IdentityMismatch, match="other weights than before"):
            await engine.wake()
        away.replace(arena)
        await engine.wake()
        assert (await engine.generate(PROMPT, max_tokens=8)).token_ids == before.token_ids


def test_what_an_engine_cannot_is_unsupported_by_name() -> None:
    engine = AttachedEngine(
        "http://127.0.0.1:1", model="m", profile="h200-llama8b-fp8", clock=SystemClock()
    )
    for what in (StandsBy, Sleeps, StagesGraphs):
        with pytest.raises(Unsupported, match="attached"):
            offered(engine, what, "attached", "graph stages")
        assert offered(ModelledEngine(), what, "modelled", "x")
