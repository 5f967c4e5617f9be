"""Static fleets: sized by hindsight, within bounds, there from the beginning."""

from __future__ import annotations

import pytest

from readyplane_lab.proof.baselines import static_peak, static_quantile
from readyplane_planner.decide.values import Memory
from tests.unit.baseline_world import fleet, observation, plan, setting


@pytest.mark.parametrize(
    "fraction, fleet_of",
    [
        (1.0, (4, 8)),
        (0.6, (3, 5)),  # ceil(2.4), ceil(4.8)
        (1.25, (5, 10)),
        (0.01, (1, 1)),  # the lower bound
        (100.0, (32, 32)),  # the upper one
    ],
)
def test_peak_is_a_fraction_of_each_pools_own_peak(
    fraction: float, fleet_of: tuple[int, int]
) -> None:
    assert static_peak.make(fraction, setting()).initial == fleet_of


def test_quantile_is_one_of_the_needs() -> None:
    needs = tuple(float(n) for n in range(1, 11))
    at = setting(needs, needs)
    assert static_quantile.make(0.5, at).initial == (6, 6)  # place 4.5 of 0..9: the next one
    assert static_quantile.make(0.95, at).initial == (10, 10)  # place 8.55
    assert static_quantile.make(1.0, at).initial == static_peak.make(1.0, at).initial


def test_it_never_changes_and_replaces_what_is_lost() -> None:
    brain = static_peak.make(1.0, setting()).brain
    memory = Memory()
    ordered: list[str] = []
    for tick, ready in enumerate((8, 8, 7)):
        load = 0.0 if tick else 500.0
        seen = observation(
            fleet(4, ready),
            now_s=5.0 * tick,
            arrivals=load or 1.0,
            prompt_work=load,
            prefill_work=load,
            queue=0.0,
            decoding=0.0,
        )
        decision, memory = brain(seen, plan(), memory, now_s=5.0 * tick, decision_id=f"d-{tick}")
        assert (decision.prefill.target, decision.decode.target) == (4, 8)
        assert not decision.drains
        ordered += [o.pool for o in decision.orders]
    assert ordered == ["decode"]
