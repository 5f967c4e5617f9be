"""Counters, latency windows and lengths of one model (R4.3).

Owns the arithmetic of what the router tells the planner; the service feeds it and stamps samples
with its own clock on receipt (a sender's clock is never used). Unknown is a count of 0, never a
latency of 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from readyplane.core.work import (
    ISL_EDGES,
    LengthStats,
    expected_remaining,
    place_of,
    with_running,
)

BINS_MAX = 16_384
GENERATIONS_MAX = 16


@dataclass(slots=True)
class Window:
    """Samples of the last `window_s`, at most `samples_max`; kept in order, so asking is cheap."""

    window_s: float
    samples_max: int
    _samples: deque[tuple[float, float]] = field(init=False, default_factory=deque)
    _sorted: list[float] = field(init=False, default_factory=list)

    def add(self, value_s: float, *, now_s: float) -> None:
        """One sample; what is negative or not finite is no latency and is left out."""
        if 0.0 <= value_s < 1e9:
            if len(self._samples) >= self.samples_max:
                self._drop_oldest()
            self._samples.append((now_s, value_s))
            insort(self._sorted, value_s)

    def quantiles(self, *, now_s: float) -> tuple[int, float, float, float, float]:
        """(count, p50, p90, p99, mean), zeros when the count is 0."""
        samples, values = self._samples, self._sorted
        while samples and samples[0][0] < now_s - self.window_s:
            self._drop_oldest()
        if not values:
            return 0, 0.0, 0.0, 0.0, 0.0
        p50, p90, p99 = (_quantile(values, q) for q in (0.5, 0.9, 0.99))
        return len(values), p50, p90, p99, math.fsum(values) / len(values)

    def _drop_oldest(self) -> None:
        value_s = self._samples.popleft()[1]
        del self._sorted[bisect_left(self._sorted, value_s)]


def _quantile(values: list[float], q: float) -> float:
    """Linear between the two nearest of the sorted values, as numpy has it by default."""
    place = (len(values) - 1) * q
    below = int(place)
    low, high = values[below], values[min(below + 1, len(values) - 1)]
    share = place - below
    if share >= 0.5:
        return high - (high - low) * (1 - share)
    return low + (high - low) * share


@dataclass(slots=True)
class Counters:
    """Totals since the router began (see `ModelSignals`)."""

    arrivals: int = 0
    arrival_tokens: int = 0
    arrival_uncached_tokens: int = 0
    finished: int = 0
    finished_prompt_tokens: int = 0
    output_tokens: int = 0
    refused: int = 0
    aborted: int = 0
    attained: int = 0
    repaired: int = 0
    handovers: int = 0


@dataclass(slots=True)
class Outcomes:
    """How requests of one generation ended: with all tokens, of those with both targets met, and
    lost by one of its workers.
    """

    finished: int = 0
    attained: int = 0
    failed: int = 0


class Generations:
    """Ends by the artifact of the pair that served, for the newest artifacts seen."""

    def __init__(self) -> None:
        """Empty."""
        self._outcomes: dict[str, Outcomes] = {}

    def of(self, digest: str) -> Outcomes:
        """The counters of one artifact; the one that was not asked for longest makes room."""
        found = self._outcomes.pop(digest, None) or Outcomes()
        self._outcomes[digest] = found
        if len(self._outcomes) > GENERATIONS_MAX:
            del self._outcomes[next(iter(self._outcomes))]
        return found

    def snapshot(self) -> list[tuple[str, Outcomes]]:
        """All of them, by artifact."""
        return sorted(self._outcomes.items())


class Lengths:
    """Joint ISL/OSL counts that age, and forecasts from them that are cheap to ask for."""

    REFRESH_EVERY = 32
    REBUILD_EVERY = 8
    """Times that the remaining output is asked for between two looks at who still runs."""

    def __init__(self, *, half_life: int, quantile: float) -> None:
        """`half_life` finished requests halve a count; `quantile` is what gets reserved."""
        self.stats = LengthStats()
        self._factor = 0.5 ** (self.REFRESH_EVERY / half_life)
        self._quantile = quantile
        self._since = 0
        self._forecasts: dict[tuple[int, int], tuple[float, float]] = {}
        self._bins: dict[int, int] = {}  # by prompt tokens
        self._counts = self.stats.counts.copy()
        self._snapshot: tuple[tuple[float, ...], ...] | None = None
        self._asked = self.REBUILD_EVERY
        self._ahead: dict[tuple[int, int], float] = {}  # as _forecasts, by those who run as well
        self._whole = self._counts

    def add(self, isl: int, osl: int) -> None:
        """One finished request."""
        self.stats.add(isl, osl)
        self._snapshot = None
        self._since += 1
        if self._since >= self.REFRESH_EVERY:
            self._since = 0
            self.stats.age(self._factor)
            self._counts = self.stats.counts.copy()
            self._forecasts.clear()

    def snapshot(self) -> tuple[tuple[float, ...], ...]:
        """The counts now."""
        if self._snapshot is None:
            self._snapshot = self.stats.snapshot()
        return self._snapshot

    def remaining(self, isl: int, emitted: int, cap: int | None) -> tuple[float, float]:
        """(mean, quantile) of the output tokens still to come, each at least 1, within the cap."""
        mean, high = self._forecast(isl, emitted)
        if cap is None:
            return mean, high
        left = float(max(1, cap - emitted))
        return min(mean, left), min(high, left)

    def remaining_in_all(self, requests: Sequence[tuple[int, int, int | None]]) -> float:
        """Sum of the means of many running requests, each (isl, emitted, cap).

        That they run already counts: where answers grow longer, those that have ended are the
        short ones.
        """
        self._asked += 1
        if self._asked > self.REBUILD_EVERY:
            self._asked = 1
            running = self.stats.counts * 0.0
            for isl, emitted, _ in requests:
                running[place_of(isl, emitted)] += 1.0
            self._whole = with_running(self._counts, running)
            self._ahead.clear()
        total, bins, ahead = 0.0, self._bins, self._ahead
        for isl, emitted, cap in requests:
            mean = ahead.get((bins.get(isl, -1), emitted & ~15))
            if mean is None:
                mean = self._mean_ahead(isl, emitted)
            if cap is not None and mean > cap - emitted:
                mean = float(max(1, cap - emitted))
            total += mean
        return total

    def _mean_ahead(self, isl: int, emitted: int) -> float:
        key = self._key(isl, emitted)
        mean = expected_remaining(self._whole, isl=key[0], emitted=key[1], cap=None)
        if len(self._ahead) < 4_096:
            self._ahead[key] = mean
        return mean

    def _key(self, isl: int, emitted: int) -> tuple[int, int]:
        low = self._bins.get(isl)
        if low is None:
            low = ISL_EDGES[bisect_right(ISL_EDGES, isl) - 1] if isl > 0 else 0
            if len(self._bins) < BINS_MAX:
                self._bins[isl] = low
        return low, emitted & ~15

    def _forecast(self, isl: int, emitted: int) -> tuple[float, float]:
        key = self._key(isl, emitted)
        found = self._forecasts.get(key)
        if found is None:
            found = (
                expected_remaining(self._counts, isl=key[0], emitted=key[1], cap=None),
                expected_remaining(
                    self._counts, isl=key[0], emitted=key[1], cap=None, quantile=self._quantile
                ),
            )
            if len(self._forecasts) < 4_096:
                self._forecasts[key] = found
        return found
