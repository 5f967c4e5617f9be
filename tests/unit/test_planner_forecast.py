"""The forecast: levels, bounds that hold as often as promised, and never a negative rate."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane_planner.decide.demand import FIRST_LOOK_S, first_look, surged
from readyplane_planner.forecast import (
    EXPERTS,
    PENDING_MAX,
    SCORES_MAX,
    Forecast,
    Knobs,
    Series,
    broken,
    predict,
    remember,
    scaled,
    trailing,
    update,
)

KNOBS = Knobs(warmup_s=60.0)


def feed(
    rates: list[float],
    *,
    dt_s: float = 2.0,
    horizon_s: float = 30.0,
    knobs: Knobs = KNOBS,
    series: Series | None = None,
) -> tuple[Series, list[Forecast]]:
    series = series or Series()
    now_s = series.updated_s or 100.0
    made: list[Forecast] = []
    for rate in rates:
        now_s += dt_s
        series = update(series, rate, dt_s=dt_s, now_s=now_s, knobs=knobs)
        made.append(predict(series, horizon_s=horizon_s, knobs=knobs))
        series = remember(series, made[-1], now_s=now_s, knobs=knobs)
    return series, made


def test_nothing_seen_is_nothing_forecast() -> None:
    made = predict(Series(), horizon_s=60.0, knobs=KNOBS)
    assert (made.level, made.upper, made.coverage) == (0.0, 0.0, None)


def test_a_flat_series_is_its_own_forecast() -> None:
    _series, made = feed([1000.0] * 100)
    assert made[-1].level == pytest.approx(1000.0)
    assert made[-1].now == pytest.approx(1000.0)


def test_the_first_bound_carries_the_prior_margin() -> None:
    _series, made = feed([1000.0])
    near, far = (
        predict(_series, horizon_s=h, knobs=KNOBS).upper / 1000.0 - 1.0 for h in (10.0, 120.0)
    )
    assert 0 < near < far < 0.6
    assert made[0].upper > made[0].level


def test_decline_never_goes_below_zero() -> None:
    """B17: every expert is clamped where forecasts leave this module, and the clamp is counted."""
    series, made = feed([100.0, 80.0, 60.0, 40.0, 20.0, 10.0, 0.0, 0.0, 0.0, 0.0, 0.0], dt_s=10.0)
    assert all(f.level >= 0 and f.lower >= 0 and f.upper >= 0 for f in made)
    assert series.holt_trend < 0
    assert series.clamps > 0


@given(
    st.lists(st.floats(0, 1e9, allow_nan=False), min_size=1, max_size=60),
    st.floats(1.0, 600.0),
)
def test_bounds_are_ordered_and_finite(rates: list[float], horizon_s: float) -> None:
    series, made = feed(rates, horizon_s=horizon_s)
    for one in made:
        assert 0 <= one.lower <= one.level * (1 + 1e-9) + 1e-9
        assert one.upper >= one.now * (1 - 1e-9) and math.isfinite(one.upper)
        assert one.upper >= one.level * (1 - 1e-9)
        assert sum(one.weights) == pytest.approx(1.0)
    for track in series.tracks:
        assert len(track.pending) <= PENDING_MAX
        assert len(track.scores) <= SCORES_MAX and len(track.peaks) <= SCORES_MAX


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("quantile", [0.8, 0.95])
def test_the_bound_holds_as_often_as_promised(seed: int, quantile: float) -> None:
    """Conformal calibration on noise with a slow swing, which is not the model's own shape."""
    rng = random.Random(seed)
    rates = [
        max(0.0, 6000 * (1 + 0.3 * math.sin(i / 60)) + rng.gauss(0, 1500)) for i in range(1500)
    ]
    series, made = feed(rates, knobs=Knobs(quantile=quantile, warmup_s=60.0))
    assert made[-1].coverage == pytest.approx(quantile, abs=0.05)
    assert series.judged > 300
    margin = sum(f.upper / f.level for f in made[-200:]) / 200
    assert margin < 2.0


def test_on_off_traffic_does_not_explode_the_bound() -> None:
    """Multiplicative scores reach 1e10 here; additive ones stay within the peaks that were seen."""
    rates = ([8000.0] * 10 + [0.0] * 40) * 20
    _series, made = feed(rates)
    assert max(f.upper for f in made) < 8000.0 * 1.3


def test_a_longer_horizon_keeps_more_headroom_at_once() -> None:
    """R5.2: T_ready enters the bound through the horizon, before new scores are there."""
    rng = random.Random(5)
    series, _made = feed([6000 + rng.gauss(0, 1200) for _ in range(600)], horizon_s=10.0)
    bounds = [predict(series, horizon_s=h, knobs=KNOBS).upper for h in (5.0, 10.0, 60.0)]
    assert bounds == sorted(bounds) and bounds[2] > bounds[0] * 1.1


def test_experts_that_err_lose_weight() -> None:
    """On a step the slow averages err for minutes: the short ones take over."""
    _series, made = feed([1000.0] * 200 + [5000.0] * 60)
    weights = dict(zip(EXPERTS, made[-1].weights, strict=True))
    assert weights["window"] + weights["last_30s"] > 3 * weights["ewma_600s"]
    assert made[-1].level == pytest.approx(5000.0, rel=0.1)


def test_a_step_is_followed_within_its_window() -> None:
    _series, made = feed([1000.0] * 100 + [4000.0] * 6)
    assert made[-1].upper >= 4000.0


def test_a_gap_voids_what_waited() -> None:
    """A rate across an outage would be false, so nothing is scored over it."""
    series, _made = feed([1000.0] * 20)
    assert any(t.pending for t in series.tracks)
    after = broken(series)
    assert not any(t.pending for t in after.tracks) and after.recent == ()
    again = update(after, 1000.0, dt_s=2.0, now_s=series.updated_s + 300.0, knobs=KNOBS)
    assert predict(again, horizon_s=30.0, knobs=KNOBS).now == pytest.approx(1000.0)


def test_a_step_is_seen_before_the_window_has_passed() -> None:
    """Beyond what chance explains the last seconds count at once; within it they do not."""
    knobs = Knobs(window_s=10.0)
    series = Series()
    for second in range(120):
        series = update(series, 3_000.0, dt_s=1.0, now_s=float(second), knobs=knobs)

    def level(rate: float, seconds: int) -> float:
        after = series
        for second in range(120, 120 + seconds):
            after = update(after, rate, dt_s=1.0, now_s=float(second), knobs=knobs)
        made = predict(after, horizon_s=10.0, knobs=knobs)
        return surged(made, after, tokens=1_000.0, cv2=1.0, spans_s=(3.0, 6.0)).level / made.level

    assert level(15_000.0, 3) > 1.5
    assert level(6_000.0, 3) == 1.0, "three requests more in a second are chance"
    assert level(500.0, 3) == 1.0, "it never lowers"


@given(
    st.lists(st.floats(1.0, 5000.0), min_size=5, max_size=60),
    st.floats(0.1, 10.0),
    st.floats(5.0, 300.0),
)
def test_scaled_work_scales_every_forecast(
    rates: list[float], factor: float, horizon_s: float
) -> None:
    """What a question 'and if it were twice as much' rests on: one scale, one forecast."""
    knobs = Knobs(warmup_s=5.0)
    series = Series()
    for second, rate in enumerate(rates, 1):
        series = update(series, rate, dt_s=1.0, now_s=float(second), knobs=knobs)
        made = predict(series, horizon_s=4.0, knobs=knobs)
        series = remember(series, made, now_s=float(second), knobs=knobs)
    plain = predict(series, horizon_s=horizon_s, knobs=knobs)
    more = predict(scaled(series, factor), horizon_s=horizon_s, knobs=knobs)
    for name in ("level", "upper", "lower", "now"):
        assert getattr(more, name) == pytest.approx(factor * getattr(plain, name), rel=1e-6), name
    assert scaled(Series(), factor) == Series()


def test_a_beginning_is_planned_by_its_mean_and_a_step_in_it_is_not() -> None:
    """Answers in flight only rise at first: what every trend makes of that is no demand."""
    knobs = Knobs()
    series, now_s = Series(), 0.0
    for rate in [*(200.0 * k for k in range(12)), *([2400.0] * 13)]:
        now_s += 2.0
        series = update(series, rate, dt_s=2.0, now_s=now_s, knobs=knobs)
        made = predict(series, horizon_s=60.0, knobs=knobs)
        begun = first_look(made, series)
        age_s = series.updated_s - (series.begun_s or 0.0)
        mean = trailing(series, FIRST_LOOK_S)
        assert age_s < FIRST_LOOK_S
        assert begun.upper <= mean + 1e-9
        assert begun.level <= made.level
    step = update(series, 40_000.0, dt_s=6.0, now_s=now_s + 6.0, knobs=knobs)
    calm = first_look(predict(step, horizon_s=60.0, knobs=knobs), step)
    lifted = surged(calm, step, tokens=100.0, cv2=0.0, spans_s=(3.0, 6.0))
    assert lifted.level > 30_000.0
    for _ in range(10):
        now_s += 6.0
        series = update(series, 2400.0, dt_s=6.0, now_s=now_s, knobs=knobs)
    made = predict(series, horizon_s=60.0, knobs=knobs)
    assert first_look(made, series) == made
