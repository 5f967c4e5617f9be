"""An order of admission at the router: whom it refuses, that it ends, and that others hear of it."""

from __future__ import annotations

from typing import Any

import pytest

from readyplane.core.errors import InvalidField, NotFound, Overloaded, StaleEpoch, Unavailable
from readyplane.core.ration import Ration
from readyplane.core.worker import Role
from readyplane_router.rationing import (
    FORGOTTEN_S,
    PRESENT_S,
    PRIORITIES_MAX,
    Rationing,
    check_ration,
)
from readyplane_router.service import RouterService
from tests.router_world import MODEL, World, on_virtual_time, shape

P, D = Role.PREFILL, Role.DECODE
HALF = Ration(1, 0.5, 10.0, "a burst", "d-7", 6.0)


def rationing(order: Ration | None = HALF) -> Rationing:
    made = Rationing()
    made.arrived(9, 100, now_s=0.0)
    if order is not None:
        made.take(order, now_s=0.0)
    return made


def admitted(made: Rationing, priority: int, tokens: list[int], *, now_s: float = 1.0) -> list[int]:
    return [t for t in tokens if not made.arrived(priority, t, now_s=now_s)]


def test_below_it_nobody_at_it_a_share_of_the_work_above_it_everybody() -> None:
    made = rationing()
    assert admitted(made, 0, [100] * 5) == []
    assert len(admitted(made, 1, [100] * 10)) == 5
    assert len(admitted(made, 2, [100] * 10)) == 10
    # Of the work, not of the requests: a long one costs as much as ten short ones.
    mixed = admitted(rationing(), 1, [1000, *[100] * 10] * 5)
    assert sum(mixed) == pytest.approx(0.5 * 5 * 2000, abs=1000)
    told = {p.priority: p for p in made.snapshot()}
    assert told[0].rationed_total == 5 and told[1].rationed_total == 5
    assert (told[1].arrivals_total, told[1].arrival_uncached_tokens_total) == (10, 1000)


def test_it_ends_by_itself_and_a_share_of_one_ends_it_at_once() -> None:
    made = rationing()
    assert made.order(now_s=9.9) is not None
    assert made.order(now_s=10.0) is None and admitted(made, 0, [1], now_s=10.0) == [1]
    made.take(HALF, now_s=20.0)
    made.take(Ration(1, 1.0, 0.0), now_s=21.0)
    assert made.order(now_s=21.0) is None and admitted(made, 0, [1], now_s=21.0) == [1]


def test_given_again_it_lasts_anew_and_its_share_goes_on() -> None:
    made = rationing()
    assert admitted(made, 1, [100]) == [], "the first is one of two"
    made.take(HALF, now_s=8.0)
    order = made.order(now_s=9.0)
    assert order is not None and order.ttl_s == pytest.approx(9.0)
    assert admitted(made, 1, [100], now_s=9.0) == [100], "idempotent: the other one of the two"


def test_nobody_of_the_highest_priority_that_is_present_is_refused() -> None:
    alone = Rationing()
    alone.take(Ration(5, 0.0, 300.0), now_s=0.0)
    assert admitted(alone, 3, [10] * 4, now_s=0.0) == [10] * 4, "all are equal"
    assert not alone.arrived(4, 10, now_s=1.0)
    assert admitted(alone, 3, [10]) == []
    # Whoever was more important has not come for a while: the door opens.
    assert admitted(alone, 3, [10], now_s=2.0 + PRESENT_S) == [10]


def test_priorities_are_bounded_and_the_forgotten_make_room() -> None:
    made = Rationing()
    for priority in range(1000):
        made.arrived(priority, 1, now_s=0.0)
    told = made.snapshot()
    assert len(told) == PRIORITIES_MAX and sum(p.arrivals_total for p in told) == 1000
    made.arrived(10**12, 1, now_s=FORGOTTEN_S + 1.0)
    assert len(made.snapshot()) == PRIORITIES_MAX
    assert made.snapshot()[0].priority == 2**31 - 1, "fit for the wire"


@pytest.mark.parametrize(
    "order",
    [
        Ration(1, -0.1, 10.0),
        Ration(1, float("nan"), 10.0),
        Ration(1, 0.5, 0.0),
        Ration(1, 0.5, 1e9),
        Ration(1, 0.5, float("nan")),
        Ration(2**40, 0.5, 10.0),
        Ration(1, 0.5, 10.0, reason="x" * 1000),
        Ration(1, 0.5, 10.0, retry_after_s=-1.0),
    ],
)
def test_an_order_that_cannot_be_is_refused_by_name(order: Ration) -> None:
    with pytest.raises(InvalidField, match=r"order\."):
        check_ration(order)


# --------------------------------------------------------------------------- the service


async def refused(router: RouterService, name: str, priority: int) -> Overloaded | None:
    try:
        await router.route(shape(name, priority=priority))
    except Overloaded as error:
        return error
    return None


async def served_by(world: World, **more: Any) -> RouterService:
    router = await world.router(**more)
    await world.worker(router, f"p{len(world.admissions)}", P)
    await world.worker(router, f"d{len(world.admissions)}", D)
    return router


def test_a_refusal_is_typed_names_the_order_and_is_counted_once() -> None:
    async def main(world: World) -> None:
        router = await served_by(world)
        assert await refused(router, "r0", 5) is None
        given = await router.ration(MODEL, HALF, leader_epoch=3)
        assert given is not None and given.ttl_s == pytest.approx(10.0)
        error = await refused(router, "r1", 0)
        assert error is not None and error.retry_after_s == 6.0
        assert "d-7" in str(error) and "a burst" in str(error) and "below 1" in str(error)
        assert router.desks[MODEL].refusals == {"rationed": 1}
        assert await refused(router, "r2", 5) is None
        part = (await router.signals(MODEL)).models[MODEL]
        assert part.ration is not None and part.ration.scale_decision_id == "d-7"
        assert part.refused_total == 1 and part.arrivals_total == 3
        assert {p.priority: p.rationed_total for p in part.priorities} == {5: 0, 0: 1}
        with pytest.raises(StaleEpoch):
            await router.ration(MODEL, HALF, leader_epoch=2)
        with pytest.raises(NotFound):
            await router.ration("nobody-has-it", HALF)
        await world.clock.sleep(10.5)
        assert await refused(router, "r3", 0) is None, "the planner is gone, the door is open"
        assert (await router.signals(MODEL)).models[MODEL].ration is None

    on_virtual_time(main)


def test_a_request_that_was_admitted_once_is_paired_anew_all_the_same() -> None:
    async def main(world: World) -> None:
        router = await served_by(world)
        first = await router.route(shape("r0", priority=0))
        await router.route(shape("r1", priority=5))
        await router.ration(MODEL, Ration(1, 0.0, 10.0))
        again = await router.route(shape("r0", priority=0), replaces=first.reservation_id)
        assert again.reservation_id != first.reservation_id

    on_virtual_time(main)


def test_other_routers_hear_of_an_order_and_of_its_end() -> None:
    async def main(world: World) -> None:
        one = await served_by(world)
        other = await world.router()
        await world.clock.sleep(3.0)
        assert other.link.routers == 2
        assert await refused(other, "h0", 5) is None
        await one.ration(MODEL, Ration(1, 0.0, 60.0, "short", "d-1"))
        await world.clock.sleep(2.0 * other.policy.tick_s)
        assert await refused(other, "r0", 0) is not None
        held = other.desks[MODEL].rationing.order(now_s=other.now_s())
        assert held is not None and 50.0 < held.ttl_s < 60.0
        await one.ration(MODEL, Ration(1, 1.0, 0.0))
        await world.clock.sleep(2.0 * other.policy.tick_s)
        assert await refused(other, "r1", 0) is None

    on_virtual_time(main, shared=True)


def test_without_its_store_an_order_is_followed_and_runs_out() -> None:
    async def main(world: World) -> None:
        router = await served_by(world)
        await refused(router, "h0", 5)

        async def away(*_: Any, **__: Any) -> None:
            raise Unavailable("the store is away", "wait")

        world.store.put_ration = away  # type: ignore[method-assign]
        world.store.shared = True
        assert await router.ration(MODEL, Ration(1, 0.0, 5.0)) is not None
        assert not router.link.answering
        assert await refused(router, "r0", 0) is not None
        await world.clock.sleep(5.5)
        assert await refused(router, "r1", 0) is None

    on_virtual_time(main)
