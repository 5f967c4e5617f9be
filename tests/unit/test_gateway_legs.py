"""A leg of a request that fails: what is repaired, what is told, and whose fault it is."""

import asyncio
from dataclasses import replace

import pytest

from readyplane.core.worker import Role, WorkerState
from readyplane_gateway.bounds import Bounds
from tests.unit.gateway_world import FLEET, MODEL, Plan, World, play, worker

ONE_EACH = (worker("p1", Role.PREFILL), worker("d1", Role.DECODE))


@pytest.mark.parametrize(
    "how", ["refuse", "reset", "garbage", "500", "502", "404", "401", "429", "503"]
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_failed_prefill_is_repaired_once(how: str, stream: bool) -> None:
    async def story(world: World) -> None:
        world.engine("p1").plans.append(Plan(how))
        got = await world.ask(stream=stream)
        assert got.status == 200
        assert got.headers["x-readyplane-prefill"] == "p2"
        first, second = world.router.asked
        assert second["replaces"] == "res-1"
        assert second["avoid"] == ("p1",)
        assert first["shape"] == second["shape"]
        await world.settle()
        failed = world.router.reservations["res-1"].events[-1]
        assert (failed.kind, failed.failed_worker_id) == ("leg_failed", "p1")
        assert failed.detail.startswith("busy") == (how in {"429", "503"})
        assert world.ends() == {"leg_failed": 1, "finished": 1}

    play(story)


@pytest.mark.parametrize(
    "how", ["refuse", "reset", "garbage", "500", "404", "429", "503", "error_event"]
)
def test_a_decode_that_fails_before_its_first_token_is_repaired(how: str) -> None:
    async def story(world: World) -> None:
        world.engine("d1").plans.append(Plan(how, tokens=1 if how == "error_event" else 5))
        got = await world.ask(stream=True)
        assert got.status == 200
        assert got.text == "t0t1t2t3t4"
        assert got.headers["x-readyplane-decode"] == "d2"
        await world.settle()
        assert world.ends() == {"leg_failed": 1, "finished": 1}

    play(story)


@pytest.mark.parametrize("how", ["freed", "told", "left_to_expire"])
def test_kv_that_nobody_will_read_is_given_back(how: str) -> None:
    """B86: the prefill engine is told at once instead of holding the blocks until they expire."""

    async def story(world: World) -> None:
        for engine in world.engines.values():
            engine.aborts = how
        world.engine("d1").plans.append(Plan("503"))
        await world.ask(stream=True)
        await world.settle(0.1)
        assert len(world.held) == (1 if how == "left_to_expire" else 0)
        assert world.metric("kv_abandoned_total", how=how) == 1
        world.held.clear()

    play(story)


def test_a_prefill_that_ended_unread_is_given_back() -> None:
    """Its answer is not waited for any longer, and it may hold KV all the same."""

    async def story(world: World) -> None:
        world.engine("p1").plans.append(Plan("held_hang"))
        got = await world.ask(stream=True)
        assert got.headers["x-readyplane-prefill"] == "p2"
        await world.settle(0.1)
        assert not world.held
        assert world.metric("kv_abandoned_total", how="freed") == 1

        world.engine("p2").plans.append(Plan("held_hang"))
        world.engine("p1").plans.append(Plan("held_hang"))
        got = await world.ask(stream=True, leave_after_s=1.0)
        assert got.left
        await world.settle(0.1)
        assert not world.held
        assert world.metric("kv_abandoned_total", how="freed") == 2

        for name in ("p1", "p2"):
            world.engine(name).plans.clear()
            world.engine(name).plans.append(Plan("hang"))
        await world.ask(stream=True, leave_after_s=1.0)
        await world.settle(0.1)
        assert world.metric("kv_abandoned_total", how="not_held") == 1

    play(story)


@pytest.mark.parametrize("how", ["reset_mid", "truncated", "stall_mid"])
def test_a_decode_that_fails_later_ends_the_stream_with_an_error(how: str) -> None:
    async def story(world: World) -> None:
        world.engine("d1").plans.append(Plan(how))
        got = await world.ask(stream=True)
        assert got.status == 200
        assert got.ended
        assert got.text == "t0t1"
        assert "[DONE]" not in got.events
        error = got.events[-1]["error"]
        code = "worker_timeout" if how == "stall_mid" else "worker_failed"
        assert error["code"] == code
        assert "d1" in error["message"]
        await world.settle()
        (reservation,) = world.router.reservations.values()
        kinds = [str(e.kind) for e in reservation.events if e.kind != "progress"]
        assert kinds == ["prefill_done", "first_token", "leg_failed"]
        assert reservation.events[-1].output_tokens == 2
        assert world.metric("requests_total", code_class="stream_error", model=MODEL) == 1

    play(story)


def test_an_error_of_the_engine_within_a_stream_is_passed_on() -> None:
    async def story(world: World) -> None:
        world.engine("d1").plans.append(Plan("error_event"))
        got = await world.ask(stream=True)
        errors = [e["error"] for e in got.events if e != "[DONE]" and "error" in e]
        assert [e["message"] for e in errors] == ["boom"]
        await world.settle()
        assert world.ends() == {"aborted": 1}

    play(story)


def test_an_answer_in_one_piece_survives_a_decode_that_dies_late() -> None:
    async def story(world: World) -> None:
        world.engine("d1").plans.append(Plan("reset_mid"))
        got = await world.ask()
        assert got.status == 200
        assert got.headers["x-readyplane-decode"] == "d2"

    play(story)


@pytest.mark.parametrize(("leg", "names"), [("prefill", ("p1", "p2")), ("decode", ("d1", "d2"))])
@pytest.mark.parametrize(
    ("how", "status", "code"),
    [
        ("500", 502, "worker_failed"),
        ("reset", 502, "worker_failed"),
        ("hang", 504, "worker_timeout"),
        ("429", 503, "workers_busy"),
    ],
)
def test_two_failures_are_told(
    leg: str, names: tuple[str, str], how: str, status: int, code: str
) -> None:
    async def story(world: World) -> None:
        for name in names:
            world.engine(name).plans.append(Plan(how))
        got = await world.ask(stream=True)
        assert (got.status, got.error["code"]) == (status, code)
        assert leg in got.error["message"]
        assert int(got.headers["retry-after"]) >= 1
        await world.settle()
        assert world.ends() == {"leg_failed": 2}

    play(story)


def test_no_other_pair_after_a_failure() -> None:
    async def story(world: World) -> None:
        world.engine("p1").plans.append(Plan("500"))
        got = await world.ask(stream=True)
        assert got.status == 502
        assert "no ready prefill worker" in got.error["message"]
        await world.settle()
        assert world.ends() == {"leg_failed": 1}

    play(story, workers=ONE_EACH)


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize("name", ["p1", "d1"])
def test_what_an_engine_refuses_is_the_clients_fault(status: int, name: str) -> None:
    """B70: passed on as it came, nobody is blamed, nothing is re-paired."""

    async def story(world: World) -> None:
        for _ in range(3):
            world.engine(name).plans.append(Plan(str(status)))
        for _ in range(3):
            got = await world.ask(stream=True)
            if got.status != 200:
                assert got.status == status
                assert got.error["message"] == f"status {status}"
                assert got.error["param"] == "prompt"
        await world.settle()
        events = [e for r in world.router.reservations.values() for e in r.events]
        assert not [e for e in events if e.kind == "leg_failed"]
        assert all(not asked["replaces"] for asked in world.router.asked)
        assert world.metric("requests_total", code_class="4xx", model=MODEL) == 2

    play(story)


def test_a_hung_worker_does_not_hold_up_the_others() -> None:
    """B75: its own bound, its own connections; the requests on it are served elsewhere or told."""

    async def story(world: World) -> None:
        world.engine("d1").plans.extend(Plan("hang") for _ in range(50))
        started_s = world.clock.monotonic_s()
        answers = [asyncio.ensure_future(world.ask(stream=True)) for _ in range(40)]
        await asyncio.sleep(0.5)
        quick = [task.result() for task in answers if task.done()]
        assert len(quick) >= 20
        assert {got.status for got in quick} == {200}
        done = await asyncio.gather(*answers)
        assert world.clock.monotonic_s() - started_s < 2 * Bounds().decode_first_s_max + 1
        assert {got.status for got in done} == {200}
        assert not [got for got in done if got.headers["x-readyplane-decode"] == "d1"]

    play(story)


def test_a_full_worker_is_busy_not_broken() -> None:
    async def story(world: World) -> None:
        world.engine("p1").plans.append(Plan(after_s=5.0))
        slow = asyncio.ensure_future(world.ask(stream=True))
        await asyncio.sleep(0.1)
        world.router._turn = iter([0, 1])  # type: ignore[assignment]  # p1 again
        got = await world.ask(stream=True)
        assert got.headers["x-readyplane-prefill"] == "p2"
        assert (await slow).status == 200
        await world.settle()
        failed = [e for r in world.router.reservations.values() for e in r.events if e.detail]
        assert [e.detail.startswith("busy") for e in failed] == [True]

    play(story, bounds=Bounds(connections_max=1))


def test_a_worker_known_to_be_gone_fails_its_legs_at_once() -> None:
    async def story(world: World) -> None:
        world.engine("d1").plans.append(Plan("hang"))
        asked = asyncio.ensure_future(world.ask(stream=True))
        await asyncio.sleep(0.5)
        began_s = world.clock.monotonic_s()
        gone = replace(FLEET[2], state=WorkerState.GONE)
        world.router.set_fleet([*FLEET[:2], gone, FLEET[3]])
        got = await asked
        assert got.headers["x-readyplane-decode"] == "d2"
        assert world.clock.monotonic_s() - began_s < 0.5

    play(story)


def test_a_router_that_has_forgotten_its_fleet_cuts_nothing() -> None:
    async def story(world: World) -> None:
        world.engine("d1").plans.append(Plan(tokens=50))
        asked = asyncio.ensure_future(world.ask(stream=True))
        await asyncio.sleep(0.2)
        world.router.set_fleet([])
        got = await asked
        assert got.events[-1] == "[DONE]"

    play(story)


def test_a_kept_connection_that_was_closed_meanwhile_is_replaced() -> None:
    async def story(world: World) -> None:
        assert (await world.ask(stream=True)).status == 200
        await world.settle()
        for transport in world.http.transports:
            transport.drop()
        got = await world.ask(stream=True)
        assert got.status == 200
        assert len(world.router.asked) == 2  # no re-pairing

    play(story, workers=ONE_EACH)
