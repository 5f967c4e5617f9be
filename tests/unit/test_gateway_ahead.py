"""A prefill leg that begins while its pair is still being reserved: nothing is served on half of it."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.errors import Overloaded, ReadyplaneError
from readyplane.core.work import RequestShape
from readyplane.ports import Pair
from readyplane_gateway.bounds import Bounds
from tests.unit.gateway_world import MODEL, Plan, World, play


@dataclass
class EarlyRouter:
    """Tells of a pair at once and reserves it later: the same one, another one, or none."""

    world: World
    fates: deque[str | ReadyplaneError] = field(default_factory=deque)
    reserve_s: float = 0.05
    told: list[Pair] = field(default_factory=list)

    async def route(
        self,
        shape: RequestShape,
        *,
        replaces: str = "",
        avoid: Sequence[str] = (),
        chosen: Callable[[Pair], None] | None = None,
    ) -> Pair:
        fate = self.fates.popleft() if self.fates else "same"
        pair = await self.world.router.route(shape, replaces=replaces, avoid=avoid)
        reservation = self.world.router.reservations[pair.reservation_id]
        try:
            if chosen is not None and fate != "silent":
                first = pair if fate == "same" else await self._another(pair)
                self.told.append(first)
                chosen(first)
            await asyncio.sleep(self.reserve_s)
        except asyncio.CancelledError:
            reservation.ends.append("withdrawn")  # as the router's own `_abandon` does
            raise
        if isinstance(fate, ReadyplaneError):
            reservation.ends.append("refused")
            raise fate
        return pair

    async def _another(self, pair: Pair) -> Pair:
        name = "p2" if pair.prefill.worker_id == "p1" else "p1"
        worker = self.world.router.fleet.workers[name]
        assert worker.serving is not None
        end = replace(pair.prefill, worker_id=name, engine_url=worker.serving.engine_url)
        return replace(pair, prefill=replace(end, incarnation=worker.offer.incarnation))


def early(world: World, *fates: str | ReadyplaneError, reserve_s: float = 0.05) -> EarlyRouter:
    router = EarlyRouter(world, deque(fates), reserve_s)
    world.gateway.proxy._route_ahead = router.route
    return router


def test_the_prefill_leg_does_not_wait_for_the_reservation() -> None:
    async def story(world: World) -> None:
        early(world, reserve_s=0.015)
        began_s = world.clock.monotonic_s()
        got = await world.ask()
        assert got.status == 200
        # 2 ms of the choice, 20 ms of prefill (in which it is reserved) and 20 ms of decode.
        assert world.clock.monotonic_s() - began_s == pytest.approx(0.1, abs=0.03)
        assert len(world.engine("p1").calls()) == 1
        await world.settle()
        (reservation,) = world.router.reservations
        assert world.router.kinds(reservation) == ["prefill_done", "finished"]

    play(story)


def test_no_token_is_shown_before_the_reservation_stands() -> None:
    async def story(world: World) -> None:
        early(world, reserve_s=1.0)
        heard: list[bytes] = []

        async def read(data: bytes) -> None:
            heard.append(data)

        asking = asyncio.ensure_future(world.ask(stream=True, read=read))
        await asyncio.sleep(0.9)
        assert len(world.engine("p1").calls()) == len(world.engine("d1").calls()) == 1
        assert not heard
        (reservation,) = world.router.reservations.values()
        assert not reservation.events
        assert (await asking).status == 200
        assert len(world.engine("p1").calls()) == len(world.engine("d1").calls()) == 1
        await world.settle()
        assert [str(e.kind) for e in reservation.events] == [
            "prefill_done",
            "first_token",
            "finished",
        ]

    play(story)


@pytest.mark.parametrize("fate", ["same", "other", "refused"])
def test_a_whole_answer_that_is_there_first_needs_no_reservation(fate: str) -> None:
    """Its work is done: the reservation, if there is one, is told so and ends."""

    async def story(world: World) -> None:
        refused = Overloaded("other routers were first", 1.0)
        early(world, refused if fate == "refused" else fate, reserve_s=1.0)
        asking = asyncio.ensure_future(world.ask())
        await asyncio.sleep(0.5)
        assert asking.done()
        assert (await asking).status == 200
        (reservation,) = world.router.reservations.values()
        assert not reservation.events  # nothing is told of what does not stand yet
        await world.settle()
        told = [str(e.kind) for e in reservation.events]
        assert told == ([] if fate == "refused" else ["finished"])
        assert len(world.engine("d1").calls()) + len(world.engine("d2").calls()) == 1

    play(story)


@pytest.mark.parametrize("reserve_s", [0.005, 1.0], ids=["leg under way", "leg has ended"])
def test_a_pair_that_was_not_reserved_is_dropped_for_the_one_that_was(reserve_s: float) -> None:
    async def story(world: World) -> None:
        router = early(world, "other", reserve_s=reserve_s)
        got = await world.ask(stream=True)
        assert got.status == 200
        assert got.text == "t0t1t2t3t4"
        first = router.told[0].prefill.worker_id
        assert got.headers["x-readyplane-prefill"] != first
        assert len(world.engine(first).calls()) == 1  # begun, and for nothing
        await world.settle()
        (reservation,) = world.router.reservations
        assert world.router.kinds(reservation) == ["prefill_done", "first_token", "finished"]

    play(story)


def test_no_pair_after_all_is_told_as_the_router_told_it() -> None:
    async def story(world: World) -> None:
        early(world, Overloaded("other routers were first", 1.0), reserve_s=0.01)
        got = await world.ask()
        assert got.status == 429
        assert got.error["code"] == "overloaded"
        await world.settle()
        (reservation,) = world.router.reservations.values()
        assert reservation.ends == ["refused"]  # nothing is told of what never was
        assert not reservation.events

    play(story)


def test_a_client_that_leaves_meanwhile_gives_both_back() -> None:
    async def story(world: World) -> None:
        early(world, reserve_s=0.5)
        world.engine("p1").plans.append(Plan(after_s=5.0))
        world.engine("p2").plans.append(Plan(after_s=5.0))
        got = await world.ask(leave_after_s=0.1)
        assert got.left
        await world.settle(3)

    play(story)


def test_a_leg_that_fails_before_the_reservation_stands_is_repaired_after_it() -> None:
    async def story(world: World) -> None:
        early(world, reserve_s=0.5)
        world.engine("p1").plans.append(Plan(how="reset"))
        got = await world.ask()
        assert got.status == 200
        assert got.headers["x-readyplane-prefill"] == "p2"
        await world.settle()
        assert world.ends()["leg_failed"] == 1

    play(story)


HOWS = ("ok", "ok", "hang", "reset", "400", "503", "no_params", "truncated")
plans = st.lists(
    st.builds(Plan, how=st.sampled_from(HOWS), after_s=st.sampled_from([0.0, 0.2])), max_size=3
)


@settings(max_examples=60)
@given(
    engines=st.fixed_dictionaries(dict.fromkeys(("p1", "p2", "d1", "d2"), plans)),
    fates=st.lists(st.sampled_from(["same", "other", "silent", "refused"]), max_size=4),
    reserve_s=st.sampled_from([0.0, 0.01, 0.3]),
    clients=st.lists(st.one_of(st.none(), st.floats(0.0, 0.5)), min_size=1, max_size=4),
)
def test_every_reservation_has_one_end(
    engines: dict[str, list[Plan]],
    fates: list[str],
    reserve_s: float,
    clients: list[float | None],
) -> None:
    async def one(world: World, leave_after_s: float | None) -> Any:
        body = {"model": MODEL, "prompt": "text"}
        got = await world.ask(body, leave_after_s=leave_after_s)
        assert got.left or got.ended

    async def story(world: World) -> None:
        for name, behaviour in engines.items():
            world.engine(name).plans.extend(behaviour)
        refused = Overloaded("other routers were first", 1.0)
        early(world, *(refused if f == "refused" else f for f in fates), reserve_s=reserve_s)
        await asyncio.gather(*(one(world, client) for client in clients))
        await world.settle(5)

    play(story, bounds=Bounds(decode_first_s_max=3, decode_total_s_max=3, prefill_slack_s=3))
