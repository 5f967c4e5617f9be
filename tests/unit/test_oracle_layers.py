"""O_LB by layers: worked by hand, and equal to dynamic programming on random needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane_lab.proof.oracle.layers import layered


def need(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(values)


@pytest.mark.parametrize(
    ("values", "beta_s", "initial", "workers", "starts"),
    [
        # A gap of two steps of 10 s is bridged at 20 s a start, and not below that.
        ((1, 0, 0, 1), 20.0, 1, (1, 1, 1, 1), 0),
        ((1, 0, 0, 1), 19.9, 1, (1, 0, 0, 1), 1),
        # Layers do not depend on each other: the second worker leaves, the first one stays.
        ((2, 1, 0, 1, 2), 10.0, 2, (2, 1, 1, 1, 2), 1),
        # The first fleet is free, more of it is not.
        ((2, 2), 100.0, 1, (2, 2), 1),
        ((2, 2), 100.0, None, (2, 2), 0),
        # Present but not yet wanted: kept if that is cheaper than to come back.
        ((0, 0, 1), 20.0, 1, (1, 1, 1), 0),
        ((0, 0, 1), 10.0, 1, (0, 0, 1), 1),
        # Without a first fleet a first start is free only if it is demanded at 0.
        ((0, 1), 100.0, None, (0, 1), 1),
        ((0, 0), 100.0, 3, (0, 0), 0),
        ((1.2, 0.3), 5.0, 2, (2, 1), 0),
    ],
)
def test_by_hand(
    values: tuple[float, ...],
    beta_s: float,
    initial: int | None,
    workers: tuple[int, ...],
    starts: int,
) -> None:
    found = layered(need(*values), step_s=10.0, beta_s=beta_s, initial=initial)
    assert tuple(found.workers.tolist()) == workers
    assert found.starts == starts
    assert found.cost_s == pytest.approx(10.0 * sum(workers) + beta_s * starts)


def test_a_least_fleet_and_a_last_step_cut_short() -> None:
    found = layered(need(0, 2, 0), step_s=10.0, beta_s=1.0, initial=1, low=1, span_s=24.0)
    assert found.workers.tolist() == [1, 2, 1]
    assert found.serving_s == pytest.approx(10 + 20 + 4) and found.starting_s == 1.0


def by_dynamic_programming(
    wanted: list[int], *, step_s: float, beta_s: float, initial: int | None
) -> float:
    """Over fleets, in O(T * K**2)."""
    most = max([*wanted, initial or 0])
    there = wanted[0] if initial is None else initial
    cost = [0.0 if k == there else np.inf for k in range(most + 1)]
    for least in wanted:
        cost = [
            min(c + beta_s * max(0, k - j) for j, c in enumerate(cost)) + step_s * k
            if k >= least
            else np.inf
            for k in range(most + 1)
        ]
    return float(min(cost))


@given(
    wanted=st.lists(st.integers(0, 5), min_size=1, max_size=14),
    beta_s=st.floats(0.0, 60.0),
    initial=st.none() | st.integers(0, 6),
)
@settings(max_examples=300, deadline=None)
def test_equals_dynamic_programming(wanted: list[int], beta_s: float, initial: int | None) -> None:
    found = layered(np.array(wanted, float), step_s=10.0, beta_s=beta_s, initial=initial)
    best = by_dynamic_programming(wanted, step_s=10.0, beta_s=beta_s, initial=initial)
    assert found.cost_s == pytest.approx(best)
    assert np.all(found.workers >= wanted)
    before = wanted[0] if initial is None else initial
    rises = np.maximum(0, np.diff(np.concatenate(([before], found.workers)))).sum()
    assert found.starts == rises


def test_long_and_wide_needs_take_no_time() -> None:
    generator = np.random.Generator(np.random.Philox(key=1))
    steps = generator.integers(-1, 2, 120_000).cumsum()
    found = layered(np.abs(steps) % 128.0, step_s=10.0, beta_s=60.0)
    assert found.workers.max() <= 127 and found.starts > 0
