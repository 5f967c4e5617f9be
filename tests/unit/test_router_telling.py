"""Standbys, activations and flips at the router: told until done, heard once, never half."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from readyplane.core.errors import InvalidField, NoPair, NotFound, Refused, StaleEpoch
from readyplane.core.worker import Role, WorkerOffer, WorkerState
from readyplane.ports import Directive, RenewalAnswer
from readyplane_router import lease
from readyplane_router.policy import RouterPolicy
from readyplane_router.told import ACTIVATE, FLIP, Told, is_to_tell, why_not_activate, why_not_flip
from tests.router_world import FakeWorker, World, offer, on_virtual_time, serving, shape

P, D = Role.PREFILL, Role.DECODE
FLIPS = serving(flips=True)
NO_WAIT = RouterPolicy()


async def kinds(worker: FakeWorker, **news: Any) -> list[str]:
    return [d.kind for d in (await worker.renew(**news)).directives]


async def standby(world: World, router: Any, name: str, role: Role) -> FakeWorker:
    """A worker that passed the gate and stands by; it does not renew by itself."""
    made = FakeWorker(router, replace(offer(name, role), standby=True))
    await made.register()
    await made.form()
    assert await made.admit() == ()
    return made


def test_every_state_has_its_moves() -> None:
    assert set(lease.TRANSITIONS) == set(WorkerState)
    assert lease.TRANSITIONS[WorkerState.STANDBY] == {
        WorkerState.READY,
        WorkerState.DRAINING,
        WorkerState.GONE,
    }


def test_a_standby_passed_the_gate_and_meets_no_request() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        d = await standby(world, router, "d0", D)
        held = (await router.list_workers()).workers["d0"]
        assert held.state is WorkerState.STANDBY and held.serving is not None
        assert all(check.passed for check in held.checks)
        assert router.desk("demo").decodes == []
        assert await kinds(d) == []
        # The evidence handed in again changes nothing, and it is no start that was admitted.
        assert await d.admit() == () and world.admissions == ["p0"]
        with pytest.raises(NoPair):
            await router.route(shape("r0"), dry_run=True)

    on_virtual_time(main)


def test_an_activation_is_told_until_done_and_its_time_is_known() -> None:
    async def main(world: World) -> None:
        router = world.service()
        followed: list[tuple[str, str, float]] = []
        router.members._on_followed = lambda what, w, s: followed.append((what, w.worker_id, s))
        await router.start()
        await world.worker(router, "p0", P)
        d = await standby(world, router, "d0", D)
        view = await router.activate("d0", reason="a burst", scale_decision_id="d-1")
        assert (view.state, view.told) == (WorkerState.STANDBY, ACTIVATE)
        assert await router.activate("d0", deadline_s=5.0) == view, "the same word, the same time"
        for _ in range(2):
            (word,) = (await d.renew()).directives
            assert (word.kind, word.reason) == (ACTIVATE, "a burst (d-1)")
        await world.clock.sleep(0.5)
        assert await d.admit() == ()
        held = (await router.list_workers()).workers["d0"]
        assert (held.state, held.told) == (WorkerState.READY, "")
        ((what, name, took_s),) = followed
        assert (what, name) == (ACTIVATE, "d0") and took_s == pytest.approx(0.5)
        assert "d0" not in world.admissions, "no start of its own"
        assert await kinds(d) == [] and (await router.activate("d0")).state is WorkerState.READY
        assert (await router.route(shape("r1"))).decode.worker_id == "d0"
        assert router.members.counts["activated"] == router.members.counts["stood_by"] == 1

    on_virtual_time(main)


def test_an_activation_runs_out_and_nobody_is_half_activated() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        d = await standby(world, router, "d0", D)
        await router.activate("d0", deadline_s=3.0)
        await d.renew()
        for _ in range(4):
            await world.clock.sleep(1.0)
            await d.renew()
        held = (await router.list_workers()).workers["d0"]
        assert (held.state, held.told) == (WorkerState.STANDBY, "")
        assert router.members.counts["activations_expired"] == 1
        # It comes too late: it stands by, and is told so.
        verdict = await router.admit(
            "d0", d.offer.incarnation, d.lease.epoch, serving=serving(), checks=()
        )
        assert verdict.admitted and verdict.standby
        assert router.desk("demo").decodes == []
        await router.activate("d0")
        assert await d.admit() == ()
        assert (await router.list_workers()).workers["d0"].state is WorkerState.READY

    on_virtual_time(main)


async def lost(world: World, router: Any, name: str) -> None:
    """Nobody renews for a whole lease, which is found out."""
    await world.clock.sleep(world.policy.lease_ttl_s + 3 * world.policy.tick_s)
    assert (await router.list_workers()).workers[name].state is WorkerState.GONE


def test_the_word_to_serve_outlives_the_lease_it_was_given_under() -> None:
    """Whether the worker has heard of it or not: it has another epoch and is told on."""

    async def main(world: World) -> None:
        router = await world.router()
        d = await standby(world, router, "d0", D)
        before = d.lease.epoch
        await router.activate("d0", deadline_s=60.0, reason="a burst")
        await lost(world, router, "d0")
        await d.register()
        held = (await router.list_workers()).workers["d0"]
        assert (held.state, held.told) == (WorkerState.PROVISIONED, ACTIVATE)
        assert d.lease.epoch > before
        (word,) = (await d.renew()).directives
        assert (word.kind, word.reason) == (ACTIVATE, "a burst")
        assert word.deadline_s is not None and word.deadline_s <= 51.0, "no second more"
        await d.form()
        assert await d.admit() == ()
        held = (await router.list_workers()).workers["d0"]
        assert (held.state, held.told) == (WorkerState.READY, "")
        counts = router.members.counts
        assert (counts["activations_carried"], counts["activated"]) == (1, 1)
        assert await kinds(d) == []

    on_virtual_time(main)


def test_a_word_that_ran_out_with_the_lease_is_counted_and_told_no_more() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        d = await standby(world, router, "d0", D)
        await router.activate("d0", deadline_s=4.0)
        await lost(world, router, "d0")
        await d.register()
        assert await kinds(d) == []
        await d.form()
        await d.admit()
        held = (await router.list_workers()).workers["d0"]
        assert (held.state, held.told) == (WorkerState.STANDBY, "")
        assert router.members.counts["activations_expired"] == 1

    on_virtual_time(main)


def test_a_word_is_for_the_process_it_was_given_to() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        d = await standby(world, router, "d0", D)
        await router.activate("d0", deadline_s=60.0)
        d.offer = replace(d.offer, incarnation="another-life")
        await d.register()
        assert await kinds(d) == []
        assert router.members.counts["activations_carried"] == 0

    on_virtual_time(main)


def test_a_router_that_came_back_empty_is_told_what_a_standby_was_told() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        say: dict[str, Any] = {"told_left_s": 20.0, "told_reason": "a burst"}
        d = FakeWorker(router, replace(offer("d0", D), standby=True, **say))
        await d.register()
        held = (await router.list_workers()).workers["d0"]
        assert held.told == ACTIVATE and held.offer.told_left_s is None, "true of that moment only"
        (word,) = (await d.renew()).directives
        assert word == Directive(ACTIVATE, 20.0, "a burst")
        await d.form()
        assert await d.admit() == ()
        assert (await router.list_workers()).workers["d0"].state is WorkerState.READY
        plain = FakeWorker(router, replace(offer("d1", D), **say))  # serves untold
        await plain.register()
        assert (await router.list_workers()).workers["d1"].told == ""
        for wrong in (float("nan"), float("inf"), -1.0):
            bad = FakeWorker(router, replace(offer("d2", D), standby=True, told_left_s=wrong))
            with pytest.raises(InvalidField, match=r"offer\.told_left_s"):
                await bad.register()

    on_virtual_time(main)


def test_a_word_that_is_told_on_too_late_leaves_a_standby() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        d = FakeWorker(router, replace(offer("d0", D), standby=True, told_left_s=2.0))
        await d.register()
        await d.form()
        await world.clock.sleep(2.5)
        await d.admit()
        await d.renew()
        await world.clock.sleep(1.5)
        held = (await router.list_workers()).workers["d0"]
        assert (held.state, held.told) == (WorkerState.STANDBY, "")
        assert router.members.counts["activations_expired"] == 1

    on_virtual_time(main)


def test_a_standby_that_still_loads_serves_at_once_when_it_was_told() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        d = FakeWorker(router, replace(offer("d0", D), standby=True))
        await d.register()
        await router.activate("d0")
        await d.form()
        assert await d.admit() == ()
        assert (await router.list_workers()).workers["d0"].state is WorkerState.READY

    on_virtual_time(main)


def test_a_standby_that_is_drained_leaves_and_is_activated_no_more() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        d = await standby(world, router, "d0", D)
        await router.drain("d0", reason="too many")
        assert await kinds(d) == ["leave"]
        with pytest.raises(Refused, match="is draining"):
            await router.activate("d0")
        with pytest.raises(NotFound):
            await router.activate("nobody")
        with pytest.raises(StaleEpoch):
            await router.flip("d0", role=P, epoch=d.lease.epoch + 1)

    on_virtual_time(main)


def test_a_flip_drains_then_serves_the_other_stage_under_a_new_epoch() -> None:
    async def main(world: World) -> None:
        router = world.service()
        followed: list[tuple[str, str, float]] = []
        router.members._on_followed = lambda what, w, s: followed.append((what, w.worker_id, s))
        await router.start()
        p = await world.worker(router, "p0", P, renewing=False, serves=FLIPS)
        await world.worker(router, "p1", P)
        await world.worker(router, "d0", D)
        pair = await router.route(shape("r0"))
        busy = p if pair.prefill.worker_id == "p0" else None
        if busy is None:
            pair = await router.route(shape("r1", first=500))
        assert pair.prefill.worker_id == "p0"
        view = await router.flip("p0", role=D, reason="decode is short")
        assert (view.state, view.told) == (WorkerState.DRAINING, FLIP)
        assert await router.flip("p0", role=D) == view, "the same word again"
        (word,) = (await p.renew(drained=True)).directives
        assert word.kind == FLIP and word.role is D and word.deadline_s, "a request needs it still"
        router.desk("demo").abort_on(router.roster.members["p0"].key, now_s=router.now_s())
        assert (await p.renew(drained=True)).directives == (Directive(FLIP, 0.0, "drained", D),)

        epoch = p.lease.epoch
        await router.leave("p0", p.offer.incarnation, epoch, reason="it becomes decode")
        p.offer = replace(p.offer, role=D)
        await p.register()
        assert p.lease.epoch > epoch
        await p.form()
        assert await p.admit() == ()
        held = (await router.list_workers()).workers["p0"]
        assert (held.role, held.state, held.told) == (D, WorkerState.READY, "")
        assert [(what, name) for what, name, _ in followed] == [(FLIP, "p0")]
        assert {s.worker_id for s in router.desk("demo").decodes} == {"d0", "p0"}
        assert {s.worker_id for s in router.desk("demo").prefills} == {"p1"}
        assert await router.flip("p0", role=D) == (await router.list_workers()).workers["p0"]

    on_virtual_time(main)


def test_a_drain_comes_before_a_flip() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        p = await world.worker(router, "p0", P, renewing=False, serves=FLIPS)
        await router.flip("p0", role=D)
        await router.drain("p0", reason="it goes")
        assert await kinds(p) == ["drain"] and await kinds(p, drained=True) == ["leave"]

    on_virtual_time(main)


@pytest.mark.parametrize(
    ("changes", "state", "flips", "to", "words"),
    [
        ({}, WorkerState.READY, True, D, ""),
        ({}, WorkerState.STALLED, True, D, ""),
        ({}, WorkerState.READY, False, D, "cannot change its stage"),
        ({"attached": True}, WorkerState.READY, False, D, "attached"),
        ({"role": Role.BOTH}, WorkerState.READY, True, D, "serves both stages already"),
        ({"ranks": 4}, WorkerState.READY, True, D, "4 ranks"),
        ({}, WorkerState.STANDBY, True, D, "it is standby"),
        ({}, WorkerState.PROVISIONED, False, D, "it is provisioned"),
        ({}, WorkerState.READY, True, Role.BOTH, "to prefill or to decode"),
    ],
)
def test_a_refused_flip_says_why(
    changes: dict[str, Any], state: WorkerState, flips: bool, to: Role, words: str
) -> None:
    who = replace(WorkerOffer("p0", "1", P, "demo", "h200"), **changes)
    reasons = why_not_flip(who, state, to, flips=flips, told=None)
    assert (not reasons) if not words else any(words in reason for reason in reasons)


def test_one_flip_at_a_time() -> None:
    who = WorkerOffer("p0", "1", P, "demo", "h200")
    becoming = Told(FLIP, 0.0, 9.0, role=D)
    draining = WorkerState.DRAINING
    assert why_not_flip(who, draining, D, flips=True, told=becoming) == []
    assert why_not_flip(who, draining, P, flips=True, told=becoming) == [
        "it is becoming decode already"
    ]


def test_who_needs_no_word_gets_none() -> None:
    plain = WorkerOffer("p0", "1", P, "demo", "h200")
    waits = replace(plain, standby=True)
    for who, state, tells in (
        (waits, WorkerState.PROVISIONED, True),
        (waits, WorkerState.STANDBY, True),
        (plain, WorkerState.PROVISIONED, False),
        (waits, WorkerState.READY, False),
    ):
        assert why_not_activate(who, state) == [] and is_to_tell(who, state) is tells
    assert why_not_activate(waits, WorkerState.DRAINING) == ["p0 is draining"]


def test_words_reach_the_router_that_holds_the_session_and_are_heard_once() -> None:
    async def main(world: World) -> None:
        keeper, other = await world.router(), await world.router()
        d = await standby(world, keeper, "d0", D)
        await world.clock.sleep(1.5)
        seen = (await other.list_workers()).workers["d0"]
        assert seen.state is WorkerState.STANDBY and other.desk("demo").decodes == []
        await other.activate("d0", deadline_s=30.0)
        await world.clock.sleep(1.5)
        assert await kinds(d) == [ACTIVATE]
        assert await d.admit() == ()
        # What was told is done; the store's old word is not heard a second time.
        for _ in range(8):
            await world.clock.sleep(1.0)
            assert await kinds(d) == []
        for router in (keeper, other):
            held = (await router.list_workers()).workers["d0"]
            assert (held.state, held.told) == (WorkerState.READY, "")
            assert [s.worker_id for s in router.desk("demo").decodes] == ["d0"]

    on_virtual_time(main, shared=True)


def listening(router: Any, worker: FakeWorker) -> list[tuple[int, str]]:
    """Epoch and kind of everything that is said to it from now on."""
    heard: list[tuple[int, str]] = []

    def told(answer: RenewalAnswer) -> None:
        heard.extend((answer.lease.epoch, d.kind) for d in answer.directives)

    router.hear(worker.offer.worker_id, worker.offer.incarnation, told)
    return heard


def test_a_word_is_said_at_once_to_whoever_listens_for_it_and_once() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        d = await standby(world, router, "d0", D)
        p = await world.worker(router, "p0", P, serves=FLIPS)
        d_heard, p_heard = listening(router, d), listening(router, p)
        router.hear("d0", "another-life", lambda _: pytest.fail("it is not this one"))
        router.hear("nobody", "1", lambda _: pytest.fail("it is not there"))
        began_s = world.clock.monotonic_s()
        for _ in range(2):
            await router.activate("d0")
            await router.flip("p0", role=D)
        assert world.clock.monotonic_s() == began_s, "nothing was waited for"
        assert d_heard == [(d.lease.epoch, ACTIVATE)] and p_heard == [(p.lease.epoch, FLIP)]
        assert await kinds(d) == [ACTIVATE], "and renewals bring it until it is done"
        assert await d.admit() == ()
        await router.drain("d0", reason="too many")
        assert d_heard[1:] == [(d.lease.epoch, "drain")]

    on_virtual_time(main)


def test_a_word_that_another_router_gave_is_said_by_the_one_that_holds_the_session() -> None:
    async def main(world: World) -> None:
        keeper, other = await world.router(), await world.router()
        d = await standby(world, keeper, "d0", D)
        await world.clock.sleep(1.5)
        heard = listening(keeper, d)
        await other.activate("d0", deadline_s=30.0)
        await world.clock.sleep(0.01)  # as long as the store's news take, and no renewal
        assert heard == [(d.lease.epoch, ACTIVATE)]

    on_virtual_time(main, shared=True)


def test_a_word_that_no_worker_has_heard_goes_with_a_router_that_came_back_empty() -> None:
    async def main(world: World) -> None:
        first = await world.router()
        d = await standby(world, first, "d0", D)
        await first.activate("d0")
        fresh = World(asyncio.get_running_loop(), policy=None, shared=False)  # type: ignore[arg-type]
        empty = await fresh.router()
        again = FakeWorker(empty, d.offer)
        await again.register()
        await again.form()
        assert await again.admit() == () and await kinds(again) == []
        assert (await empty.list_workers()).workers["d0"].state is WorkerState.STANDBY
        await fresh.end()

    on_virtual_time(main)
