"""Capacity: queues, batches, loads and corrections as formulas with known answers."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.profiles import load
from readyplane_planner import capacity
from readyplane_planner.capacity import (
    WAIT_MAX_S,
    Combine,
    Correction,
    DecodeModel,
    Prediction,
    PrefillModel,
    Supply,
    correct,
    decode_model,
    load_of,
    overrun,
    predict_tpot,
    predict_ttft,
    prefill_model,
    steady_sequences,
)

PROFILE = load("h200-slow10")


def p_model(
    isl: float = 1155.0, uncached: float = 1155.0, factor: float = 1.0, cv2: float = 1.0
) -> PrefillModel:
    return prefill_model(
        PROFILE, isl=isl, uncached=uncached, cv2=cv2, factor=factor, overhead_s=0.0
    )


def d_model(factor: float = 1.0) -> DecodeModel:
    return decode_model(PROFILE, isl=1155.0, osl=211.0, factor=factor)


def test_models_are_the_profile() -> None:
    even = p_model(cv2=0.0)
    assert even.own_s == pytest.approx(PROFILE.prefill_s(1155))
    assert even.rate == pytest.approx(1155 / PROFILE.prefill_s(1155))
    assert p_model(factor=0.5).rate == pytest.approx(p_model().rate / 2)
    d = d_model()
    assert d.iteration_s(40) == pytest.approx(PROFILE.iteration_s(40, 40 * d.context))
    assert d.sequences_at(0.1) == pytest.approx(
        PROFILE.decode_sequences(tpot_s=0.1, context=d.context), rel=1e-6
    )


def test_a_cached_prefix_costs_less_but_not_nothing() -> None:
    half = p_model(uncached=577.0)
    assert p_model(isl=577.0, uncached=577.0).own_s <= half.own_s < p_model().own_s


@pytest.mark.parametrize(("mean", "cv2"), [(256.0, 1.0), (1155.0, 1.0), (4000.0, 0.5)])
def test_prefill_is_the_mean_over_the_lengths_of_prompts(mean: float, cv2: float) -> None:
    """A pass costs something however short the prompt, and attention grows with it: the mean prompt
    does not take what a prompt of the mean length takes."""
    rng, deviation = random.Random(1), math.sqrt(math.log1p(cv2))
    lengths = [
        rng.lognormvariate(math.log(mean) - deviation**2 / 2, deviation) for _ in range(9999)
    ]
    drawn = sum(PROFILE.prefill_s(max(1.0, tokens)) for tokens in lengths) / len(lengths)
    assert p_model(isl=mean, uncached=mean, cv2=cv2).own_s == pytest.approx(drawn, rel=0.04)


def erlang_c(busy_workers: float, workers: int) -> float:
    """Chance that an arrival of an M/M/c queue has to wait, by the textbook."""
    terms = [busy_workers**k / math.factorial(k) for k in range(workers)]
    last = busy_workers**workers / math.factorial(workers) / (1.0 - busy_workers / workers)
    return last / (sum(terms) + last)


def waits_s(
    model: PrefillModel,
    *,
    demand: float,
    workers: int,
    backlog: float,
    ahead_s: float,
    share: float,
) -> float:
    """How long one in `1 / share` of the prompts waits at least, `ahead_s` from now."""
    found = predict_ttft(
        model,
        level=demand,
        upper=demand,
        backlog=backlog,
        supply=Supply(workers),
        horizon_s=ahead_s,
        quantile=1.0 - share,
    )
    return found.value_s - model.own_s


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("busy", [0.7, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("share", [0.3, 0.1, 0.02])
def test_the_steady_queue_is_that_of_erlang_c(busy: float, workers: int, share: float) -> None:
    """In the long run P(wait > t) = C exp(-(c mu - lambda) t); t in mean service times."""
    model = PrefillModel(rate=1000.0, own_s=1.0, cv2=1.0)
    demand = busy * workers * 1000.0
    got_s = waits_s(model, demand=demand, workers=workers, backlog=0.0, ahead_s=1e6, share=share)
    exact = erlang_c(busy * workers, workers) * math.exp(-(1 - busy) * workers * got_s)
    assert exact == pytest.approx(share, abs=0.12) or (got_s < 1e-6 and exact < share)


def test_a_short_look_ahead_is_not_yet_the_steady_state() -> None:
    """From an empty queue it takes a while to fill; from a full one, to clear."""
    model = PrefillModel(rate=1000.0, own_s=1.0, cv2=1.0)

    def late(backlog: float, ahead_s: float) -> float:
        return waits_s(model, demand=1900.0, workers=2, backlog=backlog, ahead_s=ahead_s, share=0.1)

    assert late(0.0, 1.0) < late(0.0, 5.0) < late(0.0, 1e5)
    assert late(20_000.0, 5.0) > 9.0, "what waits is in front of whoever comes"


@given(
    start=st.floats(0, 1e7),
    drift=st.floats(-1e6, 1e6),
    variance=st.floats(0, 1e12),
    within_s=st.floats(0, 1e5),
    limit=st.floats(0, 1e7),
)
def test_overrun_is_a_chance(
    start: float, drift: float, variance: float, within_s: float, limit: float
) -> None:
    got = overrun(start=start, drift=drift, variance=variance, within_s=within_s, limit=limit)
    assert 0.0 <= got <= 1.0
    more = overrun(
        start=start, drift=drift, variance=variance, within_s=within_s, limit=limit + 1e4
    )
    assert more <= got + 1e-6


@given(
    start=st.floats(0, 1e7),
    drift=st.floats(-1e6, 1e6),
    variance=st.floats(0, 1e12),
    within_s=st.floats(0, 1e5),
    limit=st.floats(-10, 1e7),
    share=st.floats(0.001, 0.5),
)
def test_a_search_asks_the_same_formula(
    start: float, drift: float, variance: float, within_s: float, limit: float, share: float
) -> None:
    beyond = capacity.overruns(
        share, start=start, drift=drift, variance=variance, within_s=within_s
    )
    assert beyond(limit) is (overrun(start, drift, variance, within_s, limit) > share)


@given(
    ready=st.integers(0, 5),
    arrivals=st.lists(st.sampled_from([-1.0, 0.0, 1.0, 2.5, 2.5, 7.0, 40.0]), max_size=6),
    within_s=st.floats(0, 50),
)
def test_steps_hold_each_worker_from_its_arrival_on(
    ready: int, arrivals: list[float], within_s: float
) -> None:
    steps = Supply(ready, tuple(arrivals)).steps(within_s)
    served = ready * within_s + sum(max(0.0, within_s - max(0.0, a)) for a in arrivals)
    assert sum(lasts_s for _count, lasts_s in steps) == pytest.approx(within_s)
    assert capacity.served_tokens(1.0, steps, math.inf) == pytest.approx(served)


def test_zero_denominators_are_answers() -> None:
    """B13: no worker, no rate and no demand are ordinary at the beginning."""

    def ttft(demand: float, workers: int) -> float:
        return predict_ttft(
            p_model(),
            level=demand,
            upper=demand,
            backlog=0.0,
            supply=Supply(workers),
            horizon_s=0.0,
            quantile=0.9,
        ).value_s

    assert ttft(0.0, 0) == ttft(0.0, 1) == ttft(5.0, 1) == p_model().own_s
    assert ttft(5.0, 0) == WAIT_MAX_S
    assert steady_sequences(d_model(), demand=10.0, workers=0) == math.inf
    none = predict_tpot(
        d_model(), level=1.0, upper=2.0, sequences=0.0, supply=Supply(0), horizon_s=10.0
    )
    assert none.value_s == WAIT_MAX_S


def test_pending_counts_from_its_arrival_on() -> None:
    """R1.3: a worker that is still starting serves nothing until it is there."""
    supply = Supply(1, (4.0, 30.0))
    assert [supply.at(t) for t in (0.0, 3.9, 4.0, 30.0)] == [1, 1, 2, 3]
    kwargs = {"backlog": 0.0, "demand": 30.0, "rate": 20.0}
    alone = capacity.backlog_after(**kwargs, supply=Supply(1), horizon_s=10.0)
    helped = capacity.backlog_after(**kwargs, supply=Supply(1, (4.0,)), horizon_s=10.0)
    assert alone == pytest.approx(100.0)
    assert helped == pytest.approx(0.0)  # 40 queued at 4 s, then worked off at 10 a second
    late = capacity.backlog_after(**kwargs, supply=Supply(1, (9.0,)), horizon_s=10.0)
    assert late == pytest.approx(80.0)


def test_predicted_ttft_holds_the_queue_ahead() -> None:
    """B07, R4.2: waiting in the router is part of what a user will see."""
    model = p_model()
    empty = predict_ttft(
        model, level=0.0, upper=0.0, backlog=0.0, supply=Supply(2), horizon_s=10.0, quantile=0.9
    )
    queued = predict_ttft(
        model,
        level=0.0,
        upper=0.0,
        backlog=40_000.0,
        supply=Supply(2),
        horizon_s=10.0,
        quantile=0.9,
    )
    assert empty.value_s == pytest.approx(model.own_s)
    # Two prompts are in service meanwhile and keep nobody waiting.
    ahead_s = (40_000.0 - 2 * model.tokens / 2) / (2 * model.rate)
    assert queued.value_s == pytest.approx(model.own_s + ahead_s, rel=0.01)
    assert queued.low_s <= queued.value_s


def test_tpot_follows_the_fixed_point() -> None:
    """N = W * iteration(N): what is in the batch is what arrives in the time it stays."""
    model = d_model()
    n = steady_sequences(model, demand=500.0, workers=1)
    assert n / model.iteration_s(n) == pytest.approx(500.0)
    lasting = predict_tpot(
        model, level=500.0, upper=500.0, sequences=n, supply=Supply(1), horizon_s=60.0
    )
    assert lasting.value_s == pytest.approx(model.iteration_s(n), rel=1e-6)


def test_decode_demand_lags() -> None:
    """Answers that run now hold their place: TPOT does not jump when arrivals do."""
    model = d_model()
    soon = predict_tpot(
        model, level=100.0, upper=600.0, sequences=5.0, supply=Supply(1), horizon_s=2.0
    )
    later = predict_tpot(
        model, level=100.0, upper=600.0, sequences=5.0, supply=Supply(1), horizon_s=60.0
    )
    assert soon.value_s < later.value_s


@pytest.mark.parametrize(
    ("combine", "actual", "count", "want"),
    [
        (Combine.MAX, 1.0, 50, 1.5),
        (Combine.MAX, 4.0, 50, 2.0),
        (Combine.MAX, 4.0, 3, 1.5),  # too few samples say nothing
        (Combine.WEIGHTED, 1.0, 50, 1.0),
        (Combine.PREDICTED, 9.0, 50, 1.5),
        (Combine.MAX, None, 0, 1.5),
    ],
)
def test_combine(combine: Combine, actual: float | None, count: int, want: float) -> None:
    """R3.1: load = combine(predicted, actual) / target."""
    found = load_of(
        Prediction(3.0, 2.0),
        actual_s=actual,
        count=count,
        target_s=2.0,
        combine=combine,
        weight=0.5,
        count_min=10,
    )
    assert found.value is not None and found.low is not None and found.high is not None
    assert found.value == pytest.approx(want)
    assert found.low <= found.value <= found.high


def test_unknown_load_is_not_zero() -> None:
    found = load_of(
        None, actual_s=None, count=0, target_s=2.0, combine=Combine.MAX, weight=0.5, count_min=10
    )
    assert (found.value, found.low, found.high) == (None, None, None)


def test_correction_is_slow_clamped_and_in_log_space() -> None:
    once = correct(Correction(), [0.2], dt_s=2.0)
    assert 0.97 < once.factor < 1.0
    held = Correction()
    for _ in range(2000):
        held = correct(held, [0.01], dt_s=2.0)
    assert held.factor == pytest.approx(0.5)
    up = correct(Correction(), [2.0], dt_s=60.0)
    down = correct(Correction(), [0.5], dt_s=60.0)
    assert up.factor * down.factor == pytest.approx(1.0)
    assert correct(up, [], dt_s=2.0) == up
    assert correct(up, [math.nan, -1.0, math.inf], dt_s=2.0) == up


@given(st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=9), st.floats(0.1, 600.0))
def test_correction_stays_in_range(ratios: list[float], dt_s: float) -> None:
    found = correct(Correction(), ratios, dt_s=dt_s)
    assert 0.5 - 1e-9 <= found.factor <= 2.0 + 1e-9
