"""Capacity: queues, batches, loads and corrections as formulas with known answers."""

import math

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
    predict_tpot,
    predict_ttft,
    prefill_model,
    steady_sequences,
    ttft_s,
    waiting_s,
)

PROFILE = load("h200-slow10")


def p_model(isl: float = 1155.0, uncached: float = 1155.0, factor: float = 1.0) -> PrefillModel:
    return prefill_model(
        PROFILE, isl=isl, uncached=uncached, cv2=1.0, factor=factor, overhead_s=0.0
    )


def d_model(factor: float = 1.0) -> DecodeModel:
    return decode_model(PROFILE, isl=1155.0, osl=211.0, factor=factor)


def test_models_are_the_profile() -> None:
    assert p_model().own_s == pytest.approx(PROFILE.prefill_s(1155))
    assert p_model().rate == pytest.approx(1155 / PROFILE.prefill_s(1155))
    assert p_model(factor=0.5).rate == pytest.approx(p_model().rate / 2)
    d = d_model()
    assert d.iteration_s(40) == pytest.approx(PROFILE.iteration_s(40, 40 * d.context))
    assert d.sequences_at(0.1) == pytest.approx(
        PROFILE.decode_sequences(tpot_s=0.1, context=d.context), rel=1e-6
    )


def test_a_cached_prefix_costs_less_but_not_nothing() -> None:
    half = p_model(uncached=577.0)
    assert half.own_s < p_model().own_s
    assert half.own_s >= PROFILE.prefill_s(577)


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8, 0.9])
def test_one_server_waits_as_m_m_1(busy: float) -> None:
    """Exponential service, one server: P90 of the wait is S/(1-busy) * ln(busy/0.1)."""
    got = waiting_s(demand=busy, rate=1.0, workers=1, own_s=1.0, cv2=1.0, quantile=0.9)
    assert got == pytest.approx(max(0.0, math.log(busy / 0.1) / (1 - busy)), rel=1e-9)


def test_more_servers_wait_less_and_no_steady_state_is_said() -> None:
    def wait(demand: float, workers: int) -> float:
        return waiting_s(demand=demand, rate=1.0, workers=workers, own_s=1.0, cv2=1.0, quantile=0.9)

    assert wait(0.8, 1) > wait(1.6, 2) > wait(6.4, 8)
    assert wait(2.0, 2) == WAIT_MAX_S
    assert wait(1.0, 0) == WAIT_MAX_S and wait(0.0, 0) == 0.0


def test_zero_denominators_are_answers() -> None:
    """B13: no worker, no rate and no demand are ordinary at the beginning."""
    assert waiting_s(demand=1.0, rate=0.0, workers=3, own_s=1, cv2=1, quantile=0.9) == WAIT_MAX_S
    assert ttft_s(p_model(), demand=0.0, backlog=0.0, workers=0, quantile=0.9) == p_model().own_s
    assert ttft_s(p_model(), demand=5.0, backlog=0.0, workers=0, quantile=0.9) == WAIT_MAX_S
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
    assert queued.value_s == pytest.approx(model.own_s + 40_000.0 / (2 * model.rate))
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
