"""A worker that served, lost its lease and is admitted anew is no start that is late."""

from __future__ import annotations

from readyplane.core.worker import WorkerState
from tests.unit.planner_world import HandClock, World, planner, policy


def world() -> World:
    """Six requests a second."""
    return World(HandClock(), rps=lambda _t: 6.0)


def rejoin(run_world: World, at_s: float, takes_s: float) -> None:
    """Everybody who serves is between two leases for so long."""
    for box in run_world.boxes.values():
        if box.alive and box.state is WorkerState.READY:
            box.state, box.ready_s = WorkerState.PROVISIONED, at_s + takes_s


async def test_a_fleet_that_rejoins_is_not_given_back() -> None:
    w = world()
    run = await planner(w, policy())
    await run.step(120)
    before, orders = run.desired[-1][1:], len(w.provisions)
    assert not w.releases
    rejoin(w, w.clock.now_s, 3.0)
    await run.step(20)
    assert not w.releases, "nobody is given back for the age of its allocation"
    assert min(p for p, _ in run.between(118, 140)) >= before[0] - 1
    assert len(w.provisions) - orders <= 2, "who rejoins is counted as coming"


async def test_one_that_never_comes_back_is_given_back() -> None:
    """A guard always has an exit."""
    w = world()
    run = await planner(w, policy())
    await run.step(120)
    stuck = next(b for b in w.boxes.values() if b.state is WorkerState.READY)
    stuck.state, stuck.ready_s = WorkerState.PROVISIONED, w.clock.now_s + 1e9
    await run.step(600)
    assert stuck.order.worker_id in w.releases
