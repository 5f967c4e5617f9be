"""The day's profile: what the same half-hour brought on earlier days, for hours ahead alone.

Owns bins, trust and their bounds. Up to an hour ahead the last minutes know better (persistence beats
the day on public traces), so nothing is said there. A pattern that fails loses its trust at once.
"""

from __future__ import annotations

from dataclasses import replace

from readyplane_planner.forecast.values import DAY_BINS, Days, Series

DAY_S = 86_400.0
BIN_S = DAY_S / DAY_BINS
AHEAD_MIN_S = 3600.0
BLEND = 0.3
ROOM = 1.25
TRUST_STEP = 0.1
TRUST_MIN = 0.1


def seen(days: Days, total: float, *, now_s: float) -> Days:
    """With the work so far; a half-hour that has ended is taken into the profile."""
    here = int(now_s // BIN_S) % DAY_BINS
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
    found = days.profile[int((now_s + ahead_s) // BIN_S) % DAY_BINS]
    if found is None or int(ahead_s // DAY_S) > 0:
        return None
    known = [v for v in days.profile if v is not None]
    value = days.trust * found + (1.0 - days.trust) * series.ewma[-1]
    return min(value, ROOM * max(known))


def _closed(days: Days, bin_: int, mean: float) -> Days:
    before = days.profile[bin_]
    trust = days.trust
    if before is not None and len(days.last) == 2:
        off, persistent = abs(before - mean), abs(days.last[0] - mean)
        if off <= max(persistent, 0.1 * mean):
            trust = min(1.0, trust + TRUST_STEP)
        elif off > max(2.0 * persistent, 0.5 * mean):
            trust = 0.0
        else:
            trust *= 0.5
    blended = mean if before is None else before + BLEND * (mean - before)
    profile = (*days.profile[:bin_], blended, *days.profile[bin_ + 1 :])
    return replace(days, profile=profile, trust=trust, last=(*days.last, mean)[-2:])
