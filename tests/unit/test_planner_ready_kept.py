"""A drain takes of those that serve only what the pool can spare: an arrival is no supply."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from readyplane.core.startup import StartQuantiles
from readyplane.core.worker import Role, WorkerState
from readyplane_planner.decide import Memory, Plan
from readyplane_planner.decide.acting import Acted, act
from readyplane_planner.decide.mixing import Choice, Pick
from readyplane_planner.decide.pools import census
from readyplane_planner.decide.values import Reason
from readyplane_planner.guard import Verdict
from readyplane_planner.policy import make_plan
from readyplane_planner.signals import Allocation, Observation, Priors, WorkerView, observe
from tests.unit.planner_world import DIGEST, MODEL, policy

NOW_S = 1000.0
T_READY = StartQuantiles(30.0, 60.0, 120.0, 5, 0.0)
CLASS = "h200-slow10"
FULL, EAGER = f"{CLASS}/full", f"{CLASS}/eager"
MORE = Pick(CLASS, "full")
NOBODY = Verdict(0)


def plan(low: int = 1, *, flip: bool = False) -> Plan:
    made = make_plan(policy(), version=1, manifest_digest=DIGEST)
    pool = replace(made.prefill, limits=replace(made.prefill.limits, low=low))
    return replace(made, prefill=pool, flip=flip)


def serving(name: str, mode: str = "full", role: Role = Role.PREFILL) -> WorkerView:
    made = WorkerView(name, f"{name}/1", role, WorkerState.READY, CLASS, epoch=3)
    return replace(made, ready_age_s=500.0, mode=mode, manifest_digest=DIGEST, flips=True)


def told(name: str, role: Role = Role.PREFILL) -> WorkerView:
    """A standby that was told to serve, by a person or the planner, and is on its way."""
    return replace(
        serving(name, role=role), state=WorkerState.STANDBY, told="activate", standby=True
    )


def start(name: str, age_s: float, mode: str = "full", role: Role = Role.PREFILL) -> Allocation:
    return Allocation(name, role, "running", CLASS, DIGEST, allocated_ago_s=age_s, mode=mode)


def seen(*members: WorkerView | Allocation) -> Observation:
    made = observe(
        model=MODEL,
        previous=None,
        current=None,
        allocations=tuple(m for m in members if isinstance(m, Allocation)),
        t_ready={"prefill": T_READY, "decode": T_READY},
        priors=Priors(),
        now_s=NOW_S,
    )
    workers = tuple(m for m in members if isinstance(m, WorkerView))
    return replace(made, workers=workers, fleet_known=True, allocations_known=True)


def shrunk(
    observation: Observation, wanted: Plan, verdict: Verdict, gives: tuple[str, ...] = ()
) -> tuple[Acted, list[Reason]]:
    """What becomes of a verdict on the prefill pool."""
    reasons: list[Reason] = []
    pools = (
        census("prefill", observation, wanted, Memory(), now_s=NOW_S),
        census("decode", observation, wanted, Memory(), now_s=NOW_S),
    )
    choices = (Choice((), MORE, gives), Choice((), MORE))
    acted = act(
        observation,
        wanted,
        Memory(),
        pools,
        (verdict, NOBODY),
        reasons,
        "d-1",
        choices,
        now_s=NOW_S,
    )
    return acted, reasons


@pytest.mark.parametrize("gives", [(), (FULL,), (f"{CLASS}/activate",)])
def test_the_only_one_that_serves_stays_while_a_standby_told_by_hand_is_on_its_way(
    gives: tuple[str, ...],
) -> None:
    observation = seen(serving("p-1"), told("p-2"))
    acted, reasons = shrunk(observation, plan(), Verdict(1, 0, 1), gives)
    assert not acted.drains
    assert acted.verdicts[0].target == 2, "who could not be given up stays wanted"
    assert "arriving" in {r.code for r in reasons}


def test_a_start_that_is_far_away_is_cancelled_rather_than_one_that_serves() -> None:
    observation = seen(serving("p-1"), start("p-2", 1.0))
    acted, _ = shrunk(observation, plan(), Verdict(1, 0, 1), (FULL,))
    assert [r.worker_id for r in acted.releases] == ["p-2"]
    assert not acted.drains


def test_what_serves_beyond_the_need_goes_although_another_is_on_its_way() -> None:
    observation = seen(serving("p-1"), serving("p-2"), serving("p-3"), told("p-4"))
    acted, _ = shrunk(observation, plan(), Verdict(2, 0, 2), (FULL, FULL))
    assert len(acted.drains) == 1, "two of three stay: the fourth serves nobody yet"


@settings(max_examples=150, deadline=None)
@example(["full", "full"], [], 0, 0, 2, True, 1, [])
@given(
    ready=st.lists(st.sampled_from(["full", "eager"]), max_size=5),
    coming=st.lists(
        st.tuples(st.floats(0.0, 200.0), st.sampled_from(["full", "eager"])), max_size=3
    ),
    activating=st.integers(0, 2),
    low=st.integers(0, 3),
    by=st.integers(0, 4),
    flip=st.booleans(),
    grow=st.integers(0, 2),
    kinds=st.lists(st.sampled_from([FULL, EAGER, f"{CLASS}/activate"]), max_size=4),
)
def test_those_that_serve_never_fall_below_floor_or_need(
    ready: list[str],
    coming: list[tuple[float, str]],
    activating: int,
    low: int,
    by: int,
    flip: bool,
    grow: int,
    kinds: list[str],
) -> None:
    """Whatever classes and modes the choice names, and whether by drain or by a change of stage."""
    members: list[WorkerView | Allocation] = [
        serving(f"r-{i}", mode) for i, mode in enumerate(ready)
    ]
    members += [start(f"s-{i}", age_s, mode) for i, (age_s, mode) in enumerate(coming)]
    members += [told(f"a-{i}") for i in range(activating)]
    observation, wanted = seen(*members), plan(low, flip=flip)
    live = census("prefill", observation, wanted, Memory(), now_s=NOW_S).live
    target = max(low, live - by)
    shrink = max(0, live - target)
    reasons: list[Reason] = []
    pools = (
        census("prefill", observation, wanted, Memory(), now_s=NOW_S),
        census("decode", observation, wanted, Memory(), now_s=NOW_S),
    )
    acted = act(
        observation,
        wanted,
        Memory(),
        pools,
        (Verdict(target, 0, shrink), Verdict(grow, grow, 0)),
        reasons,
        "d-1",
        (Choice((), MORE, tuple(kinds)), Choice((), MORE)),
        now_s=NOW_S,
    )
    gone = Counter(d.pool for d in acted.drains) + Counter(f.pool for f in acted.flips)
    left = len(ready) - gone["prefill"]
    assert left >= min(len(ready), max(low, target))
    went = {d.worker_id for d in acted.drains} & {f.worker_id for f in acted.flips}
    assert not went, "nobody is drained and told to serve the other stage at once"
