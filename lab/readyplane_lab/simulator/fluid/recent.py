"""What the router remembers of finished requests: latencies of its window, and output lengths."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from math import log1p

from readyplane.core.work import ISL_EDGES, OSL_EDGES
from readyplane_planner.signals import Latency, Lengths, Priors

PRIOR_OUTPUT = 256.0
REFRESH_EVERY = 32.0
ROWS_MIN = 16
"""Requests and rows after which forecasts are made anew."""
KNOWN_MIN = 20.0
_ISL_MIDDLES = [(a + b) / 2 for a, b in zip(ISL_EDGES, (*ISL_EDGES[1:], 65536), strict=True)]
_OSL_UPPER = (*OSL_EDGES[1:], 2 * OSL_EDGES[-1])
_OSL_MIDDLES = [(a + b) / 2 for a, b in zip(OSL_EDGES, _OSL_UPPER, strict=True)]


class RecentLatency:
    """Samples of the last seconds, in order of size; a sample may stand for many requests."""

    def __init__(self, window_s: float, samples_max: int) -> None:
        self._window_s = window_s
        self._samples_max = samples_max
        self._samples: deque[tuple[float, float, float]] = deque()
        self._sorted: list[float] = []
        self._weight = 0.0

    def add(self, at_s: float, value_s: float, weight: float) -> None:
        """One sample."""
        if len(self._samples) >= self._samples_max:
            self._drop_oldest()
        self._samples.append((at_s, value_s, weight))
        self._weight += weight
        insort(self._sorted, value_s)

    def latency(self, now_s: float) -> Latency:
        """Quantiles over the window."""
        samples, values = self._samples, self._sorted
        while samples and samples[0][0] < now_s - self._window_s:
            self._drop_oldest()
        if not values:
            return Latency(self._window_s)
        p50, p90, p99 = (_quantile(values, q) for q in (0.5, 0.9, 0.99))
        return Latency(self._window_s, max(1, round(self._weight)), p50, p90, p99)

    def _drop_oldest(self) -> None:
        _, value_s, weight = self._samples.popleft()
        self._weight = self._weight - weight if self._samples else 0.0
        del self._sorted[bisect_left(self._sorted, value_s)]


def _quantile(values: list[float], share: float) -> float:
    place = (len(values) - 1) * share
    below = int(place)
    low, high = values[below], values[min(below + 1, len(values) - 1)]
    return low + (high - low) * (place - below)


class RecentLengths:
    """Joint prompt and output lengths of finished requests, that age as the router's do."""

    def __init__(self, half_life: float, quantile: float) -> None:
        self._table = [[0.0] * len(OSL_EDGES) for _ in ISL_EDGES]
        self._factor = 0.5 ** (REFRESH_EVERY / half_life)
        self._quantile = quantile
        self._since, self._rows = 0.0, 0
        self._known: dict[int, tuple[float, float]] = {}

    def add(self, isl: float, osl: float, weight: float) -> None:
        """One finished row."""
        self._table[bisect_right(ISL_EDGES, isl) - 1][bisect_right(OSL_EDGES, osl) - 1] += weight
        self._since += weight
        self._rows += 1
        if self._since >= REFRESH_EVERY and self._rows >= ROWS_MIN:
            fade = self._factor ** (self._since / REFRESH_EVERY)
            self._table = [[fade * count for count in row] for row in self._table]
            self._since, self._rows = 0.0, 0
            self._known.clear()

    def forecast(self, isl: float) -> tuple[float, float]:
        """(mean, quantile) of the output tokens of a request that begins."""
        place = bisect_right(ISL_EDGES, isl) - 1
        known = self._known.get(place)
        if known is None:
            known = self._known[place] = self._measured(place)
        return known

    def lengths(self, priors: Priors, isl: float, uncached: float) -> Lengths:
        """As the planner's signals have them; `isl`, `uncached`: means over the run."""
        rows = [sum(row) for row in self._table]
        total = sum(rows)
        if total < KNOWN_MIN:
            return Lengths(isl, uncached, priors.osl, priors.isl_cv2, known=False)
        outputs = [sum(column) for column in zip(*self._table, strict=True)]
        osl = sum(m * w for m, w in zip(_OSL_MIDDLES, outputs, strict=True)) / total
        mean = sum(m * w for m, w in zip(_ISL_MIDDLES, rows, strict=True)) / total
        square = sum((m - mean) ** 2 * w for m, w in zip(_ISL_MIDDLES, rows, strict=True)) / total
        cv2 = min(4.0, max(0.1, square / (mean * mean)))
        return Lengths(isl, uncached, max(1.0, osl), cv2, known=True)

    def _measured(self, place: int) -> tuple[float, float]:
        row = self._table[place]
        if sum(row) < KNOWN_MIN:
            row = [sum(column) for column in zip(*self._table, strict=True)]
        total = sum(row)
        if total < 1.0:
            return PRIOR_OUTPUT, -PRIOR_OUTPUT * log1p(-self._quantile)
        mean = sum(m * w for m, w in zip(_OSL_MIDDLES, row, strict=True)) / total
        reached, high = 0.0, _OSL_MIDDLES[-1]
        for middle, weight in zip(_OSL_MIDDLES, row, strict=True):
            reached += weight
            if reached >= self._quantile * total:
                high = middle
                break
        return mean, high
