"""As if all work so far had been so many times as much.

Owns scaling everything that a series remembers in tokens; scores, losses and calibration are shares.
"""

from __future__ import annotations

from dataclasses import replace

from readyplane_planner.forecast import sketch
from readyplane_planner.forecast.values import Pending, Series, Track


def scaled(series: Series, factor: float) -> Series:
    """The series of so many times the work; every forecast grows by that factor.

    Growth and bursts do within the tenth that their bins are wide.
    """
    return replace(
        series,
        total=series.total * factor,
        peak=series.peak * factor,
        recent=tuple((at_s, total * factor) for at_s, total in series.recent),
        ewma=_times(series.ewma, factor),
        holt_level=series.holt_level * factor,
        holt_trend=series.holt_trend * factor,
        spread=series.spread * factor,
        tracks=tuple(_track(t, factor) for t in series.tracks),
        spells=replace(series.spells, rates=sketch.scaled(series.spells.rates, factor)),
        days=replace(
            series.days,
            profile=tuple(None if v is None else v * factor for v in series.days.profile),
            begun=series.days.begun * factor,
            last=_times(series.days.last, factor),
            lost=(series.days.lost[0] * factor, series.days.lost[1] * factor),
        ),
    )


def added(series: Series, other: Series, sign: float) -> Series:
    """With another's work put in, or taken out (`sign` -1): what is linear in work moves.

    Forecasts that wait for their truth were of another series and are void; scores stay.
    """
    if not other.ewma or not series.ewma:
        return series
    totals = dict(other.recent)
    recent = tuple(
        (at_s, total + sign * (totals[at_s] - other.total))
        for at_s, total in series.recent
        if at_s in totals
    )
    return replace(
        series,
        recent=recent if len(recent) > 1 else series.recent[-1:],
        ewma=tuple(max(0.0, a + sign * b) for a, b in zip(series.ewma, other.ewma, strict=True)),
        holt_level=max(0.0, series.holt_level + sign * other.holt_level),
        holt_trend=series.holt_trend + sign * other.holt_trend,
        tracks=tuple(replace(t, pending=()) for t in series.tracks),
    )


def _track(track: Track, factor: float) -> Track:
    return replace(
        track,
        pending=tuple(_pending(item, factor) for item in track.pending),
        peaks=_times(track.peaks, factor),
        places=(*track.places[:2], track.places[2] * factor),
        growth=sketch.scaled(track.growth, factor),
    )


def _pending(item: Pending, factor: float) -> Pending:
    return replace(
        item,
        total=item.total * factor,
        experts=_times(item.experts, factor),
        level=item.level * factor,
        upper=item.upper * factor,
        mixed=(item.mixed[0] * factor, item.mixed[1] * factor),
        scale=item.scale * factor,
        peak=item.peak * factor,
    )


def _times(values: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(value * factor for value in values)
