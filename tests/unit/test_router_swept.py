"""Reservations that one router made and another one's sweep ended, on virtual time."""

import asyncio
from typing import cast

import pytest

from readyplane.core.work import EventKind, Slo
from readyplane.core.worker import Role
from readyplane_router import ledger
from readyplane_router.pair import PairPolicy
from readyplane_router.policy import RouterPolicy
from readyplane_router.seats import Use
from readyplane_router.service import RouterService
from readyplane_router.store import MemoryStore, Store
from tests.router_faults import FaultyStore
from tests.router_world import MODEL, World, events, on_virtual_time, shape

TTL_S = 10.0
HEARD_WITHIN_S = ledger.OVERDUE_TTLS * TTL_S + 3.0  # and a round to ask, and one to be sure
POLICY = RouterPolicy(
    pair=PairPolicy(slo=Slo(2.0, 10.0), wait_max_s=3.0, empty_wait_max_s=3.0, prefill_ahead_s=60.0),
    redis_absence_max_s=60.0,
    reservation_ttl_s=TTL_S,
)


async def two_routers(world: World) -> tuple[RouterService, RouterService]:
    """The second ticks 0.4 s after the first does; 0.6 s have passed since the first did."""
    one = await world.router()
    await asyncio.sleep(0.4)
    two = await world.router()
    await world.worker(one, "p0", Role.PREFILL)
    await world.worker(one, "d0", Role.DECODE)
    await asyncio.sleep(2.2)
    return one, two


def promised(router: RouterService) -> int:
    return sum(seat.sequences for seat in router.desks[MODEL].seats.values())


def test_the_router_that_made_a_reservation_hears_that_another_swept_it() -> None:
    async def main(world: World) -> None:
        one, two = await two_routers(world)
        await one.route(shape("own"))  # due at .6: the next to tick is its own router
        await asyncio.sleep(0.6)
        await one.route(shape("other"))  # due at .2: the next to tick is the other router
        desk = one.desks[MODEL]
        await asyncio.sleep(TTL_S + 0.5)
        assert await world.store.usage(MODEL) == {"p0": Use(), "d0": Use()}
        assert len(desk.held) == 1 and desk.expired == 1  # the other's sweep told the other
        await asyncio.sleep(HEARD_WITHIN_S - TTL_S)
        assert not desk.held and promised(one) == 0
        assert desk.expired == 2 and two.desks[MODEL].expired == 0

    on_virtual_time(main, policy=POLICY, shared=True)


def test_what_is_heard_of_at_another_router_lives_until_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when more lives on than is asked about in a round."""
    monkeypatch.setattr(ledger, "ASKED_RESERVATIONS_MAX", 1)

    async def main(world: World) -> None:
        one, two = await two_routers(world)
        await asyncio.sleep(0.6)
        pairs = [await one.route(shape(f"r{n}", 32, first=100 * n)) for n in range(3)]
        desk = one.desks[MODEL]
        for _ in range(6):
            await asyncio.sleep(TTL_S / 2)
            for pair in pairs[:2]:
                await two.complete(events(pair, EventKind.PROGRESS))
        assert set(desk.held) == {pair.reservation_id for pair in pairs[:2]}
        assert desk.expired == 1
        await asyncio.sleep(HEARD_WITHIN_S)
        assert not desk.held and promised(one) == 0 and desk.expired == 3

    on_virtual_time(main, policy=POLICY, shared=True)


def test_a_sweep_whose_answer_was_lost_is_heard_of_too() -> None:
    async def main(world: World) -> None:
        store = FaultyStore(world.clock)
        world.store = cast("Store", store)
        one, _ = await two_routers(world)
        await one.route(shape("r"))
        await asyncio.sleep(TTL_S - 1.0)
        assert len(one.desks[MODEL].held) == 1
        await asyncio.sleep(1.2)
        await store.inner.sweep(MODEL)  # done, and told to nobody
        await asyncio.sleep(HEARD_WITHIN_S - TTL_S)
        assert not one.desks[MODEL].held and one.desks[MODEL].expired == 1

    on_virtual_time(main, policy=POLICY)


@pytest.mark.parametrize("lost", ["away", "empty"])
def test_a_store_that_is_lost_has_swept_nothing(lost: str) -> None:
    """Neither one that does not answer, nor a new life of it that answers in the same round."""

    class Losing(FaultyStore):
        asked_at_s: float | None = None

        async def missing(self, model: str, reservation_ids: list[str]) -> list[str]:
            self.asked_at_s = world_of[0].clock.monotonic_s()
            if lost == "empty":
                self.restart(empty=True)
            else:
                self.away = True
            return cast("list[str]", await self.__getattr__("missing")(model, reservation_ids))

    world_of: list[World] = []

    async def main(world: World) -> None:
        world_of.append(world)
        store = Losing(world.clock)
        world.store = cast("Store", store)
        one, two = await two_routers(world)
        pair = await one.route(shape("r"))
        desk = one.desks[MODEL]
        while store.asked_at_s is None:
            await asyncio.sleep(0.5)
            await two.complete(events(pair, EventKind.PROGRESS))
            assert world.clock.monotonic_s() < 30.0
        assert desk.held and desk.expired == 0
        if lost == "away":
            await asyncio.sleep(5 * POLICY.tick_s)
            assert desk.held and desk.expired == 0
            assert not one.link.answering

    on_virtual_time(main, policy=POLICY)


def test_a_router_alone_asks_about_nothing() -> None:
    async def main(world: World) -> None:
        asked: list[object] = []

        class Asked(MemoryStore):
            async def missing(self, model: str, reservation_ids: object) -> list[str]:
                asked.append(reservation_ids)
                return []

        one = await world.router(Asked(world.clock))
        await world.worker(one, "p0", Role.PREFILL)
        await world.worker(one, "d0", Role.DECODE)
        await asyncio.sleep(2.0)
        await one.route(shape("r"))
        await asyncio.sleep(2 * HEARD_WITHIN_S)
        assert one.desks[MODEL].expired == 1 and asked == []

    on_virtual_time(main, policy=POLICY)
