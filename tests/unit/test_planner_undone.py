"""What was asked for and came to nothing: in the list of decisions, in the state and in doctor's words."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from readyplane.core.worker import Role
from readyplane_lab.cli import doctor_system
from readyplane_lab.cli.decisions import decisions_table, undone_lines
from readyplane_planner.journal import Outcome
from readyplane_planner.undone import undone
from tests.unit.planner_world import HandClock, Run, World, planner, policy

NO_ROOM = "no free place: 2 of 2 are allocated"


async def refused(seconds: float = 5.0, **changes: Any) -> Run:
    """The actuator takes no decode worker."""

    def refuse(order: Any) -> str:
        return NO_ROOM if order.role is Role.DECODE else ""

    run = await planner(World(HandClock(), rps=lambda _t: 2.0, refuse=refuse), policy(**changes))
    await run.step(seconds)
    return run


async def test_a_refused_order_stands_below_its_decision() -> None:
    run = await refused()
    listed = await run.service.list_decisions(limit=50, changes_only=True)
    first = next(d for d in reversed(listed) if d["orders"])
    (decode,) = [o["worker_id"] for o in first["orders"] if o["pool"] == "decode"]
    (row,) = first["undone"]
    assert (row["worker_id"], row["kind"]) == (decode, "refused")
    assert NO_ROOM in row["why"] and row["why"].endswith("; wait"), "with what to do"
    screen = Console(width=200, record=True)
    screen.print(decisions_table([first], ["decode: it was refused"]))
    shown = screen.export_text()
    assert f"{decode} refused: order refused: {NO_ROOM}; wait" in shown
    assert "decode: it was refused" in shown


async def test_the_state_and_doctor_say_what_is_refused_until_it_is_had() -> None:
    run = await refused()
    state = await run.service.state()
    assert state["pools"]["prefill"]["denied"] == []
    (denied,) = state["pools"]["decode"]["denied"]
    assert denied["times"] >= 1 and NO_ROOM in denied["why"]
    assert denied["again_in_s"] >= 0.0 and denied["ago_s"] >= 0.0
    (finding,) = doctor_system._denied(state)
    assert finding.status == "fail" and finding.name == "orders of decode workers"
    assert NO_ROOM in finding.found and "0 of 1 workers are there" in finding.found
    assert "do what the refusal says" in finding.remedy
    run.world.refuse = lambda _order: ""
    await run.step(40)
    assert (await run.service.state())["pools"]["decode"]["denied"] == []


async def test_a_planner_that_only_advises_fails_nothing() -> None:
    run = await refused()
    state = {**await run.service.state(), "advisory": True}
    (finding,) = doctor_system._denied(state)
    assert finding.status == "warn" and "by hand" in finding.remedy
    assert (await run.service.state())["advisory"] is False
    advising = await refused(advisory=True)
    assert (await advising.service.state())["advisory"] is True


def test_a_start_that_failed_is_told_with_its_failure_and_one_that_served_is_none() -> None:
    def told(worker_id: str, kind: str, **document: Any) -> Outcome:
        return Outcome("d1", worker_id, kind, 1.0, document)

    found = undone(
        [
            told("p-1", "ready"),
            told("p-1", "failed", note="killed days later"),
            told("p-2", "failed", note="agent ended", start={"failure": "signature: none"}),
            told("p-3", "lost"),
            told("p-4", "drain_failed", note="worker 'p-4' is not known"),
        ]
    )
    assert found == {
        "d1": [
            {"worker_id": "p-2", "kind": "failed", "why": "signature: none"},
            {"worker_id": "p-3", "kind": "lost", "why": "no reason given"},
            {"worker_id": "p-4", "kind": "drain_failed", "why": "worker 'p-4' is not known"},
        ]
    }


def test_alike_reasons_are_told_once_and_the_first_three_of_them() -> None:
    rows = [{"worker_id": f"p-{i}", "kind": "refused", "why": "no room"} for i in range(3)]
    rows += [{"worker_id": f"p-{i}", "kind": "drain_failed", "why": f"{i}"} for i in range(4, 8)]
    assert undone_lines({"decision_id": "d1", "undone": rows}) == [
        "p-0 and 2 more refused: no room",
        "p-4 drain refused: 4",
        "p-5 drain refused: 5",
        "2 more reasons: readyplane explain d1",
    ]
    assert undone_lines({"decision_id": "d1"}) == []
