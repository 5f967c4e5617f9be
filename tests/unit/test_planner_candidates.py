"""What was weighed beside the proposal: neighbours with their costs, and why they cannot be."""

from dataclasses import replace

import pytest

from readyplane_planner.capacity import Supply
from readyplane_planner.optimise import Bounds, Candidate, Demand, size, weigh
from tests.unit.test_planner_optimise import D_RATE, P_RATE, problem

BUSY = problem(
    3.0 * P_RATE,
    2.0 * D_RATE,
    supply_p=Supply(3, (4.0,)),
    supply_d=Supply(3),
    demand_d=Demand(2.0 * D_RATE, 2.0 * D_RATE, sequences=40.0),
)


def by_pair(found: tuple[Candidate, ...]) -> dict[tuple[int, int], Candidate]:
    return {(c.p, c.d): c for c in found}


def test_the_proposal_comes_first_then_the_fleet_as_it_is_and_the_neighbours() -> None:
    found = weigh(BUSY, 6, 3)
    assert [(c.p, c.d) for c in found] == [(6, 3), (4, 3), (7, 3), (5, 3), (6, 4), (6, 2)]
    assert all(
        c.cost == pytest.approx(c.parts.capacity + c.parts.start_drain + c.parts.slo) for c in found
    )
    assert [(c.p, c.d) for c in weigh(problem(), 0, 0)] == [(0, 0), (1, 1), (1, 0), (0, 1)]


def test_one_more_costs_its_start_and_its_time_and_one_fewer_the_late_work() -> None:
    found = by_pair(weigh(BUSY, 4, 3))
    here, more, fewer = found[4, 3], found[5, 3], found[2 if (2, 3) in found else 3, 3]
    # Two T_ready of 10 s: an ordered worker costs both, the first while it starts.
    assert more.parts.capacity == pytest.approx(here.parts.capacity + 10.0)
    assert more.parts.start_drain == pytest.approx(here.parts.start_drain + 10.0)
    assert fewer.parts.capacity < here.parts.capacity
    assert fewer.parts.slo > here.parts.slo == more.parts.slo == 0.0
    assert not fewer.feasible and "would miss TTFT" in fewer.why_not


def test_what_is_not_enough_or_not_allowed_says_so() -> None:
    tight = replace(BUSY, bounds_p=Bounds(1, 4, 2), bounds_d=Bounds(3, 9), budget_gpus=11)
    found = by_pair(weigh(tight, 4, 3))
    assert found[4, 3].feasible and found[4, 3].why_not == ""
    assert "P may have 4" in found[5, 3].why_not
    assert "13 GPUs exceed the budget of 11" in found[5, 3].why_not
    assert "D has to have 3" in found[4, 2].why_not
    starving = by_pair(weigh(replace(BUSY, supply_d=Supply(1)), 4, 1))
    assert "of the requests would miss TPOT" in starving[4, 1].why_not


@pytest.mark.parametrize("load", [0.0, 0.5, 1.0, 2.5, 4.0, 7.5])
def test_what_the_search_proposes_is_feasible_and_one_fewer_is_not(load: float) -> None:
    asked = problem(load * P_RATE, load * D_RATE, supply_p=Supply(2), supply_d=Supply(2))
    made = size(asked)
    found = by_pair(weigh(asked, made.p, made.d))
    assert found[made.p, made.d].feasible, found[made.p, made.d].why_not
    for pair in ((made.p - 1, made.d), (made.p, made.d - 1)):
        if pair in found and min(pair) >= 1:
            assert not found[pair].feasible, pair


def test_without_work_nothing_is_late() -> None:
    assert {c.parts.slo for c in weigh(problem(), 1, 1)} == {0.0}


def test_workers_kept_for_a_loss_are_not_counted_as_enough() -> None:
    """N+k: with `spare` the pair has to be enough without those that may be lost."""
    asked = problem(2.5 * P_RATE, 2.5 * D_RATE, supply_p=Supply(4), supply_d=Supply(4))
    plain, kept = size(asked), replace(asked, bounds_p=Bounds(1, 40, spare=2))
    more = size(kept)
    assert (more.p, more.d) == (plain.p + 2, plain.d)
    found = by_pair(weigh(kept, more.p, more.d))
    assert found[more.p, more.d].feasible
    assert not found[more.p - 1, more.d].feasible
    assert f"with {plain.p - 1} P" in found[more.p - 1, more.d].why_not
