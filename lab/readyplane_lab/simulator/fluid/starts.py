"""Starts on the fluid's time: the same segments, draws and sources of weights as the event mode.

Owns the course of each start between order and ready. A start is a handful of timed steps, so it is
played exactly: the coroutine by which the event mode moves weights runs here as well, with pauses
that this module lets pass, so that readers contend for the store and for peers in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Sequence
from heapq import heappop, heappush
from math import inf

from readyplane.core.startup import SegmentName, WeightTier
from readyplane_lab.simulator.fluid.fleet import FluidWorker
from readyplane_lab.simulator.sources import WeightSources
from readyplane_lab.simulator.startup import Draws, StartUpModel

BEFORE_WEIGHTS = 2
"""Segments that come before the weights: import, and finding the sources."""


class _StartFailed(Exception):
    """A start ends half-way."""


class _Pause:
    """What a coroutine awaits to let seconds pass."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __await__(self) -> Generator[float, None, None]:
        yield self.seconds


class _Pauses:
    """A clock for coroutines that are driven by hand: only its pauses mean something."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        """The fluid's second."""
        return self.now_s

    def wall_s(self) -> float:
        """The same."""
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        """Let it pass."""
        await _Pause(max(0.0, seconds))


def _never(worker: FluidWorker, at_s: float) -> None:
    """Nothing is spoilt before the run."""
    raise AssertionError((worker, at_s))


class Starts:
    """All starts under way.

    Args:
        on_ready: told each worker with the second at which it serves.
        on_failed: told each whose start has failed.

    Attributes:
        sources: who gives weights. took_s: the longest of the starts before the run.
        alone: nobody else reads where one does.
    """

    def __init__(
        self,
        model: StartUpModel,
        draws: Draws,
        *,
        on_ready: Callable[[FluidWorker, float], None],
        on_failed: Callable[[FluidWorker, float], None],
    ) -> None:
        self._model = model
        self._draws = draws
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._spoilt: dict[str, list[bool]] = {"prefill": [], "decode": []}
        self.took_s = 0.0
        self.alone = False
        self._clock = _Pauses()
        self.sources = WeightSources(model, clock=self._clock)
        self._courses: dict[FluidWorker, Coroutine[object, None, WeightTier]] = {}
        self._due: list[tuple[float, int, FluidWorker]] = []
        self._ties = 0

    def begin(self, worker: FluidWorker, now_s: float) -> None:
        """Order one."""
        worker.provisioned_s = now_s + self._seconds(worker, SegmentName.SCHEDULE)
        self._courses[worker] = self._live(worker)
        self._push(now_s, worker)

    def activate(self, worker: FluidWorker, now_s: float) -> None:
        """A standby that is loaded serves shortly: it hears of it at once."""
        self._courses[worker] = self._activated(worker)
        self._push(now_s, worker)

    async def _activated(self, worker: FluidWorker) -> WeightTier:
        await self._clock.sleep(self._model.activation_s(self._draws, *worker.named))
        return worker.tier

    @property
    def now_s(self) -> float:
        """The second that is being played."""
        return self._clock.now_s

    def spoil(self, pool: str, count: int, *, hangs: bool) -> None:
        """The next `count` starts of a pool that have their weights never come up, or fail."""
        self._spoilt[pool] += [hangs] * count

    def cancel(self, worker: FluidWorker) -> None:
        """It is wanted no more; whatever it reads, others may read faster from now on."""
        course = self._courses.pop(worker, None)
        if course is not None:
            course.close()

    def close(self) -> None:
        """The run is over."""
        for worker in list(self._courses):
            self.cancel(worker)

    def beforehand(self, workers: Sequence[FluidWorker]) -> list[tuple[float, WeightTier]]:
        """Starts some time ago, each as if alone, the last of which ends at 0: when, and how.

        `took_s` is how long the last one took.
        """
        ready: dict[FluidWorker, float] = {}
        course = Starts(self._model, self._draws, on_ready=ready.__setitem__, on_failed=_never)
        course.alone = True
        for worker in workers:
            course.begin(worker, 0.0)
        course.advance(inf)
        self.took_s = max(ready.values(), default=0.0)
        return [(ready[worker] - self.took_s, worker.tier) for worker in workers]

    def advance(self, until_s: float) -> None:
        """Play everything up to and with that second, in order."""
        while self._due and self._due[0][0] <= until_s:
            at_s, _, worker = heappop(self._due)
            course = self._courses.get(worker)
            if course is None:
                continue
            self._clock.now_s = at_s
            try:
                pause_s = course.send(None)
            except _StartFailed:
                del self._courses[worker]
                self._on_failed(worker, at_s)
            except StopIteration as end:
                del self._courses[worker]
                worker.tier = end.value
                self._on_ready(worker, at_s)
            else:
                self._push(at_s + float(pause_s), worker)  # type: ignore[arg-type]

    async def _live(self, worker: FluidWorker) -> WeightTier:
        """One start, as `SimWorker` lives it."""
        names = list(self._model.segments)
        await self._clock.sleep(self._seconds(worker, SegmentName.SCHEDULE))
        for name in names[:BEFORE_WEIGHTS]:
            await self._clock.sleep(self._seconds(worker, name))
        cached = self._model.is_cached(self._draws, *worker.named)
        tier = await self.sources.fetch(cached=cached, alone=self.alone)
        if self._spoilt[worker.pool]:
            if self._spoilt[worker.pool].pop(0):
                await self._clock.sleep(inf)
            raise _StartFailed
        for name in names[BEFORE_WEIGHTS:]:
            await self._clock.sleep(self._seconds(worker, name))
        return tier

    def _push(self, at_s: float, worker: FluidWorker) -> None:
        self._ties += 1
        heappush(self._due, (at_s, self._ties, worker))

    def _seconds(self, worker: FluidWorker, name: SegmentName) -> float:
        return self._model.seconds(name, self._draws, *worker.named)
