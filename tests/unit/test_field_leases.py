"""Field reports about leases and time, each a test named after its number; on virtual time.

Elsewhere: B144 (test_registry_sources, test_agent_loader, test_agent_transfer), B145 of a reader's
place (test_registry_store), B146 (test_planner_leaders: three processes, SIGSTOP), B151
(test_kit_stores, test_router_store), B153 (test_registry_bytes), B154 (test_registry_port,
test_registry_service), B155 and B157 of the planner (test_planner_signals, test_planner_takeover).
"""

import asyncio
import time
from dataclasses import replace

import pytest

from readyplane.core.errors import InvalidField, LostLease, NoPair, StaleEpoch
from readyplane.core.kv import KvEvent
from readyplane.core.work import EventKind, RequestEvent, Slo
from readyplane.core.worker import Lease, LoadReport, Role, WorkerState
from readyplane_lab.simulator.loop import VirtualClock, VirtualLoop
from readyplane_planner.leadership import Leadership, MemoryLeaseStore
from readyplane_router import circuit
from readyplane_router.pair import PairPolicy
from readyplane_router.policy import RouterPolicy
from readyplane_router.prefix import PrefixIndex
from readyplane_router.service import RouterService
from readyplane_router.store import Record, Renew
from tests.router_world import (
    MODEL,
    FakeWorker,
    World,
    events,
    offer,
    on_virtual_time,
    shape,
)

P, D = Role.PREFILL, Role.DECODE
POLICY = RouterPolicy(
    pair=PairPolicy(slo=Slo(2.0, 10.0), wait_max_s=3.0, empty_wait_max_s=3.0, prefill_ahead_s=60.0),
    reservation_ttl_s=10.0,
)


class SkewedClock(VirtualClock):
    """A clock whose wall time is off by something that may change."""

    def __init__(self, loop: VirtualLoop, off_s: float) -> None:
        super().__init__(loop)
        self.off_s = off_s

    def wall_s(self) -> float:
        return super().wall_s() + self.off_s


async def skewed_router(world: World, off_s: float) -> tuple[RouterService, SkewedClock]:
    """A router of the world on a machine whose wall clock is off."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    usual, world.clock = world.clock, SkewedClock(loop, off_s)
    clock = world.clock
    router = await world.router()
    world.clock = usual
    return router, clock


def test_b145_who_lost_its_lease_cannot_end_or_renew_its_successor_s() -> None:
    """A expires, B acquires, A releases and renews, late and at another router, too."""

    async def main(world: World) -> None:
        routers = [await world.router(), await world.router()]
        a = await world.worker(routers[0], "d0", D, renewing=False)
        await asyncio.sleep(15.0)
        b = await world.worker(routers[1], "d0", D, incarnation="d0-2")
        await asyncio.sleep(2.0)
        for router in routers:
            a.router = router
            await a.leave()
            with pytest.raises((LostLease, StaleEpoch)):
                await a.renew()
        record = Record(a.offer, a.lease.epoch, WorkerState.GONE)
        assert not await world.store.end(record)  # read and deleted in one step, by epoch
        assert not await world.store.put(record)
        assert await world.store.renew([Renew(MODEL, "d0", a.lease.epoch, 9.0)]) == ["stale"]
        assert (await b.renew()).lease.epoch == b.lease.epoch > a.lease.epoch
        for router in routers:
            worker = (await router.list_workers()).workers["d0"]
            assert (worker.epoch, worker.state) == (b.lease.epoch, WorkerState.READY)

    on_virtual_time(main, policy=POLICY, shared=True)


def test_b146_a_leader_that_slept_is_refused_by_epoch_where_it_acts() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        for name, role in (("p0", P), ("d0", D)):
            await world.worker(router, name, role)
        await router.signals(MODEL, leader_epoch=3)
        await router.signals(MODEL, leader_epoch=4)  # its successor has acted
        with pytest.raises(StaleEpoch):
            await router.drain("d0", leader_epoch=3)
        assert (await router.list_workers()).workers["d0"].state is WorkerState.READY
        await router.drain("d0", leader_epoch=4)

    on_virtual_time(main, policy=POLICY)


@pytest.mark.parametrize("batched", [False, True])
def test_b148_what_outlived_its_reservation_is_said_to_be_unknown(batched: bool) -> None:
    """A read of twice the lease without a word: its place was given away, and its end counts not."""

    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        await world.worker(router, "d0", D)
        pair, other = await router.route(shape("slow")), await router.route(shape("slow too"))
        await asyncio.sleep(2 * POLICY.reservation_ttl_s + 2.0)
        assert router.desks[MODEL].decodes[0].sequences == 0
        ends = [
            *events(pair, EventKind.FINISHED),
            *events(other, EventKind.FINISHED),
            RequestEvent("never.there", EventKind.FINISHED),
        ]
        if batched:
            assert await router.complete(ends) == 3
        else:
            assert [await router.complete([end]) for end in ends] == [1, 1, 1]

    on_virtual_time(main, policy=POLICY)


async def test_b150_who_waits_for_the_lead_never_goes_on_without_it() -> None:
    """A section of three leases with renewal; then its holder is wedged: the lease is the cap."""
    now = [0.0]
    store = MemoryLeaseStore(lambda: now[0])
    number = iter(range(1, 9))

    async def next_epoch() -> int:
        return next(number)

    def member(name: str) -> Leadership:
        return Leadership(store, name=MODEL, holder=name, ttl_s=6.0, now_s=lambda: now[0])

    holder, waiter = member("a"), member("b")
    assert await holder.renew(next_epoch)
    for _ in range(9):
        now[0] += 2.0
        assert not await waiter.renew(next_epoch) and not waiter.leading
        assert waiter.other == "a"  # busy, and by whom
        assert await holder.renew(next_epoch)
    for _ in range(3):  # wedged: it renews no more, and knows itself that its time is up
        assert holder.leading and not await waiter.renew(next_epoch)
        now[0] += 2.0
    assert not holder.leading
    assert await waiter.renew(next_epoch) and waiter.epoch > 1
    assert not await holder.renew(next_epoch)


@pytest.mark.parametrize("off_s", [-90.0, 0.0, 90.0])
def test_b152_wall_clocks_that_disagree_end_no_lease_early_or_late(off_s: float) -> None:
    """Expiry is reckoned and judged by the store's clock alone."""

    async def main(world: World) -> None:
        keeper, _ = await skewed_router(world, off_s)
        judge, _ = await skewed_router(world, -off_s)
        await world.worker(keeper, "d0", D)
        silent = await world.worker(keeper, "d1", D, renewing=False)
        began_s = world.clock.monotonic_s()
        ended_s = None
        while ended_s is None:
            fleet = await judge.list_workers()
            known = fleet.workers.get("d1")
            if known is not None and known.state is WorkerState.GONE:
                ended_s = world.clock.monotonic_s() - began_s
            assert world.clock.monotonic_s() - began_s < 30.0
            await asyncio.sleep(0.1)
        # Told to the store with the next round, and looked at once a second by either router.
        assert silent.lease.ttl_s <= ended_s <= silent.lease.ttl_s + 3.0
        assert (await judge.list_workers()).workers["d0"].state is WorkerState.READY

    on_virtual_time(main, policy=POLICY, shared=True)


@pytest.mark.parametrize("off_s", [-70.0, 70.0])
def test_b155_reports_are_stamped_when_they_come(off_s: float) -> None:
    """An agent says how old a reading is, never when it was: its wall clock plays no part."""

    async def main(world: World) -> None:
        router, _ = await skewed_router(world, off_s)
        worker = await world.worker(router, "d0", D, renewing=False)
        await worker.renew(load=LoadReport(running=3, iterations_total=1, age_s=0.5))
        member = router.roster.members["d0"]
        assert member.load_s == pytest.approx(world.clock.monotonic_s() - 0.5)
        assert (await router.list_workers()).workers["d0"].load.running == 3

    on_virtual_time(main, policy=POLICY)


@pytest.mark.parametrize("running", [2, 0, None])
def test_b46_an_engine_that_hangs_is_stalled_and_keeps_its_lease(running: int | None) -> None:
    """Its agent lives and tells the last reading again, older each time; it comes back in place.

    What it did when it was last read does not count: one that froze idle takes no request either.
    """

    async def main(world: World) -> None:
        router = await world.router()
        worker = await world.worker(router, "d0", D, renewing=False)
        await world.worker(router, "p0", P)
        seen = LoadReport(running=running, iterations_total=7)
        await worker.renew(load=seen)
        for age_s in range(1, 23):
            await asyncio.sleep(1.0)
            await worker.renew(load=replace(seen, age_s=float(age_s)))
            if age_s == 15:  # one that computes a long prompt answers as late
                young = (await router.list_workers()).workers["d0"]
                assert young.state is WorkerState.READY
        hung = (await router.list_workers()).workers["d0"]
        assert hung.state is WorkerState.STALLED and hung.load.running == running
        with pytest.raises(NoPair, match="stalled"):
            await router.route(shape("r1"), dry_run=True)
        await worker.renew(load=replace(seen, iterations_total=8))
        await asyncio.sleep(1.5)
        well = (await router.list_workers()).workers["d0"]
        assert (well.state, well.epoch) == (WorkerState.READY, hung.epoch)

    on_virtual_time(main, policy=POLICY)


def test_b156_the_end_of_a_worker_with_a_million_blocks_is_no_pause() -> None:
    """Taking it out costs a small part of what hearing of its blocks did."""
    index = PrefixIndex()
    for name in ("keeps", "goes"):
        index.add(name, blocks_max=2_000_000)
    kept = list(range(1, 129))
    index.apply("keeps", 0, [KvEvent("stored", tuple(kept))], now_s=0.0)
    began_s = time.process_time()
    for number in range(1_000_000 // 250):
        first = 1_000 + number * 250
        index.apply(
            "goes", number, [KvEvent("stored", tuple(range(first, first + 250)))], now_s=0.0
        )
    heard_s, began_s = time.process_time() - began_s, time.process_time()
    index.drop("goes")
    dropped_s = time.process_time() - began_s
    assert dropped_s < heard_s / 2
    assert index.matched(kept, now_s=1.0) == {"keeps": 128}


@pytest.mark.parametrize("step_s", [-7_200.0, 7_200.0])
def test_b157_a_stepped_wall_clock_moves_no_cooldown(step_s: float) -> None:
    """A circuit stays open for its time, a lease for its own; what others wrote is never ahead."""

    async def main(world: World) -> None:
        router, clock = await skewed_router(world, 0.0)
        for name, role in (("p0", P), ("d0", D)):
            await world.worker(router, name, role)
        desk = router.desks[MODEL]
        key = desk.decodes[0].key
        failed = [
            RequestEvent(f"r{n}", EventKind.LEG_FAILED, failed_worker_id="d0")
            for n in range(POLICY.circuit_failures_max)
        ]
        await router.complete(failed)
        assert desk.circuits[key].state == circuit.OPEN
        clock.off_s = step_s
        await asyncio.sleep(POLICY.circuit_open_s - 1.0)
        assert desk.circuits[key].state == circuit.OPEN
        await asyncio.sleep(2.5)
        assert desk.circuits[key].state != circuit.OPEN
        # Another router, started on the stepped clock, reads times that lie ahead of it or far
        # behind: ages are capped at none, and nobody is taken for dead or for new.
        late, _ = await skewed_router(world, step_s)
        now_s = world.clock.monotonic_s()
        for worker in (await late.list_workers()).workers.values():
            assert worker.state is WorkerState.READY
            assert worker.ready_s is not None and worker.ready_s <= now_s

    on_virtual_time(main, policy=POLICY, shared=True)


def test_b158_times_that_leave_a_lease_no_margin_are_refused_with_the_sum() -> None:
    for ttl_s in (0.6, 1.2, 6.0, 60.0):
        lease = Lease("w", "i", 1, ttl_s)
        assert lease.renewed_within_s + ttl_s / 6 <= 0.9 * ttl_s  # with the longest tick allowed
        RouterPolicy(lease_ttl_s=ttl_s, tick_s=ttl_s / 6)
    with pytest.raises(InvalidField) as caught:
        RouterPolicy(lease_ttl_s=4.0, tick_s=1.0)
    assert caught.value.field == "router_policy.lease_ttl_s"
    words = "renewal every 1.33333 + answer 1 + retry 0.5 + tick_s 1 = 3.83333 s must leave 10%"
    assert words in str(caught.value) and "6 x tick_s (6)" in str(caught.value)


def test_b144_a_worker_restarted_at_its_address_is_another_worker() -> None:
    """The old record is fresh, the address the same: no prefix, seat or reservation is inherited."""

    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        old = await world.worker(router, "d0", D)
        held = await router.route(shape("r1"))
        old.left = True
        new = FakeWorker(router, offer("d0", D, incarnation="d0-2"))
        await new.register()
        assert not router.desks[MODEL].held  # its reservations went with the former life
        assert [seat.worker_id for seat in router.desks[MODEL].decodes] == []
        await new.form()
        assert await new.admit() == ()
        pair = await router.route(replace(shape("r2"), max_tokens=8))
        assert (pair.decode.worker_id, pair.decode.epoch) == ("d0", new.lease.epoch)
        assert pair.decode.engine_url == held.decode.engine_url
        assert pair.decode.incarnation != held.decode.incarnation
        assert pair.decode.cached_tokens == 0

    on_virtual_time(main, policy=POLICY)
