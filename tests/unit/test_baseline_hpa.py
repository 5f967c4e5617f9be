"""The Horizontal Pod Autoscaler against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from readyplane_lab.proof.baselines.hpa import Hpa, HpaState, PoolState, desired, sync
from readyplane_planner.decide.follow import PoolCount
from tests.unit.baseline_world import facts

BOUNDS: dict[str, Any] = {"target": 0.7, "low": 1, "high": 32}


@pytest.mark.parametrize(
    "metric, ready, pending, current, pods",
    [
        (0.9, 4, 0, 4, 6),  # 4 * 0.9 / 0.7 = 5.14
        (0.76, 4, 0, 4, 4),  # ratio 1.086: within 0.1
        (0.64, 4, 0, 4, 4),  # ratio 0.914: within 0.1
        (0.78, 4, 0, 4, 5),  # ratio 1.114, 4.46
        (0.35, 4, 0, 4, 2),  # ratio 0.5
        (0.0, 4, 0, 4, 0),
        # Not ready counts as 0 on the way up: (4 * 1.4 + 4 * 0) / 8 = 0.7, ratio 1: nothing.
        (1.4, 4, 4, 8, 8),
        # (4 * 2.1 + 0) / 8 = 1.05, ratio 1.5, ceil(1.5 * 8) = 12.
        (2.1, 4, 4, 8, 12),
        # The direction would turn: (4 * 0.9) / 8 = 0.45, ratio 0.64: nothing.
        (0.9, 4, 4, 8, 8),
        # On the way down those not ready are left out: ceil(0.5 * 4).
        (0.35, 4, 4, 8, 2),
    ],
)
def test_desired(metric: float, ready: int, pending: int, current: int, pods: int) -> None:
    assert desired(metric, PoolCount(ready, pending, 0), current, target=0.7) == pods


def test_growth_is_at_most_the_larger_of_double_and_four_more() -> None:
    # Demand of 28 workers at target 0.7 wants 40, bounded by 32.
    small = sync(28.0, PoolCount(2, 0, 0), PoolState(2), **BOUNDS, now_s=0.0)
    assert small.replicas == 6  # 2 + 4 beats 2 * 2
    large = sync(28.0, PoolCount(10, 0, 0), PoolState(10), **BOUNDS, now_s=0.0)
    assert large.replicas == 20  # 10 * 2 beats 10 + 4


def test_shrinking_follows_the_largest_recommendation_of_300_s() -> None:
    state = PoolState(8, ((0.0, 8),))
    seen = []
    for i in range(1, 22):
        now_s = 15.0 * i
        # Demand 2.8 at 0.7 wants 4 pods all the time; 8 were recommended at 0 s.
        count = PoolCount(state.replicas or 0, 0, 0)
        state = sync(2.8, count, state, **BOUNDS, now_s=now_s)
        seen.append((now_s, state.replicas))
    assert all(pods == 8 for at, pods in seen if at < 300.0)
    assert [pods for at, pods in seen if at >= 300.0] == [4, 4]


def test_the_first_sync_remembers_what_it_found() -> None:
    state = sync(0.7, PoolCount(8, 0, 0), PoolState(), **BOUNDS, now_s=0.0)
    assert state.replicas == 8  # not ceil(1): the 8 it found hold for 300 s


def test_a_short_peak_holds_its_pods_for_300_s() -> None:
    state = PoolState(4, ((0.0, 4),))
    for i in range(1, 30):
        load = 5.6 if i == 2 else 2.8  # 8 pods for one sync
        state = sync(load, PoolCount(state.replicas or 0, 0, 0), state, **BOUNDS, now_s=15.0 * i)
        expected = 4 if i < 2 or 15.0 * i >= 30.0 + 300.0 else 8
        assert state.replicas == expected, i


def test_no_metric_no_change() -> None:
    rule = Hpa(0.7, (1, 1), (32, 32))
    targets, state = rule.step(facts(prefill_load=None, decode_load=None), HpaState())
    assert (targets.prefill, targets.decode) == (2, 4)
    targets, _ = rule.step(facts(now_s=15.0, prefill_load=None, decode_load=None), state)
    assert (targets.prefill, targets.decode) == (2, 4)


def test_nothing_moves_between_syncs() -> None:
    rule = Hpa(0.7, (1, 1), (32, 32))
    first, state = rule.step(facts(prefill_load=1.4, decode_load=2.8), HpaState())
    assert (first.prefill, first.decode) == (2, 4)
    early, state = rule.step(facts(now_s=10.0, prefill_load=14.0), state)
    assert early.prefill == 2
    due, _ = rule.step(facts(now_s=15.0, prefill_load=14.0), state)
    assert due.prefill == 6  # wants 20, may add 4
