"""Top clients apart: what the sum of their forecasts says, and how far it is gone by.

Owns how levels and margins of several series become those of their sum, and whether that has
forecast better than the series of the whole. Nothing is used of it before it has, and nothing while
it has not. What was better lately may still be worse next: that is rare, and a matter of hundredths.

Levels add up, and margins add up as their squares do where clients are independent (too lean where they
follow the same day) and as they are where they move as one (too dear): the sum is formed with three
correlations, and which is right is told by what their bounds lost, beside that of the whole. Only the
bound is moved: the sum's level is on the whole no better than the one that is there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from readyplane_planner.forecast import bounds, experts, parts
from readyplane_planner.forecast.parts import Parts
from readyplane_planner.forecast.series import judgeable, kept
from readyplane_planner.forecast.values import HORIZONS_S, Forecast, Knobs, Series, spacing_s

CORRELATIONS = (0.0, 0.3, 1.0)
BELIEF = (0.5, 1 / 6, 1 / 6, 1 / 6)
"""Of the whole's bound and of the sum's with each correlation, before any was judged."""
MIX_RATE = 4.0
MEMORY = 0.99
LOSS_SCALE = 20.0
AWAITED_MAX = 10
JUDGED_MIN = 40
REACH = (0.6, 1.6)
"""Horizons asked for, over the judged one, between which that stays."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """Forecasts whose truth is not known yet.

    Attributes:
        uppers: of the whole, of the sum with each correlation, and the one to go by; empty
            while nobody is apart yet.
        scale: what a loss is a share of. peak: the largest rate seen since.
    """

    made_s: float
    uppers: tuple[float, ...]
    scale: float
    peak: float = 0.0


@dataclass(frozen=True, slots=True)
class Apart:
    """What forecasting one kind of work apart remembers; bounded, and empty without labels.

    Attributes:
        horizon_s: the judged one. lost: fading pinball loss of the whole's bound and of the sum's
            with each correlation. gone_by: the same of (the whole's, the one to go by).
    """

    parts: Parts = field(default_factory=Parts)
    horizon_s: float = 0.0
    awaited: tuple[Awaited, ...] = ()
    lost: tuple[float, ...] = (0.0,) * len(BELIEF)
    gone_by: tuple[float, ...] = (0.0, 0.0)
    judged: int = 0

    @property
    def used(self) -> bool:
        """Whether its bound is gone by: only while it loses less than the whole's."""
        known = self.judged >= JUDGED_MIN and self.parts.any_alone
        return known and self.gone_by[1] < self.gone_by[0]


def seen(
    apart: Apart,
    told: Mapping[str, float],
    whole: Series,
    rate: float,
    *,
    dt_s: float,
    now_s: float,
    knobs: Knobs,
) -> Apart:
    """With the rates of the last `dt_s`: of the clients told of, the largest first, and of all.

    `whole`: the series of all, which has taken `rate` in. The very same where nobody is labelled.
    """
    if not told and not apart.parts.each:
        return apart
    now_parts = parts.followed(apart.parts, told, whole, rate, dt_s=dt_s, now_s=now_s, knobs=knobs)
    if not now_parts.each:
        return Apart()  # all have gone back: as if there had been no label
    return _judged(replace(apart, parts=now_parts), whole, now_s=now_s, knobs=knobs)


def interrupted(apart: Apart) -> Apart:
    """After a gap in the signal: what waits for its truth is void."""
    if not apart.parts.each:
        return apart
    return replace(apart, parts=parts.interrupted(apart.parts), awaited=())


def chosen(apart: Apart, whole: Series, made: Forecast, *, knobs: Knobs) -> Forecast:
    """The forecast to go by: `made` of the whole, or what is better of it with the sum."""
    if not apart.used:
        return made
    ahead = _uppers(apart, whole, made.upper, made.horizon_s, knobs)
    upper = max(ahead[-1], made.level, made.now)
    return replace(made, upper=upper, lower=max(0.0, 2.0 * made.level - upper))


def remembered(
    apart: Apart, whole: Series, *, horizon_s: float, now_s: float, knobs: Knobs
) -> Apart:
    """Keep a forecast, of each part and of the sum, until its truth is known."""
    if not apart.parts.each or not judgeable(whole, now_s=now_s, knobs=knobs):
        return apart
    apart = _at(apart, horizon_s)
    judged_s = apart.horizon_s
    if apart.awaited and now_s - apart.awaited[-1].made_s < spacing_s(judged_s) - 1e-9:
        return apart
    of_s = _kept_at(judged_s)
    each = tuple(
        [
            replace(p, series=kept(p.series, of_s, now_s=now_s, knobs=knobs))
            for p in apart.parts.each
        ]
    )
    rest = kept(apart.parts.rest, of_s, now_s=now_s, knobs=knobs)
    apart = replace(apart, parts=Parts(each, rest))
    own = bounds.outlooks(whole, (judged_s,), knobs)[0]
    uppers: tuple[float, ...] = ()
    if apart.parts.any_alone:  # else the rest is the whole: there is nothing to compare
        uppers = _uppers(apart, whole, own.upper, judged_s, knobs)
    item = Awaited(now_s, uppers, own.scale)
    return replace(apart, awaited=(*apart.awaited, item)[-AWAITED_MAX:])


def scaled(apart: Apart, factor: float) -> Apart:
    """As if all work had been so many times as much; what waits for its truth is void."""
    if not apart.parts.each:
        return apart
    return replace(apart, parts=parts.of_times(apart.parts, factor), awaited=())


def _uppers(
    apart: Apart,
    whole: Series,
    upper: float,
    horizon_s: float,
    knobs: Knobs,
) -> tuple[float, ...]:
    """Bounds as `Awaited` has them, from that of the whole and what its parts say."""
    found = [bounds.outlooks(s, (horizon_s,), knobs)[0] for s in apart.parts.apart]
    summed = math.fsum(o.level for o in found)
    margins = [max(0.0, o.upper - o.level) for o in found]
    squares, plain = math.fsum(m * m for m in margins), math.fsum(margins)
    most = bounds.most(whole, summed, bounds.prior(horizon_s, knobs))
    uppers = [upper]
    for rho in CORRELATIONS:
        margin = math.sqrt((1.0 - rho) * squares + rho * plain * plain)
        uppers.append(max(summed, min(summed + margin, most)))
    least = min(apart.lost)
    weights = [
        b * math.exp(-MIX_RATE * (lost - least)) for b, lost in zip(BELIEF, apart.lost, strict=True)
    ]
    mixed = math.fsum(w * u for w, u in zip(weights, uppers, strict=True)) / math.fsum(weights)
    return (*uppers, mixed)


def _at(apart: Apart, horizon_s: float) -> Apart:
    """Judged at the horizon of the forecasts, which is kept while they stay near it."""
    if apart.horizon_s and REACH[0] <= horizon_s / apart.horizon_s <= REACH[1]:
        return apart
    parts_now = apart.parts
    if not apart.horizon_s or _kept_at(horizon_s) != _kept_at(apart.horizon_s):
        parts_now = parts_now.with_horizon(_kept_at(horizon_s))
    return Apart(parts_now, horizon_s)


def _kept_at(horizon_s: float) -> float:
    """The horizon at which each part is judged: the next longer one of the whole's.

    A part's bound comes down from there by the root of the horizons.
    """
    return next((h for h in HORIZONS_S if h >= horizon_s), HORIZONS_S[-1])


def _judged(apart: Apart, whole: Series, *, now_s: float, knobs: Knobs) -> Apart:
    """With the rate in the peaks of what waits, and with what fell due judged."""
    rate = experts.trailing(whole, knobs.window_s)
    window_s = min(knobs.window_s, apart.horizon_s) - 1e-9
    left: list[Awaited] = []
    due: list[Awaited] = []
    for item in apart.awaited:
        age_s = now_s - item.made_s
        raised = rate > item.peak and age_s >= window_s
        now = replace(item, peak=rate) if raised else item
        (due if age_s >= apart.horizon_s - 1e-9 else left).append(now)
    apart = replace(apart, awaited=tuple(left))
    for item in due:
        apart = _scored(apart, item, knobs)
    return apart


def _scored(apart: Apart, item: Awaited, knobs: Knobs) -> Apart:
    if not item.uppers:
        return apart
    scale = max(item.scale, item.peak, 1e-9) / LOSS_SCALE
    lost = [bounds.pinball(item.peak - u, knobs.quantile) / scale for u in item.uppers]
    return replace(
        apart,
        lost=_faded(apart.lost, lost[:-1]),
        gone_by=_faded(apart.gone_by, [lost[0], lost[-1]]),
        judged=apart.judged + 1,
    )


def _faded(before: Sequence[float], now: Sequence[float]) -> tuple[float, ...]:
    return tuple([MEMORY * a + (1.0 - MEMORY) * b for a, b in zip(before, now, strict=True)])
