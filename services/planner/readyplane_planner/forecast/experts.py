"""The pool of experts: what each expects of the mean rate ahead, and how much it is believed.

Owns the state of the moving means and of the damped trend. A rate below zero is clamped where it
leaves an expert (B17).
"""

from __future__ import annotations

import math
from functools import lru_cache

from readyplane_planner.forecast.values import TAUS_S, Knobs, Series

LEARNING_RATE = 32.0
HOLT_LEVEL_S = 15.0
HOLT_TREND_S = 45.0
HOLT_DAMP_S = 30.0


def moved(before: tuple[float, ...], rate: float, dt_s: float) -> tuple[float, ...]:
    """The exponential means with a rate taken in."""
    if not before:
        return (rate,) * len(TAUS_S)
    return tuple(
        old + (1.0 - math.exp(-dt_s / tau)) * (rate - old)
        for old, tau in zip(before, TAUS_S, strict=True)
    )


def holt(series: Series, rate: float, dt_s: float) -> tuple[float, float]:
    """(level, trend a second) with the rate taken in."""
    if not series.ewma or dt_s <= 0:
        return rate, 0.0
    damp = math.exp(-dt_s / HOLT_DAMP_S)
    expected = series.holt_level + series.holt_trend * damp * dt_s
    level = expected + (1.0 - math.exp(-dt_s / HOLT_LEVEL_S)) * (rate - expected)
    slope = (level - series.holt_level) / dt_s
    trend = series.holt_trend * damp
    trend += (1.0 - math.exp(-dt_s / HOLT_TREND_S)) * (slope - trend)
    return level, trend


def damped(series: Series, horizon_s: float) -> float:
    """Level plus the damped trend's whole way over half the horizon (its mean, roughly).

    Below zero on a steep decline; `holt_at` is what leaves this module.
    """
    reach_s = HOLT_DAMP_S * (1.0 - math.exp(-horizon_s / 2.0 / HOLT_DAMP_S))
    return series.holt_level + series.holt_trend * reach_s


def holt_at(series: Series, horizon_s: float) -> float:
    """The damped trend's expectation, never below zero (B17)."""
    return max(0.0, damped(series, horizon_s))


def trailing(series: Series, window_s: float) -> float:
    """Mean rate over the trailing window, or over all there is when that is shorter."""
    return mean_of(series.recent, series.ewma, window_s)


def mean_of(
    points: tuple[tuple[float, float], ...], ewma: tuple[float, ...], window_s: float
) -> float:
    """The same of given points; never below zero."""
    if len(points) < 2:
        return ewma[0] if ewma else 0.0
    end_s, end = points[-1]
    for at_s, total in reversed(points[:-1]):
        if end_s - at_s >= window_s - 1e-9:
            return (end - total) / (end_s - at_s)
    at_s, total = points[0]
    return (end - total) / (end_s - at_s) if end_s > at_s else 0.0


def expected(series: Series, knobs: Knobs) -> tuple[float, ...]:
    """One rate an expert, in the order of EXPERTS, without the trend's, which has a horizon."""
    return (
        max(0.0, trailing(series, knobs.window_s)),
        max(0.0, trailing(series, 30.0)),
        *(max(0.0, value) for value in series.ewma),
    )


@lru_cache(maxsize=256)
def weights(losses: tuple[float, ...]) -> tuple[float, ...]:
    """How much each is believed: exponential in what it lost lately."""
    best = min(losses)
    raw = [math.exp(-LEARNING_RATE * (loss - best)) for loss in losses]
    total = sum(raw)
    return tuple(value / total for value in raw)
