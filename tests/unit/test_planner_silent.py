"""A worker of which nothing is heard any more, while its process still runs: how it is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console

from readyplane.core.worker import Fleet, Role, WorkerState
from readyplane_lab.cli import doctor_system
from readyplane_lab.cli.workers import fleet_document, fleet_table
from tests.unit.cli_world import worker
from tests.unit.planner_world import Box, HandClock, Run, World, planner, policy


async def frozen() -> tuple[Run, Box]:
    """A pair that serves; the agent of its decode worker is stopped, its lease has expired."""
    run = await planner(World(HandClock(), rps=lambda _t: 2.0), policy(orphan_s=60.0))
    await run.step(20)
    box = run.world.members(Role.DECODE, WorkerState.READY)[0]
    box.state = WorkerState.GONE
    await run.step(1)
    return run, box


async def row_of(run: Run, box: Box) -> dict[str, Any]:
    rows = (await run.service.state())["workers"]
    (found,) = [r for r in rows if r["worker_id"] == box.order.worker_id]
    return dict(found)


async def test_a_frozen_worker_is_never_shown_as_ordered() -> None:
    run, box = await frozen()
    row = await row_of(run, box)
    assert (row["state"], row["unheard_s"]) == ("gone", None), "it may just be ending"
    box.leased = False  # the router has forgotten it by now
    await run.step(10)
    row = await row_of(run, box)
    assert row["state"] == "gone" and row["start"]["segments"]
    assert 9.0 <= row["unheard_s"] <= 11.0
    box.leased, box.state = True, WorkerState.READY  # it goes on
    await run.step(1)
    row = await row_of(run, box)
    assert (row["state"], row["unheard_s"]) == ("ready", None)


async def test_a_worker_that_the_router_lost_without_a_word_keeps_its_state() -> None:
    """As behind a router that was started again and has not heard of it yet."""
    run = await planner(World(HandClock(), rps=lambda _t: 2.0), policy(orphan_s=60.0))
    await run.step(20)
    box = run.world.members(Role.DECODE, WorkerState.READY)[0]
    box.leased = False
    await run.step(8)
    row = await row_of(run, box)
    assert row["state"] == "ready" and row["unheard_s"] is not None
    box.exited_s, box.state = run.world.clock.now_s, WorkerState.GONE
    await run.step(2)
    rows = (await run.service.state())["workers"]
    assert box.order.worker_id not in {r["worker_id"] for r in rows}


async def test_who_was_told_to_go_is_not_missed() -> None:
    run, box = await frozen()
    box.draining_s = run.world.clock.now_s
    await run.step(1)
    box.leased = False
    await run.step(8)
    assert (await row_of(run, box))["unheard_s"] is None


async def test_commands_say_that_nothing_is_heard_of_it() -> None:
    run, box = await frozen()
    box.leased = False
    await run.step(8)
    row = await row_of(run, box)
    (finding,) = doctor_system._workers({"workers": [row]})
    assert finding.status == "warn" and "nothing was heard of it" in finding.found
    assert "orphan_s" in finding.remedy
    for lost in (row["worker_id"], "another"):  # the router still shows it as gone, or does not
        gone = replace(worker(lost, WorkerState.GONE), draining_s=None)
        screen = Console(width=240, record=True)
        screen.print(fleet_table(fleet_document(Fleet(1, {gone.worker_id: gone}), [row])))
        assert screen.export_text().count("nothing heard of it for") == 1
