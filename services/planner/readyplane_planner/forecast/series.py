"""A series takes in rates, keeps forecasts until their truth is known, and learns from it.

Owns judging, what an expert lost and the bound missed, and noticing that a regime has changed. Rates
are tokens/s and never negative.
"""

from __future__ import annotations

import math
from dataclasses import replace

from readyplane_planner.forecast import bounds, experts, seasons, sketch, spells
from readyplane_planner.forecast.values import (
    HORIZONS_S,
    PENDING_MAX,
    SCORES_MAX,
    Forecast,
    Knobs,
    Pending,
    Series,
    Track,
    spacing_s,
)

PEAK_TAU_S = 1800.0
LOSS_MEMORY = 0.95
MIX_MEMORY = 0.99
MIX_SCALE = 20.0
GROWTH_TAU_S = 7200.0
BREAK_SPREADS = 6.0
BREAK_SHARE = 0.5
BREAK_PAUSE_S = 120.0
SPREAD_TAU_S = 900.0
FORGOTTEN = 0.2
"""Of what experts lost, that much stays after a change of regime: they begin nearly level."""


def update(series: Series, rate: float, *, dt_s: float, now_s: float, knobs: Knobs) -> Series:
    """Take in the mean rate of the last `dt_s` seconds, and judge the forecasts that fell due."""
    begun_s = now_s - dt_s if series.begun_s is None else series.begun_s
    total = series.total + rate * dt_s
    # After a gap the trailing window begins anew, at the start of the sample and not before it.
    start = series.recent or ((now_s - dt_s, series.total),)
    recent = (*start, (now_s, total))
    cut_s = now_s - max(30.0, knobs.window_s)
    while len(recent) > 2 and recent[1][0] <= cut_s:
        recent = recent[1:]
    ewma = experts.moved(series.ewma, rate, dt_s)
    now = experts.mean_of(recent, ewma, knobs.window_s)
    level, trend = experts.holt(series, rate, dt_s)
    warm = now_s - begun_s >= knobs.warmup_s
    peak = max(now, series.peak * math.exp(-dt_s / PEAK_TAU_S))
    near = experts.mean_of(recent, ewma, 30.0)
    spread, broke = _watched(series, near, ewma[1], dt_s=dt_s, now_s=now_s, warm=warm)
    before = _level_again(series.tracks) if broke else series.tracks
    # Every field, since all of them move; `replace` takes twice as long.
    return Series(
        begun_s=begun_s,
        updated_s=now_s,
        total=total,
        peak=peak,
        recent=recent,
        ewma=ewma,
        holt_level=level,
        holt_trend=trend,
        spread=spread,
        tracks=tuple([_judged(t, now, total, now_s=now_s, warm=warm, knobs=knobs) for t in before]),
        spells=spells.seen(series.spells, now, peak, now_s=now_s),
        days=seasons.seen(series.days, total, now_s=now_s),
        clamps=series.clamps,
        breaks=series.breaks + broke,
        broke_s=now_s if broke else series.broke_s,
    )


def remember(series: Series, made: Forecast, *, now_s: float, knobs: Knobs) -> Series:
    """Keep forecasts of all horizons up to that one until they have passed; spaced, so few wait."""
    if not series.ewma or series.begun_s is None or now_s - series.begun_s < knobs.window_s:
        return series
    tracks = _with_horizon(series.tracks, made.horizon_s)
    due = [t.horizon_s for t in tracks if _spaced(t, now_s)]
    if not due:
        return series
    ahead = {o.horizon_s: o for o in bounds.outlooks(series, due, knobs)}
    kept = tuple(
        _kept(t, ahead[t.horizon_s], series.total, now_s) if t.horizon_s in ahead else t
        for t in tracks
    )
    clamps = series.clamps + (1 if experts.damped(series, due[-1]) < 0 else 0)
    return replace(series, tracks=kept, clamps=clamps)


def judgeable(series: Series, *, now_s: float, knobs: Knobs) -> bool:
    """Whether it knows enough for a forecast to be kept."""
    return bool(series.ewma) and now_s - (series.begun_s or 0.0) >= knobs.window_s


def kept(series: Series, horizon_s: float, *, now_s: float, knobs: Knobs) -> Series:
    """With a forecast of that one horizon kept until its truth is known, where one is due."""
    if not series.tracks:
        series = replace(series, tracks=(Track(horizon_s),))
    if not all(_spaced(t, now_s) for t in series.tracks):
        return series
    one = bounds.outlooks(series, (horizon_s,), knobs)[0]
    tracks = tuple(
        _kept(t, one, series.total, now_s) if t.horizon_s == horizon_s else t for t in series.tracks
    )
    return replace(series, tracks=tracks)


def broken(series: Series) -> Series:
    """After a gap in the signal: rates across it would be false, so waiting forecasts are void."""
    if not series.recent and not any(t.pending for t in series.tracks):
        return series  # broken already
    return replace(
        series,
        recent=(),
        tracks=tuple(replace(t, pending=()) if t.pending else t for t in series.tracks),
        spells=replace(series.spells, at_s=None),
        days=seasons.broken(series.days),
    )


def _with_horizon(tracks: tuple[Track, ...], horizon_s: float) -> tuple[Track, ...]:
    """Every judged horizon up to the first that is long enough; those once begun stay."""
    enough = next((i + 1 for i, h in enumerate(HORIZONS_S) if h >= horizon_s), len(HORIZONS_S))
    return (*tracks, *(Track(h) for h in HORIZONS_S[len(tracks) : enough]))


def _spaced(track: Track, now_s: float) -> bool:
    if not track.pending:
        return True
    return now_s - track.pending[-1].made_s >= spacing_s(track.horizon_s) - 1e-9


def _kept(track: Track, one: bounds.Outlook, total: float, now_s: float) -> Track:
    kept = Pending(now_s, total, one.experts, one.level, one.upper, one.mixed, one.scale)
    return replace(track, pending=(*track.pending, kept)[-PENDING_MAX:])


def _judged(
    track: Track, rate: float, total: float, *, now_s: float, warm: bool, knobs: Knobs
) -> Track:
    """The track with the rate in the peaks of what waits, and with what fell due judged."""
    horizon_s = track.horizon_s
    window_s = min(knobs.window_s, horizon_s) - 1e-9
    waiting: list[Pending] = []
    due: list[Pending] = []
    changed = False
    for item in track.pending:
        # A trailing rate tells of the horizon only once its window lies inside it.
        raised = rate > item.peak and now_s - item.made_s >= window_s
        seen = _raised(item, rate) if raised else item
        changed = changed or raised
        (due if now_s - item.made_s >= horizon_s - 1e-9 else waiting).append(seen)
    if not due:
        return replace(track, pending=tuple(waiting)) if changed else track
    left = tuple(waiting)
    for item in due:
        track = _scored(track, item, left, total, now_s=now_s, warm=warm, knobs=knobs)
    return track


def _raised(item: Pending, rate: float) -> Pending:
    """`dataclasses.replace` takes three times as long, and this runs for every one that waits."""
    return Pending(
        item.made_s,
        item.total,
        item.experts,
        item.level,
        item.upper,
        item.mixed,
        item.scale,
        rate,
    )


def _scored(
    track: Track,
    item: Pending,
    left: tuple[Pending, ...],
    total: float,
    *,
    now_s: float,
    warm: bool,
    knobs: Knobs,
) -> Track:
    """The track with the truth of one forecast taken in; `left` still wait."""
    mean = (total - item.total) / max(1e-9, now_s - item.made_s)
    scale = max(item.scale, mean, 1e-9)
    losses = tuple(
        LOSS_MEMORY * old + (1.0 - LOSS_MEMORY) * abs(mean - guess) / scale * 5.0
        for old, guess in zip(track.losses, item.experts, strict=True)
    )
    if not warm:
        return replace(track, losses=losses, pending=left)
    quantile, target = knobs.quantile, 1.0 - knobs.quantile
    missed = item.peak > item.upper * (1.0 + 1e-9)
    pinball = bounds.pinball(item.peak - item.upper, quantile) / scale
    miss = target if track.miss is None else track.miss
    miss += knobs.aci_step * (target - (1.0 if missed else 0.0))
    first, second = (
        MIX_MEMORY * old
        + (1.0 - MIX_MEMORY)
        * MIX_SCALE
        * bounds.pinball(item.peak - b, quantile)
        / max(scale, item.peak)
        for old, b in zip(track.mixed, item.mixed, strict=True)
    )
    miss = min(bounds.MISS_MAX * target, max(0.02 * target, miss))
    score = min(10.0, (item.peak - item.level) / max(item.scale, 1e-9))
    scores = (*track.scores, _short(score))[-SCORES_MAX:]
    peaks = (*track.peaks, _short(item.peak))[-SCORES_MAX:]
    grown = max(0.0, item.peak - item.experts[0])
    return replace(
        track,
        losses=losses,
        pending=left,
        scores=scores,
        peaks=peaks,
        places=(quantile, *bounds.places(scores, peaks, miss, knobs)),
        mixed=(first, second),
        miss=miss,
        judged=track.judged + 1,
        covered=track.covered + (0 if missed else 1),
        pinball=0.98 * track.pinball + 0.02 * pinball if track.judged else pinball,
        growth=sketch.add(track.growth, grown, now_s=now_s, tau_s=GROWTH_TAU_S),
    )


def _short(value: float) -> float:
    """Five digits: a record holds hundreds of them."""
    return float(f"{value:.5g}")


def _watched(
    series: Series, near: float, mean: float, *, dt_s: float, now_s: float, warm: bool
) -> tuple[float, bool]:
    """(usual distance, regime has changed): `near`, the last 30 s, against the mean of minutes.

    Far is what is far by the measure of this very series: on/off traffic is far from its mean all
    the time and has a spread to match.
    """
    far = abs(near - mean)
    if not warm:
        return max(series.spread, far), False
    # A break counts for little in the measure of the next one, unless breaks are what it does.
    step = 1.0 - math.exp(-dt_s / SPREAD_TAU_S)
    spread = series.spread + step * (min(far, 4.0 * series.spread) - series.spread)
    paused = series.broke_s is not None and now_s - series.broke_s < BREAK_PAUSE_S
    if paused or far <= max(BREAK_SPREADS * series.spread, BREAK_SHARE * mean):
        return spread, False
    return max(spread, far / BREAK_SPREADS), True


def _level_again(tracks: tuple[Track, ...]) -> tuple[Track, ...]:
    """After a break what experts lost before counts little: the one that follows takes over.

    Scores and growth stay, or the bound would be blind: forgetting them too, or moving the slow
    means at once, made the bound worse in the back-test.
    """
    return tuple(replace(t, losses=tuple([FORGOTTEN * loss for loss in t.losses])) for t in tracks)
