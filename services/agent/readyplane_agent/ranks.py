"""The ranks of one worker as its agent sees them: told to the router as they get on (R17.1).

Owns which rank is told when: a step as soon as it was passed, progress once a second, so that the
router sees a rank that hangs among others that load. Rank 0's canary is the agent's to ask, and
`starting` tells it. `barrier` makes the calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from readyplane.kit.clock import Clock
from readyplane_agent.barrier import LAST, Barrier
from readyplane_agent.engines.port import EnginePort
from readyplane_agent.engines.ranks import STEPS, HasRanks, RankStep, first_gone

RANKS_POLL_S = 0.1
PROGRESS_EVERY_S = 1.0


class Ranks:
    """All ranks of a worker; nothing to do for a worker of one.

    Args:
        world: how many. placed: bytes that each rank's memory holds so far, by its number.
    """

    def __init__(
        self,
        *,
        world: int,
        engine: EnginePort,
        barrier: Barrier,
        placed: Callable[[], Sequence[int]],
        clock: Clock,
    ) -> None:
        self._world, self._engine, self._barrier = world, engine, barrier
        self._placed, self._clock = placed, clock
        self._told: dict[int, tuple[str, int, float]] = {}

    def steps(self) -> list[RankStep]:
        """How far every rank is, whether its process is there yet or not."""
        known = self._engine.ranks() if isinstance(self._engine, HasRanks) else ()
        found = {each.rank: each for each in known}
        placed = self._placed()
        out = []
        for rank in range(self._world):
            each = found.get(rank) or RankStep(rank, STEPS[0])
            step = STEPS[-2] if rank == 0 and each.step == LAST else each.step
            held = placed[rank] if rank < len(placed) else 0
            out.append(RankStep(rank, step, held + each.progress, each.pid, each.returncode))
        return out

    async def tell(self, *, again: bool = False) -> None:
        """Tell what is new of every rank, or all of it to a router that has forgotten it.

        Raises:
            Refused: the group has failed.
        """
        now_s = self._clock.monotonic_s()
        for each in self.steps():
            step, progress, told_s = self._told.get(each.rank, ("", -1, 0.0))
            grown = each.progress > progress and now_s - told_s >= PROGRESS_EVERY_S
            if each.returncode is None and (again or each.step != step or grown):
                await self._barrier.passed(each.step, rank=each.rank, progress=each.progress)
                self._told[each.rank] = each.step, each.progress, now_s

    async def beside(self, start: Awaitable[None]) -> None:
        """Tell while a start runs; a group that fails ends it.

        Raises:
            Refused: the group has failed. Whatever the start raises.
        """
        if self._world == 1:
            await start
            return
        work: set[asyncio.Future[Any]] = {
            asyncio.ensure_future(start),
            asyncio.ensure_future(self._keep()),
        }
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for each in work:
                each.cancel()
            await asyncio.wait(work)

    async def _keep(self) -> None:
        while True:
            await self.tell()
            await self._clock.sleep(RANKS_POLL_S)


def blamed(engine: EnginePort) -> int:
    """The rank that a failure is told of: see `first_gone`, rank 0 otherwise."""
    gone = first_gone(engine.ranks()) if isinstance(engine, HasRanks) else None
    return 0 if gone is None else gone.rank
