"""Routers on one store, every interleaving: crashes, expiries, retries, a store away or older.

Against what must hold whatever happens: no leak, no double booking, no epoch that goes back.
"""

import asyncio
import contextlib
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from readyplane.core.errors import ReadyplaneError, Unavailable
from readyplane.core.work import EventKind, RequestEvent, Slo
from readyplane.core.worker import Role
from readyplane.ports import Pair
from readyplane_lab.simulator.loop import VirtualClock, VirtualLoop
from readyplane_router.pair import PairPolicy
from readyplane_router.policy import RouterPolicy
from readyplane_router.seats import Use
from readyplane_router.service import RouterService
from tests.router_faults import FaultyStore
from tests.router_world import MODEL, FakeWorker, World, serving, shape

P, D = Role.PREFILL, Role.DECODE
ROUTERS = 3
POLICY = RouterPolicy(
    pair=PairPolicy(slo=Slo(2.0, 10.0), wait_max_s=3.0, empty_wait_max_s=3.0, prefill_ahead_s=60.0),
    redis_absence_max_s=20.0,
    reservation_ttl_s=10.0,
)


class SteppedWall(VirtualClock):
    """A clock whose wall time somebody sets."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(loop)
        self.off_s = 0.0

    def wall_s(self) -> float:
        return super().wall_s() + self.off_s


class SharedReservations(RuleBasedStateMachine):
    """Three routers on a store that may fail in every way.

    `unsure`: reservations that the store could not compare with the others: made without it, or
    forgotten by it. It may be overbooked by those, and by no more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.world = World(self.loop, policy=POLICY, shared=True)
        self.wall = self.world.clock = SteppedWall(self.loop)
        self.store = self.world.store = FaultyStore(self.wall)
        self.routers: list[RouterService] = []
        self.open: dict[str, Pair] = {}
        self.workers: dict[str, FakeWorker] = {}
        self.unsure: set[str] = set()
        self.granted: dict[str, int] = {}
        self.seen: dict[tuple[str, str], int] = {}
        self.count = 0

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    @initialize()
    def begin(self) -> None:
        async def start() -> None:
            self.routers = [await self.world.router() for _ in range(ROUTERS)]
            for name, role in (("p0", P), ("d0", D), ("d1", D)):
                await self._start(name, role)
            await asyncio.sleep(1.2)

        self.run(start())

    async def _start(self, name: str, role: Role) -> None:
        self.count += 1
        serves = serving(max_num_seqs=4, blocks=400)
        made = await self.world.worker(
            self.routers[self.count % ROUTERS],
            name,
            role,
            serves=serves,
            incarnation=f"{name}-{self.count}",
            renewing=False,
        )
        self.workers[name] = made
        assert made.lease.epoch > self.granted.get(name, 0), "an epoch went back"
        self.granted[name] = made.lease.epoch

    def _granted(self, pair: Pair) -> None:
        self.open[pair.reservation_id] = pair
        if any(not router.link.answering for router in self.routers):
            self.unsure.add(pair.reservation_id)

    @rule(which=st.integers(0, ROUTERS - 1), isl=st.integers(1, 600))
    def route(self, which: int, isl: int) -> None:
        self.count += 1
        request = shape(f"r{self.count}", isl, first=self.count)

        async def ask() -> None:
            try:
                pair = await self.routers[which].route(request)
            except ReadyplaneError:
                return
            self._granted(pair)

        self.run(ask())

    @rule(which=st.integers(0, ROUTERS - 1), number=st.integers(0, 9), again=st.integers(1, 2))
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
                    self._granted(pair)
                except ReadyplaneError:
                    return

        self.run(ask())

    @rule(
        which=st.integers(0, ROUTERS - 1),
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
        with contextlib.suppress(ReadyplaneError):  # without the store for too long: refused
            self.run(self._start(name, P if name == "p0" else D))

    @rule(seconds=st.sampled_from([-7_200.0, -90.0, 90.0, 7_200.0]))
    def somebody_sets_the_wall_clock(self, seconds: float) -> None:
        self.wall.off_s += seconds

    @rule()
    def the_store_goes_away(self) -> None:
        self.store.away = True
        self.unsure.update(self.open)  # what ends now is not heard of there

    @rule(how=st.sampled_from(["as it was", "empty", "older"]))
    def the_store_comes_back(self, how: str) -> None:
        """Also without having been missed: restarted between two looks."""
        if how != "as it was":
            self.unsure.update(self.open)
            self.store.restart(empty=how == "empty")
        self.store.away = False

    @rule()
    def the_store_writes_to_disk(self) -> None:
        self.store.remember()

    @rule()
    def an_answer_is_lost(self) -> None:
        """Done and not answered: whoever asked does not know."""
        self.store.answers_lost = 1
        self.unsure.update(self.open)

    @rule(name=st.sampled_from(["d0", "d1"]))
    def worker_leaves(self, name: str) -> None:
        self.run(self.workers[name].leave())

    @precondition(lambda self: not self.store.away)  # without it none starts
    @rule(which=st.integers(0, ROUTERS - 1))
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
            while True:
                try:
                    await fresh.start()
                    break
                except Unavailable:
                    await asyncio.sleep(1.0)
            self.world._tasks[which] = asyncio.create_task(fresh.run())
            self.routers[which] = fresh

        self.run(replace_it())

    @invariant()
    def the_store_adds_up_and_is_overbooked_by_nothing_it_compared(self) -> None:
        model = self.store.inner._model(MODEL)
        for seat in model.seats.seats.values():
            found = {
                rid: counted[0]
                for rid, reservation in model.seats.reservations.items()
                for counted in reservation.sides
                if counted is not None and counted[1] is seat
            }
            assert seat.used.sequences == sum(side.use.sequences for side in found.values())
            assert seat.used.blocks == sum(side.use.blocks for side in found.values())
            compared = [s for rid, s in found.items() if rid not in self.unsure]
            assert sum(side.use.sequences for side in compared) <= seat.sequences

    @invariant()
    def no_router_goes_back_to_an_older_epoch(self) -> None:
        for router in self.routers:
            for worker_id, member in router.roster.members.items():
                key = router.incarnation, worker_id
                assert member.epoch >= self.seen.get(key, 0)
                self.seen[key] = member.epoch

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
            self.store.away, self.store.answers_lost = False, 0
            # One round to be told, one lease until expiries are judged again, then a reservation.
            await asyncio.sleep(POLICY.lease_ttl_s + POLICY.reservation_ttl_s + 4.0)
            assert all(use == Use() for use in (await self.store.usage(MODEL)).values())
            for router in self.routers:
                for desk in router.desks.values():
                    assert not desk.held and not desk.queue and not desk.waiting
            await self.world.end()

        self.run(settle())
        self.loop.close()


TestSharedReservations = SharedReservations.TestCase
TestSharedReservations.settings = settings(max_examples=25, stateful_step_count=25)
