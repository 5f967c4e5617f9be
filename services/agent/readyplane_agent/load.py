"""What the engine says about its load, asked so that an engine that hangs holds up no renewal.

Owns the one question that is under way and the last answer. Without a new answer in time the last one
is told with its age, and before there is any, nothing is known: unknown is never zero.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from readyplane.core.worker import LoadReport
from readyplane.kit.clock import Clock
from readyplane_agent.engines.port import EnginePort

LOAD_SHARE = 1 / 16
"""Share of the lease's ttl that a report may take: well below a renewal's turn (a third of it)."""


class LoadReader:
    """The load of one engine; a question that is not answered in time is not asked twice."""

    def __init__(self, engine: EnginePort, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._last = LoadReport()
        self._read_s: float | None = None
        self.asking: set[asyncio.Task[None]] = set()  # one at most

    async def report(self, ttl_s: float) -> LoadReport:
        """The load now, or what is known of it after a share of `ttl_s`.

        Raises what the engine raised.
        """
        if not self.asking:
            task = asyncio.ensure_future(self._ask())
            self.asking.add(task)
            task.add_done_callback(self.asking.discard)
        done, _ = await asyncio.wait(tuple(self.asking), timeout=LOAD_SHARE * ttl_s)
        for task in done:
            task.result()
        if done or self._read_s is None:
            return self._last
        return replace(self._last, age_s=self._clock.monotonic_s() - self._read_s)

    async def _ask(self) -> None:
        load = await self._engine.load_report()
        self._last, self._read_s = load, self._clock.monotonic_s() - load.age_s
