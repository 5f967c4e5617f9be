"""Levels and bounds ahead, from what a series remembers.

Owns the conformal margin of each judged horizon and what lies between them. Two bounds are mixed by
what each lost lately: the level plus a quantile of its scores, and a quantile of the largest rates
themselves, which is the better one where load keeps coming back to the same height. The bound never
falls with the horizon, since a longer one holds the shorter.

Why additive: multiplicative scores explode on on/off traffic. Why the largest rate of the horizon
and not the rate at its end: capacity that is ready too late for the peak has missed it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import mul
from typing import NamedTuple

from readyplane_planner.forecast import experts
from readyplane_planner.forecast.values import Forecast, Knobs, Series, Track

PEAK_ROOM = 1.25
SCORES_FEW = 30
MIX_RATE = 8.0
MISS_MAX = 2.0
"""Times the wanted miss rate: a calm hour must not make the bound blind to what was seen."""


class Outlook(NamedTuple):
    """One horizon: what each expert says and weighs, their mean, the scale, the bound and its parts.

    A plain tuple, since some ten are made a tick.
    """

    horizon_s: float
    experts: tuple[float, ...]
    weights: tuple[float, ...]
    level: float
    scale: float
    upper: float
    mixed: tuple[float, float]


def predict(series: Series, *, horizon_s: float, knobs: Knobs) -> Forecast:
    """Demand over the coming `horizon_s`. Without any sample everything is zero and unjudged."""
    if not series.ewma:
        return Forecast(0.0, 0.0, 0.0, 0.0, horizon_s)
    one = outlooks(series, (horizon_s,), knobs)[0]
    near = _nearest([t for t in series.tracks if t.judged], horizon_s)
    return Forecast(
        level=one.level,
        upper=one.upper,
        lower=max(0.0, 2.0 * one.level - one.upper),
        now=one.experts[0],
        horizon_s=horizon_s,
        weights=one.weights,
        coverage=None if near is None else near.covered / near.judged,
        judged=0 if near is None else near.judged,
        pinball=0.0 if near is None else near.pinball,
    )


def quantiles(
    series: Series, horizons: Sequence[float], probabilities: Sequence[float], *, knobs: Knobs
) -> tuple[tuple[float, ...], ...]:
    """Quantiles of the largest rate within each horizon, tokens/s: a row a horizon.

    Args:
        horizons: ascending, seconds. probabilities: ascending, each below 1; below a half the
            answer rests on few scores and is a rough one.

    Returns:
        Never falling with the horizon nor with the probability. Zeros without any sample.
    """
    if not series.ewma:
        return ((0.0,) * len(probabilities),) * len(horizons)
    columns = [
        [o.upper for o in outlooks(series, horizons, knobs, miss=1.0 - p)] for p in probabilities
    ]
    for before, after in pairwise(columns):
        after[:] = map(max, before, after)
    return tuple(zip(*columns, strict=True))


def outlooks(
    series: Series, horizons: Sequence[float], knobs: Knobs, *, miss: float | None = None
) -> tuple[Outlook, ...]:
    """Of several ascending horizons; the bound of each is at least that of any shorter one.

    `miss`: another than the one of the knobs, which alone is kept calibrated.
    """
    plain = experts.expected(series, knobs)
    judged: list[Outlook] = []
    floor = plain[0]
    for track in series.tracks:
        if not track.scores:
            continue
        judged.append(_judged(series, track, plain, knobs, miss, floor))
        floor = judged[-1].upper
        if track.horizon_s >= horizons[-1]:
            break
    return tuple(_between(series, judged, plain, h, knobs) for h in horizons)


def prior(horizon_s: float, knobs: Knobs) -> float:
    """The margin before anything was scored: part of it is noise, part grows with the horizon."""
    return knobs.prior_margin * (0.4 + 0.6 * math.sqrt(horizon_s / 60.0))


def _judged(
    series: Series,
    track: Track,
    plain: tuple[float, ...],
    knobs: Knobs,
    miss: float | None,
    floor: float,
) -> Outlook:
    """A horizon with scores. `floor`: what arrives already, or the bound of a shorter horizon."""
    horizon_s = track.horizon_s
    said, weights, level, scale = _level(series, track, plain, horizon_s)
    count = len(track.scores)
    if miss is None and track.places[0] == knobs.quantile:
        _, score, by_peaks = track.places
    else:
        score, by_peaks = places(track.scores, track.peaks, track.miss, knobs, miss=miss)
    by_scores = level + score * scale
    lost = MIX_RATE * (track.mixed[0] - track.mixed[1])
    trust = 1.0 / (1.0 + math.exp(max(-60.0, min(60.0, lost))))
    upper = trust * by_scores + (1.0 - trust) * by_peaks
    before = prior(horizon_s, knobs)
    if count < SCORES_FEW:
        known = count / SCORES_FEW
        upper = known * upper + (1.0 - known) * max(upper, level + before * scale)
    upper = max(min(upper, most(series, level, before)), level, floor)
    return Outlook(horizon_s, said, weights, level, scale, upper, (by_scores, by_peaks))


def _between(
    series: Series,
    judged: Sequence[Outlook],
    plain: tuple[float, ...],
    horizon_s: float,
    knobs: Knobs,
) -> Outlook:
    """Any horizon, from the judged ones beside it by the roots of their horizons.

    Beyond them the distance from the level grows with the root, so that a changed T_ready shows at
    once and not after new scores (R5.2).
    """
    low = next((o for o in reversed(judged) if o.horizon_s <= horizon_s), None)
    high = next((o for o in judged if o.horizon_s >= horizon_s), None)
    if low is not None and (low is high or low.horizon_s == horizon_s):
        return low
    if low is not None and high is not None:
        ends = (math.sqrt(low.horizon_s), math.sqrt(high.horizon_s))
        share = (math.sqrt(horizon_s) - ends[0]) / (ends[1] - ends[0])
        level, scale, upper, first, second = (
            a + share * (b - a) for a, b in zip(_numbers(low), _numbers(high), strict=True)
        )
        near = low if share < 0.5 else high
        said = (*plain, experts.holt_at(series, horizon_s))
        return Outlook(horizon_s, said, near.weights, level, scale, upper, (first, second))
    near_track = _nearest(series.tracks, horizon_s)
    said, weights, level, scale = _level(series, near_track, plain, horizon_s)
    before = prior(horizon_s, knobs)
    only = low or high
    if only is None:
        upper = max(level + before * scale, plain[0])
    else:
        stretch = math.sqrt(horizon_s / only.horizon_s)
        upper = min(level + (only.upper - only.level) * stretch, most(series, level, before))
        # A longer horizon holds the shorter.
        upper = max(upper, only.upper) if only is low else min(upper, only.upper)
        upper = max(upper, level, plain[0])
    return Outlook(horizon_s, said, weights, level, scale, upper, (upper, upper))


def _level(
    series: Series, track: Track | None, plain: tuple[float, ...], horizon_s: float
) -> tuple[tuple[float, ...], tuple[float, ...], float, float]:
    """(what experts say, their weights, the level, the scale of scores)."""
    said = (*plain, experts.holt_at(series, horizon_s))
    weights = experts.weights((0.0,) * len(said) if track is None else track.losses)
    level = math.fsum(map(mul, weights, said))
    return said, weights, level, max(level, series.ewma[-1])


def most(series: Series, level: float, before: float) -> float:
    """No bound is higher. Scores of quiet times, laid on a busy level, ask for several times of all
    that was ever seen: on/off traffic is bounded by its own peaks.
    """
    return max(PEAK_ROOM * series.peak, level * (1.0 + before))


def _numbers(one: Outlook) -> tuple[float, ...]:
    return (one.level, one.scale, one.upper, *one.mixed)


def _nearest(tracks: Sequence[Track], horizon_s: float) -> Track | None:
    """What an expert is worth changes slowly with the horizon."""
    return min(tracks, key=lambda t: abs(math.log(t.horizon_s / horizon_s)), default=None)


def places(
    scores: tuple[float, ...],
    peaks: tuple[float, ...],
    adapted: float | None,
    knobs: Knobs,
    *,
    miss: float | None = None,
) -> tuple[float, float]:
    """Quantiles of scores and of largest rates, at the adaptive miss rate or in proportion to it."""
    count = len(scores)
    target = 1.0 - knobs.quantile
    share = target if adapted is None else adapted
    if miss is not None:
        share = min(1.0, miss * share / target)
    place = min(count - 1, max(0, math.ceil((1.0 - share) * (count + 1)) - 1))
    return sorted(scores)[place], sorted(peaks)[place]


def pinball(over: float, quantile: float) -> float:
    """Loss of a bound by how far the truth was over it."""
    return quantile * over if over > 0 else (quantile - 1.0) * over
