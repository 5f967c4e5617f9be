"""Knative's autoscaler against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

from readyplane_lab.proof.baselines.kpa import Kpa, KpaState, PoolState, scale
from readyplane_planner.decide.follow import PoolCount
from tests.unit.baseline_world import facts

BOUNDS: dict[str, Any] = {"target": 0.7, "low": 1, "high": 64}


def steady(load: float, seconds: float, ready: int, *, until_s: float = 0.0) -> PoolState:
    """A pool in stable mode with that demand for that long."""
    ticks = int(seconds / 2.0)
    samples = tuple((until_s - 2.0 * i, load) for i in reversed(range(ticks)))
    return PoolState(samples=samples, target=ready)


def test_stable_pods_are_the_minutes_mean_over_the_target() -> None:
    # 30 samples of 2.8; the oldest is at -58. One of 4.2 makes (29 * 2.8 + 4.2) / 30 = 2.8467.
    state = scale(4.2, PoolCount(4, 0, 0), steady(2.8, 60.0, 4), **BOUNDS, now_s=2.0)
    assert len(state.samples) == 30
    # 2.8467 / 0.7 = 4.07 -> 5, while the panic mean (4.2 + 2.8 + 2.8) / 3 / 0.7 = 4.67 -> 5 < 8.
    assert (state.target, state.panic_s) == (5, None)


def test_panic_begins_at_twice_the_ready_pods() -> None:
    state = steady(2.8, 60.0, 4)
    # The panic mean after one sample of 10.5: 16.1 / 3 = 5.37, / 0.7 -> 8 = 2 x 4 ready.
    state = scale(10.5, PoolCount(4, 0, 0), state, **BOUNDS, now_s=2.0)
    assert (state.panic_s, state.panic_pods, state.target) == (2.0, 8, 8)
    almost = scale(10.0, PoolCount(4, 0, 0), steady(2.8, 60.0, 4), **BOUNDS, now_s=2.0)
    assert almost.panic_s == 2.0  # 15.6 / 3 / 0.7 = 7.43 -> 8: rounded up before comparing
    less = scale(9.0, PoolCount(4, 0, 0), steady(2.8, 60.0, 4), **BOUNDS, now_s=2.0)
    assert less.panic_s is None  # 14.6 / 3 / 0.7 = 6.95 -> 7
    assert less.target == 5  # the minute: (29 * 2.8 + 9) / 30 = 3.007, / 0.7 = 4.3


def test_no_shrinking_in_panic_and_leaving_after_60_s() -> None:
    state = scale(10.5, PoolCount(4, 0, 0), steady(2.8, 60.0, 4), **BOUNDS, now_s=2.0)
    history = []
    for i in range(1, 36):
        now_s = 2.0 + 2.0 * i
        # Demand is gone; ready has grown to the 8, so the threshold is not passed any more.
        state = scale(0.7, PoolCount(8, 0, 0), state, **BOUNDS, now_s=now_s)
        history.append((now_s, state.target, state.panic_s))
    assert all(target == 8 for now_s, target, _ in history if now_s <= 62.0)
    first_out = next(now_s for now_s, _, panic_s in history if panic_s is None)
    assert first_out == 64.0  # the first tick more than 60 s after the threshold was passed
    assert state.target == 4  # 1 is wanted; at most half of the 8 go at once


def test_panic_is_extended_while_the_threshold_is_passed() -> None:
    state = scale(10.5, PoolCount(4, 0, 0), steady(2.8, 60.0, 4), **BOUNDS, now_s=2.0)
    state = scale(10.5, PoolCount(4, 4, 0), state, **BOUNDS, now_s=4.0)
    assert state.panic_s == 4.0  # pending pods are not ready ones
    # (2.8 + 10.5 + 10.5) / 3 = 7.93, / 0.7 = 11.3 -> 12.
    assert state.target == 12


def test_shrinking_halves_at_most_and_bounds_hold() -> None:
    state = scale(0.0, PoolCount(9, 0, 0), steady(0.0, 60.0, 9), **BOUNDS, now_s=2.0)
    assert state.target == 4  # floor(9 / 2)
    state = scale(0.0, PoolCount(1, 0, 0), steady(0.0, 60.0, 1), **BOUNDS, now_s=2.0)
    assert state.target == 1
    state = scale(500.0, PoolCount(4, 0, 0), steady(500.0, 60.0, 4), **BOUNDS, now_s=2.0)
    assert state.target == 64


def test_a_found_fleet_is_kept_for_a_minute() -> None:
    rule = Kpa(0.7, (1, 1), (64, 64))
    state = KpaState()
    for i in range(32):
        calm = facts(now_s=2.0 * i, d=(6, 0), decode_load=0.7, p=(1, 0), prefill_load=0.35)
        targets, state = rule.step(calm, state)
        assert targets.prefill == 1  # one pod: no panic at the start
        assert targets.decode == (6 if i <= 30 else 3)


def test_without_data_the_last_target_stays() -> None:
    state = steady(2.8, 60.0, 4)
    for i in range(1, 40):
        state = scale(None, PoolCount(4, 0, 0), state, **BOUNDS, now_s=2.0 * i)
        assert state.target == 4
    assert state.samples == ()
