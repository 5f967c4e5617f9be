"""What a push does to those who are served: windows of arms, and ratios between arms. Pure.

Owns the figures of R9.1: an arm is what was seen in its windows (time per output token, KV transfers),
a `Comparison` one arm over another with how far chance alone takes the ratio. Fed by
`bench.transfer_serving`, printed by `bench.transfer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

RESAMPLES = 2000
# Chance is told as the interval in which so many of the resamples lie.
CONFIDENCE = 0.9


@dataclass(slots=True)
class Window:
    """A few seconds of one arm.

    Attributes:
        tpot_sum_s, tpot_count: time per output token of the requests that ended in it, by the engine.
        kv_s: seconds of each KV transfer. pushed_bytes: weights that left. seconds: its length.
    """

    tpot_sum_s: float = 0.0
    tpot_count: float = 0.0
    kv_s: list[float] = field(default_factory=list)
    pushed_bytes: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure of an arm over that of another, and the interval of its resamples."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def tpot_s(windows: Sequence[Window]) -> float:
    """Mean seconds per output token; nan where none was seen."""
    count = sum(w.tpot_count for w in windows)
    return sum(w.tpot_sum_s for w in windows) / count if count else math.nan


def kv_quantile_s(windows: Sequence[Window], quantile: float) -> float:
    """Of all KV transfers of these windows, in seconds; nan where none was seen."""
    values = np.sort(np.concatenate([np.asarray(w.kv_s) for w in windows]))
    return float(values[math.ceil(quantile * len(values)) - 1]) if len(values) else math.nan


def pushed_bytes_per_s(windows: Sequence[Window]) -> float:
    """Weights that left while these windows lasted."""
    return sum(w.pushed_bytes for w in windows) / sum(w.seconds for w in windows)


def tpot_ratio(arm: Sequence[Window], other: Sequence[Window], *, seed: int = 1) -> Ratio:
    """Time per output token of an arm over that of another."""
    return _ratio(arm, other, tpot_s, seed)


def kv_ratio(
    arm: Sequence[Window], other: Sequence[Window], quantile: float, *, seed: int = 1
) -> Ratio:
    """A quantile of KV transfers of an arm over that of another."""
    return _ratio(arm, other, lambda windows: kv_quantile_s(windows, quantile), seed)


def _ratio(
    arm: Sequence[Window],
    other: Sequence[Window],
    figure: Callable[[Sequence[Window]], float],
    seed: int,
) -> Ratio:
    """Whole windows are drawn anew: transfers of one window share what disturbed it."""
    draw = np.random.default_rng(seed)

    def drawn(windows: Sequence[Window]) -> float:
        return figure([windows[n] for n in draw.integers(0, len(windows), len(windows))])

    found = [drawn(arm) / drawn(other) for _ in range(RESAMPLES)]
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Ratio(figure(arm) / figure(other), float(low), float(high))
