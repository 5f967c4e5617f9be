"""How much demand grows within a horizon, as this series' own history tells it.

Owns the distribution of growth with what was never seen yet left possible.
"""

from __future__ import annotations

import math

from readyplane_planner.forecast import experts
from readyplane_planner.forecast.bounds import prior
from readyplane_planner.forecast.values import Knobs, Series, Track, spacing_s

PRIOR_WINDOWS = 1.0
"""The prior weighs as one horizon more than was seen: the rule of succession."""
TAIL = 2.0
HALVINGS = 40


def growth(series: Series, horizon_s: float, quantile: float, *, knobs: Knobs) -> float:
    """Tokens/s by which demand grows within a horizon, not exceeded with that probability.

    Growth is the largest rate within (t, t + horizon] minus the rate at t, never below 0, both over
    the trailing window; t is any time, so 0.99 means: in one of a hundred moments it is more. It
    says nothing of where the rate is now: `now + growth` is what a fast tier beside a fleet for
    `now` would have to carry (spare capacity = growth over the lead time of the fast tier's help).

    What was seen fades over two hours. It counts as so many horizons as do not overlap, and one more
    is pretended with a heavy tail as wide as the prior margin of the level: with little history, or
    for a quantile rarer than the history is long, the answer is wider than all that was seen, and it
    comes down to the seen as horizons pass without growth. Without any sample it is 0, which means
    that there is no demand known and not that it will not grow.

    Args:
        horizon_s: between two judged horizons the answer is interpolated; beyond the longest that
            was ever asked for it grows by the root. quantile: from 0 to below 1.
    """
    if not series.ewma:
        return 0.0
    level = max(experts.trailing(series, knobs.window_s), series.ewma[-1])
    found = [
        (t.horizon_s, _of(t, level, quantile, knobs)) for t in series.tracks if t.growth.weight
    ]
    if not found:
        return _unseen(level * prior(horizon_s, knobs), 1.0 - quantile)
    rising: list[tuple[float, float]] = []
    for at_s, value in found:
        rising.append((at_s, max(value, rising[-1][1] if rising else 0.0)))
    if horizon_s <= rising[0][0]:
        return rising[0][1] * math.sqrt(horizon_s / rising[0][0])
    if horizon_s >= rising[-1][0]:
        return rising[-1][1] * math.sqrt(horizon_s / rising[-1][0])
    i = next(i for i, (at_s, _) in enumerate(rising) if at_s >= horizon_s)
    (a_s, a), (b_s, b) = rising[i - 1], rising[i]
    return a + (b - a) * math.log(horizon_s / a_s) / math.log(b_s / a_s)


def _of(track: Track, level: float, quantile: float, knobs: Knobs) -> float:
    seen, miss = track.growth, 1.0 - quantile
    # Forecasts that are judged overlap: several of them tell of one horizon.
    windows = seen.weight * min(1.0, spacing_s(track.horizon_s) / track.horizon_s)
    width = level * prior(track.horizon_s, knobs)

    def beyond(value: float) -> float:
        share = seen.above(value) / seen.weight
        return (windows * share + PRIOR_WINDOWS * _tail(value, width)) / (windows + PRIOR_WINDOWS)

    high = max(seen.largest, _unseen(width, miss))
    if beyond(high) > miss:
        high += _unseen(width, miss)
    low = 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        if beyond(middle) > miss:
            low = middle
        else:
            high = middle
    return high


def _tail(value: float, width: float) -> float:
    """Chance of more, before anything was seen."""
    return 0.0 if width <= 0 else math.pow(1.0 + value / width, -TAIL)


def _unseen(width: float, miss: float) -> float:
    """The growth that is exceeded with that chance, before anything was seen."""
    return width * (math.pow(max(miss, 1e-9), -1.0 / TAIL) - 1.0)
