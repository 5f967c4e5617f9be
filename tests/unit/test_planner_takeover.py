"""One planner after another: no order is lost, none is given twice, and the old one is refused.

Counted as an auditor would: every allocation belongs to an order of the journal, every order of the
journal has an outcome, and no worker id was allocated twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from readyplane.core.errors import StaleEpoch, Unavailable
from readyplane.core.fencing import Fences
from readyplane.core.worker import Role, WorkerState
from readyplane.ports import Instance, Order
from readyplane_planner import guard, takeover
from readyplane_planner.guard import PoolMemory
from readyplane_planner.leadership import Leadership, MemoryLeaseStore
from tests.unit.planner_world import MODEL, HandClock, Run, World, planner, policy

TTL_S = 10.0


class Lines:
    """One planner's way to the shared actuator: calls may be held, lost, or lose their answers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.gate = asyncio.Event()
        self.gate.set()
        self.lost_orders = self.lost_answers = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        await self.gate.wait()
        if self.lost_orders > 0:
            self.lost_orders -= 1
            raise Unavailable("the line is cut", "call again")
        instance = await self._world.provision(order, leader_epoch=leader_epoch)
        if self.lost_answers > 0:
            self.lost_answers -= 1
            raise Unavailable("the answer is lost", "call again")
        return instance


class AwayStore(MemoryLeaseStore):
    """A lease store that can be away."""

    away = False

    async def take(self, name: str, holder: str, ttl_s: float) -> bool:
        if self.away:
            raise Unavailable("redis does not answer", "wait")
        return await super().take(name, holder, ttl_s)


@dataclass
class Two:
    """Two planners of one model: shared world, journal and lease store."""

    world: World
    first: Run
    second: Run
    lines: tuple[Lines, Lines]
    store: AwayStore
    allocated: Counter[str] = field(default_factory=Counter)

    async def both(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            await self.first.step(1)
            await self.second.service.tick()

    async def kill_first(self) -> None:
        """As by kill -9: its calls end where they are, and it tells nobody."""
        await self.first.service._hand.aclose()

    async def audit(self) -> None:
        journal = self.first.journal
        asked: Counter[str] = Counter()
        for record in await journal.newest(MODEL, limit=1000):
            for order in record.document["orders"]:
                asked[order["worker_id"]] += 1
                outcomes = (await journal.get(record.decision_id))[1]
                told = {o.kind for o in outcomes if o.subject == order["worker_id"]}
                assert told - {"unanswered"}, f"nobody knows what became of {order['worker_id']}"
        assert set(asked.values()) <= {1}, "no name is ordered by two decisions"
        names = [o.worker_id for o in self.world.provisions]
        assert len(names) == len(set(names)), "no worker is allocated twice"
        assert set(names) <= set(asked), "nothing is allocated that is in no journal"


def ids_of(name: str) -> Callable[[], str]:
    ids = count()
    return lambda: f"{name}{next(ids):06x}"


async def two(world: World, **changes: Any) -> Two:
    store = AwayStore(world.clock.monotonic_s)
    lines = (Lines(world), Lines(world))
    runs = [await planner(world, policy(**changes)) for _ in lines]
    for name, run, line in zip("ab", runs, lines, strict=True):
        run.service._leadership = Leadership(
            store, name=MODEL, holder=name, ttl_s=TTL_S, now_s=world.clock.monotonic_s
        )
        run.service._journal = run.service._succession._journal = runs[0].journal
        run.service._in_force._journal = runs[0].journal
        run.journal = runs[0].journal
        run.service._make_id = ids_of(name)
        run.service._hand._actuator = line
    return Two(world, runs[0], runs[1], lines, store)


def grown() -> World:
    """Load that rises once, at 40 s."""
    return World(HandClock(), rps=lambda t: 1.0 if t < 40 else 5.5)


def test_fences_are_of_one_model_and_never_go_back() -> None:
    fences = Fences()
    fences.take("a", 5)
    fences.take("b", 2)
    fences.take("a", 5)
    fences.take("a", 0)
    with pytest.raises(StaleEpoch):
        fences.take("a", 4)
    fences.take("b", 3)
    assert (fences.newest("a"), fences.newest("b"), fences.newest("c")) == (5, 3, 0)


@pytest.mark.parametrize("how", ["never sent", "taken, no answer", "lost, then killed"])
async def test_killed_in_the_middle_of_an_order(how: str) -> None:
    """The journal has it, the leader is gone: it is neither lost nor given twice (B146)."""
    pair = await two(grown())
    await pair.both(39)
    before = len(pair.world.provisions)
    line = pair.lines[0]
    if how == "never sent":
        line.gate.clear()
    elif how == "lost, then killed":
        line.lost_orders = 99
    else:
        line.lost_answers = 99
    for _ in range(20):
        await pair.both(1)
        if pair.first.decisions[-1].orders:
            break
    asked = {o.worker_id for o in pair.first.decisions[-1].orders}
    assert asked
    await pair.kill_first()
    died_s = pair.world.clock.now_s
    while not pair.second.service._leadership.leading:
        await pair.second.step(1)
    assert pair.world.clock.now_s - died_s <= TTL_S + 1.0
    await pair.second.step(2)
    names = [o.worker_id for o in pair.world.provisions[before:]]
    assert asked <= set(names), "what was asked for is there, under its name"
    await pair.second.step(30)
    await pair.audit()
    live = len(pair.world.members(Role.PREFILL, WorkerState.READY, WorkerState.PROVISIONED))
    assert live == pair.second.desired[-1][1] <= 6


async def test_a_stale_leader_neither_writes_nor_acts() -> None:
    """It believes in its lease, and the journal knows better: its decision never was one."""
    pair = await two(grown())
    await pair.both(39)
    while not pair.first.service._leadership.leading:
        await pair.both(1)
    await pair.first.journal.next_epoch(MODEL)
    ordered, kept = len(pair.world.provisions), len(pair.first.journal._records)
    for _ in range(20):
        epoch = pair.first.service._leadership.epoch
        await pair.first.step(1)
        if pair.first.service._leadership.epoch != epoch:
            break
    else:
        pytest.fail("it went on leading")
    assert (len(pair.world.provisions), len(pair.first.journal._records)) == (ordered, kept)
    await pair.both(2)
    leading = [run.service._leadership.leading for run in (pair.first, pair.second)]
    assert sum(leading) == 1, "under a new number"


async def test_a_paused_leader_wakes_to_be_refused() -> None:
    """Its calls were under way when it was stopped, and arrive after its lease was taken."""
    pair = await two(grown())
    await pair.both(39)
    pair.lines[0].gate.clear()
    for _ in range(20):
        await pair.both(1)
        if pair.first.decisions[-1].orders:
            break
    old_epoch = pair.first.service._leadership.epoch
    while not pair.second.service._leadership.leading:
        await pair.second.step(1)  # the first sleeps
    await pair.second.step(3)
    before = len(pair.world.boxes)
    drained, released = list(pair.world.drains), list(pair.world.releases)
    pair.lines[0].gate.set()  # it wakes: first of all its calls in flight get through
    for _ in range(8):
        await asyncio.sleep(0)
    done = pair.first.service._hand.collect()
    assert done and all(d.kind == "refused" and "newer planner" in d.note for d in done)
    with pytest.raises(StaleEpoch):
        await pair.world.drain("whoever", leader_epoch=old_epoch)
    await pair.first.service.tick()
    assert not pair.first.service._leadership.leading
    assert "b leads" in (await pair.first.service.state())["degraded"]
    assert len(pair.world.boxes) == before
    assert (pair.world.drains, pair.world.releases) == (drained, released)
    await pair.second.step(20)
    await pair.audit()


async def test_a_list_fences_before_anything_is_ordered() -> None:
    """Else an older leader's order could come in after the newer one has counted."""
    pair = await two(World(HandClock()))
    await pair.both(5)
    assert pair.world.fences.newest(MODEL) == 1
    await pair.kill_first()
    await pair.second.step(TTL_S + 2)
    ordered = len(pair.world.provisions)
    assert pair.world.fences.newest(MODEL) == pair.world.fences_router.newest(MODEL) == 2
    assert len(pair.world.provisions) == ordered == 2


async def test_who_is_refused_a_look_leads_no_more() -> None:
    """A lease store that came back empty gives the lease anew; the fence knows better."""
    pair = await two(World(HandClock()))
    await pair.both(5)
    pair.world.fences.take(MODEL, 50)
    decision = await pair.first.service.tick()
    assert not decision.orders and not pair.first.service._leadership.leading
    assert pair.first.service._leadership.epoch == 0


async def test_cooldowns_back_off_and_targets_are_inherited() -> None:
    pair = await two(grown())
    pair.world.refuse = lambda order: "no place" if order.role is Role.PREFILL else ""
    await pair.both(50)
    theirs = pair.first.service._memory
    assert theirs.denied
    await pair.kill_first()
    while not pair.second.service._leadership.leading:
        await pair.second.step(1)
    mine = pair.second.service._memory
    assert [(d.pool, d.worker_class) for d in mine.denied] == [("prefill", "h200-slow10")]
    assert mine.denied[0].count >= theirs.denied[0].count
    assert mine.guard_p.desired == theirs.guard_p.desired


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
async def test_b157_a_stepped_wall_clock_at_the_hand_over(
    step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await two(grown())
    await pair.both(39)
    pair.lines[0].gate.clear()
    for _ in range(20):
        await pair.both(1)
        if pair.first.decisions[-1].orders:
            break
    await pair.kill_first()
    wall_s = pair.world.clock.wall_s
    monkeypatch.setattr(pair.world.clock, "wall_s", lambda: wall_s() + step_s)
    while not pair.second.service._leadership.leading:
        await pair.second.step(1)
    await pair.second.step(40)
    names = [o.worker_id for o in pair.world.provisions]
    assert len(names) == len(set(names))
    live = len(pair.world.members(Role.PREFILL, WorkerState.READY, WorkerState.PROVISIONED))
    assert live == pair.second.desired[-1][1] >= 3
    assert not pair.world.releases, "what is needed is not cancelled"


async def test_without_a_lease_store_nobody_leads_and_nobody_dies() -> None:
    """Redis away: the leader acts to the end of its lease, then everything stays as it is."""
    pair = await two(World(HandClock(), rps=lambda _t: 5.0))
    await pair.both(60)
    living = set(pair.world.boxes)
    pair.store.away = True
    await pair.both(40)
    assert not pair.first.service._leadership.leading
    assert not pair.second.service._leadership.leading
    assert set(pair.world.boxes) == living and not pair.world.releases
    state = await pair.first.service.state()
    assert "leadership" in state["degraded"] and state["pools"]["prefill"]["ready"] >= 2
    pair.store.away = False
    await pair.both(10)
    leading = [run.service._leadership.leading for run in (pair.first, pair.second)]
    assert sorted(leading) == [False, True]
    await pair.audit()


async def test_who_takes_its_own_lease_again_keeps_its_memory() -> None:
    pair = await two(World(HandClock(), rps=lambda _t: 5.0))
    await pair.both(60)
    before = pair.first.service._memory
    pair.store.away = True
    await pair.both(12)
    pair.store.away = False
    await pair.first.step(1)
    assert pair.first.service._leadership.epoch == 2
    assert pair.first.service._memory.numbered >= before.numbered
    assert pair.first.service._memory.work_p.begun_s == before.work_p.begun_s


async def test_an_order_without_an_answer_is_given_again_by_the_same_name() -> None:
    """Lost on the way or on the way back: one worker either way."""
    for lost in ("lost_orders", "lost_answers"):
        pair = await two(World(HandClock()))
        setattr(pair.lines[0], lost, 3)
        await pair.first.step(30)
        assert sorted(o.role for o in pair.world.provisions) == [Role.DECODE, Role.PREFILL]
        assert pair.first.service._memory.guard_p.failures == 0
        kinds = {o.kind for o in await pair.first.journal.outcomes(MODEL, "unanswered", limit=9)}
        assert kinds == {"unanswered"}
        versions = {o.policy_version for o in pair.world.provisions}
        assert versions == {pair.first.service._in_force.version}
        await pair.audit()


def test_a_memory_moves_to_another_clock() -> None:
    was = PoolMemory(
        desired=3,
        up_s=10.0,
        surplus_since_s=12.0,
        wants=((11.0, 3),),
        failures=2,
        retry_s=20.0,
        moved_s=10.0,
        leg_s=5.0,
        turns_s=(9.0,),
        reversals=1,
    )
    now = guard.moved(was, 100.0)
    assert (now.up_s, now.down_s, now.surplus_since_s) == (110.0, None, 112.0)
    assert (now.wants, now.retry_s, now.turns_s) == (((111.0, 3),), 120.0, (109.0,))
    assert (now.leg_s, now.desired, now.failures) == (5.0, 3, 2)
    assert guard.moved(PoolMemory(), 100.0) == PoolMemory()


async def test_a_record_that_cannot_be_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by another version: what it asked for is seen in the fleet, or decided anew."""
    pair = await two(grown())
    await pair.both(50)
    await pair.kill_first()

    def unreadable(_record: object) -> None:
        raise ValueError("written by another version")

    monkeypatch.setattr(takeover, "replayed", unreadable)
    await pair.second.step(30)
    assert pair.second.service._leadership.leading
    await pair.audit()
