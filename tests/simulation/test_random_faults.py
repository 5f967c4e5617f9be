"""Many short runs in which anything goes wrong at any time: nothing is lost and nothing hangs.

The invariants are on in every run; a run that hangs ends in a Deadlock or in its own time-out.
"""

from __future__ import annotations

import numpy as np
import pytest

from readyplane.core.worker import Role
from readyplane_lab.demo import DEMO_POLICY
from readyplane_lab.simulator import directives, faults
from readyplane_lab.simulator.faults import Fault
from readyplane_lab.simulator.startup import StartUpModel
from readyplane_lab.simulator.world_result import WorldResult
from readyplane_planner.decide.follow import Brain
from readyplane_planner.policy import overlay
from tests.simulation.sim_world import Fixed, same, steady, world

SPAN_S = 45.0
POLICY = {
    "up": {"cooldown_s": 1.0},
    "down": {"cooldown_s": 10.0, "hold_s": 5.0},
    "min_ready_s": 2.0,
    "backoff_s": 1.0,
    "orphan_s": 8.0,
    "drain_deadline_s": 30.0,
}


def drawn_faults(random: np.random.Generator, count: int) -> tuple[Fault, ...]:
    """A few faults of any kind, at any time."""

    def one() -> Fault:
        at_s = float(random.uniform(0.0, SPAN_S))
        for_s = float(random.choice([1.0, 4.0, 9.0, 25.0]))
        role = Role.PREFILL if random.random() < 0.5 else Role.DECODE
        many = int(random.integers(1, 3))
        kinds: list[Fault] = [
            faults.Crash(at_s, role, many),
            faults.Stall(at_s, role, for_s),
            faults.Partition(at_s, role, for_s, many),
            faults.SourceDies(at_s),
            faults.SourceLies(at_s),
            faults.SpotReclaim(at_s, role, for_s, many),
            faults.QuotaDenied(at_s, for_s, int(random.integers(0, 2)), role),
            faults.StartsHang(at_s, role, many),
            faults.StartsFail(at_s, role, many),
            faults.SignalsStale(at_s, for_s),
            faults.SignalsMissing(at_s, for_s),
            faults.SignalOutlier(at_s),
            faults.ClockStep(at_s, float(random.choice([-3600.0, 3600.0]))),
            faults.PlannerRestart(at_s, for_s),
        ]
        return kinds[int(random.integers(len(kinds)))]

    return tuple(one() for _ in range(count))


def drawn_directives(random: np.random.Generator) -> tuple[directives.Directive, ...]:
    role = Role.PREFILL if random.random() < 0.5 else Role.DECODE
    at_s = float(random.uniform(0.0, SPAN_S))
    return (
        directives.StandBy(at_s, role),
        directives.Activate(at_s + 8.0, role),
        directives.Flip(float(random.uniform(0.0, SPAN_S)), role),
    )


def brain_of(seed: int, random: np.random.Generator) -> Brain | None:
    """Every other run has the planner's own brain, the others one that wants anything."""
    if seed % 2:
        return None
    steps = [(0.0, 2, 2)]
    steps += [
        (float(at_s), int(random.integers(1, 7)), int(random.integers(1, 5)))
        for at_s in sorted(random.uniform(0.0, SPAN_S, 4))
    ]
    return Fixed(*steps)


def ill_fated(seed: int) -> WorldResult:
    random = np.random.Generator(np.random.Philox(key=seed))
    fast = {"flip": seed % 3 == 1, "decode": {"standby": int(seed % 4 == 0)}}
    return world(
        brain_of(seed, random),
        steady(float(random.choice([1.0, 2.0, 4.0])), SPAN_S, seed),
        policy=overlay({**DEMO_POLICY, **POLICY}, fast),
        seed=seed,
        startup=StartUpModel(cached_share=0.3, compiled_share=0.3),
        convertible=seed % 3 == 0,
        faults=drawn_faults(random, int(random.integers(1, 7))),
        directives=drawn_directives(random) if seed % 5 == 0 else (),
    )


@pytest.mark.parametrize("seed", range(1, 25))
def test_nothing_is_lost_and_nothing_hangs(seed: int) -> None:
    result = ill_fated(seed)
    assert {r.outcome for r in result.records} <= {"finished", "refused", "timed_out", "failed"}
    assert result.records[-1].at_s <= SPAN_S
    assert result.seconds < SPAN_S + 200.0
    assert all(w.released_s >= w.allocated_s for w in result.lives)


@pytest.mark.parametrize("seed", [3, 10])
def test_bad_luck_repeats(seed: int) -> None:
    assert same(ill_fated(seed).run(), ill_fated(seed).run())
