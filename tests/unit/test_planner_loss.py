"""What a pool has to let be late: limits, directions, and the same queue played one by one."""

import heapq
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane_planner.optimise.loss import CHOICE, expected, lost_share, stepped_back

sizes = st.floats(1.0, 1e6)


def share(
    capacity: float, *, demand: float = 1000.0, wall: float = 2000.0, variance: float = 1e6
) -> float:
    return lost_share(demand, capacity=capacity, wall=wall, variance=variance)


def test_its_limits() -> None:
    assert share(1e9) == 0.0, "room for everything"
    assert share(0.0) == 1.0, "nobody serves"
    assert share(1000.0) == pytest.approx(1e6 / (2 * 2000.0) / 1000.0), "just as much as comes"
    assert share(100.0, variance=1e4) == pytest.approx(0.9), "far short: what does not fit"
    assert lost_share(0.0, capacity=0.0, wall=0.0, variance=0.0) == 0.0, "nothing comes"
    assert share(1500.0, wall=0.0) == 1.0, "nobody may wait, and everybody does a little"
    assert share(1500.0, variance=0.0) == 0.0
    assert share(800.0, variance=0.0) == pytest.approx(0.2), "as much as is missing"


def test_nothing_jumps_where_capacity_and_demand_meet() -> None:
    around = [share(1000.0 + spare) for spare in (-1e-3, -1e-6, 0.0, 1e-6, 1e-3)]
    assert max(around) - min(around) < 1e-5


@given(demand=sizes, capacity=sizes, more=sizes, wall=sizes, variance=st.floats(0.0, 1e9))
def test_it_is_a_share_and_goes_one_way(
    demand: float, capacity: float, more: float, wall: float, variance: float
) -> None:
    """More capacity or patience loses no more, more variance no less, and no less than the excess."""
    here = lost_share(demand, capacity=capacity, wall=wall, variance=variance)
    assert 0.0 <= here <= 1.0
    assert lost_share(demand, capacity=capacity + more, wall=wall, variance=variance) <= here + 1e-9
    assert lost_share(demand, capacity=capacity, wall=wall + more, variance=variance) <= here + 1e-9
    assert lost_share(demand, capacity=capacity, wall=wall, variance=variance + more) >= here - 1e-9
    assert here >= (demand - capacity) / demand - 1e-9


def played(busy: float, workers: int, patience: float, *, seed: int = 3) -> float:
    """Share of a queue M/M/c in which whoever would wait longer leaves; in mean service times."""
    rng, free, at, lost, count = random.Random(seed), [0.0] * workers, 0.0, 0, 30_000
    for _ in range(count):
        at += rng.expovariate(busy * workers)
        own = rng.expovariate(1.0)
        if free[0] - at > patience:
            lost += 1
        else:
            heapq.heapreplace(free, max(at, free[0]) + own)
    return lost / count


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("patience", [2.0, 5.0])
@pytest.mark.parametrize("busy", [0.7, 0.9, 1.0, 1.3, 2.0])
def test_it_is_what_a_queue_with_patience_loses(busy: float, patience: float, workers: int) -> None:
    """One unit of work each on average, with the spread of exponential times (variance 2)."""
    demand = busy * workers
    # Whoever begins just in time brings its own work, so the line grows somewhat beyond its wall.
    beyond = 2.0 * (0.3 + 0.7 * math.sqrt(workers))
    formula = lost_share(
        demand,
        capacity=float(workers),
        wall=workers * patience + beyond,
        variance=2.0 * min(float(workers), 1.25 * demand),
    )
    assert formula == pytest.approx(played(busy, workers, patience), abs=0.02)


@given(part=st.floats(0.0, 1.0), more=st.floats(0.0, 1.0), cv2=st.floats(0.0, 20.0))
def test_the_longest_are_fewer_than_their_share_of_the_work(
    part: float, more: float, cv2: float
) -> None:
    found = stepped_back(part, cv2=cv2)
    assert 0.0 <= found <= part + 1e-12
    assert stepped_back(max(part, more), cv2=cv2) >= found - 1e-12
    assert stepped_back(part, cv2=cv2 + more) <= found + 1e-12
    assert (stepped_back(0.0, cv2=cv2), stepped_back(1.0, cv2=cv2)) == (0.0, 1.0)
    assert stepped_back(part, cv2=0.0) == part, "prompts of one length cannot be chosen from"


@pytest.mark.parametrize("cv2", [0.5, 2.0])
@pytest.mark.parametrize("part", [0.05, 0.3])
def test_how_few_hold_that_much_work(part: float, cv2: float) -> None:
    """Against lengths that were drawn, taken from the longest on."""
    rng, deviation = random.Random(5), math.sqrt(math.log1p(cv2))
    lengths = sorted((rng.lognormvariate(0.0, deviation) for _ in range(40_000)), reverse=True)
    left, taken = part * sum(lengths), 0
    while left > 0:
        left -= lengths[taken]
        taken += 1
    longest = taken / len(lengths)
    assert stepped_back(part, cv2=cv2) == pytest.approx(
        (1 - CHOICE) * part + CHOICE * longest, abs=0.01
    )


def test_a_spread_weighs_what_it_brings() -> None:
    """A demand ten times as large brings ten times the requests that may be late."""
    assert expected([], lambda _demand: 1.0) == 0.0
    assert expected([(0.0, 1.0)], lambda _demand: 1.0) == 0.0
    assert expected([(7.0, 1.0)], lambda demand: demand / 70.0) == pytest.approx(0.1)
    late = expected([(1.0, 0.9), (10.0, 0.1)], lambda demand: float(demand > 5.0))
    assert late == pytest.approx(1.0 / 1.9)
