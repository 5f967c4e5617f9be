"""The way of a request: both legs, what is forwarded, what is told, clients that leave, routers that are away."""

import asyncio
import json
from typing import Any

import pytest

from readyplane.core.errors import NoPair, Overloaded, PromptTooLong, Unavailable
from readyplane.core.work import pack_tokens
from readyplane.core.worker import Fleet, Role
from readyplane_gateway.bounds import Bounds
from tests.unit.gateway_world import KV_PARAMS, MODEL, Plan, World, play, worker

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
