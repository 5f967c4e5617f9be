"""How much work the coming T_ready will bring: a quantile of the largest demand in it (R5.1).

Owns one forecast series a pool: a small pool of experts weighted by their recent pinball loss, and
an upper bound from additive residuals scaled by the level, kept calibrated by an adaptive conformal
step with delayed feedback. Hands a Forecast to capacity. Rates are tokens/s and never negative.

Why additive: multiplicative scores explode on on/off traffic. Why the largest rate of the window
and not the rate at its end: capacity that is ready too late for the peak has missed it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

EXPERTS = ("window", "last_30s", "ewma_60s", "ewma_180s", "ewma_600s", "holt_damped")
TAUS_S = (60.0, 180.0, 600.0)
PENDING_MAX = 12
PENDING_SPACING = 8
"""A forecast is kept for judging every eighth of its horizon: closer ones tell the same again."""
SCORES_MAX = 400
PEAK_TAU_S = 1800.0
PEAK_ROOM = 1.25
SCORES_FEW = 20
LEARNING_RATE = 8.0
LOSS_MEMORY = 0.95
HOLT_LEVEL_S = 15.0
HOLT_TREND_S = 45.0
HOLT_DAMP_S = 30.0


@dataclass(frozen=True, slots=True)
class Knobs:
    """How to forecast.

    Attributes:
        quantile: share of horizons whose largest demand shall stay below the upper bound.
        window_s: a rate is the mean over this trailing window. warmup_s: no score before that.
        prior_margin: upper/level - 1 at a horizon of 60 s while nothing was scored.
        aci_step: how fast the miss rate corrects the quantile.
    """

    quantile: float = 0.9
    window_s: float = 10.0
    warmup_s: float = 120.0
    prior_margin: float = 0.3
    aci_step: float = 0.02


@dataclass(frozen=True, slots=True)
class Pending:
    """A forecast whose truth is not known yet; `peak` is the largest rate seen since."""

    made_s: float
    due_s: float
    total: float
    experts: tuple[float, ...]
    level: float
    upper: float
    scale: float
    peak: float = 0.0


@dataclass(frozen=True, slots=True)
class Series:
    """Everything a series remembers; bounded, serialisable, replaced and never changed.

    Attributes:
        peak: largest rate of a window, fading over PEAK_TAU_S.
        total: work integrated since `begun_s`, in tokens. recent: (time, total) of the last 30 s.
        scores: residual of the largest rate, as a share of the scale, over the square root of its
            horizon in seconds.
        miss: the adaptive miss rate. covered, judged: how often the bound held.
        clamps: forecasts that an expert put below zero (B17).
    """

    begun_s: float | None = None
    updated_s: float = 0.0
    total: float = 0.0
    peak: float = 0.0
    recent: tuple[tuple[float, float], ...] = ()
    ewma: tuple[float, ...] = ()
    holt_level: float = 0.0
    holt_trend: float = 0.0
    losses: tuple[float, ...] = (0.0,) * len(EXPERTS)
    pending: tuple[Pending, ...] = ()
    scores: tuple[float, ...] = ()
    miss: float | None = None
    judged: int = 0
    covered: int = 0
    pinball: float = 0.0
    clamps: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Demand over the coming horizon in tokens/s, with how good such forecasts have been.

    Attributes:
        level: the weighted expectation. upper: quantile of the largest rate in the horizon.
        lower: mirrored bound for intervals. now: rate of the trailing window.
        coverage: share of judged horizons that stayed below the bound, None before the first.
        pinball: mean pinball loss of the bound, as a share of the scale.
    """

    level: float
    upper: float
    lower: float
    now: float
    horizon_s: float
    weights: tuple[float, ...] = ()
    coverage: float | None = None
    judged: int = 0
    pinball: float = 0.0


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
    ewma = _ewma(series.ewma, rate, dt_s)
    now = _mean(recent, ewma, knobs.window_s)
    level, trend = _holt(series, rate, dt_s)
    waiting, due = _raised(series.pending, now, now_s=now_s, knobs=knobs)
    fresh = replace(
        series,
        begun_s=begun_s,
        updated_s=now_s,
        total=total,
        peak=max(now, series.peak * math.exp(-dt_s / PEAK_TAU_S)),
        recent=recent,
        ewma=ewma,
        holt_level=level,
        holt_trend=trend,
        pending=waiting,
    )
    warm = now_s - begun_s >= knobs.warmup_s
    for item in due:
        fresh = _score(fresh, item, now_s=now_s, warm=warm, knobs=knobs)
    return fresh


def predict(series: Series, *, horizon_s: float, knobs: Knobs) -> Forecast:
    """Demand over the coming `horizon_s`. Without any sample everything is zero and unjudged."""
    if not series.ewma:
        return Forecast(0.0, 0.0, 0.0, 0.0, horizon_s)
    experts = _experts(series, horizon_s, knobs)
    weights = _weights(series.losses)
    level = sum(w * e for w, e in zip(weights, experts, strict=True))
    scale = max(level, series.ewma[-1])
    margin = _margin(series, horizon_s, knobs)
    now = experts[0]
    # Scores of quiet times, laid on a busy level, ask for several times of all that was ever seen:
    # on/off traffic is bounded by its own peaks.
    most = max(PEAK_ROOM * series.peak, level * (1.0 + _prior(horizon_s, knobs)))
    return Forecast(
        level=level,
        # What already arrives is a floor: a bound below it would be refuted as it is made.
        upper=max(min(level + margin * scale, most), now),
        lower=max(0.0, level - margin * scale),
        now=now,
        horizon_s=horizon_s,
        weights=weights,
        coverage=series.covered / series.judged if series.judged else None,
        judged=series.judged,
        pinball=series.pinball,
    )


def remember(series: Series, made: Forecast, *, now_s: float, knobs: Knobs) -> Series:
    """Keep a forecast until its horizon has passed; spaced, so that few wait."""
    if not series.ewma or series.begun_s is None or now_s - series.begun_s < knobs.window_s:
        return series
    spacing_s = made.horizon_s / PENDING_SPACING
    if series.pending and now_s - series.pending[-1].made_s < spacing_s:
        return series
    kept = Pending(
        made_s=now_s,
        due_s=now_s + made.horizon_s,
        total=series.total,
        experts=_experts(series, made.horizon_s, knobs),
        level=made.level,
        upper=made.upper,
        scale=max(made.level, series.ewma[-1]),
    )
    clamps = series.clamps + (1 if _holt_at(series, made.horizon_s) < 0 else 0)
    return replace(series, pending=(*series.pending, kept)[-PENDING_MAX:], clamps=clamps)


def scaled(series: Series, factor: float) -> Series:
    """As if all work so far had been so many times as much; every forecast grows by that factor.

    Scores, losses and calibration are shares and stay.
    """
    return replace(
        series,
        total=series.total * factor,
        peak=series.peak * factor,
        recent=tuple((at_s, total * factor) for at_s, total in series.recent),
        ewma=tuple(rate * factor for rate in series.ewma),
        holt_level=series.holt_level * factor,
        holt_trend=series.holt_trend * factor,
        pending=tuple(
            replace(
                item,
                total=item.total * factor,
                experts=tuple(rate * factor for rate in item.experts),
                level=item.level * factor,
                upper=item.upper * factor,
                scale=item.scale * factor,
                peak=item.peak * factor,
            )
            for item in series.pending
        ),
    )


def broken(series: Series) -> Series:
    """After a gap in the signal: rates across it would be false, so waiting forecasts are void."""
    return replace(series, recent=(), pending=()) if series.recent or series.pending else series


def _ewma(before: tuple[float, ...], rate: float, dt_s: float) -> tuple[float, ...]:
    if not before:
        return (rate,) * len(TAUS_S)
    return tuple(
        old + (1.0 - math.exp(-dt_s / tau)) * (rate - old)
        for old, tau in zip(before, TAUS_S, strict=True)
    )


def _holt(series: Series, rate: float, dt_s: float) -> tuple[float, float]:
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


def _holt_at(series: Series, horizon_s: float) -> float:
    """Level plus the damped trend's whole way over half the horizon (its mean, roughly)."""
    reach_s = HOLT_DAMP_S * (1.0 - math.exp(-horizon_s / 2.0 / HOLT_DAMP_S))
    return series.holt_level + series.holt_trend * reach_s


def trailing(series: Series, window_s: float) -> float:
    """Mean rate over the trailing window, or over all there is when that is shorter."""
    return _mean(series.recent, series.ewma, window_s)


def _mean(
    points: tuple[tuple[float, float], ...], ewma: tuple[float, ...], window_s: float
) -> float:
    if len(points) < 2:
        return ewma[0] if ewma else 0.0
    end_s, end = points[-1]
    for at_s, total in reversed(points[:-1]):
        if end_s - at_s >= window_s - 1e-9:
            return (end - total) / (end_s - at_s)
    at_s, total = points[0]
    return (end - total) / (end_s - at_s) if end_s > at_s else 0.0


def _experts(series: Series, horizon_s: float, knobs: Knobs) -> tuple[float, ...]:
    """One rate an expert, in the order of EXPERTS; below zero is clamped at this boundary (B17)."""
    return (
        max(0.0, trailing(series, knobs.window_s)),
        max(0.0, trailing(series, 30.0)),
        *(max(0.0, value) for value in series.ewma),
        max(0.0, _holt_at(series, horizon_s)),
    )


def _weights(losses: tuple[float, ...]) -> tuple[float, ...]:
    best = min(losses)
    raw = [math.exp(-LEARNING_RATE * (loss - best)) for loss in losses]
    total = sum(raw)
    return tuple(value / total for value in raw)


def _margin(series: Series, horizon_s: float, knobs: Knobs) -> float:
    """Share of the scale between level and bound.

    Scores of another horizon are stretched by the square root of the ratio, so that a changed
    T_ready shows at once and not after a window of new scores (R5.2).
    """
    prior = _prior(horizon_s, knobs)
    count = len(series.scores)
    if count == 0:
        return prior
    ranked = _ranked(series.scores)
    miss = 1.0 - knobs.quantile if series.miss is None else series.miss
    place = min(count - 1, max(0, math.ceil((1.0 - miss) * (count + 1)) - 1))
    measured = max(0.0, ranked[place]) * math.sqrt(horizon_s)
    weight = min(1.0, count / SCORES_FEW)
    return weight * measured + (1.0 - weight) * max(prior, measured)


@lru_cache(maxsize=64)
def _ranked(scores: tuple[float, ...]) -> tuple[float, ...]:
    """In ascending order; the same scores are asked for until another is judged."""
    return tuple(sorted(scores))


def _prior(horizon_s: float, knobs: Knobs) -> float:
    """The margin before anything was scored: part of it is noise, part grows with the horizon."""
    return knobs.prior_margin * (0.4 + 0.6 * math.sqrt(horizon_s / 60.0))


def _raised(
    pending: tuple[Pending, ...], rate: float, *, now_s: float, knobs: Knobs
) -> tuple[tuple[Pending, ...], list[Pending]]:
    """(still waiting, due) forecasts with the rate in their peaks."""
    waiting: list[Pending] = []
    due: list[Pending] = []
    for item in pending:
        # A trailing rate tells of the horizon only once its window lies inside it.
        inside = now_s - item.made_s >= min(knobs.window_s, item.due_s - item.made_s) - 1e-9
        seen = replace(item, peak=rate) if inside and rate > item.peak else item
        (due if now_s >= item.due_s - 1e-9 else waiting).append(seen)
    return tuple(waiting), due


def _score(series: Series, item: Pending, *, now_s: float, warm: bool, knobs: Knobs) -> Series:
    span_s = max(1e-9, now_s - item.made_s)
    mean = (series.total - item.total) / span_s
    scale = max(item.scale, mean, 1.0)
    losses = tuple(
        LOSS_MEMORY * old + (1.0 - LOSS_MEMORY) * abs(mean - guess) / scale * 0.5 * 10.0
        for old, guess in zip(series.losses, item.experts, strict=True)
    )
    if not warm:
        return replace(series, losses=losses)
    over = item.peak - item.upper
    quantile = knobs.quantile
    pinball = (quantile * over if over > 0 else (quantile - 1.0) * over) / scale
    missed = 1.0 if over > 0 else 0.0
    target = 1.0 - quantile
    miss = target if series.miss is None else series.miss
    score = (item.peak - item.level) / max(item.scale, 1.0)
    return replace(
        series,
        losses=losses,
        scores=(*series.scores, min(score, 10.0) / math.sqrt(item.due_s - item.made_s))[
            -SCORES_MAX:
        ],
        miss=min(0.5, max(0.002, miss + knobs.aci_step * (target - missed))),
        judged=series.judged + 1,
        covered=series.covered + (1 if over <= 0 else 0),
        pinball=0.98 * series.pinball + 0.02 * pinball if series.judged else pinball,
    )
