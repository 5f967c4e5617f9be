"""Pools that are short with nothing coming, or whose orders are held back: doctor and decisions say it."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from readyplane.core.worker import Role, WorkerState
from readyplane_lab.cli import doctor_system
from readyplane_lab.cli.decisions import decisions_table, shut_lines
from readyplane_lab.cli.held_back import shortfalls
from tests.unit.planner_world import HandClock, Run, World, planner, policy
from tests.unit.test_field_planner_actuation import by_hand, ended_by_hand


async def contested() -> Run:
    """Somebody started and ended workers by hand until the planner waits; then nobody is left."""
    run = await planner(
        World(HandClock(), t_ready_s=lambda _n: 20.0), policy(prefill={"min": 2, "max": 6})
    )
    await run.step(3)
    for _ in range(4):
        by_hand(run.world, Role.PREFILL, 2)
        await run.step(3)
        for box in run.world.members(Role.PREFILL, WorkerState.READY, WorkerState.PROVISIONED):
            ended_by_hand(run.world, box.order.worker_id)
        await run.step(3)
    return run


async def test_doctor_fails_where_a_conflict_leaves_nobody_who_serves() -> None:
    run = await contested()
    state = await run.service.state()
    pool = state["pools"]["prefill"]
    assert (pool["ready"], pool["desired"]) == (0, 2), "as it was seen"
    found = doctor_system._short(state)
    (prefill,) = [f for f in found if f.name == "prefill workers"]
    assert prefill.status == "fail"
    assert "0 of 2 wanted are ready, nothing is ordered" in prefill.found
    assert "somebody else has changed this pool" in prefill.found
    assert "every request is refused" in prefill.found
    assert "set paused=true" in prefill.remedy and "by hand" in prefill.remedy
    assert any(line.startswith("prefill: 0 of 2 wanted") for line in shut_lines(state))


async def test_a_decision_that_ordered_nothing_says_so() -> None:
    run = await contested()
    by_hand(run.world, Role.PREFILL, 3)
    await run.step(3)
    listed = await run.service.list_decisions(limit=100, changes_only=True)
    grown = [
        d
        for d in listed
        if any(c["pool"] == "prefill" and c["to"] > c["from"] for c in d["changes"])
        and any(r["code"] == "ownership_conflict" for r in d["reasons"])
    ]
    assert grown, "the wanted number rose and nothing was ordered"
    screen = Console(width=300, record=True)
    screen.print(decisions_table(grown[:1]))
    shown = " ".join(screen.export_text().split())
    assert "prefill: nothing was ordered: somebody else has changed this pool" in shown
    first = next(d for d in reversed(listed) if d["orders"])
    screen.print(decisions_table([first]))
    assert "nothing was ordered" not in screen.export_text(), "that one did order"


async def test_a_pool_that_starts_or_serves_is_no_trouble() -> None:
    run = await planner(World(HandClock()), policy())
    await run.step(3)
    assert doctor_system._short(await run.service.state()) == [], "workers are on their way"
    await run.step(30)
    assert doctor_system._short(await run.service.state()) == []


def state(*workers: dict[str, Any], ready: int = 0, **more: Any) -> dict[str, Any]:
    held = more.pop("held", [])
    pools = {"prefill": {"ready": ready, "desired": 2, "provisioned": ready}}
    return {"pools": pools, "workers": list(workers), "held": held, **more}


def worker(state: str, **more: Any) -> dict[str, Any]:
    return {"worker_id": "p-1", "role": "prefill", "state": state, **more}


@pytest.mark.parametrize(
    ("seen", "status", "why"),
    [
        (state(), "fail", "no reason is told"),
        (state(ready=1), "warn", "1 of 2 wanted are ready"),
        (state(paused=True), "fail", "the planner is paused"),
        (state(advisory=True), "warn", "nothing is ordered"),
        (state(worker("provisioned", start={"failure": "x"})), "fail", "nothing is ordered"),
        (state(worker("stalled")), "fail", "1 are there and take no requests"),
        (
            state(
                worker("ordered"), held=[{"pool": "prefill", "code": "pending", "text": "waits"}]
            ),
            "fail",
            "1 on the way: waits",
        ),
    ],
)
def test_what_is_short_is_told_with_its_reason(seen: Any, status: str, why: str) -> None:
    (finding,) = doctor_system._short(seen)
    assert finding.status == status and why in finding.found and finding.remedy


def test_what_has_a_finding_of_its_own_is_not_told_twice() -> None:
    for code in ("denied", "dead_end"):
        assert shortfalls(state(held=[{"pool": "prefill", "code": code, "text": "x"}])) == []
    assert shortfalls(state(worker("provisioned"))) == []
    assert shortfalls(state(worker("standby", told="activate"))) == []
