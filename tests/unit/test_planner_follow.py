"""Targets from elsewhere: counted, bounded, ordered and drained like those of the planner's own brain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from readyplane.core.startup import StartQuantiles
from readyplane.core.worker import Role, WorkerState
from readyplane_planner.decide import Decision, Memory, Plan
from readyplane_planner.decide.follow import Targets, count_pools, follow
from readyplane_planner.policy import make_plan
from readyplane_planner.rollout import Rules
from readyplane_planner.signals import (
    Allocation,
    Kind,
    Lengths,
    Observation,
    Refusal,
    Signal,
    WorkerView,
)
from tests.unit.planner_world import DIGEST, HandClock, World, planner, policy

NOW_S = 1000.0
OTHER = "sha256:" + "b" * 64
NOTHING = Memory()
SIGNALS = (
    *("arrivals", "prompt_work", "prefill_work", "finished", "generated"),
    *("queue", "in_flight", "decoding", "remaining", "kv"),
)
T_READY = StartQuantiles(30.0, 40.0, 50.0, 9, 0.0)


def plan_of(**changes: Any) -> Plan:
    return replace(make_plan(policy(), version=1, manifest_digest=DIGEST), **changes)


def view(
    name: str, role: Role, state: WorkerState = WorkerState.READY, **fields: Any
) -> WorkerView:
    base: dict[str, Any] = {"manifest_digest": DIGEST, "ready_age_s": 100.0}
    return WorkerView(name, f"{name}/1", role, state, "h200-slow10", **{**base, **fields})


def fleet(p: int, d: int) -> list[WorkerView]:
    """Ready workers; the higher its number, the more a worker holds."""
    stages = ((Role.PREFILL, p), (Role.DECODE, d))
    return [view(f"{role[0]}{i}", role, active=i) for role, n in stages for i in range(n)]


def coming(name: str, role: Role, age_s: float) -> Allocation:
    return Allocation(name, role, "running", manifest_digest=DIGEST, allocated_ago_s=age_s)


def seen(workers: list[WorkerView], *starting: Allocation, **fields: Any) -> Observation:
    running = [Allocation(w.worker_id, w.role, "running", allocated_ago_s=500.0) for w in workers]
    signals: dict[str, Any] = dict.fromkeys(SIGNALS, Signal(Kind.FRESH, 1.0, ""))
    return Observation(
        model="demo",
        taken_s=NOW_S,
        lengths=Lengths(1000.0, 1000.0, 200.0, 1.0, known=True),
        workers=tuple(workers),
        allocations=(*running, *starting),
        t_ready={"prefill": T_READY, "decode": T_READY},
        **signals,
        **fields,
    )


def followed(
    targets: Targets, observation: Observation, plan: Plan | None = None, memory: Memory = NOTHING
) -> tuple[Decision, Memory]:
    return follow(targets, observation, plan or plan_of(), memory, now_s=NOW_S, decision_id="d1-ab")


def acts(decision: Decision) -> tuple[list[str], list[str], list[str]]:
    """(pools of the orders, drained workers, released ones)."""
    return (
        [o.pool for o in decision.orders],
        [d.worker_id for d in decision.drains],
        [r.worker_id for r in decision.releases],
    )


FAR, NEAR = coming("p-far", Role.PREFILL, 1.0), coming("p-near", Role.PREFILL, 27.0)
DRAINING = view("p9", Role.PREFILL, WorkerState.DRAINING)


@pytest.mark.parametrize(
    ("targets", "workers", "starting", "orders", "drains", "releases", "p"),
    [
        # grows both pools at once, by as many as are missing
        ((4, 3), fleet(2, 2), (), ["prefill", "prefill", "decode"], [], [], 4),
        # stays
        ((2, 2), fleet(2, 2), (), [], [], [], 2),
        # a pending start counts
        ((3, 2), fleet(2, 2), (FAR,), [], [], [], 3),
        # a draining worker does not
        ((2, 2), [*fleet(1, 2), DRAINING], (), ["prefill"], [], [], 2),
        # shrinks by the workers that hold least
        ((3, 1), fleet(3, 3), (), [], ["d0", "d1"], [], 3),
        # cancels a far start before it drains anybody, and drains for the rest
        ((2, 2), fleet(2, 2), (FAR,), [], [], ["p-far"], 2),
        ((1, 2), fleet(2, 2), (FAR,), [], ["p0"], ["p-far"], 1),
        # a start that is about to serve is paid for, and nobody is drained for it before
        ((2, 2), fleet(2, 2), (NEAR,), [], [], [], 3),
        # between the floor and the ceiling of the plan
        ((0, -3), fleet(2, 2), (), [], ["p0", "d0"], [], 1),
        ((99, 2), fleet(5, 2), (), ["prefill"], [], [], 6),
        # None keeps what there is, also outside of the bounds
        ((None, None), fleet(2, 2), (FAR,), [], [], [], 3),
        ((None, 3), fleet(0, 2), (), ["decode"], [], [], 0),
    ],
)
def test_a_target_becomes_orders_cancelled_starts_and_drains(
    targets: tuple[int | None, int | None],
    workers: list[WorkerView],
    starting: tuple[Allocation, ...],
    orders: list[str],
    drains: list[str],
    releases: list[str],
    p: int,
) -> None:
    decision, _memory = followed(Targets(*targets, why="a rule"), seen(workers, *starting))
    assert acts(decision) == (orders, drains, releases)
    assert decision.prefill.target == p
    assert (decision.prefill.wanted, decision.decode.wanted) == targets
    assert decision.why[0].code == "followed"
    assert decision.why[0].text == "a rule"


@pytest.mark.parametrize(("budget", "orders"), [(None, 4), (6, 2), (5, 1), (4, 0), (3, 0)])
def test_the_budget_cuts_growth_and_what_drains_still_counts(
    budget: int | None, orders: int
) -> None:
    workers = [*fleet(1, 2), DRAINING]
    decision, _memory = followed(Targets(3, 4), seen(workers), plan_of(budget_gpus=budget))
    assert len(decision.orders) == orders
    assert ("budget" in {r.code for r in decision.why}) is (orders < 4)


def test_an_order_counts_until_it_is_ready_and_is_not_given_twice() -> None:
    first, memory = followed(Targets(3, 2), seen(fleet(2, 2)))
    assert acts(first)[0] == ["prefill"]
    assert memory.guard_p.desired == 3
    again, memory = followed(Targets(3, 2), seen(fleet(2, 2)), memory=memory)
    assert not again.changed
    came = view(first.orders[0].worker_id, Role.PREFILL, ready_age_s=1.0)
    last, memory = followed(Targets(3, 2), seen([*fleet(2, 2), came]), memory=memory)
    assert not last.changed
    assert memory.orders == ()


def test_a_refused_order_is_given_again() -> None:
    first, memory = followed(Targets(3, 2), seen(fleet(2, 2)))
    refused = (Refusal(first.orders[0].worker_id, "prefill", "no room"),)
    again, _memory = followed(Targets(3, 2), seen(fleet(2, 2), refused=refused), memory=memory)
    assert acts(again)[0] == ["prefill"]
    assert again.orders[0].worker_id != first.orders[0].worker_id


def test_a_drain_that_was_not_taken_leaves_the_worker_ready() -> None:
    first, memory = followed(Targets(1, 2), seen(fleet(2, 2)))
    assert acts(first)[1] == ["p0"]
    look = seen(fleet(2, 2), refused=(Refusal("p0", "prefill", "router away"),))
    found = count_pools(look, plan_of(), memory, now_s=NOW_S)["prefill"]
    assert (found.ready, found.draining) == (2, 0)
    again, _memory = followed(Targets(2, 2), look, memory=memory)
    assert not again.orders


def test_without_an_artifact_nothing_is_ordered_and_it_is_said() -> None:
    decision, memory = followed(Targets(4, 2), seen(fleet(2, 2)), plan_of(manifest_digest=""))
    assert acts(decision) == ([], [], [])
    assert "artifact_unknown" in {r.code for r in decision.why}
    assert memory.orders == ()


@pytest.mark.parametrize("targets", [Targets(5, 4), Targets(1, 1)])
def test_paused_holds_whatever_the_rule_wants(targets: Targets) -> None:
    _first, memory = followed(Targets(3, 2), seen(fleet(3, 2)))
    decision, after = followed(targets, seen(fleet(3, 2)), plan_of(paused=True), memory)
    assert acts(decision) == ([], [], [])
    assert (decision.prefill.target, decision.decode.target) == (3, 2)
    assert "paused" in {r.code for r in decision.why}
    assert after.orders == ()


def test_the_surge_of_a_roll_out_is_not_cancelled_as_surplus() -> None:
    _first, memory = followed(Targets(2, 2), seen(fleet(2, 2)))
    rolling = plan_of(manifest_digest=OTHER, rollout=Rules(samples_min=0))
    surge, memory = followed(Targets(2, 2), seen(fleet(2, 2)), rolling, memory)
    assert sorted(acts(surge)[0]) == ["decode", "prefill"]
    again, memory = followed(Targets(2, 2), seen(fleet(2, 2)), rolling, memory)
    assert not again.changed
    came = [
        view(o.worker_id, Role(o.pool), manifest_digest=OTHER, generation=2) for o in surge.orders
    ]
    retired, _memory = followed(Targets(2, 2), seen([*fleet(2, 2), *came]), rolling, memory)
    assert sorted(acts(retired)[1]) == ["d0", "p0"]


def test_pools_are_counted_as_they_are_followed() -> None:
    look = seen([*fleet(2, 3), DRAINING], FAR, NEAR)
    found = count_pools(look, plan_of(), Memory(), now_s=NOW_S)
    p, d = found["prefill"], found["decode"]
    assert (p.ready, p.pending, p.draining, p.live) == (2, 2, 1, 4)
    assert (d.ready, d.pending, d.draining, d.live) == (3, 0, 0, 3)
    decision, _memory = followed(Targets(None, None), look)
    assert (decision.prefill.target, decision.decode.target) == (p.live, d.live)


async def test_a_service_with_another_brain_orders_and_drains_through_the_hand() -> None:
    wanted = [Targets(3, 2)]

    def brain(
        observation: Observation, plan: Plan, memory: Memory, *, now_s: float, decision_id: str
    ) -> tuple[Decision, Memory]:
        return follow(wanted[-1], observation, plan, memory, now_s=now_s, decision_id=decision_id)

    world = World(HandClock(), rps=lambda _t: 9.0)
    run = await planner(world, brain=brain)
    await run.step(20)
    assert len(world.provisions) == 5
    assert len(world.members(Role.PREFILL, WorkerState.READY)) == 3
    assert run.desired[-1][1:] == (3, 2)
    wanted.append(Targets(1, 2))
    await run.step(20)
    assert len(world.drains) == 2
    assert len(world.members(Role.PREFILL, WorkerState.READY)) == 1
    records = await run.journal.newest("demo", limit=10, changes_only=True)
    reasons = [r["code"] for record in records for r in record.document["reasons"]]
    assert set(reasons) >= {"followed", "victim"}
    state = await run.service.state()
    assert state["pools"]["prefill"]["desired"] == 1
    assert state["pools"]["prefill"]["load"] is None
