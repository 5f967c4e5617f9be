"""Fifty workers and three routers whose store is away, comes back empty, or older by its last writes.

Nobody is declared dead, no epoch goes back, requests are served degraded for a bounded time and then
refused by name; on return everything is reconciled and both ends are fenced. On virtual time.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from readyplane.core.errors import LostLease, StaleEpoch, Unavailable
from readyplane.core.work import EventKind, Slo
from readyplane.core.worker import Role, WorkerState
from readyplane.ports import Pair
from readyplane_router.pair import PairPolicy
from readyplane_router.policy import RouterPolicy
from readyplane_router.seats import Side, Take, Use
from readyplane_router.service import RouterService
from tests.router_faults import FaultyStore
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
WORKERS, ROUTERS, PLACES = 50, 3, 24
RETURNS = ["as it was", "empty", "older"]
POLICY = RouterPolicy(
    pair=PairPolicy(slo=Slo(2.0, 10.0), wait_max_s=3.0, empty_wait_max_s=3.0, prefill_ahead_s=60.0),
    redis_absence_max_s=30.0,
    reservation_ttl_s=60.0,
)


class Fleet:
    """Fifty workers, a third of them prefill, their sessions spread over the routers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.store = world.store = FaultyStore(world.clock)
        self.routers: list[RouterService] = []
        self.workers: dict[str, FakeWorker] = {}
        self.dead: list[str] = []

    async def begin(self) -> None:
        self.routers = [await self.world.router() for _ in range(ROUTERS)]
        for number in range(WORKERS):
            role = D if number % 3 else P
            name = f"{role[0]}{number}"
            self.workers[name] = await self.world.worker(
                self.routers[number % ROUTERS], name, role, serves=serving(max_num_seqs=PLACES)
            )
        await asyncio.sleep(3.0)
        self.world._tasks.append(asyncio.create_task(self._look()))

    async def _look(self) -> None:
        """Whoever is not ready in anybody's eyes, at any time."""
        while True:
            for router in self.routers:
                for name, worker in (await router.list_workers()).workers.items():
                    if worker.state is not WorkerState.READY:
                        self.dead.append(f"{name} {worker.state} at {router.incarnation}")
            await asyncio.sleep(0.25)

    def epochs(self) -> dict[str, int]:
        return {name: worker.lease.epoch for name, worker in self.workers.items()}

    async def route(self, number: int) -> Pair:
        return await self.routers[number % ROUTERS].route(shape(f"r{number}", 64, first=number))

    async def end(self, number: int, pair: Pair) -> None:
        await self.routers[number % ROUTERS].complete(events(pair, *SERVED))

    async def come_back(self, how: str) -> None:
        if how != "as it was":
            self.store.restart(empty=how == "empty")
        self.store.away = False
        await asyncio.sleep(4.0)  # every router looks once a second, and is told by the others

    def held(self) -> int:
        return sum(len(router.desks[MODEL].held) for router in self.routers)


def played(play: Callable[[Fleet], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        fleet = Fleet(world)
        await fleet.begin()
        await play(fleet)

    on_virtual_time(main, policy=POLICY, shared=True)


@pytest.mark.parametrize("how", RETURNS)
def test_nobody_dies_and_everything_is_reconciled(how: str) -> None:
    async def play(fleet: Fleet) -> None:
        epochs = fleet.epochs()
        kept = {n: await fleet.route(n) for n in range(30)}
        fleet.store.remember()
        for number in range(10):  # these the older store still has, their ends it has lost
            await fleet.end(number, kept.pop(number))
        kept |= {n: await fleet.route(n) for n in range(30, 45)}  # and these it never had
        fleet.store.away = True
        await asyncio.sleep(2.0)
        assert {r.link.standing() for r in fleet.routers} == {"degraded"}
        for number in range(45, 60):
            kept[number] = await fleet.route(number)
        for number in range(20, 30):
            await fleet.end(number, kept.pop(number))
        await asyncio.sleep(20.0)  # many leases long
        await fleet.come_back(how)
        assert {r.link.standing() for r in fleet.routers} == {"fresh"}
        assert fleet.held() == len(kept) == 40
        forgotten = 10 if how == "older" else 0  # released since its last write: run out there
        usage = (await fleet.store.usage(MODEL)).items()
        assert sum(use.sequences for _, use in usage) == 2 * (40 + forgotten)
        assert {r.offer.worker_id: r.epoch for r, _ in await fleet.store.workers()} == epochs
        await asyncio.sleep(POLICY.lease_ttl_s + 2.0)  # expiries are judged again: nobody's
        for number, pair in kept.items():
            await fleet.end(number, pair)
        await asyncio.sleep(POLICY.reservation_ttl_s if forgotten else 0.0)
        assert set((await fleet.store.usage(MODEL)).values()) == {Use()}
        assert fleet.dead == []
        newer = await fleet.world.worker(fleet.routers[0], "d1", D, incarnation="d1-2")
        assert newer.lease.epoch > max(epochs.values())

    played(play)


def test_served_degraded_for_its_time_then_refused_by_name() -> None:
    async def play(fleet: Fleet) -> None:
        fleet.store.away = True
        began_s = fleet.world.clock.monotonic_s()
        while fleet.world.clock.monotonic_s() - began_s < POLICY.redis_absence_max_s:
            await fleet.end(1, await fleet.route(1))
            await asyncio.sleep(0.5)
        await asyncio.sleep(2.0)  # it was missed at the next look, not when it went
        for router in fleet.routers:
            with pytest.raises(Unavailable, match="redis_absence_max_s") as caught:
                await router.route(shape("late", 64))
            assert caught.value.retry_after_s
        await fleet.come_back("as it was")
        await fleet.end(99, await fleet.route(99))
        assert fleet.dead == []

    played(play)


@pytest.mark.parametrize("how", RETURNS)
def test_both_ends_stay_fenced(how: str) -> None:
    """A worker that restarted just before, or without the store, is not its former life for it."""

    async def play(fleet: Fleet) -> None:
        fleet.store.remember()
        replaced = {}
        for name in ("p0", "d1"):
            if name == "d1":
                fleet.store.away = True
                await asyncio.sleep(2.0)
            old = fleet.workers[name]
            old.left = True
            router, role = fleet.routers[0], old.offer.role
            new = await fleet.world.worker(router, name, role, incarnation=f"{name}-again")
            assert new.lease.epoch > old.lease.epoch
            replaced[name] = (old, new)
        await fleet.come_back(how)
        await asyncio.sleep(2.0)
        for name, (old, new) in replaced.items():
            found = await fleet.store.worker(MODEL, name)
            assert found is not None and found[0].epoch == new.lease.epoch
            for router in fleet.routers:
                old.router = router
                with pytest.raises((LostLease, StaleEpoch)):
                    await old.renew()
                assert (await router.list_workers()).workers[name].epoch == new.lease.epoch
            stale = Take("late", (Side(name, old.lease.epoch, Use(1, 1)),), "", 9.0)
            assert "epoch" in (await fleet.store.take(MODEL, stale)).refused
        pair = await fleet.route(1)
        assert await fleet.routers[2].complete(events(pair, EventKind.FINISHED)) == 0

    played(play)
