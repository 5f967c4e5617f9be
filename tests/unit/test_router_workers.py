"""The router's workers on virtual time: how one becomes routable, is shut by a circuit, drains, ends."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from readyplane.core.errors import (
    InvalidField,
    LostLease,
    NoPair,
    StaleEpoch,
    Unavailable,
)
from readyplane.core.kv import KvEvent, KvEventBatch
from readyplane.core.work import EventKind
from readyplane.core.worker import LoadReport, Role, WorkerState
from readyplane.ports import Pair, RankReport
from readyplane_router.ends import LOST_WAIT_S
from tests.router_world import (
    DIGEST,
    MODEL,
    PROFILE,
    QUICK,
    SERVED,
    FakeWorker,
    World,
    all_free,
    events,
    fleet_of,
    offer,
    on_virtual_time,
    serving,
    shape,
)

P, D = Role.PREFILL, Role.DECODE


# --------------------------------------------------------------------------- workers


def test_only_the_gate_makes_a_worker_routable() -> None:
    """B47: registered is not ready."""

    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "d0", D)
        worker = FakeWorker(router, offer("p0", P))
        await worker.register()
        assert "the group is forming" in "; ".join(await worker.admit())
        await worker.form()
        wrong = {"token_ids": [0], "eos_ok": True, "sampling_ok": True}
        reasons = await worker.admit(canary=wrong)
        assert reasons == ("canary: answered 0, known answer 7, 8, 9",)
        seen = (await router.list_workers()).workers["p0"]
        assert seen.state is WorkerState.PROVISIONED and seen.serving is None
        assert [c.name for c in seen.checks if not c.passed] == ["canary"]
        with pytest.raises(NoPair):
            await router.route(shape("r1"), dry_run=True)
        assert await worker.admit() == ()
        assert await worker.admit() == ()
        assert world.admissions == ["d0", "p0"]
        assert (await router.route(shape("r1"))).prefill.worker_id == "p0"

    on_virtual_time(main)


def test_the_registry_away_delays_admission_and_lets_nobody_in_unchecked() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        worker = FakeWorker(router, offer("p0", P))
        await worker.register()
        await worker.form()
        world.registry.away = True
        with pytest.raises(Unavailable):
            await worker.admit()
        world.registry.away = False
        assert await worker.admit() == ()

    on_virtual_time(main)


def test_a_profile_nobody_registered_comes_with_the_evidence() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        worker = FakeWorker(router, offer("p0", P))
        await worker.register()
        await worker.form()
        slow = replace(PROFILE, name="slow10", slow_factor=10.0)
        serves = serving(profile="slow10")
        claim = {"name": "slow10", "digest": slow.digest}
        assert "slow10 is not registered" in "; ".join(
            await worker.admit(serves=serves, profile=claim)
        )
        whole = {**claim, "document": slow.document()}
        assert await worker.admit(serves=serves, profile=whole) == ()
        broken = {**claim, "name": "b", "document": {**slow.document(), "name": "b", "gpus": -1}}
        other = await FakeWorker(router, offer("p1", P)).register()
        assert other.epoch > worker.lease.epoch

        late = FakeWorker(router, offer("p2", P))
        await late.register()
        await late.form()
        assert "profile.gpus" in "; ".join(
            await late.admit(serves=serving(profile="b"), profile=broken)
        )

    on_virtual_time(main)


def test_one_failed_rank_fails_the_group_even_after_admission() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        worker = await world.worker(router, "p0", P, renewing=False)
        status = await router.report_rank(
            RankReport("p0", "p0-1", worker.lease.epoch, 0, "failed", DIGEST, "ECC error")
        )
        assert status.state == "failed" and status.waiting_for == ("rank 0: ECC error",)
        assert (await router.list_workers()).workers["p0"].state is WorkerState.GONE
        with pytest.raises(LostLease, match="ECC error"):
            await worker.renew()

    on_virtual_time(main)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"worker_id": ""}, "worker_id"),
        ({"worker_id": "x\x1fy"}, "worker_id"),
        ({"model": "m" * 300}, "model"),
        ({"ranks": 0}, "ranks"),
        ({"manifest_digest": ""}, "manifest_digest"),
        ({"agent_url": "http://169.254.169.254"}, "agent_url"),
    ],
)
def test_an_offer_that_makes_no_sense_gets_no_lease(changes: dict[str, Any], words: str) -> None:
    async def main(world: World) -> None:
        router = await world.router()
        with pytest.raises(InvalidField, match=words):
            await router.register(replace(offer("p0", P), **changes))
        assert (await router.list_workers()).workers == {}

    on_virtual_time(main)


def test_a_lease_that_is_not_renewed_runs_out_and_takes_its_reservations_with_it() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        silent = await world.worker(router, "d0", D, renewing=False)
        pair = await router.route(shape("r1"))
        await asyncio.sleep(9.0)
        fleet = await router.list_workers()
        assert fleet.workers["d0"].state is WorkerState.GONE
        assert fleet.workers["p0"].state is WorkerState.READY
        assert await router.complete(events(pair, EventKind.FINISHED)) == 1
        await all_free(world, router)
        with pytest.raises(LostLease):
            await silent.renew()
        await asyncio.sleep(QUICK.gone_kept_s + 2.0)
        assert "d0" not in (await router.list_workers()).workers
        # The same process may come back, with a new epoch, through the gate.
        before = silent.lease.epoch
        await silent.start()
        assert silent.lease.epoch > before

    on_virtual_time(main, policy=QUICK)


def test_a_newer_incarnation_fences_the_older_one() -> None:
    """B72, B146: paused, replaced, resumed: the old one never acts again."""

    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "d0", D)
        old = await world.worker(router, "p0", P, renewing=False)
        pair = await router.route(shape("r1"))
        new = await world.worker(router, "p0", P, incarnation="p0-2")
        assert new.lease.epoch > old.lease.epoch
        with pytest.raises(LostLease):
            await old.renew()
        with pytest.raises(LostLease, match="taken over"):
            await old.register()
        await old.leave()  # does not touch its successor (B145)
        fleet = await router.list_workers()
        assert fleet.workers["p0"].offer.incarnation == "p0-2"
        assert fleet.workers["p0"].state is WorkerState.READY
        assert await router.complete(events(pair, EventKind.FINISHED)) == 1
        with pytest.raises(StaleEpoch):
            await router.drain("p0", epoch=old.lease.epoch)
        again = await router.route(shape("r2"))
        assert again.prefill.epoch == new.lease.epoch
        await router.complete(events(again, *SERVED))
        await asyncio.sleep(1.5)  # what the fenced one held is given back with the next round
        await all_free(world, router)

    on_virtual_time(main)


def test_drain_waits_for_the_last_request_and_for_the_worker_s_word() -> None:
    """B60, B61, B62: no new work at once; leave only when nobody needs it."""

    async def main(world: World) -> None:
        router = await world.router()
        _, d0, _ = await fleet_of(world, router, d=2)
        pairs: dict[str, Pair] = {}
        for number in range(2):
            pair = await router.route(shape(f"r{number}", first=number * 999))
            pairs[pair.decode.worker_id] = pair
        assert set(pairs) == {"d0", "d1"}
        before = await router.drain(
            "d0", reason="scale down", deadline_s=120.0, scale_decision_id="dec-1"
        )
        assert before.state is WorkerState.DRAINING
        assert before.drain_reason == "scale down (dec-1)"
        for number in range(5):
            pair = await router.route(shape(f"new{number}"))
            assert pair.decode.worker_id == "d1"
            await router.complete(events(pair, *SERVED))
        answer = await d0.renew(drained=False)
        assert [d.kind for d in answer.directives] == ["drain"]
        assert 0 < (answer.directives[0].deadline_s or 0) <= 120.0
        await asyncio.sleep(50.0)
        await router.complete(events(pairs["d0"], EventKind.PROGRESS, output_tokens=3))
        assert [d.kind for d in (await d0.renew(drained=True)).directives] == ["drain"]
        await router.complete(events(pairs["d0"], *SERVED))
        assert [d.kind for d in (await d0.renew(drained=True)).directives] == ["leave"]
        assert (await router.drain("d0")).state is WorkerState.DRAINING
        await d0.leave()
        assert (await router.list_workers()).workers["d0"].state is WorkerState.GONE
        assert router.desks[MODEL].counters.aborted == 0

    on_virtual_time(main)


def test_a_drain_deadline_ends_it_with_counted_aborts() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        _, d0 = await fleet_of(world, router)
        late = await router.route(shape("late"))
        await router.route(shape("silent"))
        await router.drain("d0", deadline_s=5.0)
        await asyncio.sleep(6.5)
        answer = await d0.renew()
        assert [d.kind for d in answer.directives] == ["leave"]
        assert router.members.counts["drain_aborts"] == 2
        assert await router.complete(events(late, EventKind.FINISHED)) == 1  # just in time
        await all_free(world, router)
        desk = router.desks[MODEL]
        assert (desk.counters.finished, desk.counters.aborted) == (1, 0)
        await asyncio.sleep(LOST_WAIT_S + 2.0)
        assert (desk.counters.finished, desk.counters.aborted) == (1, 1)
        assert desk.ends.aborts == {"drain_deadline": 1}

    on_virtual_time(main)


def counted(by: str, count: int) -> dict[str, int]:
    """What an engine tells that counts iterations, tokens, or only what it prefilled."""
    if by == "iterations":
        return {"iterations_total": count}
    tokens = {"prefill_tokens_total": 1000, "decode_tokens_total": count}
    return tokens if by == "tokens" else {"prefill_tokens_total": 1000}


@pytest.mark.parametrize("by", ["iterations", "tokens"])
def test_running_sequences_without_iterations_are_a_stall_and_idleness_is_not(by: str) -> None:
    """B46, B48. An engine that counts no iterations (SGLang) is judged by its tokens."""

    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        d0 = await world.worker(router, "d0", D, renewing=False)

        async def report(seconds: int, *, iterations: int, running: int) -> WorkerState:
            for step in range(seconds):
                moving = iterations + step if iterations < 0 else iterations
                told = counted(by, abs(moving))
                await d0.renew(load=LoadReport(**told, running=running, waiting=0))
                await asyncio.sleep(1.0)
            return (await router.list_workers()).workers["d0"].state

        assert await report(30, iterations=7, running=0) is WorkerState.READY
        assert await report(8, iterations=7, running=2) is WorkerState.READY
        assert await report(4, iterations=7, running=2) is WorkerState.STALLED
        with pytest.raises(NoPair, match="stalled"):
            await router.route(shape("r1"), dry_run=True)
        assert await report(2, iterations=8, running=2) is WorkerState.READY
        assert (await router.route(shape("r2"))).decode.worker_id == "d0"
        assert await report(30, iterations=-100, running=2) is WorkerState.READY

    on_virtual_time(main)


def test_an_engine_that_counts_nothing_is_never_called_stalled() -> None:
    """Not known is no standing still."""

    async def main(world: World) -> None:
        router = await world.router()
        d0 = await world.worker(router, "d0", D, renewing=False)
        for _ in range(60):
            await d0.renew(load=LoadReport(**counted("half", 0), running=2))
            await asyncio.sleep(1.0)
        assert (await router.list_workers()).workers["d0"].state is WorkerState.READY

    on_virtual_time(main)


def test_a_fresh_worker_without_reports_gets_a_share_not_a_stampede() -> None:
    """B80."""

    async def main(world: World) -> None:
        router = await world.router()
        await fleet_of(world, router)
        for number in range(40):
            pair = await router.route(shape(f"r{number}", 16, first=number * 99))
            await router.complete(events(pair, EventKind.PREFILL_DONE))
        new = await world.worker(router, "d1", D, renewing=False)
        await asyncio.sleep(1.0)
        for number in range(30):
            pair = await router.route(shape(f"n{number}", 16, first=number * 99))
            await router.complete(events(pair, EventKind.PREFILL_DONE))
        seats = {s.worker_id: s.sequences for s in router.desks[MODEL].decodes}
        assert seats == {"d0": 54, "d1": 16}
        await new.renew(load=LoadReport(running=16, iterations_total=5))
        await asyncio.sleep(1.0)
        pair = await router.route(shape("later", 16))
        assert pair.decode.worker_id == "d1"

    on_virtual_time(main, policy=replace(QUICK, pair=replace(QUICK.pair, tpot_admit=100.0)))


def test_old_reports_are_not_taken_for_idleness() -> None:
    """B74: a worker whose engine was last seen idle long ago gets probe traffic only."""

    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        await world.worker(router, "d0", D)
        old = await world.worker(router, "d1", D, renewing=False)
        await old.renew(load=LoadReport(running=0, iterations_total=1, age_s=60.0))
        await asyncio.sleep(1.5)
        for number in range(10):
            pair = await router.route(shape(f"r{number}", 16, first=number * 99))
            await router.complete(events(pair, EventKind.PREFILL_DONE))
        seats = {s.worker_id: s.sequences for s in router.desks[MODEL].decodes}
        assert seats == {"d0": 9, "d1": 1}

    on_virtual_time(main)


def test_load_that_nobody_here_promised_counts_too() -> None:
    """B81: the engine's own figures and the routers' promises are separate, and both count."""

    async def main(world: World) -> None:
        router = await world.router()
        await fleet_of(world, router, d=2)
        d0 = FakeWorker(router, offer("d0", D))
        d0.lease = await d0.register()
        await d0.renew(load=LoadReport(running=20, waiting=3, iterations_total=9))
        pairs = [await router.route(shape(f"r{n}", 16, first=n * 99)) for n in range(6)]
        assert {p.decode.worker_id for p in pairs} == {"d1"}
        full = LoadReport(running=1, kv_used_blocks=9_999, iterations_total=10)
        await d0.renew(load=full)
        worker = (await router.list_workers()).workers["d0"]
        assert worker.load.kv_used_blocks == 9_999 and worker.promised_kv_blocks == 0

    on_virtual_time(main)


def test_the_fleet_is_watched_from_now_on() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        seen: list[tuple[int, list[str]]] = []

        async def follow() -> None:
            async for fleet in router.watch(MODEL):
                states = [f"{w.worker_id}:{w.state}" for w in fleet.workers.values()]
                seen.append((fleet.version, states))

        task = asyncio.create_task(follow())
        await asyncio.sleep(0)
        worker = await world.worker(router, "p0", P)
        await asyncio.sleep(0)
        await router.drain("p0")
        await asyncio.sleep(0)
        await worker.leave()
        await asyncio.sleep(0)
        task.cancel()
        states = [states for _, states in seen]
        assert states[0] == []
        assert ["p0:ready"] in states and ["p0:draining"] in states
        assert states[-1] == ["p0:gone"]
        versions = [version for version, _ in seen]
        assert versions == sorted(set(versions))

    on_virtual_time(main)


def test_hundreds_of_comings_and_goings_leave_nothing_behind() -> None:
    """B100, B160."""

    async def main(world: World) -> None:
        router = await world.router()
        for number in range(300):
            worker = await world.worker(
                router, f"p{number % 50}", P, renewing=False, incarnation=f"i{number}"
            )
            await worker.renew(kv_events=(KvEventBatch(0, (KvEvent("stored", tuple(range(20))),)),))
            await worker.leave()
        await asyncio.sleep(15.0)
        desk = router.desks[MODEL]
        assert (await router.list_workers()).workers == {}
        assert not (desk.seats or desk.prefills or desk.circuits or desk.held or len(desk.index))

    on_virtual_time(main)


# --------------------------------------------------------------------------- circuits


def test_a_failed_leg_gives_everything_back_and_is_paired_anew_elsewhere() -> None:
    """B71, R19.3."""

    async def main(world: World) -> None:
        router = await world.router()
        await fleet_of(world, router, p=2)
        first = await router.route(shape("r1"))
        bad = first.prefill.worker_id
        failed = events(first, EventKind.LEG_FAILED, failed_worker_id=bad, detail="refused")
        assert await router.complete(failed) == 0
        await all_free(world, router)
        second = await router.route(shape("r1"), replaces=first.reservation_id, avoid=[bad])
        assert second.prefill.worker_id not in (bad, "")
        assert second.reservation_id != first.reservation_id
        told = (await router.signals()).models[MODEL]
        assert (told.arrivals_total, told.repaired_total) == (1, 1)
        # A re-pair that comes before the failure was told releases the old one, too.
        third = await router.route(shape("r1"), replaces=second.reservation_id, avoid=[])
        assert await router.complete(events(second, EventKind.ABORTED)) == 1
        await router.complete(events(third, *SERVED))
        await all_free(world, router)

    on_virtual_time(main)


def test_a_circuit_opens_for_failures_only_and_closes_with_one_good_probe() -> None:
    """B68, B70."""

    async def main(world: World) -> None:
        router = await world.router()
        await fleet_of(world, router)

        async def fail(number: int, detail: str) -> None:
            pair = await router.route(shape(f"{detail}{number}"))
            await router.complete(
                events(pair, EventKind.LEG_FAILED, failed_worker_id="p0", detail=detail)
            )

        for number in range(20):
            await fail(number, "busy: 429")
        for number in range(5):
            await fail(number, "connection refused")
        with pytest.raises(NoPair, match="circuit open") as caught:
            await router.route(shape("now"))
        assert caught.value.retry_after_s == 5.0
        await asyncio.sleep(6.1)
        probe = await router.route(shape("probe"))
        with pytest.raises(NoPair, match="probe under way"):
            await router.route(shape("meanwhile"))
        await router.complete(events(probe, *SERVED))
        again = await router.route(shape("again"))
        await router.complete(events(again, *SERVED))
        await all_free(world, router)

    on_virtual_time(main)


def test_a_probe_that_ends_without_a_verdict_does_not_shut_its_worker_for_ever() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await fleet_of(world, router)
        for number in range(5):
            pair = await router.route(shape(f"r{number}"))
            await router.complete(events(pair, EventKind.LEG_FAILED, failed_worker_id="p0"))
        await asyncio.sleep(6.1)
        probe = await router.route(shape("probe"))
        await router.complete(events(probe, EventKind.ABORTED))
        await asyncio.sleep(1.1)
        assert (await router.route(shape("next"))).prefill.worker_id == "p0"

    on_virtual_time(main)
