"""The search for O_SIM, the bracket, and the ratios to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane_lab.proof.oracle import bracket
from readyplane_lab.proof.oracle.ratios import captured_saving, ratios


def steep(
    edge: float, luck: dict[float, float] | None = None
) -> tuple[Callable[[float], tuple[float, float]], list[float]]:
    """Attainment rises through 0.99 at `edge`; GPU-hours with alpha; `luck` shifts single points."""
    asked: list[float] = []

    def run(alpha: float) -> tuple[float, float]:
        asked.append(alpha)
        shift = next((s for at, s in (luck or {}).items() if abs(at - alpha) < 0.02), 0.0)
        return min(1.0, 0.99 + (alpha - edge) / 10 + shift), 10.0 + alpha

    return run, asked


@pytest.mark.parametrize("edge", [-0.34, -0.03, 0.0, 0.07, 0.42, 1.9])
def test_the_smallest_margin_is_found(edge: float) -> None:
    run, asked = steep(edge)
    found = bracket(run, attainment=0.99, lower_gpu_hours=9.0)
    assert found.best is not None
    assert edge <= found.best.alpha <= edge + 0.05
    assert found.upper_gpu_hours == found.best.gpu_hours
    assert [t.alpha for t in found.tried] == asked and len(asked) <= 12
    assert len(set(asked)) == len(asked)


def test_who_never_attains_has_no_upper_end() -> None:
    run, asked = steep(50.0)
    found = bracket(run, attainment=0.99, lower_gpu_hours=9.0, tries=5)
    assert found.best is None and found.upper_gpu_hours is None and len(asked) == 5


def test_who_attains_everywhere_stops_at_the_least() -> None:
    run, _ = steep(-50.0)
    found = bracket(run, attainment=0.99, lower_gpu_hours=9.0, least=-0.3)
    assert found.best is not None and found.best.alpha == pytest.approx(-0.3)


def test_bad_luck_just_below_is_looked_into() -> None:
    """At 0 it fails by chance; everything above -0.12 attains."""
    run, _ = steep(-0.12, {0.0: -0.03})
    found = bracket(run, attainment=0.99, lower_gpu_hours=9.0, least=-0.2, tries=16)
    unlucky = [t for t in found.tried if t.alpha == 0.0]
    assert unlucky[0].attainment < 0.99
    assert found.best is not None and found.best.alpha <= -0.05


def test_a_clear_failure_is_not_looked_into_again() -> None:
    def run(alpha: float) -> tuple[float, float]:
        return (1.0 if alpha > 0.05 else 0.5), 10.0 + alpha

    found = bracket(run, attainment=0.99, lower_gpu_hours=9.0)
    assert min(t.alpha for t in found.tried) == 0.0 and len(found.tried) == 6


def test_the_cheapest_that_attains_counts_not_the_smallest_margin() -> None:
    def run(alpha: float) -> tuple[float, float]:
        return (1.0 if alpha > 0.15 else 0.9), (12.0 if alpha < 0.2 else 11.0 + alpha)

    found = bracket(run, attainment=0.99, lower_gpu_hours=9.0)
    assert found.best is not None and found.best.alpha >= 0.2


@given(
    edge=st.floats(-0.4, 2.0),
    noise=st.lists(st.floats(-0.02, 0.02), min_size=16, max_size=16),
    tries=st.integers(1, 16),
)
@settings(max_examples=150, deadline=None)
def test_whatever_the_noise_the_best_attains(edge: float, noise: list[float], tries: int) -> None:
    count = iter(noise)

    def run(alpha: float) -> tuple[float, float]:
        return 0.99 + (alpha - edge) / 10 + next(count), 10.0 + alpha

    found = bracket(run, attainment=0.99, lower_gpu_hours=9.0, tries=tries)
    passed = [t for t in found.tried if t.attainment >= 0.99]
    assert len(found.tried) <= tries and found.lower_gpu_hours == 9.0
    assert (found.best is None) == (not passed)
    assert found.best is None or found.best.gpu_hours == min(t.gpu_hours for t in passed)


def test_ratios_by_hand() -> None:
    found = ratios(15.0, bound=8.0, achievable=10.0, look=12.0, static_peak=30.0)
    assert found.to_achievable == 1.5 and found.to_bound == 1.875
    assert found.control == 1.25 and found.myopia == pytest.approx(1.2)
    assert found.captured == 0.75


def test_what_was_not_reached_has_no_ratio() -> None:
    found = ratios(None, bound=8.0, achievable=10.0, look=12.0, static_peak=30.0)
    assert (found.to_achievable, found.to_bound, found.control, found.captured) == (None,) * 4
    assert found.myopia == pytest.approx(1.2)
    found = ratios(15.0, bound=8.0, achievable=None, look=None, static_peak=None)
    assert found.to_bound == 1.875 and found.myopia is None and found.captured is None


def test_where_a_static_fleet_wastes_nothing_nothing_can_be_saved() -> None:
    assert captured_saving(9.0, static_peak=10.0, achievable=10.0) is None
    assert captured_saving(10.0, static_peak=30.0, achievable=10.0) == 1.0
    assert captured_saving(40.0, static_peak=30.0, achievable=10.0) == -0.5


@given(st.tuples(*[st.floats(1.0, 100.0)] * 4))
@settings(max_examples=100, deadline=None)
def test_the_losses_multiply(points: tuple[float, float, float, float]) -> None:
    policy, achievable, look, static = points
    found = ratios(policy, bound=1.0, achievable=achievable, look=look, static_peak=static)
    assert found.control is not None and found.myopia is not None
    assert found.control * found.myopia == pytest.approx(found.to_achievable)
