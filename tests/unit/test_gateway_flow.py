"""The way of a request: both legs, what is forwarded, what is told, what breaks and how it ends."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from readyplane.core.errors import NoPair, Overloaded, PromptTooLong, Unavailable
from readyplane.core.work import pack_tokens
from readyplane.core.worker import Fleet, Role, WorkerState
from readyplane_gateway.bounds import Bounds
from tests.unit.gateway_world import FLEET, KV_PARAMS, MODEL, Plan, World, play, worker

ONE_EACH = (worker("p1", Role.PREFILL), worker("d1", Role.DECODE))


def test_a_streamed_completion_goes_over_both_legs() -> None:
    async def story(world: World) -> None:
        got = await world.ask(stream=True, temperature=0.5)
        assert got.status == 200
        assert got.headers["content-type"].startswith("text/event-stream")
        assert got.text == "t0t1t2t3t4"
        assert got.events[-1] == "[DONE]"
        assert all("usage" not in e or e["usage"] is None for e in got.events[:-1])
        assert got.headers["x-readyplane-prefill"] == "p1"
        assert got.headers["x-readyplane-decode"] == "d1"
        assert got.headers["x-readyplane-handover"] == "kv"
        (sent,) = world.engine("p1").calls()
        assert sent.body["max_tokens"] == 1
        assert sent.body["stream"] is False
        assert sent.body["temperature"] == 0.5
        assert sent.body["kv_transfer_params"] == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        (sent,) = world.engine("d1").calls()
        assert sent.body["max_tokens"] == 5
        assert sent.body["stream"] is True
        assert sent.body["stream_options"] == {
            "include_usage": True,
            "continuous_usage_stats": True,
        }
        await world.settle()
        reservation = got.headers["x-readyplane-reservation"]
        assert world.router.kinds(reservation) == ["prefill_done", "first_token", "finished"]
        prefill, first, end = world.router.reservations[reservation].events
        assert prefill.cached_tokens == 4
        assert first.ttft_s == pytest.approx(0.045, abs=0.01)
        assert end.output_tokens == 5
        assert end.tpot_s == pytest.approx(0.01, rel=0.01)
        assert end.attained is True

    play(story)


def test_the_handover_parameters_are_forwarded_byte_for_byte() -> None:
    async def story(world: World) -> None:
        await world.ask(stream=True)
        (sent,) = world.engine("d1").calls()
        held = sent.body["kv_transfer_params"]["remote_request_id"]
        assert b'"kv_transfer_params":' + (KV_PARAMS % held).encode() in sent.raw

    play(story)


def test_an_answer_in_one_piece_is_the_engines_own() -> None:
    async def story(world: World) -> None:
        got = await world.ask()
        assert got.status == 200
        assert got.json["choices"][0]["text"] == "aaaaa"
        await world.settle()
        (end,) = world.router.reservations.values()
        assert [str(e.kind) for e in end.events] == ["prefill_done", "finished"]
        assert end.events[-1].ttft_s is None  # never seen, so not told
        assert end.events[-1].output_tokens == 5
        assert end.events[-1].attained is True

    play(story)


def test_usage_is_shown_to_those_who_ask() -> None:
    async def story(world: World) -> None:
        got = await world.ask(stream=True, stream_options={"include_usage": True})
        assert got.events[-2]["usage"]["completion_tokens"] == 5

    play(story)


def test_text_is_tokenised_once_and_both_legs_get_the_ids() -> None:
    async def story(world: World) -> None:
        for _ in range(2):
            await world.ask(stream=True, prompt="hello", add_special_tokens=False)
        ids = [byte + 3 for byte in b"hello"]
        for name in ("p1", "p2", "d1", "d2"):
            (sent,) = world.engine(name).calls()
            assert sent.body["prompt"] == ids
        assert sum(engine.tokenized for engine in world.engines.values()) == 1
        shape = world.router.asked[0]["shape"]
        assert shape.isl == 5
        assert shape.token_ids == pack_tokens(ids)

    play(story)


def test_a_chat_keeps_its_messages_and_is_routed_by_tokens() -> None:
    async def story(world: World) -> None:
        messages = [{"role": "user", "content": "hi"}]
        got = await world.ask(
            {"model": MODEL, "messages": messages, "max_completion_tokens": 7, "stream": True},
            path="/v1/chat/completions",
        )
        assert got.text == "t0t1t2t3t4"
        (sent,) = world.engine("p1").calls()
        assert sent.path == "/v1/chat/completions"
        assert sent.body["messages"] == messages
        assert sent.body["max_tokens"] == sent.body["max_completion_tokens"] == 1
        (sent,) = world.engine("d1").calls()
        assert sent.body["max_completion_tokens"] == 7
        assert world.router.asked[0]["shape"].max_tokens == 7
        ids = [byte + 3 for byte in json.dumps(messages).encode()]
        shape = world.router.asked[0]["shape"]
        assert (shape.isl, shape.token_ids) == (len(ids), pack_tokens(ids))
        for name in ("p1", "d1"):  # the same prompt for both, tokenised by neither
            (sent,) = world.engine(name).calls()
            assert sent.body["prompt_token_ids"] == ids
        assert sum(engine.tokenized for engine in world.engines.values()) == 1

    play(story)


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"documents": [{"text": "x"}]},
        {"reasoning_effort": "low"},
        {"tool_choice": "none"},
    ],
)
def test_a_chat_that_tokens_do_not_tell_goes_as_its_messages(more: dict[str, Any]) -> None:
    """The ids serve the router's choice; each engine writes the prompt out itself."""

    async def story(world: World) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}
        got = await world.ask(body, path="/v1/chat/completions")
        assert got.status == 200
        for name in ("p1", "d1"):
            (sent,) = world.engine(name).calls()
            assert "prompt_token_ids" not in sent.body
            assert sent.body["messages"] == body["messages"]
        assert world.router.asked[0]["shape"].token_ids

    play(story)


def test_a_chat_may_bring_its_tokens() -> None:
    async def story(world: World) -> None:
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": MODEL, "messages": messages, "prompt_token_ids": [9, 8, 7]}
        got = await world.ask(body, path="/v1/chat/completions")
        assert got.status == 200
        assert world.router.asked[0]["shape"].token_ids == pack_tokens([9, 8, 7])
        assert world.engine("d1").calls()[0].body["prompt_token_ids"] == [9, 8, 7]
        assert sum(engine.tokenized for engine in world.engines.values()) == 0
        got = await world.ask({**body, "prompt_token_ids": [-1]}, path="/v1/chat/completions")
        assert (got.status, got.error["param"]) == (400, "prompt_token_ids")

    play(story)


def test_what_the_router_is_told_of_a_request() -> None:
    async def story(world: World) -> None:
        body = {"model": MODEL, "prompt": [[9, 8]], "priority": -3, "cache_salt": "s"}
        body["request_id"] = "mine"
        headers = {
            "x-llm-d-slo-ttft-ms": "1500",
            "x-llm-d-inference-fairness-id": "team-a",
            "x-request-id": "mine",
        }
        got = await world.ask(body, headers=headers)
        assert got.headers["x-request-id"] == "mine"
        shape = world.router.asked[0]["shape"]
        assert (shape.priority, shape.tenant, shape.cache_salt) == (-3, "team-a", "s")
        assert shape.max_tokens is None
        assert (shape.slo.ttft_s, shape.slo.tpot_s) == (1.5, 0.1)
        assert shape.request_id != "mine"  # two clients may choose one id
        (sent,) = world.engine("d1").calls()
        assert "max_tokens" not in sent.body
        # Both legs of one attempt carry one id, another attempt another: held KV is named by it.
        assert sent.headers["x-request-id"] == "res-1"
        assert "request_id" not in sent.body

    play(story)


def test_one_worker_for_both_stages_needs_no_handover() -> None:
    async def story(world: World) -> None:
        world.router.local = True
        got = await world.ask(stream=True)
        assert got.headers["x-readyplane-handover"] == "local"
        (sent,) = world.engine("b1").calls()
        assert "kv_transfer_params" not in sent.body
        assert sent.body["max_tokens"] == 5
        assert world.metric("handovers_total", kind="local") == 1

    play(story, workers=(worker("b1", Role.BOTH),))


def test_a_prefill_without_parameters_is_counted_not_hidden() -> None:
    """B73: decode then computes the prompt itself; header and metric say so."""

    async def story(world: World) -> None:
        world.engine("p1").plans.append(Plan("no_params"))
        got = await world.ask(stream=True)
        assert got.status == 200
        assert got.headers["x-readyplane-handover"] == "none"
        assert world.metric("handovers_total", kind="missing") == 1

    play(story)


# --------------------------------------------------------------------------- failing legs


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


# --------------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("stage", "at_s"),
    [("route", 0.001), ("prefill", 0.015), ("decode", 0.04), ("stream", 0.06)],
)
def test_a_client_that_leaves_frees_everything(stage: str, at_s: float, stream: bool) -> None:
    """B71, B76: both legs are cancelled and the reservation is released within 100 ms."""

    async def story(world: World) -> None:
        got = await world.ask(stream=stream, leave_after_s=at_s)
        assert got.left
        await asyncio.sleep(0.1)
        world.check_nothing_leaks()
        assert world.ends() == {"aborted": 1}
        expected = "decode" if stage == "stream" and not stream else stage
        assert world.metric("aborted_total", stage=expected) == 1
        last = list(world.router.reservations.values())[-1].events[-1]
        assert last.detail.startswith("the client left")
        cut = [s for e in world.engines.values() for s in e.calls() if s.cut]
        assert len(cut) == (0 if stage == "route" else 1)

    play(story)


def test_a_request_that_queues_in_the_router_is_taken_out() -> None:
    async def story(world: World) -> None:
        world.router.faults.append(30.0)
        got = await world.ask(stream=True, leave_after_s=1.0)
        assert got.left
        await asyncio.sleep(1.5)
        assert world.router.cancelled == 1
        assert not world.router.reservations

    play(story)


def test_a_client_that_does_not_read_is_cut_off() -> None:
    async def story(world: World) -> None:
        async def never(data: bytes) -> None:
            await asyncio.Event().wait()

        world.engine("d1").plans.append(Plan(tokens=2000))
        got = await world.ask(stream=True, read=never)
        assert got.body == b""
        assert world.clock.monotonic_s() < 10
        await world.settle()
        assert world.ends() == {"aborted": 1}

    play(story, bounds=Bounds(client_stall_s_max=5.0))


def test_a_slow_client_slows_its_engine_and_nothing_else() -> None:
    async def story(world: World) -> None:
        async def slowly(data: bytes) -> None:
            await asyncio.sleep(0.5)

        world.engine("d1").plans.append(Plan(tokens=300, every_s=0.001))
        got = await world.ask(stream=True, read=slowly)
        assert got.events[-1] == "[DONE]"
        assert len(got.events) == 301

    play(story, bounds=Bounds(decode_idle_s_max=0.4))


# --------------------------------------------------------------------------- router


def test_a_router_that_is_away_for_a_moment_is_waited_for() -> None:
    async def story(world: World) -> None:
        world.router.faults.extend(Unavailable("router is away", "wait") for _ in range(3))
        assert (await world.ask(stream=True)).status == 200
        assert world.metric("router_retries_total", call="route") == 3

    play(story)


def test_a_router_that_stays_away_is_a_503() -> None:
    async def story(world: World) -> None:
        world.router.faults.extend(Unavailable("router is away", "wait") for _ in range(100))
        began_s = world.clock.monotonic_s()
        got = await world.ask(stream=True)
        assert got.status == 503
        assert got.headers["retry-after"] == "2"
        assert got.error["code"] == "unavailable"
        assert world.clock.monotonic_s() - began_s < 6
        await world.settle(0.1)  # a pair may have been reserved whose answer was lost
        assert world.router.disowned == [f"{world.router.asked[0]['shape'].request_id}.0"]
        assert await world.gateway.unhealthy() == ""

    play(story)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NoPair("no ready prefill worker", 3.2), 503, "no_ready_pair"),
        (Overloaded("shed", 1.0), 429, "overloaded"),
        (PromptTooLong("prompt", 5, "send less"), 400, "context_length_exceeded"),
    ],
)
def test_what_the_router_refuses_is_told(error: Exception, status: int, code: str) -> None:
    async def story(world: World) -> None:
        world.router.faults.append(error)  # type: ignore[arg-type]
        got = await world.ask(stream=True)
        assert (got.status, got.error["code"]) == (status, code)
        assert ("retry-after" in got.headers) == (status in {429, 503})
        if code == "no_ready_pair":
            assert got.headers["retry-after"] == "4"
            assert got.headers["x-llm-d-request-dropped-reason"] == code

    play(story)


def test_facts_survive_a_router_that_is_away() -> None:
    async def story(world: World) -> None:
        world.router.complete_faults.extend(Unavailable("away", "wait") for _ in range(4))
        await world.ask(stream=True)
        await world.settle(0.3)
        assert world.gateway.reporter.buffered > 0
        assert world.metric("events_buffered") > 0
        await world.settle(8)
        assert world.metric("events_buffered") == 0
        assert world.router.kinds("res-1") == ["prefill_done", "first_token", "finished"]

    play(story)


def test_facts_go_in_batches() -> None:
    async def story(world: World) -> None:
        await asyncio.gather(*(world.ask(stream=True) for _ in range(100)))
        await world.settle()
        assert sum(world.router.batches) == 300
        assert len(world.router.batches) < 30

    play(story)


def test_mere_progress_is_told_together() -> None:
    async def story(world: World) -> None:
        for name in ("p1", "p2"):
            world.engine(name).plans.extend(Plan(after_s=10.0) for _ in range(20))

        async def one(after_s: float) -> None:
            await asyncio.sleep(after_s)
            assert (await world.ask(stream=True)).status == 200

        asked = [asyncio.ensure_future(one(n * 0.05)) for n in range(40)]
        await asyncio.sleep(2.4)
        before = len(world.router.batches)
        await asyncio.sleep(6.0)
        told = world.router.batches[before:]
        assert sum(told) > 40
        assert len(told) <= 12  # one each half second, although no two come at one time
        await asyncio.gather(*asked)

    play(story)


def test_a_long_prefill_keeps_its_reservation_alive() -> None:
    async def story(world: World) -> None:
        world.router.ttl_s = 6.0
        world.engine("p1").plans.append(Plan(after_s=9.0))
        assert (await world.ask(stream=True)).status == 200
        await world.settle()
        assert world.router.kinds("res-1").count("progress") in {7, 8, 9}

    play(story)


def test_a_long_stream_tells_its_progress() -> None:
    async def story(world: World) -> None:
        world.engine("d1").plans.append(Plan(tokens=1000, every_s=0.01, together=10))
        got = await world.ask(stream=True)
        assert len(got.events) == 101
        await world.settle()
        told = [e for e in world.router.reservations["res-1"].events if e.kind == "progress"]
        assert [e.output_tokens for e in told] == [260, 520, 780]

    play(story)


# --------------------------------------------------------------------------- nobody is there yet


def test_a_text_without_any_worker_still_counts_as_demand() -> None:
    """From zero: the router sees the arrival although nobody can tokenise its prompt."""

    async def story(world: World) -> None:
        world.gateway.fleet.publish([MODEL])
        got = await world.ask(stream=True, prompt="x" * 400)
        assert got.status == 503
        assert int(got.headers["retry-after"]) == 2
        assert world.router.asked[0]["shape"].isl == 101

    play(story, workers=())


def test_a_worker_that_comes_while_a_text_waits_tokenises_it() -> None:
    async def story(world: World) -> None:
        world.gateway.fleet.publish([MODEL])
        await asyncio.sleep(0.1)
        world.gateway.fleet.apply(Fleet())  # the gateway's own view lags behind
        got = await world.ask(stream=True, prompt="hello")
        assert got.status == 200
        (sent,) = world.engine("d1").calls()
        assert sent.body["prompt"] == [byte + 3 for byte in b"hello"]

    play(story)


@pytest.mark.parametrize(("path", "status"), [("completions", 404), ("chat/completions", 400)])
def test_engines_that_do_not_tokenise(path: str, status: int) -> None:
    """Both legs get what the client sent, the router an estimate, and a metric says so."""

    async def story(world: World) -> None:
        for engine in world.engines.values():
            engine.tokenize_status = status
        messages = [{"role": "user", "content": "hello there"}]
        body = {"prompt": "hello there"} if path == "completions" else {"messages": messages}
        got = await world.ask({"model": MODEL, "stream": True, **body}, path="/v1/" + path)
        assert got.status == 200
        (sent,) = world.engine("d1").calls()
        assert body.items() <= sent.body.items()
        shape = world.router.asked[0]["shape"]
        assert (shape.isl, shape.token_ids) == (3, b"")
        assert world.metric("tokenized_total", how="not_offered") == 1

    play(story)


def test_a_text_that_an_engine_refuses_is_the_clients_fault() -> None:
    async def story(world: World) -> None:
        for engine in world.engines.values():
            engine.tokenize_status = 400
        got = await world.ask(prompt="hello")
        assert (got.status, got.error["message"]) == (400, "not here")
        assert not world.router.asked

    play(story)


def test_no_engine_answers_for_tokens() -> None:
    async def story(world: World) -> None:
        for engine in world.engines.values():
            engine.tokenize_status = 500
        got = await world.ask(prompt="hello")
        assert (got.status, "retry-after" in got.headers) == (503, True)

    play(story)
