"""Graphs that a modelled engine captures while it serves (R14): one shape after another, paced.

Owns the capture from the agent's word to its use or its end. Its time is slept like that of a whole
start, what it compiles is real files, and each shape's memory is really taken from the KV pool before
it is captured; where no block is free it waits, since no request is ever stalled for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from readyplane.core.errors import Unavailable
from readyplane.core.startup import SegmentName
from readyplane.kit.clock import Clock
from readyplane_agent.engines.modelled import startup
from readyplane_agent.engines.modelled.core_stages import StagedEngineModel
from readyplane_agent.engines.modelled.plants import Plant
from readyplane_agent.engines.modelled.settings import ModelledSettings
from readyplane_agent.engines.modelled.startup import StartupLog
from readyplane_agent.engines.offers import CaptureState

LOG = logging.getLogger("engine")
BLOCK_WAIT_POLL_S = 0.05
BLOCK_WAIT_S_MAX = 3000.0
PACE = 1.0
"""Beside requests as much time is left to them after each shape as it took."""
FAILS_AFTER = 2


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """What the second stage has, beyond the first.

    Attributes:
        shapes: sequences an iteration, in the order of their capture. shape_blocks: KV blocks that
            one takes, 0 without a modelled device. shape_bytes: the same in bytes.
    """

    shapes: tuple[int, ...]
    shape_blocks: int
    shape_bytes: int


class GraphStages:
    """The graphs of one engine that was started without them.

    Args:
        pump: lets the runtime see what was changed in the model.
    """

    def __init__(
        self,
        model: StagedEngineModel,
        plan: GraphPlan,
        *,
        settings: ModelledSettings,
        clock: Clock,
        pump: Callable[[], object],
        plants: Collection[Plant] = (),
    ) -> None:
        self._model, self._plan, self._s = model, plan, settings
        self._clock, self._pump, self._plants = clock, pump, plants
        self._log = StartupLog(clock, None, {})  # the start is over: its file stays as it is
        self._task: asyncio.Task[None] | None = None
        self.state, self.failure = CaptureState.IDLE, ""
        self.captured: tuple[int, ...] = ()
        self.used: tuple[int, ...] = ()

    def document(self) -> dict[str, Any]:
        """`offers.Graphs` as JSON."""
        total, size = self._model.pool.total, self._plan.shape_blocks
        left = len(self._plan.shapes) - len(self.captured)
        taking = self._model.withheld - size * len(self.captured)  # of the one that is captured now
        return {
            "used": list(self.used),
            "captured": list(self.captured),
            "wanted": list(self._plan.shapes),
            "state": str(self.state),
            "failure": self.failure,
            "kv_total_blocks": total,
            "kv_blocks_after": total - size * left + taking,
            "graph_bytes": len(self.captured) * self._plan.shape_bytes,
        }

    def capture(self) -> None:
        """Begin, unless it is under way or done."""
        if self.state in (CaptureState.IDLE, CaptureState.FAILED):
            self.state, self.failure = CaptureState.RUNNING, ""
            self._task = asyncio.get_running_loop().create_task(self._capture())

    def use(self) -> bool:
        """Requests run with what is captured, from the next iteration on; False while it is not."""
        if self.state is not CaptureState.DONE:
            return False
        if not self.used:
            self._model.run_at(1.0, self._clock.monotonic_s())
            self.used = self.captured
            self._pump()
        return True

    def drop(self) -> None:
        """As after the start: nothing is captured, nothing used, all memory is KV."""
        self.stop()
        now_s = self._clock.monotonic_s()
        self._model.run_at(self._s.eager_factor, now_s)
        self._model.return_withheld(now_s)
        self.state, self.failure = CaptureState.IDLE, ""
        self.captured, self.used = (), ()
        self._pump()

    def stop(self) -> None:
        """Capture no more."""
        if self._task is not None:
            self._task.cancel()

    @property
    def other_tokens(self) -> bool:
        """Whether graphs answer something else, as a plant has it."""
        return Plant.GRAPH_TOKENS in self._plants

    async def _capture(self) -> None:
        try:
            await startup.modelled(self._log, self._clock, self._s, SegmentName.COMPILE)
            each_s = self._s.segments.get(SegmentName.CUDA_GRAPH, 0.0) / len(self._plan.shapes)
            for shape in self._plan.shapes:
                await self._take()
                if Plant.GRAPH_FAILS in self._plants and len(self.captured) >= FAILS_AFTER:
                    raise Unavailable(
                        f"capturing {shape} sequences ran out of memory", "see its log"
                    )
                await self._clock.sleep(each_s)
                self.captured = (*self.captured, shape)
                if not self._model.is_idle():
                    await self._clock.sleep(PACE * each_s)
        except (Unavailable, OSError) as error:
            LOG.warning("graphs: %s", error)
            self.state, self.failure = CaptureState.FAILED, str(error)
        else:
            LOG.info("graphs: %d shapes captured", len(self.captured))
            self.state = CaptureState.DONE

    async def _take(self) -> None:
        """Memory of one shape, as soon as nobody uses it. Raises Unavailable: never came free."""
        until_s = self._clock.monotonic_s() + BLOCK_WAIT_S_MAX
        while not self._model.withhold(self._plan.shape_blocks, self._clock.monotonic_s()):
            if self._clock.monotonic_s() > until_s:
                raise Unavailable(
                    f"no {self._plan.shape_blocks} KV blocks came free within {BLOCK_WAIT_S_MAX:g} s",
                    "upgrade it when it has less to do",
                )
            await self._clock.sleep(BLOCK_WAIT_POLL_S)
        self._pump()
