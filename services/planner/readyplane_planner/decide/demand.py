"""What is asked of both pools: forecasts, recent mean lengths, and service models that fit them.

Token work is forecast directly; lengths only turn it into service times and are never multiplied
as independent forecasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import NormalDist

from readyplane.core.profile import ClassProfile
from readyplane_planner import capacity, forecast, guard
from readyplane_planner.capacity import Correction, DecodeModel, PrefillModel
from readyplane_planner.decide import clients, risk
from readyplane_planner.decide.clients import Asked
from readyplane_planner.decide.pools import Pool
from readyplane_planner.decide.values import Averages, Memory, Plan
from readyplane_planner.forecast import Forecast, Series
from readyplane_planner.signals import Observation, Signal

LENGTHS_TAU_S = 60.0
"""Recent mean lengths fade with this time constant: fast enough for a cache shift, slow enough
that one long prompt does not move them."""
OUTPUT_TAU_S = 60.0
"""The same for outputs, which take a residence time to be known."""
SURELY_BUSY = 1.5
"""A P worker's speed is learned only where its queue would have lasted for a worker so much faster
than profiled: a rate between two moments with work may hold idle time, and then is no speed."""
FIRST_LOOK_S = 60.0
"""Until then a demand is the mean of what was seen, unless it is a step beyond chance."""
SURGE_SPANS_S = (3.0, 6.0)
SURGE_SIGMAS = 3.5
KV_SATURATED = 0.95
"""Share of its KV pool in use from which on a D worker preempts and computes prompts again inside
its iterations: what it takes then tells of its load and not of its speed."""
REQUESTS_FEW = 5.0
NODES = ((0.1, 0.2), (0.3, 0.2), (0.5, 0.2), (0.7, 0.2), (0.88, 0.14), (0.97, 0.06))
"""Quantiles that stand for all that demand may be, and what each weighs."""
PEAK_MEAN, PEAK_SPREAD = 1.35, 0.6
"""The largest of some seven windows of a horizon is so many deviations above a window's mean, and
varies by so many: what chance alone makes of an even load."""
_DEVIATIONS = {p: NormalDist().inv_cdf(p) for p, _ in NODES}
PRIOR_REQUESTS = 10.0
SEQUENCES_FEW = 10.0
HELD_TAU_S, HELD_SEEN = 90.0, 0.3
"""KV a sequence is meant over that time, once a part of it was seen."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Forecasts and models of this tick.

    Attributes:
        lasting_p, lasting_d: the part of each bound that is more than noise, tokens/s.
        uncached: mean uncached prompt tokens. osl: mean output tokens.
        spread_p, spread_d: (tokens/s, probability) of what has to be served all the time.
        risk: share of the requests that may be planned to be late.
    """

    work_p: Forecast
    work_d: Forecast
    model_p: PrefillModel
    model_d: DecodeModel
    lasting_p: float
    lasting_d: float
    uncached: float
    osl: float
    spread_p: tuple[tuple[float, float], ...]
    spread_d: tuple[tuple[float, float], ...]
    risk: float


def needs(
    observation: Observation, plan: Plan, memory: Memory, pools: tuple[Pool, Pool], *, now_s: float
) -> tuple[Needs, Memory]:
    """What is asked of both pools over the coming T_ready plus one control interval.

    Takes the tick's rates into the series (an unknown rate breaks them and is never a zero),
    forecasts, and remembers the forecasts and how fast workers were.
    """
    knobs, t_ready = plan.knobs, observation.t_ready
    serving = len(pools[1].ready) + len(pools[1].draining)
    averages = _averages(observation, plan, memory, serving)
    budget = risk.spent(observation, memory.budget)
    osl = mean_output(observation, averages)
    arrivals = observation.arrivals
    decode = replace(arrivals, value=None if arrivals.value is None else arrivals.value * osl)
    series_p = _fold(memory.work_p, observation.prefill_work, observation.dt_s, plan, now_s)
    series_d = _fold(memory.work_d, decode, observation.dt_s, plan, now_s)
    horizon_p = t_ready["prefill"].p90_s + plan.tick_s
    horizon_d = t_ready["decode"].p90_s + plan.tick_s
    work_p = forecast.predict(series_p, horizon_s=horizon_p, knobs=knobs)
    work_d = forecast.predict(series_d, horizon_s=horizon_d, knobs=knobs)
    of_p, of_d = clients.asked(
        observation,
        plan,
        memory,
        ((series_p, observation.prefill_work, work_p), (series_d, decode, work_d)),
        osl,
        now_s=now_s,
    )
    series_p = forecast.remember(series_p, work_p, now_s=now_s, knobs=knobs)
    series_d = forecast.remember(series_d, work_d, now_s=now_s, knobs=knobs)
    isl, uncached = mean_lengths(observation, averages)
    cv2 = observation.lengths.isl_cv2
    model_p = capacity.prefill_model(
        plan.prefill.profile,
        isl=isl,
        uncached=uncached,
        cv2=cv2,
        factor=memory.correct_p.factor,
        overhead_s=plan.overhead_s,
    )
    model_d = capacity.decode_model(
        plan.decode.profile,
        isl=isl,
        osl=osl,
        factor=memory.correct_d.factor,
        held=_held_each(averages),
    )
    model_d = _holding(model_d, plan.decode.profile, pools[1])
    uneven = risk.uneven(memory.uneven, observation, series_p, uncached * (1.0 + cv2))
    model_p = replace(model_p, dispersion=risk.dispersion(uneven))
    work_p = surged(
        first_look(of_p.made, series_p), series_p, tokens=uncached, cv2=cv2, spans_s=SURGE_SPANS_S
    )
    # Answers begin after their prompts and last: D has the time to see the longer span.
    work_d = surged(
        first_look(of_d.made, series_d), series_d, tokens=osl, cv2=0.0, spans_s=SURGE_SPANS_S[1:]
    )
    each_p = uncached * (1.0 + cv2) / knobs.window_s
    each_d = osl / knobs.window_s
    needs_now = Needs(
        work_p,
        work_d,
        model_p,
        model_d,
        lasting(work_p, each=each_p, plan=plan),
        lasting(work_d, each=each_d, plan=plan),
        uncached,
        osl,
        spread_p=spread(series_p, work_p, of_p, plan, each=each_p),
        spread_d=spread(series_d, work_d, of_d, plan, each=each_d),
        risk=risk.of(budget, plan.risk, arrivals=averages.requests / LENGTHS_TAU_S),
    )
    correct_p, correct_d = _corrected(observation, plan, memory, pools, model_p)
    memory = replace(
        memory,
        work_p=series_p,
        work_d=series_d,
        apart_p=of_p.apart,
        apart_d=of_d.apart,
        averages=averages,
        budget=budget,
        uneven=uneven,
        idle_since_s=guard.since(memory.idle_since_s, observation.idle, now_s),
        correct_p=correct_p,
        correct_d=correct_d,
        bad_samples=memory.bad_samples + len(observation.bad),
    )
    return needs_now, memory


def _held_each(averages: Averages) -> float:
    """KV tokens that a running sequence held lately; 0 while few ran or it is not known.

    Of the moment it would jump with every very long prompt.
    """
    few = SEQUENCES_FEW * HELD_TAU_S * HELD_SEEN
    return averages.held / averages.running if averages.running > few else 0.0


def _holding(model: DecodeModel, profile: ClassProfile, pool: Pool) -> DecodeModel:
    """With the KV that workers say they hold, where the profile only assumes it.

    What a capacity profile with stages publishes counts in any case: graphs take it off (R14.1).
    """
    published = [float(w.kv_published) for w in pool.ready if w.kv_published is not None]
    if published:
        return replace(model, kv_tokens=min(*published, model.kv_tokens))
    told = [w.kv_capacity for w in pool.ready if w.kv_capacity]
    return model if profile.measured or not told else replace(model, kv_tokens=min(told))


def _averages(observation: Observation, plan: Plan, memory: Memory, serving: int) -> Averages:
    averages, dt_s = memory.averages, observation.dt_s
    rates = (observation.arrivals, observation.prompt_work, observation.prefill_work)
    if dt_s > 0 and all(signal.known for signal in rates):
        fade = math.exp(-dt_s / LENGTHS_TAU_S)
        requests, tokens, uncached = (s.get() * dt_s for s in rates)
        averages = replace(
            averages,
            requests=averages.requests * fade + requests,
            tokens=averages.tokens * fade + tokens,
            uncached=averages.uncached * fade + uncached,
        )
    if dt_s > 0 and observation.finished.known and observation.decoding.known:
        fade = math.exp(-dt_s / OUTPUT_TAU_S)
        made = observation.generated.get(_modelled_output(observation, plan, memory, serving))
        averages = replace(
            averages,
            finished=averages.finished * fade + observation.finished.get() * dt_s,
            generated=averages.generated * fade + made * dt_s,
        )
    if dt_s > 0 and observation.kv.known and observation.decoding.known:
        fade = math.exp(-dt_s / HELD_TAU_S)
        averages = replace(
            averages,
            held=averages.held * fade + observation.kv.get() * dt_s,
            running=averages.running * fade + observation.decoding.get() * dt_s,
        )
    return averages


def _modelled_output(observation: Observation, plan: Plan, memory: Memory, serving: int) -> float:
    """Output tokens/s by the profile, for engines that do not count them."""
    sequences = observation.decoding.get()
    if sequences <= 0 or serving <= 0:
        return 0.0
    each = sequences / serving
    kv = observation.kv.get(sequences * observation.lengths.isl) / serving
    return sequences * memory.correct_d.factor / plan.decode.profile.iteration_s(each, kv)


def mean_output(observation: Observation, averages: Averages) -> float:
    """Mean output tokens of a request, from all tokens made over all requests finished.

    Lengths of finished requests alone are those of the short ones while load grows: the long ones
    still run. Counting what the running have made already (the estimate for censored lifetimes)
    has no such bias. A few pretended requests of the prior length steady the beginning.
    """
    known = observation.lengths.osl
    return max(
        1.0,
        (averages.generated + PRIOR_REQUESTS * known) / (averages.finished + PRIOR_REQUESTS),
    )


def _fold(series: Series, rate: Signal, dt_s: float, plan: Plan, now_s: float) -> Series:
    if not rate.known or dt_s <= 0:
        return forecast.broken(series)
    return forecast.update(series, rate.get(), dt_s=dt_s, now_s=now_s, knobs=plan.knobs)


def surged(
    work: Forecast, series: Series, *, tokens: float, cv2: float, spans_s: tuple[float, ...]
) -> Forecast:
    """The forecast, lifted when the last seconds hold more than chance explains.

    The trailing window takes its whole length to show a step. Work of requests of `tokens` each
    that arrive by chance varies by a known amount; far beyond that it is a step, and counts at once
    with what is certain of it.
    """
    level = work.level
    for span_s in spans_s:
        rate = forecast.trailing(series, span_s)
        spread = math.sqrt(max(work.level, 1.0) * tokens * (1.0 + cv2) / span_s)
        if rate > work.level + SURGE_SIGMAS * spread:
            level = max(level, rate - math.sqrt(rate * tokens * (1.0 + cv2) / span_s))
    if level <= work.level:
        return work
    return replace(work, level=level, upper=max(work.upper, level))


def spread(
    series: Series, work: Forecast, of: Asked, plan: Plan, *, each: float
) -> tuple[tuple[float, float], ...]:
    """(tokens/s, probability): the largest demand within the horizon, without what is chance.

    Requests of a window vary by their square root, and their lengths add to it (`each`, tokens). The
    largest window of a horizon holds that noise, and so does the waiting line of the sizing.
    """
    probabilities = [p for p, _ in NODES]
    found = forecast.quantiles(series, (work.horizon_s,), probabilities, knobs=plan.knobs)[0]
    weights: dict[float, float] = {}
    most = work.upper if _begins(series) else math.inf
    for (probability, weight), rate in zip(NODES, found, strict=True):
        chance = PEAK_MEAN + PEAK_SPREAD * _DEVIATIONS[probability]
        lasts = max(work.level, min(most, beneath(of.moved(rate), max(0.0, chance), each)))
        weights[lasts] = weights.get(lasts, 0.0) + weight
    return tuple(weights.items())


def first_look(work: Forecast, series: Series) -> Forecast:
    """In the first minute, what was seen on the mean: every trend of a beginning points up."""
    if not _begins(series):
        return work
    mean = forecast.trailing(series, FIRST_LOOK_S)
    return replace(work, level=min(work.level, mean), upper=min(work.upper, mean))


def _begins(series: Series) -> bool:
    return series.begun_s is not None and series.updated_s - series.begun_s < FIRST_LOOK_S


def beneath(rate: float, deviations: float, each: float) -> float:
    """The steady rate that looks like `rate` when chance adds so many deviations.

    A rate x varies by the root of `each` times x, where it would be and not where it is now.
    """
    half = deviations * math.sqrt(each) / 2.0
    return (math.sqrt(half * half + max(0.0, rate)) - half) ** 2


def lasting(work: Forecast, *, each: float, plan: Plan) -> float:
    """The bound without the noise of single arrivals, and never less than the expectation.

    The queueing model holds that noise already; what exceeds it is growth, which lasts.
    """
    chance = NormalDist().inv_cdf(plan.knobs.quantile)
    return max(work.level, beneath(work.upper, max(0.0, chance), each))


def mean_lengths(observation: Observation, averages: Averages) -> tuple[float, float]:
    """(prompt tokens, uncached ones) of recent requests; few of them lean on the life's mean."""
    lengths = observation.lengths
    weight = min(1.0, averages.requests / REQUESTS_FEW)
    if averages.requests <= 0:
        return lengths.isl, lengths.uncached
    isl = weight * averages.tokens / averages.requests + (1 - weight) * lengths.isl
    uncached = weight * averages.uncached / averages.requests + (1 - weight) * lengths.uncached
    return max(1.0, isl), max(1.0, min(uncached, isl))


def _corrected(
    observation: Observation,
    plan: Plan,
    memory: Memory,
    pools: tuple[Pool, Pool],
    model_p: PrefillModel,
) -> tuple[Correction, Correction]:
    """Learn how fast workers really are, from steady ones only.

    Frozen while the data is old or the pool is changing; a worker that has just become ready is
    left out, since its first batches say nothing of what it can do (B26), and so is a D worker
    whose KV pool is full.
    """
    dt_s = observation.dt_s
    correct_p, correct_d = memory.correct_p, memory.correct_d
    if dt_s <= 0 or observation.bad:
        return correct_p, correct_d
    pool_p, pool_d = pools
    if _steady(pool_p):
        base = model_p.rate / memory.correct_p.factor
        correct_p = _learn(
            correct_p,
            (
                w.prefill_rate / own
                for w in pool_p.ready
                if _warm(w.ready_age_s, plan)
                and w.prefill_rate is not None
                and (w.dry_rate or 0.0) > SURELY_BUSY * (own := base * pool_p.worth_of(w)) > 0
            ),
            dt_s,
            plan.prefill.profile,
        )
    if _steady(pool_d):
        profile = plan.decode.profile
        correct_d = _learn(
            correct_d,
            (
                plan.decode.iteration_s(w.worker_class, w.mode, w.running, w.kv_tokens)
                / w.iteration_s
                for w in pool_d.ready
                if _warm(w.ready_age_s, plan)
                and w.iteration_s
                and w.running
                and w.kv_tokens is not None
                and (w.kv_usage or 0.0) < KV_SATURATED
            ),
            dt_s,
            profile,
        )
    return correct_p, correct_d


def _steady(pool: Pool) -> bool:
    return not (pool.coming or pool.draining or pool.overdue)


def _warm(ready_age_s: float | None, plan: Plan) -> bool:
    return ready_age_s is not None and ready_age_s >= plan.warm_worker_s


def _learn(
    before: Correction, ratios: Iterable[float], dt_s: float, profile: ClassProfile
) -> Correction:
    """A measured profile is nearly right; of one that nobody measured little is known."""
    within = capacity.CORRECTION_RANGE
    if not profile.measured:
        within = capacity.CORRECTION_RANGE_UNMEASURED
    return capacity.correct(before, ratios, dt_s=dt_s, within=within)


def sequences_ahead(
    observation: Observation, model: Needs, *, prefill_workers: float, within_s: float
) -> float:
    """Sequences that D has to hold: those it decodes, and those P can hand over in that time.

    Requests that the router keeps back because D is full are among them: D's own saturation must
    not hide behind P's queue (R4.1).
    """
    decoding = observation.decoding.get()
    waiting = max(0.0, observation.in_flight.get(decoding) - decoding)
    most = (prefill_workers or 1) * model.model_p.rate * within_s / model.uncached
    return decoding + min(waiting, most)
