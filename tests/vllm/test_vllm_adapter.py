"""The vLLM adapter on a real vLLM: weights from the arena, its start in segments, standing by.

Measured figures are printed; `docs/vllm.md` has those of a quiet machine.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import Unavailable
from readyplane.core.startup import SegmentName, StartMode, critical_path
from readyplane.kit.clock import SystemClock
from readyplane_agent.engines.offers import Sleeps, StandsBy
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.engines.vllm import VllmEngine
from readyplane_lab.up.real_engine import RealEngine
from tests.vllm.vllm_world import VllmFactory, vllm_factory

PROMPT = tuple(range(10, 60))
LIMITS = {"stall_s": 240.0, "limit_s": 500.0}
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def world(engine: RealEngine, tmp_path_factory: pytest.TempPathFactory) -> VllmFactory:
    return vllm_factory(tmp_path_factory.mktemp("vllm"), engine)


def without_weights(spec: EngineSpec) -> EngineSpec:
    """No checkpoint file beside the configuration: weights can only come from the arena."""
    for path in (spec.work_dir / "files").glob("*.safetensors"):
        path.unlink()
    return spec


class Life:
    """One start: its engine and what it took."""

    def __init__(self, world: VllmFactory) -> None:
        self.engine = VllmEngine(clock=SystemClock(), program=world.engine.program)
        self.clock = SystemClock()
        self.ready_s = 0.0

    async def start(self, spec: EngineSpec) -> tuple[int, ...]:
        """Start it, and its answer to the prompt."""
        begun_s = self.clock.monotonic_s()
        await self.engine.start(spec)
        await self.engine.wait_ready(**LIMITS)
        self.ready_s = self.clock.monotonic_s() - begun_s
        segments = self.engine.startup_segments()
        self.path = critical_path(segments, start_s=begun_s, end_s=begun_s + self.ready_s)
        told = {str(k): round(v, 2) for k, v in self.path.exclusive_s.items()}
        print(
            f"ready after {self.ready_s:.1f} s: {told}, {self.path.unexplained_fraction:.4f} open"
        )
        return (await self.engine.generate(PROMPT, max_tokens=8)).token_ids

    @property
    def compile_s(self) -> float:
        return self.path.inclusive_s.get(SegmentName.COMPILE, 0.0)

    @property
    def compiled(self) -> str:
        found = [s for s in self.engine.startup_segments() if s.name is SegmentName.COMPILE]
        return found[0].detail if found else ""


async def test_cold_then_warm_then_from_a_standby(world: VllmFactory) -> None:
    """The same model compiled once; its code taken again elsewhere; a process that had imported."""
    cold_spec = without_weights(world.spec("cold", mode=StartMode.JIT))
    compiled = cold_spec.work_dir / "compile-cache"
    cold_spec = replace(cold_spec, compile_cache_dir=compiled)
    cold = Life(world)
    try:
        first = await cold.start(cold_spec)
        kv = cold.engine.serving().kv
        assert kv.dtype == "bfloat16" and kv.block_size > 0 and kv.layout != "unknown"
        assert kv.engine_version == f"vllm/{world.engine.version.partition('+')[0]}"
        assert cold.engine.serving().kv_side_channel
    finally:
        await cold.engine.stop(grace_s=10)
    assert "miss" in cold.compiled
    assert cold.path.unexplained_fraction <= 0.02

    warm_spec = without_weights(world.spec("warm", mode=StartMode.JIT))
    elsewhere = shutil.copytree(compiled, warm_spec.work_dir / "compile-cache")
    warm_spec = replace(warm_spec, compile_cache_dir=elsewhere)
    warm = Life(world)
    port: object = warm.engine
    assert isinstance(port, StandsBy)
    assert not isinstance(port, Sleeps)
    try:
        bare = replace(
            warm_spec,
            arena_path=Path("/nowhere"),
            tensor_table_path=Path("/nowhere"),
            config_path=Path("/nowhere"),
            tokenizer_path=None,
            compile_cache_dir=None,
        )
        waits = await warm.engine.stand_by(bare, **LIMITS)
        print(f"stands by after {waits.ready_s - waits.start_s:.1f} s, {waits.resident_bytes} B")
        assert waits.pid == warm.engine.pid and waits.device_bytes == 0
        again = await warm.start(warm_spec)
        assert waits.pid == warm.engine.pid
    finally:
        await warm.engine.stop(grace_s=10)
    assert again == first, "the same weights and the same code give the same answer"
    assert "hit" in warm.compiled
    kept = warm.engine.startup_segments()[0]
    assert kept.name is SegmentName.RUNTIME_IMPORT and kept.saved_s > 0
    print(f"compile {warm.compile_s / cold.compile_s:.3f}, ready {warm.ready_s / cold.ready_s:.3f}")
    assert warm.compile_s <= 0.25 * cold.compile_s
    assert warm.ready_s <= 0.30 * cold.ready_s
    assert warm.path.unexplained_fraction <= 0.02


async def test_it_imports_while_the_weights_come_in(world: VllmFactory) -> None:
    """Started before the tensor table is there, it serves soon after it came."""
    spec = without_weights(world.spec("early"))
    table = spec.tensor_table_path.read_bytes()
    spec.tensor_table_path.unlink()
    life = Life(world)
    try:
        begun = asyncio.create_task(life.start(replace(spec, wait_weights=True)))
        while not any(m == "weights_awaited" for m in _marks(spec)):
            assert not begun.done(), begun
            await asyncio.sleep(0.5)
        spec.tensor_table_path.with_suffix(".part").write_bytes(table)
        spec.tensor_table_path.with_suffix(".part").replace(spec.tensor_table_path)
        assert len(await begun) == 8
    finally:
        await life.engine.stop(grace_s=10)


def _marks(spec: EngineSpec) -> list[str]:
    path = spec.work_dir / "engine-marks.jsonl"
    return [json.loads(line)[0] for line in path.read_text().splitlines()] if path.exists() else []


def _lack(doc: dict[str, Any]) -> None:
    doc["tensors"] = doc["tensors"][:-1]


def _another(doc: dict[str, Any]) -> None:
    doc["manifest_digest"] = "sha256:another"


@pytest.mark.parametrize(
    ("alter", "why"),
    [(_lack, "not initialized from checkpoint"), (_another, "manifest_digest: sha256:another")],
)
async def test_weights_that_are_not_as_ordered_end_the_start(
    world: VllmFactory, alter: Any, why: str
) -> None:
    """The checkpoint lies beside it, and is not taken instead."""
    spec = world.spec("refused")
    doc = json.loads(spec.tensor_table_path.read_bytes())
    alter(doc)
    spec.tensor_table_path.write_text(json.dumps(doc))
    life = Life(world)
    try:
        with pytest.raises(Unavailable):
            await life.start(spec)
        assert why in spec.log_path.read_text()
    finally:
        await life.engine.stop(grace_s=5)
