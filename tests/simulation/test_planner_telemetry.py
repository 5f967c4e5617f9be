"""What is told of the world is late, missing, empty, broken or exaggerated; the world is as it was.

Many short runs with drawn faults of telemetry against the planner's own brain. Nobody is let go on
data that is not known, no target leaves its bounds, and afterwards everything is as in a calm run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from readyplane_lab.simulator import faults
from readyplane_lab.simulator.faults import Fault, SignalsDistorted
from readyplane_lab.simulator.world_result import WorldResult
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_planner.decide import Decision, Memory, Plan, decide
from readyplane_planner.signals import Kind, Observation
from tests.simulation.sim_world import steady, world

BUSY_S = 30.0
CALM_S = 125.0
POLICY = {
    "up": {"cooldown_s": 1.0},
    "down": {"cooldown_s": 10.0, "hold_s": 5.0},
    "min_ready_s": 2.0,
    "backoff_s": 1.0,
}
HOWS: tuple[Any, ...] = ("empty", "broken", "partial", "dipped", "restarted")


class Watched:
    """The planner's own brain, and every tick of it."""

    def __init__(self) -> None:
        self.ticks: list[tuple[float, Observation, Decision]] = []

    def __call__(
        self, observation: Observation, plan: Plan, memory: Memory, **when: Any
    ) -> tuple[Decision, Memory]:
        decision, memory = decide(observation, plan, memory, **when)
        self.ticks.append((when["now_s"], observation, decision))
        return decision, memory

    @property
    def targets(self) -> list[tuple[int, int]]:
        return [(d.prefill.target, d.decode.target) for _, _, d in self.ticks]


@lru_cache
def load() -> tuple[WorkloadRequest, ...]:
    """Busy for a while, then a trickle in which pools go back to their minimum."""
    first = steady(4.0, BUSY_S, 2)
    rest = steady(0.3, CALM_S - BUSY_S, 3)
    moved = (replace(r, at_s=r.at_s + BUSY_S, index=r.index + len(first)) for r in rest)
    return (*first, *moved)


def drawn(seed: int) -> tuple[Fault, ...]:
    """A few faults of telemetry in the busy time and just after it."""
    random = np.random.Generator(np.random.Philox(key=seed))

    def one() -> Fault:
        at_s = float(random.uniform(5.0, BUSY_S + 15.0))
        for_s = float(random.choice([1.0, 4.0, 9.0, 20.0]))
        kinds: list[Fault] = [
            faults.SignalsStale(at_s, for_s),
            faults.SignalsMissing(at_s, for_s),
            faults.SignalOutlier(at_s, float(random.choice([0.1, 10.0, 50.0]))),
            faults.ClockStep(at_s, float(random.choice([-3600.0, 3600.0]))),
            *(SignalsDistorted(at_s, for_s, how) for how in HOWS),
        ]
        return kinds[int(random.integers(len(kinds)))]

    return tuple(one() for _ in range(int(random.integers(1, 5))))


def blind(given: tuple[Fault, ...]) -> list[tuple[float, float]]:
    """When nobody can be known to be spare, whatever the planner takes it for."""
    spans = []
    for fault in given:
        lost = isinstance(fault, faults.SignalsStale | faults.SignalsMissing)
        spoilt = isinstance(fault, SignalsDistorted) and fault.how in {"empty", "broken", "partial"}
        if lost or spoilt:
            spans.append((fault.at_s + 1.5, fault.at_s + getattr(fault, "for_s", 0.0)))
    return spans


def played(
    *given: Fault, requests: tuple[WorkloadRequest, ...] | None = None
) -> tuple[Watched, WorldResult]:
    brain = Watched()
    return brain, world(brain, requests or load(), policy=POLICY, initial=(1, 1), faults=given)


@pytest.mark.parametrize("seed", range(1, 11))
def test_bad_telemetry_lets_nobody_go_and_is_recovered_from(seed: int) -> None:
    given = drawn(seed)
    brain, result = played(*given)
    first_s, spans = brain.ticks[0][0], blind(given)
    assert len(brain.ticks) > 80
    for (_, _, before), (at_s, seen, now) in pairwise(brain.ticks):
        assert 1 <= now.prefill.target <= 6 and 1 <= now.decode.target <= 4
        grown = now.prefill.target - before.prefill.target
        assert grown <= 2 + max(0, before.prefill.before - before.prefill.target), "max_step"
        unseen = any(start_s < at_s - first_s < end_s for start_s, end_s in spans)
        if unseen or seen.unknown() or seen.bad or not seen.fleet_known:
            assert not now.drains, now.why
            assert now.prefill.target >= now.prefill.before, now.why
            assert now.decode.target >= now.decode.before, now.why
        assert all(s.value is None or s.value >= 0 for s in seen.signals().values())
    last = brain.ticks[-1][2]
    assert last.degraded == "" and brain.targets[-1] == (1, 1), "as in a calm run"
    assert {r.outcome for r in result.records} <= {"finished", "refused"}


def test_a_calm_run_for_comparison() -> None:
    brain, result = played()
    assert max(p for p, _ in brain.targets) >= 2 and brain.targets[-1] == (1, 1)
    assert {r.outcome for r in result.records} == {"finished"}
    assert not any(seen.bad for _, seen, _ in brain.ticks)


def during(how: Any, for_s: float = 9.0) -> list[tuple[Observation, Decision]]:
    busy = steady(4.0, 22.0, 2)
    brain, _ = played(SignalsDistorted(11.0, for_s, how), requests=busy)
    first_s = brain.ticks[0][0]
    return [(o, d) for at_s, o, d in brain.ticks if 12.5 < at_s - first_s < 11.0 + for_s]


@pytest.mark.parametrize(
    ("how", "signal", "kind"),
    [
        ("empty", "arrivals", Kind.MISSING),
        ("broken", "finished", Kind.MISSING),
        ("partial", "finished", Kind.MISSING),
        ("restarted", "arrivals", Kind.WARMING),
    ],
)
def test_each_distortion_is_seen_for_what_it_is(how: str, signal: str, kind: Kind) -> None:
    looks = during(how)
    assert len(looks) >= 5
    assert {o.signals()[signal].kind for o, _ in looks} == {kind}
    assert all(bool(o.bad) is (how == "broken") for o, _ in looks)
    if how in {"empty", "restarted"}:
        # What is unknown holds a pool, or grows it; it never lets anybody go.
        held = [any(r.code == "hold" for r in d.why) for _, d in looks]
        grew = [d.prefill.target > d.prefill.before for _, d in looks]
        assert all(h or g for h, g in zip(held, grew, strict=True))
        assert sum(held) >= len(looks) - 2


def test_counters_that_dip_are_no_restart_and_no_standstill() -> None:
    looks = during("dipped")
    dipped = [o for o, _ in looks if any("in one life" in bad for bad in o.bad)]
    assert len(dipped) >= 2
    assert not any(o.arrivals.known and o.finished.known for o in dipped)
    known = [o.arrivals.get() for o, _ in looks if o.arrivals.known]
    assert known and max(known) < 40.0, "never the whole count again"
