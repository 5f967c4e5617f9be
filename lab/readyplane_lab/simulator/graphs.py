"""Graphs that a simulated engine captures while it serves (R14), on virtual time.

Owns the engine's side only: `readyplane_agent.upgrading`, which asks it and tells the router, is the
agent's own. As the modelled engine does, it compiles, then captures one shape after the other, takes
each shape's KV blocks first and waits where none is free, and leaves requests as much time as it took.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

from readyplane.core.identity import Manifest
from readyplane.core.stage import CapacityStage
from readyplane.core.startup import Segment, SegmentName
from readyplane.core.worker import Lease, Serving
from readyplane.kit.clock import Clock
from readyplane.ports import Order, Router
from readyplane_agent.engines.offers import CaptureState, Graphs
from readyplane_agent.engines.port import GenerateResult
from readyplane_agent.settings import AgentSettings
from readyplane_agent.starting import Started
from readyplane_agent.trace import StartTrace
from readyplane_agent.upgrade import Terms
from readyplane_agent.upgrading import Upgrading
from readyplane_lab.simulator.engine import SimEngine

BLOCK_WAIT_POLL_S = 0.05
PACE = 1.0
"""Beside requests as much time is left to them after each shape as it took."""


def shapes_of(max_num_seqs: int) -> tuple[int, ...]:
    """Sequences an iteration that are captured: powers of two, and the most there may be."""
    powers = {2**n for n in range(max_num_seqs.bit_length()) if 2**n <= max_num_seqs}
    return tuple(sorted({*powers, max_num_seqs}))


class SimGraphs:
    """The graphs of one engine that came up without them: `StagesGraphs`, and answers.

    Args:
        kv_blocks: that all of them take. seconds: what compiling and capturing take as a whole.

    Attributes:
        facts: what the worker serves with, set when it does.
    """

    facts: Serving

    def __init__(
        self,
        engine: SimEngine,
        *,
        kv_blocks: int,
        seconds: Callable[[SegmentName], float],
        clock: Clock,
    ) -> None:
        self._engine, self._seconds, self._clock = engine, seconds, clock
        shapes = shapes_of(engine.model.max_num_seqs)
        share, more = divmod(kv_blocks, len(shapes))
        self._plan = {shape: share + (n < more) for n, shape in enumerate(shapes)}
        self._task: asyncio.Task[None] | None = None
        self._state = CaptureState.IDLE
        self._captured: tuple[int, ...] = ()
        self._used: tuple[int, ...] = ()

    def serving(self) -> Serving:
        """See the port."""
        return self.facts

    async def graphs(self) -> Graphs:
        """See the port."""
        total, withheld = self._engine.model.pool.total, self._engine.model.withheld
        left = sum(self._plan.values()) - withheld
        wanted = tuple(self._plan)
        return Graphs(self._used, self._captured, wanted, self._state, total, total - left, 0)

    async def capture(self) -> None:
        """See the port."""
        if self._state is CaptureState.IDLE:
            self._state = CaptureState.RUNNING
            self._task = asyncio.get_running_loop().create_task(self._capture())

    async def use_captured(self) -> Graphs:
        """See the port."""
        self._engine.run_at(1.0)
        self._used = self._captured
        return await self.graphs()

    async def drop_captured(self) -> Graphs:
        """See the port."""
        self.stop()
        self._engine.run_at(self._engine.profile.eager_factor)
        self._engine.return_withheld()
        self._state, self._captured, self._used = CaptureState.IDLE, (), ()
        return await self.graphs()

    async def answer_captured(
        self, prompt_token_ids: tuple[int, ...], *, max_tokens: int
    ) -> GenerateResult:
        """See the port."""
        return await self._answer(prompt_token_ids, max_tokens, 1.0)

    async def generate(
        self, prompt_token_ids: tuple[int, ...], *, max_tokens: int, timeout_s: float
    ) -> GenerateResult:
        """One greedy answer with what requests run with; an upgrade changes no token of it."""
        del timeout_s
        factor = 1.0 if self._used else self._engine.profile.eager_factor
        return await self._answer(prompt_token_ids, max_tokens, factor)

    def stop(self) -> None:
        """Capture no more."""
        if self._task is not None:
            self._task.cancel()

    async def _answer(
        self, prompt: tuple[int, ...], max_tokens: int, factor: float
    ) -> GenerateResult:
        profile = self._engine.profile
        base_s, per_sequence_s, per_token_s = profile.decode_coefficients_s()
        each_s = base_s + per_sequence_s + per_token_s * len(prompt)
        await self._clock.sleep(factor * (profile.prefill_s(len(prompt), 0) + max_tokens * each_s))
        told = hashlib.shake_256(repr(prompt).encode()).digest(max_tokens)
        return GenerateResult(tuple(told), "", "length", len(prompt))

    async def _capture(self) -> None:
        await self._clock.sleep(self._seconds(SegmentName.COMPILE))
        each_s = self._seconds(SegmentName.CUDA_GRAPH) / len(self._plan)
        for shape, blocks in self._plan.items():
            while not self._engine.withhold(blocks):
                await self._clock.sleep(BLOCK_WAIT_POLL_S)
            await self._clock.sleep(each_s)
            self._captured = (*self._captured, shape)
            if not self._engine.model.is_idle():
                await self._clock.sleep(PACE * each_s)
        self._state = CaptureState.DONE


class Staging:
    """One worker's stages: the agent's `Upgrading` over a simulated engine.

    Attributes:
        stage: what is promised now. segments: of the upgrade, for the start's trace.
    """

    def __init__(
        self,
        order: Order,
        manifest: Manifest,
        engine: SimEngine,
        *,
        profile: str,
        kv_blocks: int,
        seconds: Callable[[SegmentName], float],
        router: Router,
        clock: Clock,
        lease: Callable[[], Lease],
        told: Callable[[], None],
    ) -> None:
        settings = AgentSettings(
            worker_id=order.worker_id,
            role=order.role,
            model=order.model,
            router="in process",
            work_dir=Path(),
            graph_stages=True,
            engine="modelled",
        )
        self._graphs = SimGraphs(engine, kv_blocks=kv_blocks, seconds=seconds, clock=clock)
        self._terms = Terms(profile, engine.model.block_size)
        self._started = Started(order.role, manifest=manifest)
        self._trace = StartTrace(clock, process_start_s=clock.monotonic_s())
        self._upgrading = Upgrading(
            settings,
            router=router,
            engine=self._graphs,  # type: ignore[arg-type]  # all of the port that is asked of it
            started=self._started,
            clock=clock,
            trace=self._trace,
            lease=lease,
            told=told,
        )

    @property
    def stage(self) -> CapacityStage | None:
        """What is promised; None before the engine has come up."""
        return self._started.stage

    @property
    def segments(self) -> tuple[Segment, ...]:
        """How long after ready the graphs came."""
        return self._trace.segments()

    async def came_up(self) -> None:
        """The engine is up: this is what it has without graphs."""
        if self._started.stage is None:
            self._started.stage = self._terms.first(await self._graphs.graphs())

    def begin(self, serving: Serving) -> None:
        """It serves with that: the graphs may come."""
        self._started.serving = self._graphs.facts = serving
        self._upgrading.begin()

    async def interrupt(self, why: str) -> None:
        """Something else comes first."""
        await self._upgrading.interrupt(why)

    def stop(self) -> None:
        """The worker ends."""
        self._upgrading.stop()
        self._graphs.stop()
