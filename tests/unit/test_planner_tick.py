"""What a tick leaves out: documents nobody asked for, and instances that ended long ago."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from readyplane.core.errors import Unavailable
from readyplane.core.worker import Role, WorkerState
from readyplane.ports import Instance, Order
from readyplane_planner.decide import Decision, Memory, Plan, decide
from readyplane_planner.journal import MemoryJournal
from readyplane_planner.outcomes import Judge
from readyplane_planner.signals import Observation
from tests.unit.planner_world import DIGEST, MODEL, Box, HandClock, World, planner


def ended(world: World, count: int) -> None:
    """Instances that the actuator still lists and nobody waits for."""
    for i in range(count):
        order = Order(f"old-{i}", Role.PREFILL, MODEL, "h200-slow10", DIGEST)
        gone_s = world.clock.now_s - 500.0
        world.boxes[order.worker_id] = Box(
            order, gone_s - 100.0, gone_s - 90.0, WorkerState.GONE, exited_s=gone_s, failed=True
        )


async def test_a_decision_reads_of_the_ended_only_who_is_awaited() -> None:
    looked: list[Observation] = []

    def brain(
        observation: Observation, plan: Plan, memory: Memory, *, now_s: float, decision_id: str
    ) -> tuple[Decision, Memory]:
        looked.append(observation)
        return decide(observation, plan, memory, now_s=now_s, decision_id=decision_id)

    world = World(HandClock(), rps=lambda _t: 2.0, hang=lambda order: order.role is Role.DECODE)
    ended(world, 50)
    run = await planner(world, brain=brain)
    await run.step(2)
    assert {a.worker_id[:2] for a in looked[-1].allocations} == {"p-", "d-"}
    starting = next(b for b in world.boxes.values() if b.order.role is Role.DECODE)
    starting.exited_s, starting.failed, starting.leased = world.clock.now_s, True, False
    await run.step(1)
    mine = [a for a in looked[-1].allocations if a.worker_id == starting.order.worker_id]
    assert [a.state for a in mine] == ["failed"]
    assert "start_failed" in run.codes()
    await run.step(3)
    assert starting.order.worker_id not in {a.worker_id for a in looked[-1].allocations}


async def test_a_worker_that_fails_after_the_router_forgot_it_is_still_told_of() -> None:
    world = World(HandClock(), rps=lambda _t: 2.0)
    run = await planner(world)
    await run.step(20)
    box = world.members(Role.PREFILL, WorkerState.READY)[0]
    box.exited_s, box.failed, box.leased = world.clock.now_s, True, False
    await run.step(1)
    told = await run.journal.outcomes(MODEL, "failed", limit=10)
    assert [o.subject for o in told] == [box.order.worker_id]


async def test_nobody_watches_and_no_document_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await planner(World(HandClock(), rps=lambda _t: 2.0))
    await run.step(2)

    def made(*_arguments: Any) -> Any:
        raise AssertionError("a document was made")

    with monkeypatch.context() as patch:
        patch.setattr("readyplane_planner.service.state_document", made)
        patch.setattr("readyplane_planner.service.state_pools", made)
        await run.step(20)
    assert (await run.service.state())["pools"]["prefill"]["desired"] == run.desired[-1][1]


async def test_the_history_is_what_the_states_said() -> None:
    run = await planner(World(HandClock(), rps=lambda t: 1.0 + t / 10.0))
    assert run.service._history.document()["prefill"] == {
        "desired": [],
        "provisioned": [],
        "ready": [],
        "load": [],
    }
    said: list[dict[str, Any]] = []
    for _ in range(40):
        await run.step(1)
        said.append(await run.service.state())
    history = said[-1]["history"]
    assert history["t_s"] == [s["now_s"] for s in said]
    for pool in ("prefill", "decode"):
        for key, values in history[pool].items():
            assert values == [s["pools"][pool][key] for s in said], (pool, key)
    for stem, pool in (("ttft", "prefill"), ("tpot", "decode")):
        assert history[f"{stem}_predicted_s"] == [s["pools"][pool]["predicted_s"] for s in said]
        assert history[f"{stem}_actual_p90_s"] == [
            s["latency"][stem]["actual"]["p90_s"] for s in said
        ]
    assert len(set(history["prefill"]["ready"])) > 1


async def test_what_came_of_an_order_outlives_a_journal_that_is_away() -> None:
    """A start's moments are seen once: what cannot be written in that tick is written later."""
    journal = MemoryJournal()
    run = await planner(World(HandClock(), rps=lambda _t: 2.0), journal=journal)

    async def away(*_arguments: Any, **_how: Any) -> Any:
        raise Unavailable("database", "wait")

    await run.step(1)  # both orders are given, and answered before the next tick
    for where, name in ((journal, "attach"), (Judge, "look")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, name, away)
            with pytest.raises(Unavailable):
                await run.step(1)
    await run.step(20)
    ordered = {d.decision_id: d.orders for d in run.decisions if d.orders}
    decision_id, orders = next(iter(ordered.items()))
    told = {(o.subject, o.kind) for o in (await journal.get(decision_id))[1]}
    steps = ("ordered", "allocated", "running", "provisioned", "ready")
    assert {(o.worker_id, kind) for o in orders for kind in steps} <= told


class CutOff(World):
    """An actuator whose answers never arrive: it takes each order all the same."""

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        await super().provision(order, leader_epoch=leader_epoch)
        raise Unavailable("no answer within 5 s", "look at the actuator")


async def test_an_order_whose_call_was_cut_off_is_known_to_be_taken_by_the_list() -> None:
    """A start that is over before the order is given again has no other answer to show."""
    world = CutOff(HandClock(), rps=lambda _t: 2.0, t_ready_s=lambda _n: 0.5)
    run = await planner(world)
    await run.step(5)
    first = next(d for d in run.decisions if d.orders)
    explained = await run.service.explain(first.decision_id)
    accepted = [m for m in explained["timeline"] if m["what"] == "order accepted"]
    assert len(accepted) == len(first.orders) == 2
    assert all(m["after_s"] is not None for m in accepted)
    told = {(o.subject, o.kind) for o in (await run.journal.get(first.decision_id))[1]}
    assert {(o.worker_id, "unanswered") for o in first.orders} <= told


class Slow(World):
    """An actuator whose answer takes longer than a tick."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.answers = asyncio.Event()

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        await self.answers.wait()
        return await super().provision(order, leader_epoch=leader_epoch)


@pytest.mark.parametrize(("why", "kind"), [("", "ordered"), ("no room", "refused")])
async def test_an_answer_that_comes_ticks_later_is_heard(why: str, kind: str) -> None:
    """Else a refusal holds nothing up, and an order that was taken has no answer to show."""
    world = Slow(HandClock(), rps=lambda _t: 2.0, refuse=lambda _order: why)
    run = await planner(world)
    await run.step(3)
    assert await run.journal.outcomes(MODEL, kind, limit=9) == []
    world.answers.set()
    await run.step(2)
    told = await run.journal.outcomes(MODEL, kind, limit=9)
    first = next(d for d in run.decisions if d.orders)
    assert {o.worker_id for o in first.orders} == {o.subject for o in told}
    assert ("denied" in run.codes(3)) is bool(why)
