"""Top clients apart: what the sum of their forecasts says, and how far it is gone by.

Owns how levels and margins of several series become those of their sum, and whether that has
forecast better than the series of the whole. Nothing is used of it before it has, and nothing while
it has not, so that labels can only help.

Levels add up. Margins add up as their squares do where clients are independent (too lean where they
follow the same day) and as they are where they move as one (too dear): the sum is formed with three
correlations, and which is right is told by what their bounds lost, beside that of the whole.
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
MIX_MEMORY, GATE_MEMORY = 0.99, 0.97
LOSS_SCALE = 20.0
AWAITED_MAX = 10
JUDGED_MIN = 30
REACH = (0.3, 1.5)
"""Horizons asked for, over the judged one, between which that stays the judged one."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """Forecasts whose truth is not known yet.

    Attributes:
        total: work of the whole when they were made. levels: of the whole, and the one to go by.
        uppers: of the whole, of the sum with each correlation, and the one to go by. Both are empty
            while nobody is apart yet.
        scale: what a loss is a share of. peak: the largest rate seen since.
    """

    made_s: float
    total: float
    levels: tuple[float, ...]
    uppers: tuple[float, ...]
    scale: float
    peak: float = 0.0


@dataclass(frozen=True, slots=True)
class Apart:
    """What forecasting one kind of work apart remembers; bounded, and empty without labels.

    Attributes:
        horizon_s: the judged one. lost: fading pinball loss of the whole's bound and of the sum's
            with each correlation. bounds, levels: faster fading, of (the whole's, the one to go by).
    """

    parts: Parts = field(default_factory=Parts)
    horizon_s: float = 0.0
    awaited: tuple[Awaited, ...] = ()
    lost: tuple[float, ...] = (0.0,) * len(BELIEF)
    bounds: tuple[float, ...] = (0.0, 0.0)
    levels: tuple[float, ...] = (0.0, 0.0)
    judged: int = 0

    @property
    def used(self) -> tuple[bool, bool]:
        """Whether its level and its bound are gone by: only while they lose less than the whole's."""
        if self.judged < JUDGED_MIN or not self.parts.any_alone:
            return False, False
        return self.levels[1] < self.levels[0], self.bounds[1] < self.bounds[0]


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
    by_level, by_bound = apart.used
    if not (by_level or by_bound):
        return made
    found = [bounds.outlooks(s, (made.horizon_s,), knobs)[0] for s in apart.parts.apart]
    levels, uppers = _ahead(apart, whole, found, made.level, made.upper, made.horizon_s, knobs)
    level = levels[-1] if by_level else made.level
    upper = max(uppers[-1] if by_bound else made.upper, level, made.now)
    return replace(made, level=level, upper=upper, lower=max(0.0, 2.0 * level - upper))


def remembered(
    apart: Apart, whole: Series, *, horizon_s: float, now_s: float, knobs: Knobs
) -> Apart:
    """Keep a forecast, of each part and of the sum, until its truth is known."""
    if not apart.parts.each or not judgeable(whole, now_s=now_s, knobs=knobs):
        return apart
    apart = _at(apart, horizon_s)
    at_s = apart.horizon_s
    if apart.awaited and now_s - apart.awaited[-1].made_s < spacing_s(at_s) - 1e-9:
        return apart
    rest, of_rest = kept(apart.parts.rest, at_s, now_s=now_s, knobs=knobs)
    found, each = [of_rest], []
    for part in apart.parts.each:
        series, one = kept(part.series, at_s, now_s=now_s, knobs=knobs)
        each.append(replace(part, series=series))
        if part.alone:
            found.append(one)
    apart = replace(apart, parts=Parts(tuple(each), rest))
    own = bounds.outlooks(whole, (at_s,), knobs)[0]
    levels, uppers = _ahead(apart, whole, found, own.level, own.upper, at_s, knobs)
    if not apart.parts.any_alone:  # the rest is the whole: there is nothing to compare
        levels, uppers = (), ()
    item = Awaited(now_s, whole.total, levels, uppers, own.scale)
    return replace(apart, awaited=(*apart.awaited, item)[-AWAITED_MAX:])


def scaled(apart: Apart, factor: float) -> Apart:
    """As if all work had been so many times as much; what waits for its truth is void."""
    if not apart.parts.each:
        return apart
    return replace(apart, parts=parts.of_times(apart.parts, factor), awaited=())


def _ahead(
    apart: Apart,
    whole: Series,
    found: Sequence[bounds.Outlook],
    level: float,
    upper: float,
    horizon_s: float,
    knobs: Knobs,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(levels, bounds) as `Awaited` has them, from those of the whole and of its parts."""
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
    # Half of each: levels of the whole and of the sum err in different ways.
    return (level, (level + summed) / 2.0), (*uppers, mixed)


def _at(apart: Apart, horizon_s: float) -> Apart:
    """Judged at the horizon of forecasts next above, which is kept while it is near enough."""
    if apart.horizon_s and REACH[0] <= horizon_s / apart.horizon_s <= REACH[1]:
        return apart
    at_s = next((h for h in HORIZONS_S if h >= horizon_s), HORIZONS_S[-1])
    if at_s == apart.horizon_s:
        return apart
    return Apart(apart.parts.with_horizon(at_s), at_s)


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
        apart = _scored(apart, item, whole.total, now_s=now_s, knobs=knobs)
    return apart


def _scored(apart: Apart, item: Awaited, total: float, *, now_s: float, knobs: Knobs) -> Apart:
    if not item.uppers:
        return apart
    mean = (total - item.total) / max(1e-9, now_s - item.made_s)
    scale = max(item.scale, mean, item.peak, 1e-9) / LOSS_SCALE
    off = [abs(mean - level) / scale for level in item.levels]
    lost = [bounds.pinball(item.peak - u, knobs.quantile) / scale for u in item.uppers]
    return replace(
        apart,
        lost=_faded(apart.lost, lost[:-1], MIX_MEMORY),
        bounds=_faded(apart.bounds, [lost[0], lost[-1]], GATE_MEMORY),
        levels=_faded(apart.levels, off, GATE_MEMORY),
        judged=apart.judged + 1,
    )


def _faded(before: Sequence[float], now: Sequence[float], memory: float) -> tuple[float, ...]:
    return tuple([memory * a + (1.0 - memory) * b for a, b in zip(before, now, strict=True)])
