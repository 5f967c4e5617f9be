"""Stages of a serving worker's capacity profile, and standbys that hold a process only, at the router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from readyplane.core import gate_checks as gc
from readyplane.core.errors import NoPair
from readyplane.core.stage import CapacityStage, UpgradeState
from readyplane.core.worker import CheckResult, Holds, LoadReport, Role, Serving, WorkerState
from readyplane.ports import GateVerdict
from readyplane_router import group
from readyplane_router.stages import why_not_stage
from readyplane_router.telling import LOAD_S_DEFAULT
from tests.router_world import (
    PROFILE,
    FakeWorker,
    World,
    evidence,
    offer,
    on_virtual_time,
    serving,
    shape,
)

P, D = Role.PREFILL, Role.DECODE
SHAPES = (1, 2, 4)


def at(
    state: UpgradeState, blocks: int, *, shapes: tuple[int, ...] = (), failure: str = ""
) -> Serving:
    stage = CapacityStage(state, PROFILE.name, shapes, blocks * 16, failure=failure)
    return serving(blocks=blocks, stage=stage)


FIRST = at(UpgradeState.FIRST, 10_000)
CAPTURING = at(UpgradeState.CAPTURING, 9_000)
COMPLETE = at(UpgradeState.COMPLETE, 9_000, shapes=SHAPES)
BACK = at(UpgradeState.ROLLED_BACK, 10_000, failure="other tokens")


def check(blocks: int = 9_000, **changes: Any) -> CheckResult:
    pair = {"before": [5, 6], "after": [5, 6]}
    told = {"answers": [pair, pair], "shapes": list(SHAPES), "kv_total_blocks": blocks, **changes}
    return CheckResult(gc.GRAPH_STAGE, passed=True, evidence=told)


async def publish(worker: FakeWorker, serves: Serving, *checks: CheckResult) -> GateVerdict:
    return await worker.router.admit(
        worker.offer.worker_id,
        worker.offer.incarnation,
        worker.lease.epoch,
        serving=serves,
        checks=checks,
    )


def test_the_seat_follows_every_stage_and_promises_stay() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        d = await world.worker(router, "d0", D, serves=FIRST)
        (seat,) = router.desk("demo").decodes
        eager, whole = PROFILE.eager, PROFILE
        assert (seat.times.name, seat.kv_total_blocks) == (eager.name, 10_000)
        await router.route(shape("r0"))
        held = seat.kv_blocks
        assert held > 0
        seat.decode_factor = 1.7  # measured against the eager times
        assert (await publish(d, CAPTURING)).admitted
        assert (seat.times.name, seat.kv_total_blocks, seat.kv_blocks) == (eager.name, 9_000, held)
        assert seat.decode_factor == 1.7, "same times, same factor"
        assert (await publish(d, COMPLETE, check())).admitted
        assert (seat.times.name, seat.kv_total_blocks, seat.kv_blocks) == (whole.name, 9_000, held)
        assert seat.decode_factor == 1.0, "what was measured against other times says nothing"
        shown = (await router.list_workers()).workers["d0"]
        assert shown.serving == COMPLETE and shown.checks[-1].name == gc.GRAPH_STAGE
        counts = router.members.counts
        assert (await publish(d, COMPLETE, check())).admitted and counts["staged"] == 2, "once"

    on_virtual_time(main)


def test_a_stage_that_failed_goes_back_and_says_so() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        d = await world.worker(router, "d0", D, serves=FIRST)
        await publish(d, CAPTURING)
        assert (await publish(d, BACK)).admitted
        (seat,) = router.desk("demo").decodes
        assert (seat.times.name, seat.kv_total_blocks) == (PROFILE.eager.name, 10_000)
        shown = (await router.list_workers()).workers["d0"].serving
        assert shown is not None and shown.stage is not None
        assert shown.stage.failure == "other tokens" and shown.stage.digest == FIRST.stage.digest  # type: ignore[union-attr]

    on_virtual_time(main)


@pytest.mark.parametrize(
    ("after", "checks", "why"),
    [
        (COMPLETE, (), "graph_stage: not made"),
        (COMPLETE, (check(), check()), "graph_stage: not made"),
        (COMPLETE, (replace(check(), passed=False, reason="hangs"),), "graph_stage: hangs"),
        (COMPLETE, (check(answers=[{"before": [5], "after": [5]}]),), "1 questions"),
        (
            COMPLETE,
            (check(answers=[{"before": [5], "after": [5]}, {"before": [5], "after": [6]}]),),
            "question 1 got other tokens",
        ),
        (COMPLETE, (check(answers=[{"before": [], "after": []}] * 2),), "other tokens"),
        (COMPLETE, (check(blocks=9_001),), "9001 KV blocks were left"),
        (replace(COMPLETE, kv_total_blocks=9_001), (check(),), "stage.kv_tokens"),
        (at(UpgradeState.COMPLETE, 10_001), (check(10_001),), "10001 KV blocks beside more graphs"),
        (replace(COMPLETE, max_num_seqs=1), (check(),), "max_num_seqs differ"),
        (replace(COMPLETE, engine_url="http://127.0.0.1:1"), (check(),), "engine_url differ"),
        (replace(BACK, stage=replace(BACK.stage, failure="")), (), "stage.failure"),  # type: ignore[type-var]
        (replace(COMPLETE, stage=None), (), "it was not started in stages"),
    ],
)
def test_what_is_not_believed_is_named(
    after: Serving, checks: tuple[CheckResult, ...], why: str
) -> None:
    assert why_not_stage(FIRST, COMPLETE, (check(),)) == []
    assert any(why in reason for reason in why_not_stage(FIRST, after, checks))


def test_a_refused_stage_changes_nothing() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        d = await world.worker(router, "d0", D, serves=FIRST)
        verdict = await publish(d, COMPLETE)
        assert not verdict.admitted and verdict.reasons == ("graph_stage: not made",)
        (seat,) = router.desk("demo").decodes
        assert (seat.times.name, seat.kv_total_blocks) == (PROFILE.eager.name, 10_000)
        assert router.members.counts["stages_refused"] == 1

    on_virtual_time(main)


def test_another_router_follows_a_stage() -> None:
    async def main(world: World) -> None:
        one, two = await world.router(), await world.router()
        d = await world.worker(one, "d0", D, serves=FIRST)
        await world.clock.sleep(5.0)
        assert two.desk("demo").decodes[0].kv_total_blocks == 10_000
        await publish(d, CAPTURING)
        await publish(d, COMPLETE, check())
        await world.clock.sleep(5.0)
        (seat,) = two.desk("demo").decodes
        assert (seat.times.name, seat.kv_total_blocks) == (PROFILE.name, 9_000)

    on_virtual_time(main, shared=True)


# ------------------------------------------------------------------ a standby that holds a process


async def process(world: World, router: Any) -> FakeWorker:
    made = FakeWorker(router, replace(offer("d0", D), standby=True, holds=Holds.PROCESS))
    await made.register()
    await made.renew(stands_by=Holds.PROCESS)
    return made


def test_a_process_stands_by_unjudged_and_is_judged_whole_when_it_is_told() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        d = await process(world, router)
        held = (await router.list_workers()).workers["d0"]
        assert (held.state, held.holds) == (WorkerState.STANDBY, Holds.PROCESS)
        assert held.serving is None and held.checks == ()
        for _ in range(200):  # far beyond the time in which a group must form
            await world.clock.sleep(4.0)
            await d.renew(stands_by=Holds.PROCESS)
        assert router.members._members["d0"].group.state == group.FORMING
        with pytest.raises(NoPair):
            await router.route(shape("r0"), dry_run=True)
        await router.activate("d0")
        (word,) = (await d.renew(stands_by=Holds.PROCESS)).directives
        assert word.kind == "activate"
        assert word.deadline_s == pytest.approx(LOAD_S_DEFAULT), "it has to load first"
        await d.renew()  # it loads
        held = (await router.list_workers()).workers["d0"]
        assert (held.state, held.holds) == (WorkerState.STANDBY, None)
        await d.form()
        assert await d.admit(**{gc.CANARY: None}) != (), "no check may be missing"
        assert await d.admit() == ()
        assert (await router.list_workers()).workers["d0"].state is WorkerState.READY

    on_virtual_time(main)


def test_a_process_that_was_told_too_late_stands_by_with_its_weights_and_was_judged() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        d = await process(world, router)
        await router.activate("d0", deadline_s=3.0)
        await d.renew()
        for _ in range(4):
            await world.clock.sleep(1.0)
            await d.renew()
        await d.form()
        assert await d.admit(**{gc.CANARY: None}) != ()
        verdict = await router.admit(
            "d0",
            d.offer.incarnation,
            d.lease.epoch,
            serving=serving(),
            checks=evidence(d.lease.epoch, d.group_epoch),
        )
        assert verdict.standby and len(verdict.checks) == len(gc.GATE_CHECKS)
        await d.renew(stands_by=Holds.WEIGHTS)
        held = (await router.list_workers()).workers["d0"]
        assert (held.state, held.holds) == (WorkerState.STANDBY, Holds.WEIGHTS)

    on_virtual_time(main)


def test_who_falls_asleep_holds_no_prefix_any_more() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        made = FakeWorker(router, replace(offer("d0", D), standby=True, holds=Holds.ASLEEP))
        await made.register()
        await made.form()
        assert await made.admit() == ()
        index = router.desk("demo").index
        member = router.members._members["d0"]
        index.add(member.key, blocks_max=100)
        index.guess(member.key, (1, 2), now_s=world.clock.monotonic_s())
        await made.renew(stands_by=Holds.WEIGHTS, load=LoadReport())
        assert index.matched((1, 2), now_s=world.clock.monotonic_s()) == {member.key: 2}
        await made.renew(stands_by=Holds.ASLEEP)
        assert index.matched((1, 2), now_s=world.clock.monotonic_s()) == {}

    on_virtual_time(main)
