"""Several routers on one store, and one router without its store, on virtual time."""

import asyncio
import contextlib
import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from readyplane.core.errors import LostLease, NoPair, ReadyplaneError, StaleEpoch, Unavailable
from readyplane.core.work import EventKind, RequestEvent, Slo, sequence_hashes
from readyplane.core.worker import Role, WorkerState
from readyplane.ports import KvEvent, KvEventBatch, Pair
from readyplane_lab.simulator.loop import VirtualLoop
from readyplane_router.pair import PairPolicy
from readyplane_router.policy import RouterPolicy
from readyplane_router.service import RouterService
from readyplane_router.store import MemoryStore, Use
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


# --------------------------------------------------------------------------- every interleaving


class SharedReservations(RuleBasedStateMachine):
    """Routers, crashes, expiries, retries against what must hold: no leak, no double booking."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.world = World(self.loop, policy=POLICY, shared=True)
        self.routers: list[RouterService] = []
        self.open: dict[str, Pair] = {}
        self.workers: dict[str, FakeWorker] = {}
        self.count = 0

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    @initialize()
    def begin(self) -> None:
        async def start() -> None:
            self.routers = [await self.world.router(), await self.world.router()]
            for name, role in (("p0", P), ("d0", D), ("d1", D)):
                await self._start(name, role)
            await asyncio.sleep(1.2)

        self.run(start())

    async def _start(self, name: str, role: Role) -> None:
        self.count += 1
        serves = serving(max_num_seqs=4, blocks=400)
        self.workers[name] = await self.world.worker(
            self.routers[self.count % 2],
            name,
            role,
            serves=serves,
            incarnation=f"{name}-{self.count}",
            renewing=False,
        )

    @rule(which=st.integers(0, 1), isl=st.integers(1, 600))
    def route(self, which: int, isl: int) -> None:
        self.count += 1
        request = shape(f"r{self.count}", isl, first=self.count)

        async def ask() -> None:
            try:
                pair = await self.routers[which].route(request)
            except ReadyplaneError:
                return
            self.open[pair.reservation_id] = pair

        self.run(ask())

    @rule(which=st.integers(0, 1), number=st.integers(0, 9), again=st.integers(1, 2))
    def repeat(self, which: int, number: int, again: int) -> None:
        """The same call again, at either router: the same reservation or, if over, a new one."""
        if not self.open:
            return
        reservation = list(self.open)[number % len(self.open)]
        request_id = reservation.rpartition(".")[0]

        async def ask() -> None:
            for _ in range(again):
                try:
                    pair = await self.routers[which].route(shape(request_id, 32))
                    self.open[pair.reservation_id] = pair
                except ReadyplaneError:
                    return

        self.run(ask())

    @rule(
        which=st.integers(0, 1),
        number=st.integers(0, 9),
        kind=st.sampled_from(
            [
                EventKind.PREFILL_DONE,
                EventKind.FIRST_TOKEN,
                EventKind.PROGRESS,
                EventKind.FINISHED,
                EventKind.FINISHED,
                EventKind.ABORTED,
                EventKind.LEG_FAILED,
            ]
        ),
        tokens=st.integers(0, 900),
    )
    def tell(self, which: int, number: int, kind: EventKind, tokens: int) -> None:
        if not self.open:
            return
        reservation = list(self.open)[number % len(self.open)]
        event = RequestEvent(reservation, kind, output_tokens=tokens, failed_worker_id="p0")
        self.run(self.routers[which].complete([event]))
        if kind in (EventKind.FINISHED, EventKind.ABORTED, EventKind.LEG_FAILED):
            self.open.pop(reservation)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]), renewing=st.booleans())
    def time_passes(self, seconds: float, renewing: bool) -> None:
        async def wait() -> None:
            if renewing:
                for worker in self.workers.values():
                    with contextlib.suppress(ReadyplaneError):
                        await worker.renew()
            await asyncio.sleep(seconds)

        self.run(wait())

    @rule(name=st.sampled_from(["p0", "d0", "d1"]))
    def worker_restarts(self, name: str) -> None:
        self.run(self._start(name, P if name == "p0" else D))

    @rule(name=st.sampled_from(["d0", "d1"]))
    def worker_leaves(self, name: str) -> None:
        self.run(self.workers[name].leave())

    @rule(which=st.integers(0, 1))
    def router_crashes(self, which: int) -> None:
        """Its memory is gone; another one starts on the same store."""

        async def replace_it() -> None:
            old = self.routers[which]
            for model in old.desks:
                timer = old._timers.pop(model, None)
                if timer is not None:
                    timer[1].cancel()
            task = self.world._tasks[which]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            fresh = self.world.service()
            await fresh.start()
            self.world._tasks[which] = asyncio.create_task(fresh.run())
            self.routers[which] = fresh

        self.run(replace_it())

    @invariant()
    def the_store_adds_up_and_is_never_overbooked(self) -> None:
        if not self.routers:
            return
        store = self.world.store
        assert isinstance(store, MemoryStore)
        model = store._model(MODEL)
        for worker_id, seat in model.seats.items():
            sides = [
                side
                for reservation in model.reservations.values()
                for side in reservation.sides
                if side is not None and side.worker_id == worker_id and side.epoch == seat.epoch
            ]
            assert seat.used.sequences == len(sides)
            assert seat.used.blocks == sum(side.use.blocks for side in sides)
            assert seat.used.sequences <= seat.sequences

    @invariant()
    def each_router_s_books_balance(self) -> None:
        for router in self.routers:
            for desk in router.desks.values():
                for seat in desk.seats.values():
                    held = [h for h in desk.held.values() if h.decode is seat]
                    feeding = [h for h in desk.held.values() if h.prefill is seat]
                    prefilling = [h for h in feeding if h.prefilling]
                    assert seat.decoding == len(held)
                    assert seat.sequences == len(held) + len(prefilling)
                    assert set(seat.works) == {h.reservation_id for h in prefilling}
                    assert seat.work_s == pytest.approx(sum(seat.works.values()), abs=1e-6)
                    assert seat.transfers >= 0 and seat.prefill_tokens >= 0
                    blocks = sum(h.decode_blocks for h in held)
                    blocks += sum(h.prefill_blocks for h in feeding if h.reading)
                    assert seat.kv_blocks == blocks

    def teardown(self) -> None:
        """When all is told or has run out, nothing is left anywhere."""
        if not self.routers:
            self.loop.close()
            return

        async def settle() -> None:
            await asyncio.sleep(POLICY.reservation_ttl_s + 3.0)
            assert all(use == Use() for use in (await self.world.store.usage(MODEL)).values())
            for router in self.routers:
                for desk in router.desks.values():
                    assert not desk.held and not desk.queue and not desk.waiting
            await self.world.end()

        self.run(settle())
        self.loop.close()


TestSharedReservations = SharedReservations.TestCase
TestSharedReservations.settings = settings(max_examples=25, stateful_step_count=25)
