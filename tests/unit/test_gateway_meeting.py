"""Legs that are sent at once: engines that meet under a room, and what happens when one fails."""

from dataclasses import replace

import pytest

from readyplane.core.identity import KvFormat
from readyplane.core.worker import Role, Worker
from tests.unit.gateway_world import FLEET, Plan, World, play, worker


def meeting(w: Worker) -> Worker:
    """The worker, with an engine that meets others."""
    assert w.serving is not None
    kv = KvFormat(w.serving.kv.model_digest, connector="sglang/nixl")
    at = f"10.0.0.{w.worker_id[1:]}:8998" if w.role is Role.PREFILL else ""
    return replace(w, serving=replace(w.serving, kv=kv, kv_side_channel=at))


FOUR = tuple(meeting(w) for w in FLEET)
TWO = tuple(meeting(w) for w in (worker("p1", Role.PREFILL), worker("d1", Role.DECODE)))


@pytest.mark.parametrize("stream", [True, False])
def test_both_engines_get_the_same_body_at_the_same_time(stream: bool) -> None:
    async def story(world: World) -> None:
        got = await world.ask(stream=stream, temperature=0.5)
        assert got.status == 200
        assert (got.text if stream else got.json["choices"][0]["text"]) in ("t0t1t2t3t4", "aaaaa")
        assert got.headers["x-readyplane-handover"] == "kv"
        (one,), (two,) = world.engine("p1").calls(), world.engine("d1").calls()
        assert one.raw == two.raw
        assert one.body["bootstrap_host"] == "10.0.0.1" and one.body["bootstrap_port"] == 8998
        reservation = world.router.reservations[got.headers["x-readyplane-reservation"]]
        assert one.body["bootstrap_room"] == reservation.pair.bootstrap_room
        assert one.body["rid"] == reservation.pair.reservation_id
        assert one.body["stream"] is stream and one.body["max_tokens"] == 5
        assert "kv_transfer_params" not in one.body
        await world.settle(3.0)
        kinds = [str(e.kind) for e in reservation.events]
        if stream:
            assert sorted(kinds) == ["finished", "first_token", "prefill_done"]
            assert reservation.events[-1].tpot_s == pytest.approx(0.01, rel=0.01)
        else:
            assert kinds == ["prefill_done", "finished"]
        assert world.metric("handovers_total", kind="handed_over") == 1
        assert not world.engine("p1").cut_off and not world.engine("d1").cut_off

    play(story, workers=TWO)


def test_each_request_has_a_room_of_its_own() -> None:
    async def story(world: World) -> None:
        for _ in range(6):
            assert (await world.ask(stream=True)).status == 200
        rooms = [c.body["bootstrap_room"] for n in ("p1", "p2") for c in world.engine(n).calls()]
        assert len(set(rooms)) == len(rooms) == 6
        assert all(here == {"p", "d"} for here in world.rooms.values())

    play(story, workers=FOUR)


@pytest.mark.parametrize("leg", ["p", "d"])
@pytest.mark.parametrize("how", ["refuse", "reset", "500", "503", "garbage"])
@pytest.mark.parametrize("stream", [True, False])
def test_b71_a_leg_that_fails_ends_the_other_at_once(leg: str, how: str, stream: bool) -> None:
    """B71: cancelled and given back within 100 ms, told to both engines, and paired anew."""

    async def story(world: World) -> None:
        world.engine(f"{leg}1").plans.append(Plan(how))
        began_s = world.clock.monotonic_s()
        got = await world.ask(stream=stream)
        assert got.status == 200
        assert world.clock.monotonic_s() - began_s < 0.3
        second = "prefill" if leg == "p" else "decode"
        assert got.headers[f"x-readyplane-{second}"] == f"{leg}2"
        _, again = world.router.asked
        assert again["avoid"] == (f"{leg}1",)
        await world.settle(3.0)
        assert world.ends() == {"leg_failed": 1, "finished": 1}
        failed = world.router.reservations["res-1"].events[-1]
        assert failed.failed_worker_id == f"{leg}1"
        assert failed.detail.startswith("busy") == (how == "503")
        other = world.engine("d1" if leg == "p" else "p1")
        assert all(seen.cut or seen.done for seen in other.calls())
        assert "res-1" in other.cut_off  # nobody is left waiting for half an hour
        assert world.engine("p1").open == world.engine("d1").open == 0

    play(story, workers=FOUR)


def test_a_client_that_leaves_ends_both() -> None:
    async def story(world: World) -> None:
        world.engine("p1").plans.append(Plan("hang"))
        got = await world.ask(stream=True, leave_after_s=1.0)
        assert got.left
        await world.settle(3.0)
        assert world.ends() == {"aborted": 1}
        for name in ("p1", "d1"):
            assert [seen.cut for seen in world.engine(name).calls()] == [True]
            assert world.engine(name).cut_off == ["res-1"]

    play(story, workers=TWO)


def test_two_that_never_meet_are_given_up() -> None:
    """A prefill engine that says nothing holds nobody up for longer than its bound."""

    async def story(world: World) -> None:
        world.engine("p1").plans.append(Plan("hang"))
        got = await world.ask(stream=True)
        assert (got.status, got.error["code"]) == (504, "worker_timeout")
        assert "no ready" in got.error["message"]
        await world.settle(3.0)
        assert world.engine("p1").cut_off == world.engine("d1").cut_off == ["res-1"]

    play(story, workers=TWO)


def test_a_decode_engine_that_names_the_kv_blames_who_gives_it() -> None:
    """B60: it is there and works; what it waited for did not come."""

    async def story(world: World) -> None:
        world.engine("d1").plans.append(Plan("500"))
        world.engine("d1").fails_with = "Decode transfer failed: KVTransferError(bootstrap_room=1)"
        got = await world.ask(stream=True)
        assert got.status == 200
        assert world.router.asked[1]["avoid"] == ("p1",)

    play(story, workers=FOUR)


@pytest.mark.parametrize("name", ["p1", "d1"])
def test_what_an_engine_refuses_is_the_clients_fault(name: str) -> None:
    async def story(world: World) -> None:
        world.engine(name).plans.append(Plan("400"))
        got = await world.ask(stream=True)
        assert (got.status, got.error["message"]) == (400, "status 400")
        await world.settle(3.0)
        assert world.ends() == {"aborted": 1}
        assert not [a for a in world.router.asked if a["replaces"]]

    play(story, workers=FOUR)


def test_a_stream_that_breaks_later_ends_with_an_error() -> None:
    async def story(world: World) -> None:
        world.engine("d1").plans.append(Plan("reset_mid"))
        got = await world.ask(stream=True)
        assert got.status == 200 and got.text == "t0t1"
        assert got.events[-1]["error"]["code"] == "worker_failed"

    play(story, workers=TWO)
