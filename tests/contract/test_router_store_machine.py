"""Every order of calls to the routers' store, against a model that keeps sums and no counters.

The memory twin in many runs, a real Redis in a few: leases with their epochs, seats with their
lives, reservations that are taken, put back, grown, given back and run out.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from readyplane.core.worker import Role, WorkerState
from readyplane.kit.clock import SystemClock
from readyplane.kit.redis import connect
from readyplane_router import lease
from readyplane_router.redis import RedisStore
from readyplane_router.seats import ALL_SIDES, INCOMPLETE, PUT_BACK, TWIN, Side, Take, Use
from readyplane_router.store import MemoryStore, Record, Renew, Store
from tests.router_world import offer

T = TypeVar("T")
M = "demo"
LONG_S, SHORT_S = 600.0, 0.03
SEQUENCES, BLOCKS = 3, 40
names = st.sampled_from(["p0", "d0"])
rids = st.sampled_from(["r0", "r1", "r2", "r3"])
ttls = st.sampled_from([LONG_S, LONG_S, SHORT_S])


@dataclass
class ModelLease:
    """Who holds a worker's name; `short`: it has run out when time has passed."""

    incarnation: str
    epoch: int
    short: bool
    ended: bool = False
    past: tuple[str, ...] = ()
    recorded: bool = True


@dataclass
class ModelSeat:
    epoch: int
    life: int
    is_open: bool
    sequences: int


@dataclass
class ModelReservation:
    payload: str
    short: bool
    sides: list[tuple[str, int, Use] | None] = field(default_factory=list)


class Stepped(SystemClock):
    """A clock that stands until it is moved."""

    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s


class StoreMachine(RuleBasedStateMachine):
    """One store and its model."""

    redis_url = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = Stepped()
        self.store: Store = MemoryStore(self.clock, shared=True)
        if self.redis_url:
            client = connect(self.redis_url)
            self.run(client.flushall())
            self.store = RedisStore(client, call_timeout_s=5.0)
        self.leases: dict[str, ModelLease] = {}
        self.seats: dict[str, ModelSeat] = {}
        self.reservations: dict[str, ModelReservation] = {}
        self.epoch = self.life = 0

    def run(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.run(self.store.aclose())
        self.loop.close()

    # ------------------------------------------------------------------------ leases

    def record(self, name: str, incarnation: str, epoch: int) -> Record:
        role = Role.PREFILL if name == "p0" else Role.DECODE
        return Record(offer(name, role, incarnation=incarnation), epoch, WorkerState.READY)

    @rule(name=names, number=st.integers(0, 3), back=st.sampled_from([0, 0, 0, 5]), ttl_s=ttls)
    def grant(self, name: str, number: int, back: int, ttl_s: float) -> None:
        """`back`: with an epoch that a slow caller drew long ago."""
        self.epoch += 1
        incarnation, epoch = f"{name}-{number}", max(1, self.epoch - back)
        told = self.run(self.store.grant(self.record(name, incarnation, epoch), ttl_s=ttl_s))
        had, short = self.leases.get(name), ttl_s == SHORT_S
        if had is not None and incarnation in had.past:
            assert isinstance(told, lease.Lost)
        elif had is not None and had.incarnation == incarnation and not had.ended:
            assert isinstance(told, Record) and told.epoch == had.epoch
            had.short = short
        elif had is not None and epoch <= had.epoch:
            assert told == lease.Stale(had.epoch)
        else:
            assert isinstance(told, Record) and told.epoch == epoch
            past = had.past if had is not None else ()
            if had is not None and had.incarnation != incarnation:
                past = (*past, had.incarnation)
            self.leases[name] = ModelLease(incarnation, epoch, short, past=past)
            self.seats.pop(name, None)

    @rule(name=names, off=st.sampled_from([0, 0, -1, 1]), ttl_s=ttls)
    def renew(self, name: str, off: int, ttl_s: float) -> None:
        had = self.leases.get(name)
        epoch = (had.epoch if had is not None else 7) + off
        want = "unknown"
        if had is not None:
            want = "stale" if had.ended or off else "ok"
            if want == "ok":
                had.short = ttl_s == SHORT_S
        assert self.run(self.store.renew([Renew(M, name, epoch, ttl_s)])) == [want]

    @rule(name=names, off=st.sampled_from([0, -1]))
    def end(self, name: str, off: int) -> None:
        had = self.leases.get(name)
        if had is None:
            return
        gone = replace(self.record(name, had.incarnation, had.epoch + off), state=WorkerState.GONE)
        assert self.run(self.store.end(gone)) is (not had.ended and off == 0)
        if off == 0 and not had.ended:
            had.ended = True
            self._shut(name)

    @rule(name=names)
    def forget(self, name: str) -> None:
        had = self.leases.get(name)
        if had is None:
            return
        self.run(self.store.forget(M, name, had.epoch))
        if had.ended:
            had.recorded = False
            self.seats.pop(name, None)

    @rule(name=names, back=st.integers(0, 2))
    def restore(self, name: str, back: int) -> None:
        """A router that still has it puts it back."""
        had = self.leases.get(name)
        if had is None:
            return
        epoch = max(1, had.epoch - back)
        told = self.run(
            self.store.restore(self.record(name, had.incarnation, epoch), ttl_s=LONG_S, vitals=None)
        )
        assert told is (epoch >= had.epoch)
        if told:
            had.ended, had.short, had.recorded = False, False, True

    # ------------------------------------------------------------------------ seats

    @rule(name=names, is_open=st.sampled_from([True, True, True, False]), older=st.booleans())
    def seat(self, name: str, is_open: bool, older: bool) -> None:
        held, had = self.leases.get(name), self.seats.get(name)
        if held is None:
            return
        epoch = held.epoch - older
        told = self.run(
            self.store.seat(M, name, epoch, is_open=is_open, sequences=SEQUENCES, blocks=BLOCKS)
        )
        assert told is (had is None or had.epoch <= epoch)
        if told:
            self.life += 1
            same = had is not None and had.epoch == epoch
            life = had.life if same and had is not None else self.life
            self.seats[name] = ModelSeat(epoch, life, is_open, SEQUENCES)

    def _shut(self, name: str) -> None:
        if name in self.seats:
            self.seats[name].is_open = False

    # ------------------------------------------------------------------------ reservations

    def _sides(self, blocks: int) -> tuple[Side, ...]:
        return tuple(
            Side(name, held.epoch if held is not None else 1, Use(1, blocks, 5 * (name == "p0")))
            for name in ("p0", "d0")
            for held in (self.leases.get(name),)
        )

    def _kept(self, take: Take) -> ModelReservation:
        kept = ModelReservation(take.payload, take.ttl_s == SHORT_S)
        for side in take.sides:
            seat = self.seats.get(side.worker_id)
            there = seat is not None and seat.epoch == side.epoch
            life = seat.life if seat is not None else 0
            kept.sides.append((side.worker_id, life, side.use) if there else None)
        return kept

    def _used(self, name: str) -> Use:
        seat = self.seats.get(name)
        uses = [
            side[2]
            for found in self.reservations.values()
            for side in found.sides
            if side is not None and seat is not None and side[:2] == (name, seat.life)
        ]
        return Use(*(sum(getattr(use, part) for use in uses) for part in Use.__slots__))

    @rule(rid=rids, blocks=st.integers(1, 20), ttl_s=ttls)
    def take(self, rid: str, blocks: int, ttl_s: float) -> None:
        take = Take(rid, self._sides(blocks), f"{rid} by {blocks}", ttl_s)
        had = self.reservations.get(rid)
        fits = all(
            seat is not None
            and seat.epoch == side.epoch
            and seat.is_open
            and self._used(side.worker_id).sequences + 1 <= SEQUENCES
            and self._used(side.worker_id).blocks + blocks <= BLOCKS
            for side in take.sides
            for seat in (self.seats.get(side.worker_id),)
        )
        told = self.run(self.store.take(M, take))
        if had is not None:
            assert told.repeated and told.payload == had.payload
            return
        assert bool(told.refused) is not fits, told
        if fits:
            self.reservations[rid] = self._kept(take)
        assert told.used == tuple(self._used(name) for name in ("p0", "d0"))

    @rule(rid=rids, blocks=st.integers(1, 20), ttl_s=ttls, twin=st.booleans())
    def put_back(self, rid: str, blocks: int, ttl_s: float, twin: bool) -> None:
        had = self.reservations.get(rid)
        payload = "elsewhere" if twin or had is None else had.payload
        take = Take(rid, self._sides(blocks), payload, ttl_s)
        told = self.run(self.store.put_back(M, [take]))
        if had is not None and had.payload != payload:
            assert told == [TWIN]
            return
        self.reservations[rid] = self._kept(take)
        assert told == [INCOMPLETE if None in self.reservations[rid].sides else PUT_BACK]

    @rule(rid=rids, which=st.sampled_from([ALL_SIDES, ALL_SIDES, 0, 1]))
    def release(self, rid: str, which: int) -> None:
        had = self.reservations.get(rid)
        assert self.run(self.store.release(M, [(rid, which)])) == (had is None)
        if had is None:
            return
        for index in range(2):
            if which in (ALL_SIDES, index):
                had.sides[index] = None
        if not any(had.sides):
            del self.reservations[rid]

    @rule(rid=rids, side=st.integers(0, 1), blocks=st.integers(1, 30))
    def grow(self, rid: str, side: int, blocks: int) -> None:
        had = self.reservations.get(rid)
        part = had.sides[side] if had is not None else None
        assert self.run(self.store.grow(M, rid, side, blocks)) is (part is not None)
        if had is not None and part is not None:
            name, life, use = part
            had.sides[side] = name, life, replace(use, blocks=use.blocks + blocks)

    @rule(rid=rids)
    def extend(self, rid: str) -> None:
        self.run(self.store.extend(M, [rid], ttl_s=LONG_S))
        if rid in self.reservations:
            self.reservations[rid].short = False

    @rule()
    def time_passes(self) -> None:
        """What was short has run out, of leases and of reservations; each is told once."""
        self.clock.now_s += 2 * SHORT_S
        if self.redis_url:
            self.run(asyncio.sleep(2 * SHORT_S))
        over = {rid for rid, found in self.reservations.items() if found.short}
        assert set(self.run(self.store.sweep(M))) == over
        for rid in over:
            del self.reservations[rid]
        lost = {n for n, held in self.leases.items() if held.short and not held.ended}
        assert {change.worker_id for change in self.run(self.store.expire())} == lost
        for name in lost:
            self.leases[name].ended = True
            self._shut(name)
        assert self.run(self.store.sweep(M)) == [] and self.run(self.store.expire()) == []

    # ------------------------------------------------------------------------ what must hold

    @invariant()
    def usage_is_the_sum_of_what_is_reserved(self) -> None:
        found = self.run(self.store.usage(M))
        assert found == {name: self._used(name) for name in self.seats}

    @invariant()
    def records_carry_the_epoch_that_holds(self) -> None:
        found = {r.offer.worker_id: r for r, _ in self.run(self.store.workers())}
        recorded = {name: held for name, held in self.leases.items() if held.recorded}
        assert {n: r.epoch for n, r in found.items()} == {
            n: held.epoch for n, held in recorded.items()
        }
        for name, held in recorded.items():
            assert (found[name].state is WorkerState.GONE) is held.ended


def test_every_order_of_calls_to_the_memory_twin() -> None:
    run_state_machine_as_test(StoreMachine, settings=settings(max_examples=60))


def test_every_order_of_calls_to_redis(redis_url: str) -> None:
    """Fewer runs: each call is a round trip, and time passes for real."""

    class OnRedis(StoreMachine):
        pass

    OnRedis.redis_url = redis_url
    run_state_machine_as_test(
        OnRedis,
        settings=settings(
            max_examples=12,
            stateful_step_count=30,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
