"""An engine twin that offers what engines may: graphs that come later, standing by, sleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from readyplane.core.errors import IdentityMismatch, Refused, Unavailable
from readyplane.core.startup import Segment, SegmentName
from readyplane.core.worker import LoadReport, Serving
from readyplane_agent.engines.offers import CaptureState, Graphs, Imported, SleepDepth
from readyplane_agent.engines.port import EngineSpec, GenerateResult
from tests.unit.agent_twins import TwinEngine

BLOCKS, EACH = 100, 5
SHAPES = (1, 2, 4, 8)


class StagedTwin(TwinEngine):
    """What it is to do wrong is set by tests.

    Attributes:
        blocks: KV blocks now. fails_at: shapes after which the capture fails. other_tokens: of
            captured graphs. keeps: blocks that it takes beyond its plan. away: calls raise.
    """

    def __init__(self, golden: Sequence[int] = (7, 8, 9, 2), **more: Any) -> None:
        super().__init__(golden, **more)
        self.blocks, self.each_s = BLOCKS, 0.01
        self.captured: tuple[int, ...] = ()
        self.used: tuple[int, ...] = ()
        self.state, self.failure = CaptureState.IDLE, ""
        self.fails_at: int | None = None
        self.other_tokens = False
        self.keeps = 0
        self.away = False
        self.busy = False
        self.sleep_s = 0.0
        self.weights_lost = False
        self.depth: SleepDepth | None = None
        self.bare: EngineSpec | None = None
        self.calls: list[str] = []
        self._task: asyncio.Task[None] | None = None

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.away:
            raise Unavailable("the engine is away", "wait")

    # ------------------------------------------------------------------ graphs

    async def graphs(self) -> Graphs:
        self._call("graphs")
        left = len(SHAPES) - len(self.captured)
        return Graphs(
            used=self.used,
            captured=self.captured,
            wanted=SHAPES,
            state=self.state,
            kv_total_blocks=self.blocks,
            kv_blocks_after=self.blocks - EACH * left,
            graph_bytes=1000 * len(self.captured),
            failure=self.failure,
        )

    async def capture(self) -> None:
        self._call("capture")
        if self.state is not CaptureState.RUNNING:
            self.state = CaptureState.RUNNING
            self._task = asyncio.create_task(self._capture())

    async def _capture(self) -> None:
        for shape in SHAPES:
            if self.fails_at is not None and len(self.captured) >= self.fails_at:
                self.state, self.failure = CaptureState.FAILED, "out of memory"
                return
            self.blocks -= EACH
            await asyncio.sleep(self.each_s)
            self.captured = (*self.captured, shape)
        self.blocks -= self.keeps
        self.state = CaptureState.DONE

    async def answer_captured(
        self, prompt_token_ids: tuple[int, ...], *, max_tokens: int
    ) -> GenerateResult:
        self._call("answer_captured")
        found = await self.generate(prompt_token_ids, max_tokens=max_tokens)
        wrong = (*found.token_ids[:-1], 999)
        return replace(found, token_ids=wrong) if self.other_tokens else found

    async def use_captured(self) -> Graphs:
        self._call("use_captured")
        if self.state is not CaptureState.DONE:
            raise Refused("use", ["nothing is captured"])
        self.used = self.captured
        return await self.graphs()

    async def drop_captured(self) -> Graphs:
        self._call("drop_captured")
        if self._task is not None:
            self._task.cancel()
        self.blocks, self.captured, self.used = BLOCKS, (), ()
        self.state, self.failure = CaptureState.IDLE, ""
        return await self.graphs()

    # ------------------------------------------------------------------ standing by, sleep

    async def stand_by(
        self, spec: EngineSpec, *, stall_s: float = 60.0, limit_s: float = 600.0
    ) -> Imported:
        self._call("stand_by")
        self.bare = spec
        now_s = time.monotonic()
        return Imported(self.pid, now_s - 2.5, now_s, 2**20, 0)

    async def sleep(self, depth: SleepDepth) -> None:
        self._call("sleep")
        if self.busy:
            raise Refused("sleep", ["requests run"], "wait")
        await asyncio.sleep(self.sleep_s)
        self.depth = depth

    async def wake(self) -> None:
        self._call("wake")
        if self.weights_lost:
            raise IdentityMismatch("weights", ["weights_missing"], "load them again")
        self.depth = None

    async def generate(self, *args: Any, **kwargs: Any) -> GenerateResult:
        if self.depth is not None:
            raise Unavailable("asleep", "wake it")
        return await super().generate(*args, **kwargs)

    # ------------------------------------------------------------------ what it is

    def serving(self) -> Serving:
        return replace(super().serving(), max_model_len=512)

    async def load_report(self) -> LoadReport:
        return LoadReport(running=0, waiting=0, kv_used_blocks=0, kv_total_blocks=self.blocks)

    async def wait_ready(self, *, stall_s: float = 60.0, limit_s: float = 1800.0) -> None:
        await super().wait_ready(stall_s=stall_s, limit_s=limit_s)
        if self.bare is not None:
            now_s = time.monotonic()
            found = Segment(SegmentName.RUNTIME_IMPORT, now_s, now_s, saved_s=2.5)
            self.segments.append(found)
