"""What a series tells beyond one bound: several horizons, growth, bursts, the day, and its laws."""

import math
import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane_planner import forecast
from readyplane_planner.forecast import (
    HORIZONS_S,
    PENDING_MAX,
    SCORES_MAX,
    Knobs,
    Series,
    bursts,
    growth,
    predict,
    quantiles,
)
from readyplane_planner.forecast.sketch import BINS_MAX, GROWTH, Sketch, add

KNOBS = Knobs(warmup_s=60.0)
RATES = st.lists(
    st.one_of(st.just(0.0), st.floats(1.0, 1e7, allow_nan=False)), min_size=1, max_size=80
)


def feed(
    rates: list[float],
    *,
    dt_s: float = 2.0,
    horizon_s: float = 60.0,
    knobs: Knobs = KNOBS,
    series: Series | None = None,
    begin_s: float = 100.0,
) -> Series:
    series = series or Series()
    now_s = series.updated_s or begin_s
    for rate in rates:
        now_s += dt_s
        series = forecast.update(series, rate, dt_s=dt_s, now_s=now_s, knobs=knobs)
        made = predict(series, horizon_s=horizon_s, knobs=knobs)
        series = forecast.remember(series, made, now_s=now_s, knobs=knobs)
    return series


def noisy(
    count: int, *, seed: int = 1, mean: float = 6000.0, spread: float = 1500.0
) -> list[float]:
    rng = random.Random(seed)
    return [max(0.0, rng.gauss(mean, spread)) for _ in range(count)]


# ------------------------------------------------------------------------------ several horizons


def test_quantiles_of_several_horizons_at_once() -> None:
    series = feed(noisy(600), horizon_s=100.0)
    table = quantiles(series, (10.0, 60.0, 200.0), (0.5, 0.9, 0.99), knobs=KNOBS)
    assert [len(row) for row in table] == [3, 3, 3]
    assert all(row == tuple(sorted(row)) for row in table)
    assert all(a <= b for near, far in pairwise(table) for a, b in zip(near, far, strict=True))
    middle = predict(series, horizon_s=60.0, knobs=KNOBS).upper
    assert table[1][1] == pytest.approx(middle, rel=0.01)
    assert quantiles(Series(), (10.0, 60.0), (0.5,), knobs=KNOBS) == ((0.0,), (0.0,))


def test_every_horizon_up_to_the_one_in_use_is_judged_and_no_longer() -> None:
    series = feed(noisy(300), horizon_s=62.0)
    assert [t.horizon_s for t in series.tracks] == [h for h in HORIZONS_S if h <= 108.0]
    assert all(t.judged > 10 for t in series.tracks)


@given(RATES, st.floats(1.0, 900.0), st.floats(1.0, 900.0))
def test_the_bound_never_falls_with_the_horizon(rates: list[float], a: float, b: float) -> None:
    series = feed(rates, knobs=Knobs(warmup_s=10.0))
    short, long = (predict(series, horizon_s=h, knobs=KNOBS) for h in sorted((a, b)))
    assert long.upper >= short.upper * (1 - 1e-9)
    for made in (short, long):
        numbers = (made.lower, made.level, made.upper, made.now)
        assert all(math.isfinite(x) and x >= 0 for x in numbers)
        assert made.lower <= made.level * (1 + 1e-9) and made.level <= made.upper * (1 + 1e-9)


@given(RATES, st.sampled_from((0.001, 0.5, 1000.0)), st.floats(5.0, 300.0))
def test_another_unit_is_another_number_and_nothing_else(
    rates: list[float], factor: float, horizon_s: float
) -> None:
    plain = predict(feed(rates), horizon_s=horizon_s, knobs=KNOBS)
    other = predict(feed([factor * r for r in rates]), horizon_s=horizon_s, knobs=KNOBS)
    for name in ("level", "upper", "lower", "now"):
        assert getattr(other, name) == pytest.approx(
            factor * getattr(plain, name), rel=1e-3, abs=1e-6 * factor * max(rates)
        ), name


@given(RATES, st.integers(1, 40), st.floats(3.0, 500.0))
def test_a_gap_never_counts_as_zero(rates: list[float], at: int, gap_s: float) -> None:
    """The same rates around a gap: nothing is judged over it, and the level stays."""
    before = feed(rates[:at])
    broken = forecast.broken(before)
    assert not any(t.pending for t in broken.tracks)
    assert forecast.broken(broken) == broken
    now_s = before.updated_s + gap_s
    after = forecast.update(broken, rates[0], dt_s=2.0, now_s=now_s, knobs=KNOBS)
    assert after.judged == before.judged
    assert predict(after, horizon_s=30.0, knobs=KNOBS).now == pytest.approx(rates[0])
    assert after.spells.off_s <= before.spells.off_s + 2.0 and after.days.last == ()


@given(RATES)
def test_what_is_remembered_is_bounded_and_survives_the_journal(rates: list[float]) -> None:
    series = feed(rates * 3, horizon_s=700.0, knobs=Knobs(warmup_s=4.0))
    for track in series.tracks:
        assert len(track.pending) <= PENDING_MAX and len(track.scores) <= SCORES_MAX
        assert len(track.peaks) == len(track.scores) and len(track.growth.keys) <= BINS_MAX
    assert msgspec.json.decode(msgspec.json.encode(series), type=Series) == series


def test_b17_no_expert_speaks_below_zero_at_any_horizon() -> None:
    series = feed([9000.0 - 400.0 * i for i in range(22)] + [200.0, 0.0], dt_s=10.0)
    assert series.holt_trend < 0 < series.clamps
    for track in series.tracks:
        assert all(value >= 0 for item in track.pending for value in item.experts)
    assert min(min(row) for row in quantiles(series, (5.0, 600.0), (0.5, 0.9), knobs=KNOBS)) >= 0


# ---------------------------------------------------------------------------------- other regimes


def test_load_that_keeps_coming_back_is_bounded_by_its_own_height() -> None:
    """A square wave: the level is off most of the time, the largest rate is always the same."""
    rates = ([8000.0] * 30 + [2000.0] * 30) * 20
    series = feed(rates, horizon_s=108.0)
    bounds = []
    for rate in rates[:120]:
        series = feed([rate], series=series, horizon_s=108.0)
        bounds.append(predict(series, horizon_s=108.0, knobs=KNOBS).upper)
    assert max(bounds) < 8000.0 * 1.3 and min(bounds) > 8000.0 * 0.95


def test_a_change_of_regime_is_noticed_once_and_followed() -> None:
    series = feed(noisy(600, spread=300.0), horizon_s=36.0)
    assert series.breaks == 0
    series = feed(noisy(40, mean=20_000.0, spread=300.0, seed=2), series=series, horizon_s=36.0)
    assert series.breaks == 1
    assert predict(series, horizon_s=36.0, knobs=KNOBS).level == pytest.approx(20_000.0, rel=0.1)


def test_on_off_traffic_is_no_change_of_regime_each_time() -> None:
    series = feed(([8000.0] * 15 + [0.0] * 45) * 30)
    assert series.breaks <= 3
    assert predict(series, horizon_s=60.0, knobs=KNOBS).upper > 4000.0, "never blind"


# ---------------------------------------------------------------------------------------- growth


def test_growth_is_that_of_the_series_own_past() -> None:
    """Steps of 3,000 tokens/s every 100 s: most windows of 100 s see one, few of 12 s do."""
    rates = ([2000.0] * 50 + [5000.0] * 50) * 20
    series = feed(rates, horizon_s=108.0)
    # Over 12 s a step is within one in sixteen windows, over 108 s within half of them.
    assert growth(series, 12.0, 0.5, knobs=KNOBS) < 300.0
    assert growth(series, 108.0, 0.9, knobs=KNOBS) == pytest.approx(3000.0, rel=0.25)
    assert growth(series, 12.0, 0.98, knobs=KNOBS) == pytest.approx(3000.0, rel=0.3)


def test_growth_and_bursts_scale_within_their_bins() -> None:
    series = feed(([2000.0] * 50 + [5000.0] * 50) * 6, horizon_s=108.0)
    double = forecast.scaled(series, 2.0)
    assert growth(double, 60.0, 0.9, knobs=KNOBS) == pytest.approx(
        2 * growth(series, 60.0, 0.9, knobs=KNOBS), rel=0.06
    )
    assert bursts(double).on_rate == pytest.approx(2 * bursts(series).on_rate, rel=0.06)
    nothing = forecast.scaled(series, 0.0)
    assert growth(nothing, 60.0, 0.9, knobs=KNOBS) == pytest.approx(0.0, abs=1e-6)
    assert predict(nothing, horizon_s=60.0, knobs=KNOBS).upper == 0.0


def test_little_history_leaves_more_room_than_much() -> None:
    """The rule of succession: what was never seen stays possible, less so with every quiet hour."""
    widths = [
        growth(feed([1000.0] * n, horizon_s=60.0), 60.0, 0.99, knobs=KNOBS)
        for n in (1, 60, 300, 3000)
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 1000.0 > 2 * widths[-1] > 0
    assert growth(Series(), 60.0, 0.99, knobs=KNOBS) == 0.0


@given(RATES, st.floats(2.0, 400.0), st.floats(2.0, 400.0))
def test_growth_rises_with_horizon_and_quantile(rates: list[float], a: float, b: float) -> None:
    series = feed(rates, knobs=Knobs(warmup_s=10.0))
    low, high = sorted((a, b))
    values = [growth(series, h, 0.9, knobs=KNOBS) for h in (low, high)]
    assert 0 <= values[0] <= values[1] * (1 + 1e-9)
    assert values[1] <= growth(series, high, 0.99, knobs=KNOBS) * (1 + 1e-9)


@given(st.lists(st.floats(0.0, 1e9), min_size=1, max_size=200), st.floats(0.01, 0.999))
def test_a_sketch_keeps_quantiles_within_its_bins(values: list[float], share: float) -> None:
    sketch = Sketch()
    for value in values:
        sketch = add(sketch, value, now_s=0.0, tau_s=3600.0)
    assert sketch.weight == pytest.approx(len(values)) and len(sketch.keys) <= BINS_MAX
    exact = sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
    found = sketch.quantile(share)
    smallest_told = max(values) / GROWTH ** (BINS_MAX - 1)
    if exact > max(smallest_told, 1e-6):
        assert exact * (1 - 1e-9) <= found <= exact * GROWTH * (1 + 1e-9)
    assert add(sketch, 1.0, now_s=1e9, tau_s=3600.0).weight == pytest.approx(1.0), "it fades"


# ---------------------------------------------------------------------------------------- bursts


def test_bursts_are_told_from_quiet_and_how_high_they_are() -> None:
    series = feed(([8000.0] * 15 + [0.0] * 45) * 30)
    found = bursts(series)
    assert found.on_share == pytest.approx(0.3, abs=0.07), "a quarter, and the window's own length"
    assert found.on_rate == pytest.approx(8000.0, rel=0.11)
    assert found.on_s == pytest.approx(38.0, abs=8.0) and found.off_s == pytest.approx(
        82.0, abs=8.0
    )


def test_a_steady_series_is_always_on() -> None:
    found = bursts(feed(noisy(300)))
    assert found.on_share == 1.0 and found.off_s is None
    assert bursts(Series()).on_share == 0.0


# ------------------------------------------------------------------------------------------- days

DAY = [1000.0] * 16 + [5000.0] * 16 + [1000.0] * 16


def days_of(profile: list[float], count: int, series: Series | None = None) -> Series:
    """Half-hours in steps of ten minutes, from the clock's midnight."""
    rates = [rate for rate in profile for _ in range(3)] * count
    return feed(rates, dt_s=600.0, series=series, begin_s=1e-9)


def test_the_day_is_told_hours_ahead_and_never_within_the_hour() -> None:
    series = days_of(DAY, 4)
    midnight = series.updated_s
    assert forecast.ahead(series, 9 * 3600.0, now_s=midnight) == pytest.approx(5000.0, rel=0.25)
    assert forecast.ahead(series, 3000.0, now_s=midnight) is None
    assert forecast.ahead(Series(), 9 * 3600.0, now_s=0.0) is None
    assert forecast.ahead(days_of(DAY[:10], 1), 9 * 3600.0, now_s=0.0) is None, "never seen"


def test_a_poisoned_day_loses_its_say_at_once() -> None:
    """Noon stays away: from the first half-hour that failed nothing is said of the others."""
    series = days_of([1000.0] * 19, 1, days_of(DAY, 4))
    assert series.days.trust == 0.0
    assert forecast.ahead(series, 3600.0, now_s=series.updated_s) is None
    again = days_of(DAY, 5, days_of(DAY[19:], 1, series))
    assert again.days.trust > 0.5, "and has it again when it comes true"
    assert predict(series, horizon_s=60.0, knobs=KNOBS).level == pytest.approx(1000.0, rel=0.05)
