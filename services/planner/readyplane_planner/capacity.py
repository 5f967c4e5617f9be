"""From work, profiles and arriving workers to predicted TTFT, TPOT and loads (R3, R4, R5).

Owns the queueing model of both pools and the correction of their service rates. Hands Predictions
to optimise and decide. Tokens, tokens/s and seconds throughout; pending capacity counts from the
quantile of its arrival on and not before (R1.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from readyplane.core.profile import ClassProfile

WAIT_MAX_S = 3600.0
"""A prediction beyond an hour says nothing more than 'far too late'."""
CORRECTION_RANGE = (0.5, 2.0)
CORRECTION_RANGE_UNMEASURED = (0.1, 10.0)
"""Of a profile that nobody measured: its figures are assumptions, and slow ones."""
EVIDENCE_MIN_S = 300.0
"""An unmeasured profile is acted on once its correction rests on so much: by then it has moved nine
tenths of its way."""
CORRECTION_TAU_S = 120.0
KV_FILL_MAX = 0.9
"""Share of the KV pool that is planned for: the rest absorbs long answers and fragmentation."""
STEPS = 8
LENGTH_NODES = ((-1.7320508, 1 / 6), (0.0, 2 / 3), (1.7320508, 1 / 6))
"""Three points that stand for a normal distribution: deviations and their weights."""
OUTPUT_CV2 = 0.6
"""Squared spread of outputs, of which only means are told."""
_SQRT_2 = math.sqrt(2.0)
_SQRT_2_PI = math.sqrt(2.0 * math.pi)


class Combine(StrEnum):
    """How predicted and actual latency make a load (R3.1)."""

    MAX = "max"
    WEIGHTED = "weighted"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True)
class Supply:
    """Workers of a pool: ready now, and seconds until each pending one is expected.

    Attributes:
        sizes: what each pending one is worth in workers; empty for one each.
    """

    ready: float
    arrivals_s: tuple[float, ...] = ()
    sizes: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        """Everybody, sooner or later."""
        return self.ready + (sum(self.sizes) if self.sizes else len(self.arrivals_s))

    def at(self, ahead_s: float) -> float:
        """Workers that serve `ahead_s` from now."""
        if self.sizes:
            pairs = zip(self.arrivals_s, self.sizes, strict=True)
            return self.ready + sum(size for eta, size in pairs if eta <= ahead_s)
        return self.ready + sum(1 for eta in self.arrivals_s if eta <= ahead_s)

    def steps(self, within_s: float) -> list[tuple[float, float]]:
        """(workers that serve, for how many seconds), one after another until then."""
        if not self.arrivals_s:
            return [(self.ready, within_s)]
        count, at_s = self.at(0.0), 0.0
        out: list[tuple[float, float]] = []
        sizes = self.sizes or (1,) * len(self.arrivals_s)
        for eta, size in sorted(zip(self.arrivals_s, sizes, strict=True)):
            if 0 < eta < within_s:
                out.append((count, eta - at_s))
                count, at_s = count + size, eta
        out.append((count, within_s - at_s))
        return out


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """One P worker: tokens/s, seconds of a mean prompt, spread, and what every request pays.

    `dispersion`: how much more arriving work varies than if requests came one by one, by chance.
    `cached`: prompt tokens of a mean request that some worker's cache holds.
    """

    rate: float
    own_s: float
    cv2: float = 1.0
    overhead_s: float = 0.0
    dispersion: float = 1.0
    cached: float = 0.0

    @property
    def tokens(self) -> float:
        """Tokens to compute of a mean prompt."""
        return self.own_s * self.rate

    @property
    def each(self) -> float:
        """Tokens² that chance adds with a token of work: the mean prompt with its spread."""
        return self.tokens * (1.0 + self.cv2)


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """One D worker: iteration = base + per_sequence * n + per_kv_token * kv, in seconds."""

    base_s: float
    per_sequence_s: float
    per_kv_token_s: float
    context: float
    osl: float
    kv_tokens: float
    sequences_max: float

    @property
    def each_s(self) -> float:
        """What one sequence of the mean context adds to an iteration."""
        return self.per_sequence_s + self.per_kv_token_s * self.context

    def iteration_s(self, sequences: float) -> float:
        """Seconds a token at that many sequences of the mean context."""
        return self.base_s + sequences * self.each_s

    def sequences_at(self, tpot_s: float) -> float:
        """Most sequences one worker runs within `tpot_s`, its KV pool and its batch limit."""
        each_s = self.each_s
        by_time = (tpot_s - self.base_s) / each_s if each_s > 0 else self.sequences_max
        by_memory = KV_FILL_MAX * self.kv_tokens / max(1.0, self.context)
        return max(0.0, min(by_time, by_memory, self.sequences_max))

    def rate_at(self, tpot_s: float) -> float:
        """Tokens/s of one worker at the largest batch that keeps `tpot_s`; 0 when none does."""
        sequences = self.sequences_at(tpot_s)
        return sequences / self.iteration_s(sequences) if sequences > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Latency the pool is heading for: `value_s` at the demand's bound, `low_s` at its level."""

    value_s: float
    low_s: float
    backlog_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Latency over target with its interval; None where nothing is known (never zero)."""

    value: float | None
    low: float | None
    high: float | None
    actual_s: float | None
    predicted_s: float | None


@dataclass(frozen=True, slots=True)
class Correction:
    """Observed over profiled service rate, smoothed in log space; 1 until something was measured."""

    log_factor: float = 0.0
    evidence_s: float = 0.0

    @property
    def factor(self) -> float:
        """Multiplies the profiled rate; within the range that `correct` was given."""
        return math.exp(self.log_factor)


def correct(
    before: Correction,
    ratios: Iterable[float],
    *,
    dt_s: float,
    within: tuple[float, float] = CORRECTION_RANGE,
) -> Correction:
    """Move the correction towards the median of measured/profiled rates of steady workers.

    The caller leaves out workers that are warming up (B26) and calls nothing while samples are
    stale or the pool is in transition: then the factor stays as it is.
    """
    sound = sorted(r for r in ratios if math.isfinite(r) and r > 0)
    if not sound or dt_s <= 0:
        return before
    low, high = within
    middle = (
        sound[len(sound) // 2]
        if len(sound) % 2
        else math.sqrt(sound[len(sound) // 2 - 1] * sound[len(sound) // 2])
    )
    wanted = math.log(min(high, max(low, middle)))
    step = 1.0 - math.exp(-dt_s / CORRECTION_TAU_S)
    return Correction(
        before.log_factor + step * (wanted - before.log_factor), before.evidence_s + dt_s
    )


def prefill_model(
    profile: ClassProfile,
    *,
    isl: float,
    uncached: float,
    cv2: float,
    factor: float,
    overhead_s: float,
) -> PrefillModel:
    """Rates for the prompts as they are now; a cached prefix still costs its attention.

    The mean over their lengths, taken for lognormal: short prompts pay a pass each, and long ones
    their attention, so that a prompt of the mean length is quicker than the mean prompt.
    """
    uncached = max(1.0, uncached)
    cached = max(0.0, isl - uncached)
    deviation = math.sqrt(math.log1p(max(0.0, cv2)))
    own_s = tokens = 0.0
    for z, weight in LENGTH_NODES:
        times = math.exp(z * deviation - deviation * deviation / 2.0)
        own_s += weight * profile.prefill_s(max(1.0, uncached * times), cached * times)
        tokens += weight * times
    own_s /= factor * tokens
    return PrefillModel(uncached / own_s, own_s, cv2, overhead_s, cached=cached)


def decode_model(
    profile: ClassProfile, *, isl: float, osl: float, factor: float, held: float = 0.0
) -> DecodeModel:
    """Iteration costs at the mean context: the whole prompt and half of the answer it is at.

    `held`: KV tokens a running sequence holds, as measured, 0 where it is not known: a few very long
    answers hold more than means tell.
    """
    a, b, c = profile.decode_coefficients_s()
    return DecodeModel(
        base_s=a / factor,
        per_sequence_s=b / factor,
        per_kv_token_s=c / factor,
        # Who runs now is likelier a long answer than a short one.
        context=max(1.0, isl + osl * (1.0 + OUTPUT_CV2) / 2.0, held),
        osl=max(1.0, osl),
        kv_tokens=float(profile.kv_capacity_tokens),
        sequences_max=float(profile.max_num_seqs),
    )


def overrun(start: float, drift: float, variance: float, within_s: float, limit: float) -> float:
    """Chance that a queue is above `limit` after `within_s`; it never falls below empty.

    A reflected Brownian motion, which holds the backlog of now, growth, and the steady state of a
    busy queue in one formula. Tokens; `drift` tokens/s, `variance` tokens²/s. Asked a hundred times
    in a decision.
    """
    if limit <= 0 and (start > 0 or drift > 0 or variance > 0):
        return 1.0
    sd = math.sqrt(variance * within_s) if variance > 0 and within_s > 0 else 0.0
    if sd <= 0:
        return 1.0 if max(start, 0.0) + drift * within_s > limit else 0.0
    drifted = drift * within_s
    direct = 0.5 * math.erfc((limit - start - drifted) / sd / _SQRT_2)
    mirrored = (limit + start + drifted) / sd
    power = 2.0 * drift * limit / variance
    if mirrored > 30.0:  # the tail itself is too small a number: its logarithm is not
        tail = power - mirrored * mirrored / 2.0 - math.log(mirrored * _SQRT_2_PI)
        reflected = math.exp(min(0.0, tail))
    else:
        power = min(600.0, power)
        reflected = math.exp(power) * (0.5 * math.erfc(mirrored / _SQRT_2))
    chance = direct + reflected
    return chance if chance < 1.0 else 1.0


def overruns(
    share: float, *, start: float, drift: float, variance: float, within_s: float
) -> Callable[[float], bool]:
    """Whether `overrun` is beyond `share`, which is below 1, at a limit.

    The same formula for a search among limits: what they share is worked out once, and the second
    half only where the first does not decide.
    """
    if not (variance > 0 and within_s > 0 and variance * within_s > 0):
        return lambda limit: overrun(start, drift, variance, within_s, limit) > share
    sd, drifted, twice = math.sqrt(variance * within_s), drift * within_s, 2.0 * drift

    def beyond(limit: float) -> bool:
        if limit <= 0:
            return True
        direct = 0.5 * math.erfc((limit - start - drifted) / sd / _SQRT_2)
        if direct > share:
            return True
        mirrored = (limit + start + drifted) / sd
        power = twice * limit / variance
        if mirrored > 30.0:
            tail = power - mirrored * mirrored / 2.0 - math.log(mirrored * _SQRT_2_PI)
            reflected = math.exp(min(0.0, tail))
        else:
            power = min(600.0, power)
            reflected = math.exp(power) * (0.5 * math.erfc(mirrored / _SQRT_2))
        return direct + reflected > share

    return beyond


def served_tokens(rate: float, steps: Iterable[tuple[float, float]], workers_max: float) -> float:
    """Tokens that a pool serves in these steps, with at most `workers_max` workers at a time."""
    tokens = 0.0
    for count, lasts_s in steps:
        tokens += min(float(count), workers_max) * rate * lasts_s
    return tokens


def variance_of(demand: float, rate: float, each: float) -> float:
    """Tokens² a second by which arriving work spreads: Poisson arrivals of work of any length.

    A busy queue decays as if it were fed at its own rate, a quiet one by what arrives.

    Args:
        demand, rate: tokens/s that arrive, and that are served. each: tokens² that a token of work
            adds, the mean length with its spread.
    """
    return min(rate, 1.25 * demand) * each


def _in_service(model: PrefillModel, workers: float) -> float:
    """Tokens being computed that keep nobody waiting: with them the chance to wait at all is
    that of Erlang C to about a tenth.
    """
    return workers * model.each / 4.0


def backlog_after(
    *, backlog: float, demand: float, rate: float, supply: Supply, horizon_s: float
) -> float:
    """Tokens still queued after the horizon, with pending workers joining at their arrival."""
    tokens = backlog
    for count, lasts_s in supply.steps(horizon_s):
        tokens = max(0.0, tokens + (demand - count * rate) * lasts_s)
    return tokens


def predict_ttft(
    model: PrefillModel,
    *,
    level: float,
    upper: float,
    backlog: float,
    supply: Supply,
    horizon_s: float,
    quantile: float,
) -> Prediction:
    """Worst quantile of TTFT over the horizon, with the workers there and on their way (R5.1).

    The queue ahead, the random spread of what arrives, and the prompt's own time (R4.2).
    """
    worst = low = 0.0
    for step in range(STEPS + 1):
        ahead_s = horizon_s * step / STEPS
        workers = supply.at(ahead_s)
        served = served_tokens(model.rate, supply.steps(ahead_s), math.inf)
        worst = _ttft_s(model, upper, backlog, workers, served, ahead_s, quantile, worst)
        if level != upper:
            low = _ttft_s(model, level, backlog, workers, served, ahead_s, quantile, low)
    low = worst if level == upper else low
    left = backlog_after(
        backlog=backlog, demand=upper, rate=model.rate, supply=supply, horizon_s=horizon_s
    )
    return Prediction(worst, low, left)


def _ttft_s(
    model: PrefillModel,
    demand: float,
    backlog: float,
    workers: float,
    served: float,
    ahead_s: float,
    quantile: float,
    at_least_s: float,
) -> float:
    """Quantile of the TTFT of who arrives `ahead_s` from now, or `at_least_s` if that is more.

    Asking first whether it can be more at all saves the search for most moments of a horizon.
    """
    own_s = model.own_s + model.overhead_s
    if workers <= 0 or model.rate <= 0:
        return max(at_least_s, WAIT_MAX_S if demand > 0 or backlog > 0 else own_s)
    rate, held = workers * model.rate, _in_service(model, workers)
    if ahead_s > 0:
        late = overruns(
            1.0 - quantile,
            start=backlog,
            drift=demand - served / ahead_s,
            variance=variance_of(demand, rate, model.each),
            within_s=ahead_s,
        )
    else:

        def late(limit: float) -> bool:
            return backlog > limit

    low = max(0.0, at_least_s - own_s)
    if not late(rate * low + held):
        return max(at_least_s, own_s)
    high = max(1.0, 2.0 * low)
    while late(rate * high + held) and high < WAIT_MAX_S:
        low, high = high, high * 2.0
    while high - low > 0.005 * high:
        middle = (low + high) / 2.0
        low, high = (middle, high) if late(rate * middle + held) else (low, middle)
    return max(at_least_s, min(WAIT_MAX_S, high + own_s))


def steady_sequences(model: DecodeModel, demand: float, workers: float) -> float:
    """Sequences of the whole pool when `demand` tokens/s are served; inf where that cannot be."""
    if demand <= 0:
        return 0.0
    if workers <= 0:
        return math.inf
    share = demand / workers
    busy = share * model.each_s
    if busy >= 1.0:
        return math.inf
    return workers * share * model.base_s / (1.0 - busy)


def predict_tpot(
    model: DecodeModel,
    *,
    level: float,
    upper: float,
    sequences: float,
    supply: Supply,
    horizon_s: float,
) -> Prediction:
    """Worst TPOT over the horizon. Demand lags: what runs now drains while new answers begin."""
    step_s = horizon_s / STEPS
    workers = [supply.at(step_s * step) or 1 for step in range(STEPS + 1)]
    worst = low = _worst_tpot(model, upper, sequences, workers, step_s)
    if level != upper:
        low = _worst_tpot(model, level, sequences, workers, step_s)
    if supply.at(horizon_s) <= 0 and (upper > 0 or sequences > 0):
        return Prediction(WAIT_MAX_S, WAIT_MAX_S if level > 0 else low)
    return Prediction(min(WAIT_MAX_S, worst), min(WAIT_MAX_S, low))


def _worst_tpot(
    model: DecodeModel, demand: float, sequences: float, workers: Iterable[float], step_s: float
) -> float:
    """Longest iteration of fluid steps: answers begin at demand/osl and end at the rate the batch
    makes tokens; `workers` serve in each.
    """
    worst, each_s = 0.0, model.each_s
    for count in workers:
        worst = max(worst, model.base_s + sequences / count * each_s)
        running = min(sequences, count * model.sequences_max)
        tokens_per_s = 0.0
        if running > 0:
            tokens_per_s = running / (model.base_s + running / count * each_s)
        sequences = max(0.0, sequences + (demand - tokens_per_s) / model.osl * step_s)
    return worst


def load_of(
    prediction: Prediction | None,
    *,
    actual_s: float | None,
    count: int,
    target_s: float,
    combine: Combine,
    weight: float,
    count_min: int,
) -> Load:
    """Combined latency over target, with an interval (R3.1).

    Args:
        actual_s, count: a quantile and how many samples it rests on; below `count_min` it is not
            known. weight: share of the actual one when `combine` is weighted.
    """
    actual = actual_s if actual_s is not None and count >= count_min else None
    predicted = None if prediction is None else prediction.value_s
    if combine is Combine.PREDICTED:
        actual_used = None
    else:
        actual_used = actual
    value = _combined(predicted, actual_used, combine, weight)
    if value is None:
        return Load(None, None, None, actual, predicted)
    spread = 1.645 / math.sqrt(max(1, count))
    low_of = None if prediction is None else prediction.low_s
    low = _combined(
        low_of,
        None if actual_used is None else actual_used * (1 - min(0.9, spread)),
        combine,
        weight,
    )
    high = _combined(
        predicted, None if actual_used is None else actual_used * (1 + spread), combine, weight
    )
    bounds = sorted(v / target_s for v in (low, value, high) if v is not None)
    return Load(value / target_s, bounds[0], bounds[-1], actual, predicted)


def _combined(
    predicted: float | None, actual: float | None, combine: Combine, weight: float
) -> float | None:
    known: Sequence[float] = [v for v in (predicted, actual) if v is not None]
    if not known:
        return None
    if combine is Combine.WEIGHTED and predicted is not None and actual is not None:
        return (1.0 - weight) * predicted + weight * actual
    return max(known)
