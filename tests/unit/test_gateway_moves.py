"""Requests on a worker that drains: they go on elsewhere as one answer, or end where they are."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.errors import Overloaded
from readyplane.core.worker import Role, WorkerState
from readyplane_gateway.bounds import Bounds
from tests.unit.gateway_world import FLEET, Plan, World, play, worker

LONG = Plan(tokens=200, every_s=0.05)  # 10 s of decode
ALL = "".join(f"t{n}" for n in range(200))


def long_streams(world: World) -> None:
    for name in ("d1", "d2"):
        world.engine(name).plans.extend([LONG, LONG, LONG])


def test_a_stream_goes_on_at_another_worker_as_one_answer() -> None:
    async def story(world: World) -> None:
        long_streams(world)
        asking = asyncio.ensure_future(world.ask(stream=True))
        await asyncio.sleep(1.0)
        world.drain("d1")
        got = await asking
        assert got.text == ALL  # nothing twice, nothing lost
        assert got.events[-1] == "[DONE]"
        assert got.events.count("[DONE]") == 1
        assert "moved" not in got.body.decode()
        (first,), (second,) = world.engine("d1").calls(), world.engine("d2").calls()
        assert first.done
        assert 0 < len(second.body["continuation"]["output_token_ids"]) < 200
        assert second.body["continuation"]["draws"] == "7"
        assert second.body["kv_transfer_params"]["remote_request_id"].startswith("m-")
        assert second.body["max_tokens"] == 5  # of the whole answer, as the client sent it
        await world.settle()
        assert world.ends() == {"moved": 1, "finished": 1}
        last = list(world.router.reservations.values())[-1]
        assert last.events[-1].output_tokens == 200
        assert world.metric("moves_total", outcome="moved") == 1

    play(story)


def test_what_ends_soon_ends_where_it_is() -> None:
    async def story(world: World) -> None:
        world.engine("d1").plans.append(Plan(tokens=20, every_s=0.05))
        asking = asyncio.ensure_future(world.ask(stream=True))
        await asyncio.sleep(0.2)
        world.drain("d1")
        assert (await asking).status == 200
        await world.settle(5)
        assert not world.router.moves

    play(story)


def test_without_room_elsewhere_it_is_asked_again_and_ends_where_it_is() -> None:
    async def story(world: World) -> None:
        long_streams(world)
        world.router.move_faults.extend(Overloaded("full", 1.0) for _ in range(30))
        asking = asyncio.ensure_future(world.ask(stream=True))
        await asyncio.sleep(1.0)
        world.drain("d1")
        got = await asking
        assert got.text == ALL
        assert len(world.router.moves) > 1
        await world.settle(5)
        assert world.ends() == {"finished": 1}

    play(story)


@pytest.mark.parametrize("status", [404, 500])
def test_an_engine_that_keeps_it_ends_it(status: int) -> None:
    async def story(world: World) -> None:
        long_streams(world)
        world.engine("d1").move_status = status
        asking = asyncio.ensure_future(world.ask(stream=True))
        await asyncio.sleep(1.0)
        world.drain("d1")
        assert (await asking).text == ALL
        await world.settle(5)
        assert world.ends()["finished"] == 1

    play(story)


def test_an_engine_that_cannot_move_is_not_asked() -> None:
    """R22.2: such a worker is drained by finishing."""

    async def story(world: World) -> None:
        long_streams(world)
        asking = asyncio.ensure_future(world.ask(stream=True))
        await asyncio.sleep(1.0)
        draining = [
            replace(w, state=WorkerState.DRAINING) if w.worker_id == "d1" else w
            for w in world.router.fleet.workers.values()
        ]
        world.router.set_fleet(draining)
        assert (await asking).text == ALL
        await world.settle()
        assert not world.router.moves

    play(story)


@pytest.mark.parametrize("how", ["reset", "500", "refuse"])
def test_when_the_next_engine_fails_it_is_prefilled_anew(how: str) -> None:
    async def story(world: World) -> None:
        world.engine("d1").plans.append(LONG)
        world.engine("d2").plans.extend([Plan(how=how), LONG])
        asking = asyncio.ensure_future(world.ask(stream=True))
        await asyncio.sleep(1.0)
        world.drain("d1")
        got = await asking
        assert got.status == 200
        await world.settle()
        # Its other pair is without the worker that failed; here nobody is left to decode.
        assert got.events[-1]["error"]["code"] == "worker_failed"
        assert world.metric("moves_total", outcome="repaired") == 1
        assert world.ends() == {"moved": 1, "leg_failed": 1}

    play(story)


def test_prefilled_anew_it_goes_on_from_the_tokens_it_had() -> None:
    async def story(world: World) -> None:
        world.engine("d1").plans.append(LONG)
        world.engine("d2").plans.append(Plan(how="500"))
        world.engine("d3").plans.append(LONG)
        asking = asyncio.ensure_future(world.ask(stream=True))
        await asyncio.sleep(1.0)
        world.drain("d1")
        got = await asking
        assert got.text == ALL
        prefills = [c for n in ("p1", "p2") for c in world.engine(n).calls()]
        again = max(prefills, key=lambda c: len(c.body["prompt"]))
        assert again.body["prompt"][:4] == [5, 6, 7, 8]
        assert len(again.body["prompt"]) > 4 + 10
        assert again.body["max_tokens"] == 1
        assert "continuation" not in again.body
        await world.settle()
        assert world.ends() == {"moved": 1, "leg_failed": 1, "finished": 1}

    play(story, workers=(*FLEET, worker("d3", Role.DECODE)))


def test_a_client_that_leaves_during_a_move_leaves_nothing_behind() -> None:
    async def story(world: World) -> None:
        long_streams(world)
        for after_s in (3.0, 3.001, 3.002, 3.004, 3.01, 3.03):
            world.drain("nobody")
            asking = asyncio.ensure_future(world.ask(stream=True, leave_after_s=after_s))
            await asyncio.sleep(1.0)
            world.drain("d1")
            await asking
            await world.settle(5)
            world.engine("d1").moved.clear()
            ready = [
                replace(w, state=WorkerState.READY) for w in world.router.fleet.workers.values()
            ]
            world.router.set_fleet(ready)
            await asyncio.sleep(0.1)

    play(story)


@settings(max_examples=40)
@given(
    drains=st.lists(
        st.tuples(st.floats(0.0, 6.0), st.sampled_from(["d1", "d2"])), min_size=1, max_size=3
    ),
    clients=st.lists(
        st.fixed_dictionaries(
            {
                "at_s": st.floats(0.0, 3.0),
                "tokens": st.integers(1, 120),
                "leave_after_s": st.one_of(st.none(), st.floats(0.1, 8.0)),
            }
        ),
        min_size=1,
        max_size=4,
    ),
    how=st.sampled_from(["ok", "reset_mid", "500", "stall_mid", "truncated"]),
)
def test_every_reservation_has_one_end(
    drains: list[tuple[float, str]], clients: list[dict[str, Any]], how: str
) -> None:
    async def one(world: World, client: dict[str, Any]) -> None:
        await asyncio.sleep(client["at_s"])
        got = await world.ask(stream=True, leave_after_s=client["leave_after_s"])
        if got.left or got.status != 200:
            return
        whole = got.events[-1] == "[DONE]"
        assert whole or "error" in got.events[-1]
        numbers = [int(n) for n in got.text.split("t") if n]
        assert numbers == list(range(len(numbers)))  # each token once, in order

    async def drain(world: World, at_s: float, name: str) -> None:
        await asyncio.sleep(at_s)
        world.drain(name)

    async def story(world: World) -> None:
        for name in ("d1", "d2"):
            plans = [Plan(tokens=c["tokens"], every_s=0.05) for c in clients]
            world.engine(name).plans.extend([*plans, Plan(how=how, tokens=50), *plans])
        await asyncio.gather(
            *(one(world, client) for client in clients),
            *(drain(world, at_s, name) for at_s, name in drains),
        )
        await world.settle(70)

    play(story, bounds=Bounds(decode_first_s_max=3, decode_idle_s_max=3))
