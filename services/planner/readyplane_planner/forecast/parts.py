"""Whom to follow apart: a series for each of the largest clients, and one for all others.

Owns who is taken in and who goes back, so that parts and rest always add up to the whole. A client
that is not told of, is quiet for long or is outgrown by others goes back into the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from readyplane_planner.forecast.scaling import added, scaled
from readyplane_planner.forecast.series import broken, update
from readyplane_planner.forecast.values import Days, Knobs, Series, Spells, Track

PARTS_MAX = 6
"""Clients followed apart; each costs about as much as the whole."""
RANK_SLACK = 2
"""So many places beyond the last a client may fall before another takes its place."""
AT_HOME_S = 300.0
"""A new one stays in the rest for so long, until its own means say something."""
UNTOLD_S = 60.0
QUIET_S = 900.0


@dataclass(frozen=True, slots=True)
class Part:
    """One client that is followed.

    Attributes:
        begun_s: since when. told_s, busy_s: when it was last told of, and last with work.
        alone: its work is no longer in the rest.
    """

    name: str
    series: Series
    begun_s: float
    told_s: float
    busy_s: float
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """All who are followed, in the order in which they were taken in, and the rest."""

    each: tuple[Part, ...] = ()
    rest: Series = field(default_factory=Series)

    @property
    def apart(self) -> tuple[Series, ...]:
        """Series that add up to the whole: the rest, and whoever is no longer in it."""
        return (self.rest, *(p.series for p in self.each if p.alone))

    @property
    def any_alone(self) -> bool:
        """Whether there is anything to add up."""
        return any(p.alone for p in self.each)

    def with_horizon(self, horizon_s: float) -> Parts:
        """Judged at another horizon: what was learnt at the one before says nothing of it."""
        anew = (Track(horizon_s),)
        each = tuple([replace(p, series=replace(p.series, tracks=anew)) for p in self.each])
        return Parts(each, replace(self.rest, tracks=anew))


def followed(
    parts: Parts,
    told: Mapping[str, float],
    whole: Series,
    rate: float,
    *,
    dt_s: float,
    now_s: float,
    knobs: Knobs,
) -> Parts:
    """With the rates of the last `dt_s`: of the clients told of, the largest first, and of all.

    What is not told of a client is in the rest. `whole`: the series that has taken `rate` in.
    """
    each, rest = _chosen(parts, told, now_s=now_s)
    left, moved = rate, []
    for part in each:
        own = min(told.get(part.name, 0.0), left if part.alone else rate)
        left -= own if part.alone else 0.0
        series = _lean(update(part.series, own, dt_s=dt_s, now_s=now_s, knobs=knobs))
        told_s = now_s if part.name in told else part.told_s
        busy_s = now_s if own > 0 else part.busy_s
        alone = part.alone or now_s - part.begun_s >= AT_HOME_S
        moved.append(Part(part.name, series, part.begun_s, told_s, busy_s, alone))
    if rest.ewma:
        rest = _lean(update(rest, left, dt_s=dt_s, now_s=now_s, knobs=knobs))
    else:  # until now it was all there is
        rest = _lean(replace(whole, tracks=()))
    for before, after in zip(each, moved, strict=True):
        if after.alone and not before.alone:
            rest = added(rest, after.series, -1.0)
    return Parts(tuple(moved), rest)


def interrupted(parts: Parts) -> Parts:
    """After a gap in the signal."""
    each = tuple([replace(p, series=broken(p.series)) for p in parts.each])
    return Parts(each, broken(parts.rest))


def of_times(parts: Parts, factor: float) -> Parts:
    """As if all work had been so many times as much."""
    each = tuple([replace(p, series=scaled(p.series, factor)) for p in parts.each])
    return Parts(each, scaled(parts.rest, factor))


def _chosen(parts: Parts, told: Mapping[str, float], *, now_s: float) -> tuple[list[Part], Series]:
    """Those who are followed from now on, and the rest with whoever went back into it."""
    rank = {name: place for place, name in enumerate(told)}
    gone = [p for p in parts.each if now_s - p.told_s > UNTOLD_S or now_s - p.busy_s > QUIET_S]
    each = [p for p in parts.each if p not in gone]
    mine = {p.name for p in each}
    for name in list(told)[:PARTS_MAX]:
        if name in mine or told[name] <= 0:
            continue
        if len(each) >= PARTS_MAX:
            last = max(each, key=lambda p: rank.get(p.name, len(rank)))
            if rank.get(last.name, len(rank)) < PARTS_MAX + RANK_SLACK:
                continue
            each.remove(last)
            gone.append(last)
        each.append(Part(name, Series(), now_s, now_s, now_s))
    rest = parts.rest
    for part in gone:
        if part.alone:
            rest = added(rest, part.series, 1.0)
    return each, rest


_NO_SPELLS, _NO_DAYS = Spells(), Days()


def _lean(series: Series) -> Series:
    """Without what nobody asks of a part, which would only fill records."""
    return replace(series, spells=_NO_SPELLS, days=_NO_DAYS)
