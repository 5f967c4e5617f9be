"""The day's profile: what the same half-hour brought on earlier days.

Owns bins, trust, skill and their bounds. As a forecast it is for hours ahead alone: up to an hour the
last minutes know better (persistence beats the day on public traces). A rise that it has seen coming
is worth a start all the same, where starts take long: `coming` says how large and how far, and how
good the pattern has been; nothing else rests on it. A pattern that fails loses its trust at once.
"""

from __future__ import annotations

import math
from dataclasses import replace

from readyplane_planner.forecast.values import DAY_BINS, Days, Season, Series

DAY_S = 86_400.0
BIN_S = DAY_S / DAY_BINS
AHEAD_MIN_S = 3600.0
BLEND, BLEND_FAILED = 0.3, 0.1
"""A day that is not like the others says little of the next one."""
LOST_MEMORY = 0.98
ROOM = 1.25
TRUST_STEP = 0.1
TRUST_MIN = 0.1


def seen(days: Days, total: float, *, now_s: float) -> Days:
    """With the work so far; a half-hour that has ended is taken into the profile."""
    here = int((now_s + days.shift_s) // BIN_S) % DAY_BINS
    if days.bin == here:
        return days
    lasted_s = now_s - days.begun_s
    # Half of it is enough to stand for it; less is a beginning or the end of a gap.
    if days.bin is not None and lasted_s >= BIN_S / 2:
        days = _closed(days, days.bin, (total - days.begun) / lasted_s)
    return replace(days, bin=here, begun_s=now_s, begun=total)


def broken(days: Days) -> Days:
    """After a gap the running half-hour is void, and the last ones are not those of the last hour."""
    return replace(days, bin=None, last=()) if days.bin is not None or days.last else days


def ahead(series: Series, ahead_s: float, *, now_s: float) -> float | None:
    """Mean rate of the half-hour that lies `ahead_s` ahead, tokens/s; None when nothing is known.

    Times of day are those of the clock that the rates came with. Nothing is said for less than an
    hour ahead, of a half-hour that was never seen, or when the pattern has failed lately. The answer
    is bounded by the profile's own largest half-hour.
    """
    days = series.days
    if ahead_s < AHEAD_MIN_S or days.trust < TRUST_MIN or not series.ewma:
        return None
    found = days.profile[int((now_s + days.shift_s + ahead_s) // BIN_S) % DAY_BINS]
    if found is None or int(ahead_s // DAY_S) > 0:
        return None
    known = [v for v in days.profile if v is not None]
    value = days.trust * found + (1.0 - days.trust) * series.ewma[-1]
    return min(value, ROOM * max(known))


def coming(series: Series, *, from_s: float, to_s: float, now_s: float) -> Season | None:
    """The largest rate that the days before had between those seconds from now; None where unseen.

    Between the middles of half-hours it goes straight. What is not trusted leans on the ten minutes
    that have been.
    """
    days = series.days
    to_s = min(to_s, DAY_S)
    if not series.ewma or not days.closed or to_s < from_s:
        return None
    clock_s = now_s + days.shift_s
    first = math.ceil((clock_s + from_s) / BIN_S - 0.5)
    middles = [(first + k + 0.5) * BIN_S - clock_s for k in range(DAY_BINS + 1)]
    found = [
        (rate, at_s)
        for at_s in (from_s, *(m for m in middles if m < to_s), to_s)
        if (rate := _between(days, clock_s + at_s)) is not None
    ]
    if not found:
        return None
    rate, in_s = max(found, key=lambda pair: (pair[0], -pair[1]))
    lost, flat = days.lost
    return Season(
        rate=days.trust * rate + (1.0 - days.trust) * series.ewma[-1],
        in_s=in_s,
        trust=days.trust,
        skill=1.0 - lost / flat if flat > 0 else 0.0,
        days=days.closed / DAY_BINS,
    )


def moved(days: Days, by_s: float) -> Days:
    """The same days on a clock that is ahead by that; the running half-hour is void."""
    return replace(broken(days), shift_s=days.shift_s - by_s)


def _between(days: Days, clock_s: float) -> float | None:
    place = clock_s / BIN_S - 0.5
    below = math.floor(place)
    one, other = days.profile[below % DAY_BINS], days.profile[(below + 1) % DAY_BINS]
    if one is None or other is None:
        return None
    return one + (place - below) * (other - one)


def _closed(days: Days, bin_: int, mean: float) -> Days:
    before = days.profile[bin_]
    trust, lost = days.trust, days.lost
    if before is not None and len(days.last) == 2:
        off, persistent = abs(before - mean), abs(days.last[0] - mean)
        # What was not believed has cost nothing.
        used = off if trust >= TRUST_MIN else persistent
        lost = (LOST_MEMORY * lost[0] + used, LOST_MEMORY * lost[1] + persistent)
        if off <= max(persistent, 0.1 * mean):
            trust = min(1.0, trust + TRUST_STEP)
        elif off > max(2.0 * persistent, 0.5 * mean):
            trust = 0.0
        else:
            trust *= 0.5
    blend = BLEND if trust > 0.0 else BLEND_FAILED
    blended = mean if before is None else before + blend * (mean - before)
    return replace(
        days,
        profile=(*days.profile[:bin_], blended, *days.profile[bin_ + 1 :]),
        trust=trust,
        last=(*days.last, mean)[-2:],
        closed=days.closed + 1,
        lost=lost,
    )
