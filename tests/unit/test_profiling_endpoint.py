"""What is asked of an endpoint, and what is made of the answers of engines that differ from ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from aiohttp import web

from readyplane.core.errors import InvalidField, Unavailable
from readyplane.kit.clock import SystemClock
from readyplane_lab.profiling.endpoint import Facts
from readyplane_lab.profiling.live import Asked, Measured, measure, span_of
from readyplane_lab.profiling.measure import Wanted

SGLANG = """# TYPE sglang:cache_config_info gauge
sglang:cache_config_info{page_size="16",num_pages="5000"} 1
sglang:num_running_reqs{model_name="m"} 0
"""
QUICK = Wanted(points=3, steps=2, repeats=1, window=4)


@dataclass
class Fake:
    """An engine as far as its protocol goes; one token a millisecond."""

    metrics: str = SGLANG
    context: int | None = 1024
    running_usage: bool = True
    tokens_a_chunk: int = 1
    first_s: float = 0.0
    """Before the token of a request that asks for one: a prompt takes so long each time."""

    status: int = 200
    breaks_after: int | None = None
    tells_more: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    aborted: int = 0

    async def models(self, _request: web.Request) -> web.Response:
        entry: dict[str, Any] = {"id": "m"}
        if self.context is not None:
            entry["max_model_len"] = self.context
        return web.json_response({"data": [entry]})

    async def info(self, _request: web.Request) -> web.Response:
        """As SGLang tells it, under its old name only."""
        states = [{"effective_max_running_requests_per_dp": 3}]
        told = {"max_total_num_tokens": 7000, "chunked_prefill_size": 2048}
        return web.json_response({**told, "internal_states": states})

    async def page(self, _request: web.Request) -> web.Response:
        return web.Response(text=self.metrics, status=200 if self.metrics else 404)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.status != 200:
            return web.json_response({"error": {"message": "not so"}}, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        isl, done = len(body["prompt"]), 0
        usage: dict[str, Any] = {"prompt_tokens": isl, "total_tokens": isl}
        await asyncio.sleep(self.first_s if body["max_tokens"] == 1 else 0.0)
        try:
            while done < body["max_tokens"]:
                await asyncio.sleep(0.001)
                done = min(body["max_tokens"], done + self.tokens_a_chunk)
                doc: dict[str, Any] = {"choices": [{"text": " x", "finish_reason": None}]}
                if self.running_usage:
                    doc["usage"] = {**usage, "completion_tokens": done}
                await response.write(f"data: {json.dumps(doc)}\n\n".encode())
                if self.breaks_after is not None and done >= self.breaks_after:
                    return response
            end = {"choices": [], "usage": {**usage, "completion_tokens": done}}
            await response.write(f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n".encode())
        except (ConnectionError, asyncio.CancelledError):
            self.aborted += 1
            raise
        return response

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.page)
        if self.tells_more:
            app.router.add_get("/get_server_info", self.info)
        app.router.add_post("/v1/completions", self.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def run(fake: Fake, **asked: Any) -> Measured:
    async with fake.serve() as url:
        fields = {"wanted": QUICK, "sequences_max": 4, "isl_max": 300, **asked}
        return await measure(
            Asked(url=url + "/v1/", **fields),
            clock=SystemClock(),
            random=Random(1),
            say=lambda _text: None,
        )


async def test_an_sglang_endpoint_is_measured_from_end_to_end() -> None:
    fake = Fake(first_s=0.15)
    found = await run(fake, token="secret")
    assert (found.facts.engine, found.kv_tokens, found.facts.model) == ("sglang", 80_000, "m")
    assert set(fake.tokens) == {"Bearer secret"}
    assert len(found.readings.prefill) == 3
    assert {r.sequences for r in found.readings.decode} == {1.0, 4.0}
    assert all(r.milliseconds > 0.9 for r in found.readings.decode)
    prompts = [tuple(b["prompt"]) for b in fake.asked]
    repeated = len(prompts) - len(set(prompts))
    assert repeated == 2, "only the cached prompt is sent again"
    assert all(b["ignore_eos"] and b["temperature"] == 0 for b in fake.asked)
    assert fake.aborted, "batches are ended as soon as they have told enough"
    assert found.requests == len(fake.asked)
    assert any("no prefix is kept" in note for note in found.readings.notes)


async def test_what_sglang_tells_of_itself_is_taken() -> None:
    found = await run(Fake(metrics="", tells_more=True), sequences_max=0)
    assert (found.kv_tokens, found.sequences_max, found.facts.batch_tokens) == (7000, 3, 2048)
    assert max(r.sequences for r in found.readings.decode) == 3
    assert not any("assumed" in note for note in found.readings.notes)


async def test_a_token_a_chunk_needs_no_running_usage() -> None:
    found = await run(Fake(running_usage=False))
    assert len(found.readings.decode) == 6


@pytest.mark.parametrize(
    ("fake", "asked", "error", "said"),
    [
        (Fake(running_usage=False, tokens_a_chunk=4), {}, InvalidField, "running usage"),
        (Fake(metrics=""), {}, InvalidField, "--kv-tokens"),
        (Fake(context=None), {"isl_max": 0}, InvalidField, "--isl-max"),
        (Fake(), {"isl_max": 5000}, InvalidField, "takes 1022 at most"),
        (Fake(), {"model": "other"}, InvalidField, "serves m"),
        (Fake(status=400), {}, InvalidField, "400: not so"),
        (Fake(status=401), {}, InvalidField, "READYPLANE_ENGINE_TOKEN"),
        (Fake(status=503), {}, Unavailable, "503: not so"),
        (Fake(breaks_after=2), {}, Unavailable, "before its end"),
    ],
)
async def test_what_cannot_be_measured_is_named(
    fake: Fake, asked: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        await run(fake, **asked)


async def test_nobody_there() -> None:
    with pytest.raises(Unavailable, match="give its base URL"):
        await measure(
            Asked(url="http://127.0.0.1:1"), clock=SystemClock(), random=Random(1), say=print
        )


async def test_a_budget_of_requests_ends_it_with_what_there_is() -> None:
    fake = Fake()
    found = await run(fake, requests_max=10)
    assert len(fake.asked) <= 10
    assert any("stopped by its budget" in note for note in found.readings.notes)
    assert found.readings.prefill


@pytest.mark.parametrize(
    ("asked", "facts", "span"),
    [
        ({}, Facts("m", 8192, 100_000, ""), (8190, 8192, 100_000, 256)),
        ({"kv_tokens": 5000}, Facts("m", 8192, None, ""), (4998, 5000, 5000, 256)),
        ({"isl_max": 1000}, Facts("m", None, 100_000, ""), (1000, 2000, 100_000, 256)),
        ({"sequences_max": 8}, Facts("m", 4096, 9000, ""), (4094, 4096, 9000, 8)),
    ],
)
def test_what_is_given_and_what_is_told(
    asked: dict[str, Any], facts: Facts, span: tuple[int, ...]
) -> None:
    found = span_of(Asked(url="", **asked), facts)
    assert (found.isl_max, found.context_max, found.kv_tokens, found.sequences_max) == span
