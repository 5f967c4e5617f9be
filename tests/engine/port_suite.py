"""What every engine behind the port must do, field by field.

`CHECKS` lists each thing that is checked; `docs/engine-port.md` shows the same table, and a test
holds the two together. Each check is a coroutine over a `World` of running engines: `one` answers
alone, `p` and `d` are a pair. `test_engine_modelled.py` runs them on the modelled engine; a real
engine is run through the same list by giving another factory.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from readyplane.core.errors import InvalidField, Unavailable
from readyplane.core.work import pack_tokens, sequence_hashes
from readyplane_agent import probes
from readyplane_agent.engines.port import EnginePort
from tests.engine.engine_world import Factory, Traits

PREFILL_LEG: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
HANDOVER_FIELDS = {
    "do_remote_prefill": bool,
    "do_remote_decode": bool,
    "remote_block_ids": list,
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_host": str,
    "remote_port": int,
    "tp_size": int,
    "remote_num_tokens": int,
}
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
COUNTERS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
)
HISTOGRAMS = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:iteration_tokens_total",
)


@dataclass
class World:
    """Running engines and an HTTP client."""

    one: EnginePort
    p: EnginePort
    d: EnginePort
    traits: Traits
    http: aiohttp.ClientSession
    factory: Factory
    prompts: Any

    def prompt(self, length: int = 70) -> list[int]:
        """A prompt that no engine has seen."""
        number = next(self.prompts)
        return [3 + (number * 7919 + i * 31 + (i * i) % 97) % 200 for i in range(length)]

    async def post(self, engine: EnginePort, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """Status and document of one answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = engine.serving().engine_url + path
        json_type = {"content-type": "application/json"}
        async with self.http.post(url, data=data, headers=json_type) as response:
            return response.status, await response.json(content_type=None)

    async def complete(self, engine: EnginePort, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        body = {"model": self.traits.model, "temperature": 0, "max_tokens": 8, **fields}
        body.setdefault("prompt", self.prompt())
        status, doc = await self.post(engine, "/v1/completions", body)
        assert status == 200, doc
        return doc

    async def refused(self, engine: EnginePort, path: str, body: Any) -> dict[str, Any]:
        """The error of a request that must be refused by the client's fault."""
        status, doc = await self.post(engine, path, body)
        assert 400 <= status < 500, (status, doc)
        error = doc["error"]
        assert isinstance(error["message"], str) and error["message"]
        assert error["code"] == status
        assert isinstance(error["type"], str)
        assert "param" in error
        return dict(error)

    async def stream(
        self, engine: EnginePort, path: str, body: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        """Documents of a stream, which must end with [DONE]."""
        url = engine.serving().engine_url + path
        ended = False
        async with self.http.post(url, json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            async for line in response.content:
                text = line.decode().strip()
                if not text:
                    continue
                assert not ended, f"after [DONE]: {text}"
                assert text.startswith("data: "), text
                if text == "data: [DONE]":
                    ended = True
                else:
                    yield json.loads(text[6:])
        assert ended, "no [DONE]"

    async def page(self, engine: EnginePort) -> str:
        """The metrics page."""
        async with self.http.get(engine.serving().engine_url + "/metrics") as response:
            assert response.status == 200
            return await response.text()

    async def metric(self, engine: EnginePort, name: str) -> float:
        """Sum of one metric's samples."""
        values = [
            float(line.rpartition(" ")[2])
            for line in (await self.page(engine)).splitlines()
            if line.startswith((name + "{", name + " "))
        ]
        assert values, f"{name} is not on the page"
        return sum(values)

    async def handover(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        """Parameters of a prefill leg on `p`."""
        doc = await self.complete(
            self.p, prompt=prompt, **{**fields, "max_tokens": 1}, kv_transfer_params=PREFILL_LEG
        )
        return dict(doc["kv_transfer_params"])

    async def until(self, what: Callable[[], Awaitable[bool]], limit_s: float = 30.0) -> None:
        """Wait for a condition."""
        async with asyncio.timeout(limit_s):
            while not await what():
                await asyncio.sleep(0.05)


@dataclass(frozen=True)
class Check:
    """One row: where, which field, what must hold."""

    area: str
    field: str
    holds: str
    run: Callable[[World], Awaitable[None]]


CHECKS: list[Check] = []


def check(area: str, field: str, holds: str) -> Callable[[Any], Any]:
    """Add a check to the list."""

    def added(run: Callable[[World], Awaitable[None]]) -> Callable[[World], Awaitable[None]]:
        CHECKS.append(Check(area, field, holds, run))
        return run

    return added


# --------------------------------------------------------------------------- completions


@check("completions", "id, object, created, model", "as OpenAI writes them")
async def completion_head(w: World) -> None:
    doc = await w.complete(w.one)
    assert doc["id"].startswith("cmpl-")
    assert doc["object"] == "text_completion"
    assert type(doc["created"]) is int and doc["created"] > 1_700_000_000
    assert doc["model"] == w.traits.model


@check("completions", "choices", "one choice with index, text, logprobs null and a reason")
async def completion_choice(w: World) -> None:
    (choice,) = (await w.complete(w.one, max_tokens=8, ignore_eos=True))["choices"]
    assert choice["index"] == 0 and choice["logprobs"] is None
    assert isinstance(choice["text"], str) and choice["text"]
    assert choice["finish_reason"] == "length"


@check("completions", "usage", "prompt, completion and total tokens are exact")
async def completion_usage(w: World) -> None:
    prompt = w.prompt(33)
    usage = (await w.complete(w.one, prompt=prompt, max_tokens=9, ignore_eos=True))["usage"]
    assert usage["prompt_tokens"] == 33
    assert usage["completion_tokens"] == 9
    assert usage["total_tokens"] == 42


@check("completions", "return_token_ids", "token ids of the answer, as many as usage says")
async def completion_ids(w: World) -> None:
    doc = await w.complete(w.one, max_tokens=7, ignore_eos=True, return_token_ids=True)
    ids = doc["choices"][0]["token_ids"]
    assert len(ids) == doc["usage"]["completion_tokens"] == 7
    assert all(type(i) is int and i >= 0 for i in ids)


@check("completions", "prompt", "text and its token ids get the same answer; a list of one too")
async def completion_prompt_forms(w: World) -> None:
    text = f"prompt forms {w.prompt(4)}"
    ids = list(await w.one.tokenize(text))
    answers = {
        (await w.complete(w.one, prompt=form, max_tokens=6))["choices"][0]["text"]
        for form in (text, ids, [ids])
    }
    assert len(answers) == 1


@check("completions", "determinism", "greedy decoding repeats itself, another prompt differs")
async def completion_repeats(w: World) -> None:
    prompt = w.prompt()
    first = await w.one.generate(prompt, max_tokens=12, ignore_eos=True)
    again = await w.one.generate(prompt, max_tokens=12, ignore_eos=True)
    other = await w.one.generate(w.prompt(), max_tokens=12, ignore_eos=True)
    assert first.token_ids == again.token_ids != other.token_ids
    assert len(first.token_ids) == 12


@check("completions", "continuation", "a prompt with the start of its answer goes on the same way")
async def completion_continues(w: World) -> None:
    prompt = w.prompt()
    whole = await w.one.generate(prompt, max_tokens=12, ignore_eos=True)
    rest = await w.one.generate([*prompt, *whole.token_ids[:5]], max_tokens=7, ignore_eos=True)
    assert rest.token_ids == whole.token_ids[5:]


@check("completions", "ignore_eos, max_tokens", "exactly max_tokens tokens, reason length")
async def completion_ignores_eos(w: World) -> None:
    got = await w.one.generate(w.prompt(), max_tokens=40, ignore_eos=True)
    assert (len(got.token_ids), got.finish_reason) == (40, "length")


@check("completions", "stop", "text ends before the stop text, reason stop")
async def completion_stops(w: World) -> None:
    prompt = w.prompt()
    whole = (await w.complete(w.one, prompt=prompt, max_tokens=30, ignore_eos=True))["choices"][0]
    stop = whole["text"][10:13]
    cut = whole["text"].index(stop)
    doc = await w.complete(w.one, prompt=prompt, max_tokens=30, ignore_eos=True, stop=[stop])
    (choice,) = doc["choices"]
    assert choice["text"] == whole["text"][:cut]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert doc["usage"]["completion_tokens"] < 30


# --------------------------------------------------------------------------- chat


@check("chat", "message", "role assistant and a content; object chat.completion")
async def chat_message(w: World) -> None:
    body = {
        "model": w.traits.model,
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 6,
        "ignore_eos": True,
    }
    status, doc = await w.post(w.one, "/v1/chat/completions", body)
    assert status == 200, doc
    assert doc["object"] == "chat.completion" and doc["id"].startswith("chatcmpl-")
    message = doc["choices"][0]["message"]
    assert message["role"] == "assistant" and isinstance(message["content"], str)
    assert doc["usage"]["completion_tokens"] == 6


@check("chat", "content parts", "a list of text parts is the same as their text")
async def chat_parts(w: World) -> None:
    answers = []
    for content in ("one two", [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]):
        body = {
            "model": w.traits.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 6,
        }
        _, doc = await w.post(w.one, "/v1/chat/completions", body)
        answers.append((doc["choices"][0]["message"]["content"], doc["usage"]["prompt_tokens"]))
    assert answers[0] == answers[1]
    assert answers[0][0]


@check(
    "chat", "prompt_token_ids", "tokens beside the messages are the prompt; /tokenize gives them"
)
async def chat_tokens(w: World) -> None:
    chat = {"model": w.traits.model, "messages": [{"role": "user", "content": "as tokens"}]}
    _, doc = await w.post(w.one, "/tokenize", chat)
    path = "/v1/chat/completions"
    limits = {"max_tokens": 9, "ignore_eos": True, "temperature": 0}
    _, plain = await w.post(w.one, path, {**chat, **limits})
    _, given = await w.post(w.one, path, {**chat, **limits, "prompt_token_ids": doc["tokens"]})
    other = {**chat, **limits, "prompt_token_ids": w.prompt(doc["count"])}
    _, other = await w.post(w.one, path, other)
    assert plain["usage"]["prompt_tokens"] == given["usage"]["prompt_tokens"] == doc["count"]
    assert plain["choices"] == given["choices"] != other["choices"]


@check("chat", "the next turn", "begins with this one and its answer, whose blocks it finds cached")
async def chat_turns(w: World) -> None:
    text = " ".join(str(n) for n in w.prompt(w.one.serving().block_size))
    messages = [{"role": "user", "content": text}]
    path = "/v1/chat/completions"
    body = {"model": w.traits.model, "messages": messages, "temperature": 0}
    body |= {"max_tokens": 40, "ignore_eos": True}
    _, first = await w.post(w.one, path, body)
    messages.append(first["choices"][0]["message"])
    messages.append({"role": "user", "content": "and then?"})
    _, later = await w.post(w.one, path, {**body, "messages": messages})
    size = w.one.serving().block_size
    cached = later["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    # The last token of an answer has no KV of its own yet.
    assert cached >= (first["usage"]["total_tokens"] - 1) // size * size > 0


# --------------------------------------------------------------------------- streams


@check("stream", "completions", "pieces of the unstreamed text, one reason at the end, [DONE]")
async def stream_completion(w: World) -> None:
    prompt = w.prompt()
    whole = (await w.complete(w.one, prompt=prompt, max_tokens=25, ignore_eos=True))["choices"][0]
    body = {
        "model": w.traits.model,
        "prompt": prompt,
        "max_tokens": 25,
        "ignore_eos": True,
        "temperature": 0,
    }
    docs = [doc async for doc in w.stream(w.one, "/v1/completions", body)]
    assert "".join(d["choices"][0]["text"] for d in docs) == whole["text"]
    reasons = [d["choices"][0]["finish_reason"] for d in docs]
    assert reasons[-1] == "length" and not any(reasons[:-1])
    assert len({d["id"] for d in docs}) == 1
    assert {d["object"] for d in docs} == {"text_completion"}


@check("stream", "chat", "the first delta names the role, object chat.completion.chunk")
async def stream_chat(w: World) -> None:
    body = {
        "model": w.traits.model,
        "messages": [{"role": "user", "content": "stream"}],
        "temperature": 0,
        "max_tokens": 5,
        "ignore_eos": True,
    }
    docs = [doc async for doc in w.stream(w.one, "/v1/chat/completions", body)]
    assert docs[0]["choices"][0]["delta"]["role"] == "assistant"
    assert {d["object"] for d in docs} == {"chat.completion.chunk"}
    assert docs[-1]["choices"][0]["finish_reason"] == "length"


@check("stream", "stream_options.include_usage", "a last chunk without choices tells the usage")
async def stream_usage(w: World) -> None:
    body = {
        "model": w.traits.model,
        "prompt": w.prompt(20),
        "max_tokens": 11,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    docs = [doc async for doc in w.stream(w.one, "/v1/completions", body)]
    assert docs[-1]["choices"] == []
    usage = docs[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (20, 11)
    assert not any(d.get("usage") for d in docs[:-1])


@check("stream", "stream_options.continuous_usage_stats", "every chunk tells the tokens so far")
async def stream_continuous_usage(w: World) -> None:
    body = {
        "model": w.traits.model,
        "prompt": w.prompt(20),
        "max_tokens": 30,
        "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    docs = [doc async for doc in w.stream(w.one, "/v1/completions", body)]
    counts = [d["usage"]["completion_tokens"] for d in docs]
    assert counts == sorted(counts) and counts[-1] == 30 and counts[0] >= 1


# --------------------------------------------------------------------------- errors


async def _param(w: World, param: str | None, **fields: Any) -> None:
    error = await w.refused(
        w.one, "/v1/completions", {"model": w.traits.model, "prompt": "hi", **fields}
    )
    if param is not None:
        assert error["param"] == param, error


@check("errors", "model", "an unknown model is 404 and named")
async def error_model(w: World) -> None:
    error = await w.refused(w.one, "/v1/completions", {"model": "nobody", "prompt": "hi"})
    assert error["code"] == 404 and "nobody" in error["message"]


@check("errors", "body", "no JSON, no object, no prompt: 400")
async def error_body(w: World) -> None:
    for body in (b"{", b"[]", b"", b'{"model": "%s"}' % w.traits.model.encode()):
        assert (await w.refused(w.one, "/v1/completions", body))["code"] in (400, 422)


@check("errors", "prompt", "too long for the model: 400, both lengths named")
async def error_long(w: World) -> None:
    limit = w.one.serving().max_model_len
    error = await w.refused(
        w.one, "/v1/completions", {"model": w.traits.model, "prompt": w.prompt(limit + 1)}
    )
    assert str(limit) in error["message"] and str(limit + 1) in error["message"]


@check("errors", "max_tokens", "0, negative, too large for the model: 400")
async def error_max_tokens(w: World) -> None:
    for value in (0, -1, 10**7):
        await _param(w, None, max_tokens=value)


@check("errors", "temperature", "negative: 400")
async def error_temperature(w: World) -> None:
    await _param(w, None, temperature=-1)


@check("errors", "stream_options", "without stream: 400")
async def error_stream_options(w: World) -> None:
    await _param(w, None, stream_options={"include_usage": True})


@check("errors", "as port errors", "the port raises InvalidField for what the engine refuses")
async def error_port(w: World) -> None:
    with pytest.raises(InvalidField):
        await w.one.generate([5], max_tokens=0)


# --------------------------------------------------------------------------- other paths


@check("paths", "/v1/models", "lists the model with max_model_len")
async def path_models(w: World) -> None:
    serving = w.one.serving()
    async with w.http.get(serving.engine_url + "/v1/models") as response:
        doc = await response.json()
    assert doc["object"] == "list"
    (entry,) = [m for m in doc["data"] if m["id"] == w.traits.model]
    assert entry["object"] == "model" and entry["max_model_len"] == serving.max_model_len


@check("paths", "/health", "200 when ready")
async def path_health(w: World) -> None:
    async with w.http.get(w.one.serving().engine_url + "/health") as response:
        assert response.status == 200


@check("paths", "/tokenize, /detokenize", "there and back; count and max_model_len")
async def path_tokenize(w: World) -> None:
    body = {"model": w.traits.model, "prompt": "hello there", "add_special_tokens": False}
    status, doc = await w.post(w.one, "/tokenize", body)
    assert status == 200
    assert doc["count"] == len(doc["tokens"]) > 0
    assert doc["max_model_len"] == w.one.serving().max_model_len
    back = {"model": w.traits.model, "tokens": doc["tokens"]}
    status, doc = await w.post(w.one, "/detokenize", back)
    assert (status, doc["prompt"]) == (200, "hello there")


@check("paths", "/kv_event_sources", "endpoint, replay endpoint and topic of each rank")
async def path_event_sources(w: World) -> None:
    async with w.http.get(w.one.serving().engine_url + "/kv_event_sources") as response:
        doc = await response.json()
    assert isinstance(doc, list) and len(doc) == 1
    assert doc[0]["data_parallel_rank"] == 0
    assert doc[0]["endpoint"].startswith("tcp://") and "replay_endpoint" in doc[0]
    assert isinstance(doc[0]["topic"], str)


# --------------------------------------------------------------------------- hand-over


@check("hand-over", "kv_transfer_params of the P leg", "every field, its type, roles turned round")
async def handover_fields(w: World) -> None:
    prompt = w.prompt(50)
    params = await w.handover(prompt)
    for name, kind in HANDOVER_FIELDS.items():
        assert type(params[name]) is kind, (name, params.get(name))
    assert params["do_remote_prefill"] and not params["do_remote_decode"]
    assert params["remote_num_tokens"] == 50
    (blocks,) = params["remote_block_ids"]
    assert len(blocks) == -(-50 // w.p.serving().block_size) == len(set(blocks))
    await w.d.generate(prompt, max_tokens=2, ignore_eos=True, kv_transfer_params=params)


@check("hand-over", "answer", "P then D gives the tokens that one engine alone gives")
async def handover_answer(w: World) -> None:
    for length in (1, 15, 16, 17, 200):
        prompt = w.prompt(length)
        alone = await w.one.generate(prompt, max_tokens=20, ignore_eos=True)
        first = await w.p.generate(
            prompt, max_tokens=1, ignore_eos=True, kv_transfer_params=PREFILL_LEG
        )
        both = await w.d.generate(
            prompt, max_tokens=20, ignore_eos=True, kv_transfer_params=first.kv_transfer_params
        )
        assert first.token_ids == alone.token_ids[:1]
        assert both.token_ids == alone.token_ids
        assert (both.prompt_tokens, both.finish_reason) == (length, "length")


@check("hand-over", "a chat", "P then D, by tokens beside the messages, answers as one alone")
async def handover_chat(w: World) -> None:
    content = "hand over " + " ".join(str(n) for n in w.prompt(30))
    body: dict[str, Any] = {"model": w.traits.model}
    body["messages"] = [{"role": "user", "content": content}]
    _, doc = await w.post(w.one, "/tokenize", body)
    body |= {"max_tokens": 12, "ignore_eos": True, "temperature": 0}
    path = "/v1/chat/completions"
    _, alone = await w.post(w.one, path, body)
    leg = {**body, "prompt_token_ids": doc["tokens"]}
    prefill = {**leg, "max_tokens": 1, "max_completion_tokens": 1}
    status, answer = await w.post(w.p, path, {**prefill, "kv_transfer_params": PREFILL_LEG})
    assert status == 200, answer
    leg["kv_transfer_params"] = answer["kv_transfer_params"]
    status, answer = await w.post(w.d, path, leg)
    assert status == 200, answer
    assert answer["choices"] == alone["choices"]


@check("hand-over", "vllm:nixl_xfer_time_seconds_count", "rises by one on D")
async def handover_counted(w: World) -> None:
    name = "vllm:nixl_xfer_time_seconds_count"
    before = await w.metric(w.d, name)
    prompt = w.prompt()
    params = await w.handover(prompt)
    await w.d.generate(prompt, max_tokens=3, ignore_eos=True, kv_transfer_params=params)
    assert await w.metric(w.d, name) == before + 1


@check("hand-over", "P's blocks", "held until read, then free; is_idle says so")
async def handover_holds(w: World) -> None:
    await w.until(w.p.is_idle, limit_s=w.traits.hold_s + 30)
    prompt = w.prompt()
    params = await w.handover(prompt)
    assert not await w.p.is_idle()
    used = (await w.p.load_report()).kv_used_blocks
    assert used is not None and used >= len(params["remote_block_ids"][0]) - 1
    expired = await w.metric(w.p, EXPIRED)
    await w.d.generate(prompt, max_tokens=3, ignore_eos=True, kv_transfer_params=params)
    await w.until(w.p.is_idle)
    assert await w.metric(w.p, EXPIRED) == expired


async def _fails(w: World, prompt: list[int], params: dict[str, Any]) -> None:
    """The load fails (500), is counted, and D works on."""
    name = "vllm:nixl_num_failed_transfers_total"
    before = await w.metric(w.d, name)
    body = {
        "model": w.traits.model,
        "prompt": prompt,
        "max_tokens": 4,
        "kv_transfer_params": params,
    }
    async with asyncio.timeout(60):
        status, doc = await w.post(w.d, "/v1/completions", body)
    assert status == 500, doc
    assert doc["error"]["code"] == 500 and doc["error"]["message"]
    assert await w.metric(w.d, name) == before + 1
    await w.until(w.d.is_idle)
    assert len((await w.d.generate(w.prompt(), max_tokens=2, ignore_eos=True)).token_ids) == 2


@check("hand-over", "stale parameters", "a KV that was read already: 500, counted, D works on")
async def handover_stale(w: World) -> None:
    prompt = w.prompt()
    params = await w.handover(prompt)
    await w.d.generate(prompt, max_tokens=2, ignore_eos=True, kv_transfer_params=params)
    await _fails(w, prompt, params)


@check("hand-over", "foreign parameters", "another engine's id, blocks or request: 500, counted")
async def handover_foreign(w: World) -> None:
    prompt = w.prompt()
    for field, wrong in (
        ("remote_engine_id", lambda _: "somebody-else"),
        ("remote_request_id", lambda _: "no-such-request"),
        ("remote_block_ids", lambda ids: [[b + 1 for b in ids[0]]]),
    ):
        params = await w.handover(prompt)  # anew: it is held for a bounded time only
        await _fails(w, prompt, {**params, field: wrong(params[field])})
        # What was held is still there for its own reader (B72: identity is not the address).
        got = await w.d.generate(prompt, max_tokens=2, ignore_eos=True, kv_transfer_params=params)
        assert len(got.token_ids) == 2


@check("hand-over", "another prompt", "a KV of another length is refused: 500, counted")
async def handover_other_prompt(w: World) -> None:
    params = await w.handover(w.prompt(40))
    await _fails(w, w.prompt(60), params)


@check("hand-over", "expired parameters", "blocks are freed and counted on P, D's load fails")
async def handover_expired(w: World) -> None:
    name = "vllm:nixl_num_kv_expired_reqs_total"
    before = await w.metric(w.p, name)
    prompt = w.prompt()
    params = await w.handover(prompt)
    await asyncio.sleep(w.traits.hold_s + 0.3)
    await w.until(w.p.is_idle)
    assert await w.metric(w.p, name) >= before + 1
    await _fails(w, prompt, params)


@check("hand-over", "an address where nobody is", "500 within seconds, not a hang")
async def handover_nobody(w: World) -> None:
    prompt = w.prompt()
    params = await w.handover(prompt)
    await _fails(w, prompt, {**params, "remote_port": 1})


@check("hand-over", "in a stream", "a failed load is an error event and [DONE], not a silence")
async def handover_stream(w: World) -> None:
    prompt = w.prompt()
    params = {**await w.handover(prompt), "remote_engine_id": "gone"}
    body = {
        "model": w.traits.model,
        "prompt": prompt,
        "max_tokens": 4,
        "kv_transfer_params": params,
    }
    docs = [doc async for doc in w.stream(w.d, "/v1/completions", body)]
    assert docs[-1]["error"]["code"] == 500


@check("hand-over", "wrong KV", "D's answer follows from the KV as it is: a foreign one shows")
async def handover_wrong_kv(w: World) -> None:
    mine, other = w.prompt(64), w.prompt(64)
    right = await w.one.generate(mine, max_tokens=16, ignore_eos=True)
    params = await w.handover(other)
    got = await w.d.generate(mine, max_tokens=16, ignore_eos=True, kv_transfer_params=params)
    assert got.token_ids != right.token_ids


@check("hand-over", "malformed parameters", "a missing field is 400 and named")
async def handover_malformed(w: World) -> None:
    params = await w.handover(w.prompt())
    for name in ("remote_engine_id", "remote_host", "remote_port", "remote_block_ids"):
        lacking = {k: v for k, v in params.items() if k != name}
        body = {"model": w.traits.model, "prompt": w.prompt(), "kv_transfer_params": lacking}
        error = await w.refused(w.d, "/v1/completions", body)
        assert error["param"] == f"kv_transfer_params.{name}"


# --------------------------------------------------------------------------- metrics


@check("metrics", ", ".join(GAUGES), "on the page with model_name")
async def metric_gauges(w: World) -> None:
    page = await w.page(w.one)
    for name in GAUGES:
        (line,) = [x for x in page.splitlines() if x.startswith(name + "{")]
        assert f'model_name="{w.traits.model}"' in line
        assert f"# TYPE {name} gauge" in page


@check("metrics", ", ".join(COUNTERS), "on the page, growing with the work done")
async def metric_counters(w: World) -> None:
    before = {name: await w.metric(w.one, name) for name in COUNTERS}
    await w.one.generate(w.prompt(50), max_tokens=10, ignore_eos=True)
    grown = {name: await w.metric(w.one, name) - before[name] for name in COUNTERS}
    assert grown["vllm:prompt_tokens_total"] == 50
    assert grown["vllm:generation_tokens_total"] == 10
    assert grown["vllm:prefix_cache_queries_total"] == 50
    assert grown["vllm:request_success_total"] == 1


@check("metrics", ", ".join(HISTOGRAMS), "cumulative buckets, +Inf equals count, sum grows")
async def metric_histograms(w: World) -> None:
    await w.one.generate(w.prompt(), max_tokens=5, ignore_eos=True)
    page = await w.page(w.one)
    for name in HISTOGRAMS:
        buckets = [
            float(x.rpartition(" ")[2])
            for x in page.splitlines()
            if x.startswith(name + "_bucket{")
        ]
        count = await w.metric(w.one, name + "_count")
        assert buckets == sorted(buckets) and buckets[-1] == count > 0, name
        assert await w.metric(w.one, name + "_sum") >= 0


@check("metrics", "vllm:cache_config_info", "block_size and num_gpu_blocks are those of serving()")
async def metric_cache_config(w: World) -> None:
    serving = w.one.serving()
    (line,) = [
        x for x in (await w.page(w.one)).splitlines() if x.startswith("vllm:cache_config_info{")
    ]
    assert f'num_gpu_blocks="{serving.kv_total_blocks}"' in line
    assert f'block_size="{serving.block_size}"' in line


@check("metrics", "load_report()", "what the page says, in our words; an iteration counter grows")
async def metric_load(w: World) -> None:
    before = await w.one.load_report()
    await w.one.generate(w.prompt(), max_tokens=9, ignore_eos=True)
    after = await w.one.load_report()
    assert (after.running, after.waiting) == (0, 0)
    assert after.kv_total_blocks == w.one.serving().kv_total_blocks
    assert before.decode_tokens_total is not None and before.iterations_total is not None
    assert after.decode_tokens_total == before.decode_tokens_total + 9
    assert after.iterations_total is not None
    assert after.iterations_total > before.iterations_total


# --------------------------------------------------------------------------- prefix cache, events


@check("prefix cache", "hits", "a repeated prompt hits all full blocks but the last token's")
async def cache_hits(w: World) -> None:
    size = w.one.serving().block_size
    prompt = w.prompt(6 * size + 3)
    first = await w.one.generate(prompt, max_tokens=2, ignore_eos=True)
    before = await w.metric(w.one, "vllm:prefix_cache_hits_total")
    again = await w.one.generate(prompt, max_tokens=2, ignore_eos=True)
    assert await w.metric(w.one, "vllm:prefix_cache_hits_total") - before == 6 * size
    assert again.token_ids == first.token_ids
    if again.cached_tokens is not None:
        assert (first.cached_tokens, again.cached_tokens) == (0, 6 * size)


@check("prefix cache", "cache_salt", "another salt shares nothing (B96)")
async def cache_salt(w: World) -> None:
    prompt = w.prompt(4 * w.one.serving().block_size)
    hits = []
    for salt in ("a", "b", "a"):
        before = await w.metric(w.one, "vllm:prefix_cache_hits_total")
        await w.complete(w.one, prompt=prompt, max_tokens=1, cache_salt=salt)
        hits.append(await w.metric(w.one, "vllm:prefix_cache_hits_total") - before)
    assert hits[0] == hits[1] == 0 and hits[2] > 0


async def _next_stored(events: AsyncIterator[Any], wanted: set[int]) -> set[int]:
    found: set[int] = set()
    async with asyncio.timeout(60):
        async for batch in events:
            for event in batch.events:
                if event.kind == "stored":
                    found |= set(event.block_hashes)
            if wanted <= found:
                return found
    return found


@check("KV events", "stored", "our sequence hashes of exactly the prompt's full blocks")
async def events_stored(w: World) -> None:
    size = w.one.serving().block_size
    prompt = w.prompt(3 * size + 5)
    wanted = set(sequence_hashes(pack_tokens(prompt), size))
    assert len(wanted) == 3
    events = w.one.kv_events()
    await w.one.generate(prompt, max_tokens=1)
    found = await _next_stored(events, wanted)
    await events.aclose()  # type: ignore[attr-defined]
    assert wanted <= found


@check(
    "KV events", "live", "told as they happen to a reader that listens already, without a replay"
)
async def events_live(w: World) -> None:
    size = w.one.serving().block_size
    events = w.one.kv_events()
    for _ in range(3):
        prompt = w.prompt(2 * size)
        await w.one.generate(prompt, max_tokens=1)
        wanted = set(sequence_hashes(pack_tokens(prompt), size))
        assert wanted <= await _next_stored(events, wanted)
    await events.aclose()  # type: ignore[attr-defined]


@check("KV events", "sequence", "grows by one a batch, for a reader that came late too (replay)")
async def events_sequence(w: World) -> None:
    size = w.one.serving().block_size
    prompts = [w.prompt(2 * size) for _ in range(3)]
    for prompt in prompts:
        await w.one.generate(prompt, max_tokens=1)
    wanted = {h for p in prompts for h in sequence_hashes(pack_tokens(p), size)}
    sequences: list[int] = []
    found: set[int] = set()
    async with asyncio.timeout(60):
        events = w.one.kv_events()
        async for batch in events:
            sequences.append(batch.sequence)
            found |= {h for e in batch.events if e.kind == "stored" for h in e.block_hashes}
            if wanted <= found:
                break
        await events.aclose()  # type: ignore[attr-defined]
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))


@check(
    "KV events", "parity", "told of a new prompt before its start is over, for the gate to compare"
)
async def events_parity(w: World) -> None:
    question = probes.Question(tuple(w.prompt(20)), (), None)
    found = await probes.kv_hashes(w.one, question, w.one.serving())
    assert found.passed and found.evidence["told"], found


# --------------------------------------------------------------------------- aborts, canary, end


@check("abort", "client disconnect", "frees the sequence and its blocks at once")
async def abort_frees(w: World) -> None:
    await w.until(w.one.is_idle)
    body = {
        "model": w.traits.model,
        "prompt": w.prompt(200),
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
    }
    response = await w.http.post(w.one.serving().engine_url + "/v1/completions", json=body)
    await response.content.readline()
    assert not await w.one.is_idle()
    response.close()
    await w.until(w.one.is_idle, limit_s=2.0)
    assert (await w.one.load_report()).kv_used_blocks == 0


@check("abort", "D leg whose client left", "P's blocks are released, not held to the end (B86)")
async def abort_releases(w: World) -> None:
    await w.until(w.p.is_idle, limit_s=w.traits.hold_s + 30)
    prompt = w.prompt(300)
    params = await w.handover(prompt)
    body = {
        "model": w.traits.model,
        "prompt": prompt,
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
        "kv_transfer_params": params,
    }
    expired = await w.metric(w.p, EXPIRED)
    response = await w.http.post(w.d.serving().engine_url + "/v1/completions", json=body)
    response.close()
    await w.until(w.p.is_idle, limit_s=w.traits.hold_s + 30)
    assert await w.metric(w.p, EXPIRED) == expired
    await w.until(w.d.is_idle)


@check(
    "abort", "/abort_requests", "held KV is freed, by the engine's id or the client's; both said"
)
async def abort_by_id(w: World) -> None:
    await w.until(w.p.is_idle, limit_s=w.traits.hold_s + 30)
    expired = await w.metric(w.p, EXPIRED)
    given_back = await w.metric(w.p, "readyplane_engine_kv_abandoned_total")
    prompt = w.prompt()
    params = await w.handover(prompt)
    await w.handover(w.prompt(), request_id="of-the-client")
    names = [params["remote_request_id"], "of-the-client", "nobody"]
    status, doc = await w.post(w.p, "/abort_requests", {"request_ids": names})
    assert (status, doc) == (200, {"aborted": names[:2], "unknown": names[2:]})
    assert await w.p.is_idle()
    assert (await w.p.load_report()).kv_used_blocks == 0
    assert await w.metric(w.p, EXPIRED) == expired
    assert await w.metric(w.p, "readyplane_engine_kv_abandoned_total") == given_back + 2
    await _fails(w, prompt, params)
    await w.refused(w.p, "/abort_requests", {"request_ids": "all"})


@check(
    "abort", "/abort_requests of what runs", "its client gets what there is and the reason abort"
)
async def abort_running(w: World) -> None:
    body = {"model": w.traits.model, "prompt": w.prompt(), "max_tokens": 3000, "ignore_eos": True}
    body["request_id"] = "long"
    reasons: list[Any] = []
    async for doc in w.stream(w.one, "/v1/completions", body):
        if not reasons:
            await w.post(w.one, "/abort_requests", {"request_ids": ["long"]})
        reasons += [choice["finish_reason"] for choice in doc["choices"]]
    assert reasons[0] is None and reasons[-1] == "abort"
    assert await w.one.is_idle()


@check("canary", "golden answer", "the answer recorded at publish")
async def canary_golden(w: World) -> None:
    canary = w.traits.canary
    got = await w.one.generate(
        canary.prompt_token_ids, max_tokens=len(canary.golden_token_ids), ignore_eos=True
    )
    assert got.token_ids == canary.golden_token_ids


@check("concurrency", "many requests at once", "all answered as if alone")
async def many_at_once(w: World) -> None:
    prompts = [w.prompt(20 + i) for i in range(24)]
    together = await asyncio.gather(
        *(w.one.generate(p, max_tokens=10, ignore_eos=True) for p in prompts)
    )
    for prompt, got in list(zip(prompts, together, strict=True))[::6]:
        alone = await w.one.generate(prompt, max_tokens=10, ignore_eos=True)
        assert got.token_ids == alone.token_ids


@check("port", "serving()", "url, blocks, block size, lengths, side channel are filled in")
async def port_serving(w: World) -> None:
    serving = w.d.serving()
    assert serving.engine_url.startswith("http://")
    assert serving.kv_total_blocks > 0 and serving.block_size > 0
    assert serving.max_model_len > 0 and serving.max_num_seqs > 0
    assert serving.kv_side_channel.count(":") == 1
    assert serving.kv.block_size == serving.block_size


@check("port", "startup_segments()", "each ended, none negative, in CLOCK_MONOTONIC seconds")
async def port_segments(w: World) -> None:
    segments = w.one.startup_segments()
    assert segments
    for segment in segments:
        assert segment.end_s is not None and segment.end_s >= segment.start_s


@check("port", "errors", "an engine that is gone is Unavailable, load unknown, not idle")
async def port_gone(w: World) -> None:
    async with w.factory.start("short-lived") as engine:
        await engine.generate([5, 6, 7], max_tokens=1)
        await engine.stop()
        with pytest.raises(Unavailable):
            await engine.generate([5, 6, 7], max_tokens=1)
        assert engine.returncode is not None
        assert not await engine.is_idle()
        report = await engine.load_report()
        assert report.running is None or report.age_s > 0


def table() -> str:
    """The list as a Markdown table, with what vLLM does instead where it differs."""
    from tests.vllm.differences import DIFFERENCES

    rows = ["| area | field | what must hold | vLLM 0.32 |", "|---|---|---|---|"]
    for c in CHECKS:
        differs = DIFFERENCES.get(c.run.__name__)
        rows.append(
            f"| {c.area} | {c.field} | {c.holds} | {'so' if differs is None else differs.does} |"
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    from pathlib import Path

    document = Path(__file__).parents[2] / "docs" / "engine-port.md"
    head, begin, rest = document.read_text().partition("<!-- checks begin -->\n")
    _, end, tail = rest.partition("<!-- checks end -->")
    document.write_text(head + begin + "\n" + table() + "\n" + end + tail)
