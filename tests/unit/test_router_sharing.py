"""Several routers on one store, and one router without its store, on virtual time."""

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest

from readyplane.core.errors import LostLease, NoPair, ReadyplaneError, StaleEpoch, Unavailable
from readyplane.core.kv import KvEvent, KvEventBatch
from readyplane.core.work import EventKind, Slo, sequence_hashes
from readyplane.core.worker import Role, WorkerState
from readyplane_router import sharing
from readyplane_router.pair import PairPolicy
from readyplane_router.policy import RouterPolicy
from readyplane_router.seats import Use
from readyplane_router.store import MemoryStore
from tests.router_world import (
    MODEL,
    SERVED,
    FakeWorker,
    World,
    events,
    on_virtual_time,
    serving,
    shape,
)

P, D = Role.PREFILL, Role.DECODE
POLICY = RouterPolicy(
    pair=PairPolicy(slo=Slo(2.0, 10.0), wait_max_s=3.0, empty_wait_max_s=3.0, prefill_ahead_s=60.0),
    redis_absence_max_s=20.0,
    reservation_ttl_s=10.0,
)


class Flaky:
    """A store that can be taken away, and come back as it was or empty."""

    def __init__(self, inner: MemoryStore) -> None:
        self.inner, self.away, self.shared = inner, False, True

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name == "watch":
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.away:
                raise Unavailable("the store does not answer", "start it")
            return await method(*args, **kwargs)

        return call


def flaky(world: World) -> Flaky:
    store = Flaky(MemoryStore(world.clock, shared=True))
    world.store = store
    return store


# --------------------------------------------------------------------------- several routers


def test_workers_of_one_router_serve_at_another() -> None:
    async def main(world: World) -> None:
        one, two = await world.router(), await world.router()
        p0 = await world.worker(one, "p0", P)
        await world.worker(two, "d0", D)
        await asyncio.sleep(1.5)
        for router in (one, two):
            fleet = await router.list_workers()
            assert {k: w.state for k, w in fleet.workers.items()} == {
                "p0": WorkerState.READY,
                "d0": WorkerState.READY,
            }
        pair = await two.route(shape("r1"))
        assert (pair.prefill.worker_id, pair.prefill.epoch) == ("p0", p0.lease.epoch)
        assert await one.complete(events(pair, EventKind.FINISHED, output_tokens=5)) == 0
        assert (await world.store.usage(MODEL)) == {"p0": Use(), "d0": Use()}
        await two.drain("p0", reason="elsewhere", deadline_s=60.0)
        await asyncio.sleep(1.5)
        assert [d.kind for d in (await p0.renew()).directives] == ["drain"]
        with pytest.raises(NoPair):
            await one.route(shape("r2"))

    on_virtual_time(main, policy=POLICY, shared=True)


def test_a_leader_is_fenced_off_at_every_router() -> None:
    """B146: a planner that slept drains nobody, not even at a router that never saw its successor."""

    async def main(world: World) -> None:
        one, two = await world.router(), await world.router()
        await world.worker(one, "p0", P)
        await asyncio.sleep(1.5)
        await one.signals(MODEL, leader_epoch=4)
        with pytest.raises(StaleEpoch):
            await two.drain("p0", leader_epoch=3)
        with pytest.raises(StaleEpoch):
            await two.signals(MODEL, leader_epoch=3)
        assert (await two.drain("p0", leader_epoch=4)).state is WorkerState.DRAINING

    on_virtual_time(main, policy=POLICY, shared=True)


def test_a_session_may_move_to_another_router() -> None:
    async def main(world: World) -> None:
        one, two = await world.router(), await world.router()
        p0 = await world.worker(one, "p0", P, renewing=False)
        moved = FakeWorker(two, p0.offer)
        moved.lease = p0.lease
        for _ in range(10):  # longer than a lease
            await moved.renew()
            await asyncio.sleep(2.0)
        for router in (one, two):
            assert (await router.list_workers()).workers["p0"].state is WorkerState.READY
        # A restarted one that registers at the other router fences the first everywhere.
        await world.worker(two, "p0", P, incarnation="p0-2")
        await asyncio.sleep(1.5)
        with pytest.raises(LostLease):
            await p0.renew()

    on_virtual_time(main, policy=POLICY, shared=True)


def test_two_routers_never_promise_the_last_place_twice() -> None:
    """Both decide at the same time on views that do not know of each other: the store decides."""

    async def main(world: World) -> None:
        one, two = await world.router(), await world.router()
        await world.worker(one, "p0", P)
        small = serving(max_num_seqs=5)
        await world.worker(one, "d0", D, serves=small)
        await asyncio.sleep(1.5)
        tasks = [
            asyncio.create_task(router.route(shape(f"{name}{i}", 16, first=i)))
            for i in range(5)
            for name, router in (("a", one), ("b", two))
        ]
        await asyncio.sleep(2.0)
        done = [t.result() for t in tasks if t.done()]
        assert len(done) == 5
        assert (await world.store.usage(MODEL))["d0"].sequences == 5
        conflicts = sum(r.desks[MODEL].take_conflicts for r in (one, two))
        assert conflicts > 0
        for pair in done:
            owner = one if pair.reservation_id in one.desks[MODEL].held else two
            await owner.complete(events(pair, *SERVED))
        await asyncio.sleep(1.5)
        assert sum(t.done() for t in tasks) == 10
        await asyncio.gather(*tasks, return_exceptions=True)

    on_virtual_time(main, policy=POLICY, shared=True)


def test_a_request_repeated_at_another_router_is_the_same_reservation() -> None:
    async def main(world: World) -> None:
        one, two = await world.router(), await world.router()
        await world.worker(one, "p0", P)
        await world.worker(one, "d0", D)
        await asyncio.sleep(1.5)
        first = await one.route(shape("r1"))
        again = await two.route(shape("r1"))
        assert again == first
        assert (await world.store.usage(MODEL))["d0"].sequences == 1
        assert not two.desks[MODEL].held
        assert two.desks[MODEL].decodes[0].sequences == 0
        assert await two.complete(events(again, *SERVED)) == 0
        assert (await world.store.usage(MODEL))["d0"] == Use()

    on_virtual_time(main, policy=POLICY, shared=True)


def test_a_router_that_dies_leaves_nothing_reserved_for_ever() -> None:
    async def main(world: World) -> None:
        one = await world.router()
        dying = world.service()
        await dying.start()
        await world.worker(one, "p0", P)
        await world.worker(one, "d0", D)
        await dying.members._resync()
        for number in range(5):
            await dying.route(shape(f"r{number}", first=number))
        assert (await world.store.usage(MODEL))["d0"].sequences == 5
        await asyncio.sleep(12.0)
        assert (await world.store.usage(MODEL)) == {"p0": Use(), "d0": Use()}

    on_virtual_time(main, policy=POLICY, shared=True)


def test_a_restarted_router_knows_its_workers_at_once_and_pays_for_its_former_life() -> None:
    """B51: nobody is told `no workers` because a router has just begun."""

    async def main(world: World) -> None:
        first = world.service()
        await first.start()
        await world.worker(first, "p0", P, renewing=False)
        d0 = await world.worker(first, "d0", D, renewing=False)
        pair = await first.route(shape("r1"))
        version = (await first.list_workers()).version
        again = await world.router()
        fleet = await again.list_workers()
        assert fleet.version > version
        assert {w.state for w in fleet.workers.values()} == {WorkerState.READY}
        assert (await again.route(shape("r2"))).prefill.worker_id == "p0"
        assert await again.complete(events(pair, EventKind.FINISHED)) == 0
        moved = FakeWorker(again, d0.offer)
        moved.lease = d0.lease
        assert (await moved.renew()).lease.epoch == d0.lease.epoch

    on_virtual_time(main, policy=POLICY, shared=True)


def test_kv_events_reach_the_other_routers_and_late_ones_catch_up() -> None:
    async def main(world: World) -> None:
        one, two = await world.router(), await world.router()
        p0 = await world.worker(one, "p0", P)
        await world.worker(one, "p1", P)
        await world.worker(one, "d0", D)
        await asyncio.sleep(2.5)
        hashes = sequence_hashes(shape("x", 320).token_ids, 16)
        half = len(hashes) // 2
        await p0.renew(kv_events=(KvEventBatch(0, (KvEvent("stored", hashes[:half]),)),))
        await p0.renew(kv_events=(KvEventBatch(1, (KvEvent("stored", hashes[half:]),)),))
        await asyncio.sleep(2.5)
        pair = await two.route(shape("r1", 320))
        assert (pair.prefill.worker_id, pair.prefill.cached_tokens) == ("p0", 319)
        late = await world.router()
        await p0.renew(kv_events=(KvEventBatch(2, (KvEvent("stored", (5,)),)),))
        await asyncio.sleep(12.5)
        pair = await late.route(shape("r2", 320))
        assert (pair.prefill.worker_id, pair.prefill.cached_tokens) == ("p0", 319)
        await p0.leave()
        await asyncio.sleep(2.5)
        for router in (one, two, late):
            assert router.desks[MODEL].index.matched(hashes, now_s=world.clock.monotonic_s()) == {}

    on_virtual_time(main, policy=replace(POLICY, lease_ttl_s=6.0), shared=True)


# --------------------------------------------------------------------------- without the store


def test_without_its_store_a_router_serves_on_then_refuses_and_nobody_dies() -> None:
    async def main(world: World) -> None:
        store = flaky(world)
        router = await world.router()
        await world.worker(router, "p0", P)
        await world.worker(router, "d0", D)
        held = await router.route(shape("before"))
        store.away = True
        pair = await router.route(shape("r1"))
        assert (await router.list_workers()).degraded == "the store is away (degraded)"
        await router.complete(events(pair, *SERVED))
        await router.complete(events(held, *SERVED))
        await asyncio.sleep(10.0)
        fleet = await router.list_workers()
        assert {w.state for w in fleet.workers.values()} == {WorkerState.READY}
        another = await world.worker(router, "d1", D)  # leases and gate go on, too
        assert another.lease.epoch > 0
        kept = await router.route(shape("kept"))
        await asyncio.sleep(11.5)
        assert (await router.list_workers()).degraded == "the store is away (cut_off)"
        with pytest.raises(Unavailable, match="redis_absence_max_s"):
            await router.route(shape("r2"))
        store.away = False
        await asyncio.sleep(1.5)
        assert (await router.list_workers()).degraded == ""
        usage = await world.store.usage(MODEL)
        assert usage["d0"].sequences + usage["d1"].sequences == 0  # `kept` ran out meanwhile
        assert await router.complete(events(kept, EventKind.FINISHED)) == 1
        await asyncio.sleep(20.0)
        fleet = await router.list_workers()
        assert {w.state for w in fleet.workers.values()} == {WorkerState.READY}
        await router.complete(events(await router.route(shape("r3")), *SERVED))
        assert all(use == Use() for use in (await world.store.usage(MODEL)).values())

    on_virtual_time(main, policy=POLICY)


@pytest.mark.parametrize("lost", [False, True])
def test_a_store_that_comes_back_is_refilled_and_no_epoch_goes_back(lost: bool) -> None:
    async def main(world: World) -> None:
        store = flaky(world)
        router = await world.router()
        p0 = await world.worker(router, "p0", P)
        d0 = await world.worker(router, "d0", D)
        silent = await world.worker(router, "d1", D, renewing=False)
        held = await router.route(shape("r1"))
        store.away = True
        await asyncio.sleep(3.0)
        meanwhile = await router.route(shape("r2"))
        await router.complete(events(held, *SERVED))
        if lost:
            store.inner = MemoryStore(world.clock, shared=True)
        store.away = False
        await asyncio.sleep(1.5)
        usage = await world.store.usage(MODEL)
        assert sum(use.sequences for use in usage.values()) == 2  # both ends of `meanwhile`
        assert usage[meanwhile.decode.worker_id].sequences == 1
        records = {r.offer.worker_id: r for r, _ in await world.store.workers()}
        assert records["p0"].epoch == p0.lease.epoch and records["d0"].epoch == d0.lease.epoch
        assert records["p0"].state is WorkerState.READY
        # The one that stopped renewing is found out in the end, not at once.
        assert (await router.list_workers()).workers["d1"].state is WorkerState.READY
        await asyncio.sleep(14.0)
        states = {k: w.state for k, w in (await router.list_workers()).workers.items()}
        assert states["p0"] is WorkerState.READY and states["d0"] is WorkerState.READY
        assert states.get("d1", WorkerState.GONE) is WorkerState.GONE
        again = await silent.register()
        assert again.epoch > max(p0.lease.epoch, d0.lease.epoch)

    on_virtual_time(main, policy=replace(POLICY, reservation_ttl_s=60.0))


def test_a_router_that_was_stopped_does_not_take_its_own_silence_for_its_workers() -> None:
    async def main(world: World) -> None:
        router = world.service()
        await router.start()
        made = [await world.worker(router, name, P, renewing=False) for name in ("p0", "p1")]
        for _ in range(8):
            await asyncio.sleep(1.0)
            for worker in made:
                await worker.renew()
            await router.tick()
        await asyncio.sleep(30.0)  # stopped: nothing is heard, nothing is told
        for _ in range(12):
            await router.tick()
            await asyncio.sleep(1.0)
            await made[0].renew()
        states = {k: w.state for k, w in (await router.list_workers()).workers.items()}
        assert states == {"p0": WorkerState.READY, "p1": WorkerState.GONE}

    on_virtual_time(main, policy=POLICY)


@pytest.mark.parametrize("older", [False, True])
def test_a_store_replaced_between_two_looks_kills_nobody(older: bool) -> None:
    """Restarted empty, or from an old copy whose leases have all run out, before anybody noticed."""

    async def main(world: World) -> None:
        store = flaky(world)
        router = await world.router()
        for name, role in (("p0", P), ("d0", D), ("d1", D)):
            await world.worker(router, name, role)
        await asyncio.sleep(1.0)
        held = await router.route(shape("r1"))
        copy_of = MemoryStore(world.clock, shared=True, name="another life")
        if older:
            copy_of._models = copy.deepcopy(store.inner._models)
            for worker_id, kept in copy_of._model(MODEL).leases.items():
                copy_of._model(MODEL).leases[worker_id] = replace(kept, expires_s=0.0)
        store.inner = copy_of
        pair = await router.route(shape("r2"))
        await asyncio.sleep(30.0)
        fleet = await router.list_workers()
        assert {w.state for w in fleet.workers.values()} == {WorkerState.READY}
        assert router.link.absences == 0 and fleet.degraded == ""
        late = await router.route(shape("r3"))
        usage = await world.store.usage(MODEL)
        assert sum(usage[name].sequences for name in ("d0", "d1")) == 3
        for one in (held, pair, late):
            await router.complete(events(one, *SERVED))
        assert all(use == Use() for use in (await world.store.usage(MODEL)).values())

    on_virtual_time(main, policy=replace(POLICY, reservation_ttl_s=60.0))


def test_with_several_routers_a_cut_off_one_serves_its_share_only() -> None:
    async def main(world: World) -> None:
        store = flaky(world)
        one, two = await world.router(), await world.router()
        await world.worker(one, "p0", P)
        await world.worker(one, "d0", D, serves=serving(max_num_seqs=10))
        await asyncio.sleep(2.5)
        store.away = True
        await asyncio.sleep(1.5)
        placed = 0
        for router, name in ((one, "a"), (two, "b")):
            for number in range(10):
                try:
                    await router.route(shape(f"{name}{number}", 16, first=number), dry_run=True)
                    await router.route(shape(f"{name}{number}", 16, first=number))
                    placed += 1
                except ReadyplaneError:
                    break
        assert placed == 10  # five each

    on_virtual_time(main, policy=POLICY)


# --------------------------------------------------------------------------- packed forms


def test_batches_and_snapshots_survive_the_log() -> None:
    batch = KvEventBatch(
        7,
        (
            KvEvent("stored", (1, 2**64 - 1), 5),
            KvEvent("removed", (3,), None, "cpu"),
            KvEvent("cleared"),
        ),
    )
    packed = sharing.pack_batch(batch)
    assert sharing.unpack_batch(packed) == batch
    chains = [("gpu", (1, 2, 3)), ("disk", (2**63,))]
    snapshot = sharing.pack_snapshot(7, chains)
    assert sharing.unpack_snapshot(snapshot) == (7, chains)
    for garbled in (b"", b"\xc1", packed[:-1], snapshot[:-3], snapshot):
        assert sharing.unpack_batch(garbled) is None
    for garbled in (b"", packed, snapshot[:-3]):
        assert sharing.unpack_snapshot(garbled) is None
