"""Lazy capacity provisioning against every schedule there is, and against its promise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from readyplane_lab.proof.baselines.lcp import Lcp, LcpState, advance, begin, extend, slot_cost
from readyplane_lab.simulator.outcome import Floats
from tests.unit.baseline_world import facts


def convex(rng: np.random.Generator, states: int) -> Floats:
    """A random convex cost: a slope of its own on each side of a random state."""
    x = np.arange(states, dtype=float)
    place, left, right = rng.uniform(0, states - 1), rng.uniform(0, 5), rng.uniform(0, 2)
    cost: Floats = np.where(x < place, left * (place - x), right * (x - place)) + rng.uniform(0, 1)
    return cost


def cost_of(states: tuple[int, ...], slots: list[Floats], *, up: float, down: float) -> float:
    total, before = 0.0, 0
    for now, slot in zip(states, slots, strict=True):
        total += up * max(0, now - before) + down * max(0, before - now) + float(slot[now])
        before = now
    return total


def ends_of_optima(slots: list[Floats], *, up: float, down: float) -> list[int]:
    """Last states of all optimal schedules, by trying every schedule."""
    every = itertools.product(range(len(slots[0])), repeat=len(slots))
    costs = {s: cost_of(s, slots, up=up, down=down) for s in every}
    least = min(costs.values())
    return sorted({s[-1] for s, cost in costs.items() if cost <= least + 1e-9})


def optimum(slots: list[Floats], *, switch: float) -> float:
    """Offline, by dynamic programming over all pairs of states."""
    states = range(len(slots[0]))
    best = [0.0 if i == 0 else np.inf for i in states]
    for slot in slots:
        best = [
            min(best[y] + switch * max(0, x - y) for y in states) + float(slot[x]) for x in states
        ]
    return min(best)


@pytest.mark.parametrize("seed", range(12))
def test_the_range_is_where_the_optima_of_the_past_end(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = [convex(rng, 4) for _ in range(5)]
    switch = float(rng.uniform(0.2, 6))
    lazy = begin(4, 0)
    for length, slot in enumerate(slots, start=1):
        before = lazy.now
        lazy = advance(lazy, slot, switch=switch)
        lower = ends_of_optima(slots[:length], up=switch, down=0.0)[0]
        upper = ends_of_optima(slots[:length], up=0.0, down=switch)[-1]
        assert lower <= upper
        assert lazy.now == min(max(before, lower), upper)


@pytest.mark.parametrize("seed", range(40))
def test_it_costs_at_most_three_times_the_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    states, switch = int(rng.integers(2, 9)), float(rng.uniform(0.1, 20))
    slots = [convex(rng, states) for _ in range(60)]
    lazy, chosen = begin(states, 0), []
    for slot in slots:
        lazy = advance(lazy, slot, switch=switch)
        chosen.append(lazy.now)
    paid = cost_of(tuple(chosen), slots, up=switch, down=0.0)
    best = optimum(slots, switch=switch)
    assert best - 1e-6 <= paid <= 3 * best + 1e-6


def test_one_step_of_moving() -> None:
    # From {0: 5, 1: 0, 2: 9}: up costs 2 each, down 1 each.
    moved = extend(np.array([5.0, 0.0, 9.0, np.inf]), up=2.0, down=1.0)
    assert moved.tolist() == [1.0, 0.0, 2.0, 4.0]


def rule(switch_s: float = 36.0, target: float = 1.0) -> Lcp:
    return Lcp(target, (switch_s, switch_s), (1, 1), (16, 16))


def play(loads: list[float | None], lcp: Lcp) -> list[int | None]:
    """Decode targets at the end of each slot of 10 s, two ticks each; 4 workers at first."""
    state, seen = LcpState(), []
    _, state = lcp.step(facts(now_s=0.0, d=(4, 0), decode_load=None), state)
    for i, load in enumerate(loads):
        _, state = lcp.step(facts(now_s=10.0 * i + 5.0, decode_load=load), state)
        targets, state = lcp.step(facts(now_s=10.0 * i + 10.0, decode_load=load), state)
        seen.append(targets.decode)
    return seen


def test_need_is_met_at_once_and_a_worker_waits_as_long_as_its_start_costs() -> None:
    # A slot costs a worker 10 s, a start 36 s: idle for four slots is dearer, three are not.
    assert play([7.2, 7.2, 3.0, 3.0, 3.0, 3.0, 3.0], rule()) == [8, 8, 8, 8, 8, 3, 3]


def test_a_short_gap_is_bridged() -> None:
    assert play([6.0, 2.0, 2.0, 2.0, 6.0, 2.0, 2.0, 2.0], rule()) == [6] * 8


def test_unknown_slots_are_left_out() -> None:
    assert play([6.0, None, None, None, None, None, 2.0, 2.0, 2.0], rule()) == [6] * 9


def test_the_target_is_a_margin() -> None:
    assert play([3.5], rule(target=0.7)) == [5]
    assert play([3.6], rule(target=0.7)) == [6]  # 5.14


def test_missing_workers_are_dearer_than_any_start() -> None:
    cost = slot_cost(5.0, low=1, high=8)
    assert cost.tolist()[3:6] == [10 * (4 + 100), 50.0, 60.0]
    assert play([16.0], rule(switch_s=600.0)) == [16]
