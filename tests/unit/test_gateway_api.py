"""The HTTP side: error bodies field by field, models, health, keys, limits, metrics."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from readyplane.core.errors import (
    ReadyplaneError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from readyplane.core.identity import KvFormat
from readyplane.core.startup import StartMode
from readyplane.core.worker import Role, StartProgress, WorkerState
from readyplane_gateway.bounds import Bounds
from tests.unit.gateway_world import FLEET, MODEL, Plan, World, play, worker

GOOD = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{nonsense", 400, "invalid_json", "body"),
        (b"", 400, "invalid_json", "body"),
        (b"[1, 2]", 400, "invalid_json", "body"),
        (b'{"model": NaN}', 400, "invalid_json", "body"),
        (b"[" * 100_000, 400, "invalid_json", "body"),
        (b'{"a": 1e999}', 400, "invalid_json", "body"),
        (without("model"), 400, "invalid_value", "model"),
        ({**GOOD, "model": 5}, 400, "invalid_value", "model"),
        ({**GOOD, "model": "gpt-9"}, 404, "model_not_found", "model"),
        (without("prompt"), 400, "invalid_value", "prompt"),
        ({**GOOD, "prompt": ""}, 400, "invalid_value", "prompt"),
        ({**GOOD, "prompt": []}, 400, "invalid_value", "prompt"),
        ({**GOOD, "prompt": 7}, 400, "invalid_value", "prompt"),
        ({**GOOD, "prompt": ["a", "b"]}, 400, "invalid_value", "prompt"),
        ({**GOOD, "prompt": [[1], [2]]}, 400, "invalid_value", "prompt"),
        ({**GOOD, "prompt": [1, -2]}, 400, "invalid_value", "prompt"),
        ({**GOOD, "prompt": [1, 2**40]}, 400, "invalid_value", "prompt"),
        ({**GOOD, "prompt": [1, 2.5]}, 400, "invalid_value", "prompt"),
        ({**GOOD, "prompt": [1, True]}, 400, "invalid_value", "prompt"),
        ({**GOOD, "prompt": [1] * 4096}, 400, "context_length_exceeded", "prompt"),
        ({**GOOD, "max_tokens": 4094}, 400, "context_length_exceeded", "max_tokens"),
        ({**GOOD, "max_tokens": 2**31 - 1}, 400, "context_length_exceeded", "max_tokens"),
        ({**GOOD, "max_tokens": 10**30}, 400, "invalid_value", "max_tokens"),
        ({**GOOD, "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ({**GOOD, "max_tokens": -1}, 400, "invalid_value", "max_tokens"),
        ({**GOOD, "max_tokens": 1.5}, 400, "invalid_value", "max_tokens"),
        ({**GOOD, "max_tokens": "9"}, 400, "invalid_value", "max_tokens"),
        ({**GOOD, "max_tokens": True}, 400, "invalid_value", "max_tokens"),
        ({**GOOD, "max_completion_tokens": True}, 400, "invalid_value", "max_completion_tokens"),
        ({**GOOD, "temperature": True}, 400, "invalid_value", "temperature"),
        ({**GOOD, "top_k": False}, 400, "invalid_value", "top_k"),
        ({**GOOD, "seed": True}, 400, "invalid_value", "seed"),
        ({**GOOD, "min_tokens": True}, 400, "invalid_value", "min_tokens"),
        ({**GOOD, "logprobs": True}, 400, "invalid_value", "logprobs"),
        ({**GOOD, "n": True}, 400, "invalid_value", "n"),
        ({**GOOD, "n": 2}, 400, "invalid_value", "n"),
        ({**GOOD, "n": 0}, 400, "invalid_value", "n"),
        ({**GOOD, "best_of": 3}, 400, "invalid_value", "best_of"),
        ({**GOOD, "use_beam_search": True}, 400, "invalid_value", "use_beam_search"),
        ({**GOOD, "prompt_embeds": "AA"}, 400, "invalid_value", "prompt_embeds"),
        ({**GOOD, "stream": "yes"}, 400, "invalid_value", "stream"),
        ({**GOOD, "stream_options": {}}, 400, "invalid_value", "stream_options"),
        ({**GOOD, "stream": True, "stream_options": 1}, 400, "invalid_value", "stream_options"),
        (
            {**GOOD, "stream": True, "stream_options": {"include_usage": 1}},
            400,
            "invalid_value",
            "stream_options.include_usage",
        ),
        ({**GOOD, "priority": 2**31}, 400, "invalid_value", "priority"),
        ({**GOOD, "cache_salt": 1}, 400, "invalid_value", "cache_salt"),
        (
            {**GOOD, "kv_transfer_params": {"do_remote_prefill": True}},
            400,
            "unknown_parameter",
            "kv_transfer_params",
        ),
        ({**GOOD, "bootstrap_room": 1}, 400, "unknown_parameter", "bootstrap_room"),
    ],
)
def test_error_bodies(body: Any, status: int, code: str, param: str) -> None:
    async def story(world: World) -> None:
        got = await world.ask(body)
        assert got.status == status, got.body
        assert got.headers["content-type"] == "application/json"
        assert set(got.error) == {"message", "type", "param", "code"}
        assert got.error["type"] == "invalid_request_error"
        assert (got.error["code"], got.error["param"]) == (code, param)
        assert len(got.error["message"]) < 400
        assert got.headers["x-request-id"] == "id-1"
        # A bad request never reaches a worker or the router.
        assert not world.router.asked
        assert not [s for engine in world.engines.values() for s in engine.calls()]

    play(story)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "messages[1]"),
    ],
)
def test_chat_messages(messages: Any, param: str) -> None:
    async def story(world: World) -> None:
        got = await world.ask({"model": MODEL, "messages": messages}, path="/v1/chat/completions")
        assert (got.status, got.error["param"]) == (400, param)

    play(story)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-llm-d-slo-ttft-ms", "soon"),
        ("x-llm-d-slo-tpot-ms", "-1"),
        ("x-slo-ttft-ms", "nan"),
        ("x-llm-d-slo-ttft-ms", "0"),
    ],
)
def test_slo_headers(name: str, value: str) -> None:
    async def story(world: World) -> None:
        got = await world.ask(headers={name: value})
        assert (got.status, got.error["param"]) == (400, name)

    play(story)


def test_the_longest_prompt_names_the_limit() -> None:
    async def story(world: World) -> None:
        got = await world.ask({**GOOD, "prompt": "x" * 5000})
        assert got.status == 400
        assert "4096" in got.error["message"]
        assert "5000" in got.error["message"]
        got = await world.ask({"model": MODEL, "prompt": [1] * 4095})
        assert got.status == 200

    play(story)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"prompt": "x" * 65_537}, "prompt"),
        ({"prompt": "x" * 20_000_000}, "prompt"),
        ({"prompt": "é" * 32_769}, "prompt"),
        ({"messages": [{"role": "user", "content": "x" * 40_000}] * 2}, "messages"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "x" * 40_000}] * 2}
                ]
            },
            "messages",
        ),
        ({"prompt": [5] * 70_000}, "prompt"),
    ],
)
def test_what_cannot_fit_is_refused_without_an_engine(fields: dict[str, Any], param: str) -> None:
    async def story(world: World) -> None:
        path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
        got = await world.ask({"model": MODEL, **fields}, path=path)
        assert (got.status, got.error["code"]) == (400, "context_length_exceeded")
        assert got.error["param"] == param
        assert "4096" in got.error["message"]
        assert not any(engine.seen for engine in world.engines.values())

    play(story)


def test_text_within_the_bound_is_tokenised_and_the_bound_is_set() -> None:
    async def story(world: World) -> None:
        got = await world.ask({**GOOD, "prompt": "x" * 8192})
        assert "8192" in got.error["message"]
        assert sum(engine.tokenized for engine in world.engines.values()) == 1
        got = await world.ask({**GOOD, "prompt": "x" * 8193})
        assert "2 a token" in got.error["message"]
        assert sum(engine.tokenized for engine in world.engines.values()) == 1

    play(story, bounds=Bounds(prompt_bytes_per_token_max=2))


def test_paths_and_methods() -> None:
    async def story(world: World) -> None:
        for path, method, status, code in [
            ("/v1/embeddings", "POST", 404, "unknown_path"),
            ("/v1/completions", "GET", 405, "method_not_allowed"),
            ("/v1/models", "POST", 405, "method_not_allowed"),
            ("/v1/models/gpt-9", "GET", 404, "model_not_found"),
        ]:
            got = await world.ask(GOOD, path=path, method=method)
            assert (got.status, got.error["code"]) == (status, code), path
        got = await world.ask(GOOD, path="/elsewhere", method="GET")
        assert got.status == 404

    play(story)


def test_sizes_are_bounded() -> None:
    async def story(world: World) -> None:
        got = await world.ask({**GOOD, "user": "x" * 5000})
        assert (got.status, got.error["code"]) == (413, "request_too_large")
        assert "4096" in got.error["message"]
        assert "--body-mib-max" in got.error["message"]
        got = await world.ask(GOOD, headers={"x-long": "y" * 3000})
        assert (got.status, got.error["code"]) == (431, "headers_too_large")
        got = await world.ask({**GOOD, "user": "x" * 5000}, headers={"content-length": "1"})
        assert got.status == 413  # counted, not believed

    play(story, bounds=Bounds(body_bytes_max=4096, header_bytes_max=2048))


def test_too_many_requests() -> None:
    async def story(world: World) -> None:
        for name in ("p1", "p2"):
            world.engine(name).plans.append(Plan(after_s=5))
        held = [asyncio.ensure_future(world.ask(GOOD)) for _ in range(2)]
        await asyncio.sleep(0.1)
        got = await world.ask(GOOD)
        assert (got.status, got.error["code"]) == (429, "too_many_requests")
        assert got.error["type"] == "rate_limit_error"
        assert got.headers["retry-after"] == "1"
        assert {(await task).status for task in held} == {200}
        assert (await world.ask(GOOD)).status == 200

    play(story, bounds=Bounds(requests_max=2))


def test_the_api_key() -> None:
    async def story(world: World) -> None:
        for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic secret"}):
            got = await world.ask(GOOD, headers=headers)
            assert (got.status, got.error["code"]) == (401, "invalid_api_key")
            assert got.error["type"] == "authentication_error"
        assert (await world.ask(GOOD, headers={"authorization": "bearer secret"})).status == 200
        assert (await world.ask(path="/v1/models", method="GET")).status == 401
        assert (await world.ask(path="/health", method="GET")).status == 200

    play(story, key="secret")


def test_request_ids() -> None:
    async def story(world: World) -> None:
        good = await world.ask(GOOD, headers={"x-request-id": "abc-1"})
        assert good.headers["x-request-id"] == "abc-1"
        for bad in ("a b", "x" * 129, "é"):
            got = await world.ask(GOOD, headers={"x-request-id": bad})
            assert got.headers["x-request-id"].startswith("id-")

    play(story)


# --------------------------------------------------------------------------- models


def starting(name: str, role: Role, failure: str = "") -> Any:
    return replace(
        worker(name, role, model="cold"),
        state=WorkerState.PROVISIONED,
        serving=None,
        progress=StartProgress(0.0, 1.0, failure=failure),
    )


def test_models_are_listed_when_a_pair_is_ready() -> None:
    """B47, B53: one ready role is not a model that can be served."""
    other = replace(worker("d3", Role.DECODE, model="odd"))
    assert other.serving is not None
    odd_kv = replace(other.serving, kv=KvFormat("sha256:" + "1" * 64))
    fleet = (
        *FLEET,
        starting("c1", Role.PREFILL),
        worker("p3", Role.PREFILL, model="half"),
        worker("p4", Role.PREFILL, model="odd"),
        replace(other, serving=odd_kv),
        worker("b1", Role.BOTH, model="both"),
        replace(worker("d9", Role.BOTH, model="leaving"), state=WorkerState.DRAINING),
    )

    async def story(world: World) -> None:
        got = await world.ask(path="/v1/models", method="GET")
        assert sorted(card["id"] for card in got.json["data"]) == ["both", MODEL]
        assert got.json["object"] == "list"
        card = (await world.ask(path=f"/v1/models/{MODEL}", method="GET")).json
        assert card["max_model_len"] == 4096
        assert card["object"] == "model"
        for name in ("half", "odd", "cold", "leaving"):
            got = await world.ask(path=f"/v1/models/{name}", method="GET")
            assert (got.status, got.error["code"]) == (503, "no_ready_pair"), name
            assert "retry-after" in got.headers

    play(story, workers=fleet)


def test_unknown_is_404_and_not_ready_is_503() -> None:
    """B172: and a model whose every start failed is a 500 that says why."""

    async def story(world: World) -> None:
        world.gateway.fleet.publish(["published"])
        for model, status in [("nothing", 404), ("published", 503), ("cold", 503)]:
            got = await world.ask({"model": model, "prompt": [1]})
            assert got.status == status, model
            assert ("retry-after" in got.headers) == (status == 503)
        world.router.set_fleet([*FLEET, starting("c1", Role.PREFILL, "tensor w.3 is missing")])
        await asyncio.sleep(0.1)
        got = await world.ask({"model": "cold", "prompt": [1]})
        assert (got.status, got.error["code"]) == (500, "model_load_failed")
        assert "tensor w.3 is missing" in got.error["message"]

    play(story, workers=(*FLEET, starting("c1", Role.PREFILL)))


def test_a_model_is_not_forgotten_with_its_workers() -> None:
    """A router that restarted, or a fleet that shrank to nothing: 503, and never 404."""

    async def story(world: World) -> None:
        world.router.set_fleet([])
        await asyncio.sleep(0.1)
        got = await world.ask(GOOD)
        assert (got.status, got.error["code"]) == (503, "no_ready_pair")
        got = await world.ask(path="/v1/models", method="GET")
        assert got.json["data"] == []

    play(story)


def test_before_the_first_snapshot_nothing_is_unknown() -> None:
    """B51."""

    async def story(world: World) -> None:
        fresh = type(world.gateway.fleet)(gone=lambda *_: None)
        world.gateway.fleet = world.gateway.proxy._fleet = fresh
        got = await world.ask(GOOD)
        assert (got.status, got.error["code"]) == (503, "unavailable")
        assert "retry-after" in got.headers

    play(story)


def test_made_up_models_add_no_series() -> None:
    """B159: and 404 is no success; the classes sum to the total."""

    async def story(world: World) -> None:
        for n in range(200):
            await world.ask({"model": f"junk-{n}", "prompt": [1]})
        await world.ask(GOOD)
        samples = [
            s
            for family in world.metrics.collect()
            for s in family.samples
            if s.name == "readyplane_gateway_requests_total"
        ]
        counted = {(s.labels["code_class"], s.labels["model"]): s.value for s in samples}
        assert counted == {("4xx", "other"): 200, ("2xx", MODEL): 1}

    play(story)


# --------------------------------------------------------------------------- health and the end


def test_health_needs_the_fleet_and_the_router() -> None:
    """B51."""

    async def story(world: World) -> None:
        got = await world.ask(path="/health", method="GET")
        assert (got.status, got.json) == (200, {"status": "ok", "why": ""})
        await asyncio.sleep(2)
        world.router.complete_faults.append(Unavailable("refused", "wait"))
        got = await world.ask(path="/health", method="GET")
        assert got.status == 503
        assert "router" in got.json["why"]
        world.gateway.fleet.applied = False
        got = await world.ask(path="/health", method="GET")
        assert (got.status, "fleet" in got.json["why"]) == (503, True)

    play(story)


def test_the_end_lets_requests_finish_and_refuses_new_ones() -> None:
    """B61."""

    async def story(world: World) -> None:
        world.engine("d1").plans.append(Plan(tokens=100, every_s=0.02))
        world.engine("d2").plans.append(Plan("hang"))
        short, hung = (asyncio.ensure_future(world.ask({**GOOD, "stream": True})) for _ in "ab")
        await asyncio.sleep(0.3)
        ending = asyncio.ensure_future(world.gateway.stop())
        await asyncio.sleep(0.1)
        refused = await world.ask(GOOD)
        assert (refused.status, refused.error["code"]) == (503, "stopping")
        await ending
        assert (await short).events[-1] == "[DONE]"
        assert hung.done()
        assert world.ends() == {"finished": 1, "aborted": 1}

    play(story)


def test_a_bug_is_a_500_and_frees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        monkeypatch.setattr("readyplane_gateway.proxy.Bodies.of", lambda *_: json.loads("not json"))
        got = await world.ask(GOOD)
        assert (got.status, got.error["code"]) == (500, "internal_error")
        await world.settle()
        assert world.ends() == {"aborted": 1}

    play(story)


def test_start_mode_is_not_a_matter_of_the_gateway() -> None:
    eager = [replace(w, offer=replace(w.offer, mode=StartMode.EAGER)) for w in FLEET]

    async def story(world: World) -> None:
        assert (await world.ask(GOOD)).status == 200

    play(story, workers=eager)


@pytest.mark.parametrize("chat", [False, True])
def test_an_engine_that_finds_a_prompt_too_long_is_believed(chat: bool) -> None:
    async def story(world: World) -> None:
        for engine in world.engines.values():
            engine.tokenize_status = 400
            engine.tokenize_says = "This model's maximum context length is 4096 tokens."
        fields = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        got = await world.ask({"model": MODEL, **fields}, path=path)
        assert (got.status, got.error["code"]) == (400, "context_length_exceeded")
        assert "4096" in got.error["message"]
        assert not any(engine.calls() for engine in world.engines.values())

    play(story)


@pytest.mark.parametrize(
    "refusal",
    [Unsupported("Watch on this port", "call it on the other gRPC port"), Unauthenticated()],
)
def test_a_router_that_refuses_the_gateway_is_said_to_do_so_after_a_while(
    refusal: ReadyplaneError,
) -> None:
    """A pick port serves no Watch: whoever is told to try again would try for ever."""

    async def story(world: World) -> None:
        async def refuses(model: str = "") -> Any:
            del model
            raise refusal
            yield

        gateway = world.gateway
        told: list[str] = []
        gateway.tell_why = told.append
        gateway.fleet.__init__(lambda *_: None)  # type: ignore[misc]  # as at the start
        world.router.watch = refuses  # type: ignore[method-assign]
        watching = asyncio.ensure_future(gateway.watch_fleet())
        await asyncio.sleep(5.0)
        early = await world.ask()
        assert early.status == 503
        assert "retry-after" in early.headers
        assert not told
        await asyncio.sleep(10.0)
        late = await world.ask()
        assert late.status == 500
        error = json.loads(late.body)["error"]
        assert error["code"] == "router_refuses"
        assert "--router" in error["message"]
        assert "retry-after" not in late.headers
        assert told == [error["message"]]
        assert error["message"] in (await world.ask(path="/health", method="GET")).body.decode()
        watching.cancel()

    play(story)


def test_a_router_that_refuses_to_route_is_not_taken_for_the_clients_fault() -> None:
    async def story(world: World) -> None:
        for refusal in (Unsupported("Route on this port", "another"), Unauthenticated()):
            world.router.faults.append(refusal)
            got = await world.ask()
            assert (got.status, json.loads(got.body)["error"]["code"]) == (500, "router_refuses")

    play(story)
