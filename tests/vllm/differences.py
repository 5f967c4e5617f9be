"""Where vLLM 0.32 does otherwise than the port suite asks: what it does instead, and that it does.

Each entry replaces one check of the suite for vLLM by a check of its own, as narrow as the other. Most
of them are about parameters of a hand-over that are not what a prefill leg gave: vLLM believes them.
They never come from a client: the gateway makes the legs and takes no such field from outside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from readyplane.core.errors import Unavailable
from readyplane_agent.engines.port import EnginePort
from tests.engine.port_suite import EXPIRED, World

FAILED = "vllm:nixl_num_failed_transfers_total"
READ = "vllm:nixl_xfer_time_seconds_count"
ENDS_WITHIN_S = 60.0
HANGS_S = 5.0


@dataclass(frozen=True)
class Difference:
    """What vLLM does instead, in words for the table, and the check of it."""

    does: str
    run: Callable[[World], Awaitable[None]]


async def _load(
    w: World, prompt: list[int], params: Mapping[str, Any], *, limit_s: float = 45.0
) -> tuple[int, dict[str, Any], float, float]:
    """A decode leg: status, document, and how much more was read and failed on D."""
    read, failed = await w.metric(w.d, READ), await w.metric(w.d, FAILED)
    body = {"model": w.traits.model, "prompt": prompt, "max_tokens": 6, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "kv_transfer_params": dict(params)}
    async with asyncio.timeout(limit_s):
        status, doc = await w.post(w.d, "/v1/completions", body)
    return (
        status,
        doc,
        await w.metric(w.d, READ) - read,
        await w.metric(w.d, FAILED) - failed,
    )


def _answer(doc: dict[str, Any]) -> tuple[int, ...]:
    return tuple(doc["choices"][0]["token_ids"])


async def _alone(w: World, prompt: list[int]) -> tuple[int, ...]:
    return (await w.one.generate(prompt, max_tokens=6, ignore_eos=True)).token_ids


async def _fails(w: World, prompt: list[int], params: Mapping[str, Any]) -> None:
    """The load fails (500), is counted once, and D works on."""
    status, doc, _, failed = await _load(w, prompt, params)
    assert (status, failed) == (500, 1), doc
    assert doc["error"]["code"] == 500 and doc["error"]["message"]
    await w.until(w.d.is_idle, limit_s=30.0)
    assert len((await w.d.generate(w.prompt(), max_tokens=2, ignore_eos=True)).token_ids) == 2


def _prompt(w: World, blocks: float = 2.3) -> list[int]:
    return w.prompt(int(blocks * w.p.serving().block_size))


# --------------------------------------------------------------------------- other paths


async def _chat_parts(w: World) -> None:
    counts = []
    for content in (
        "one \ntwo",
        [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}],
    ):
        chat = {"model": w.traits.model, "messages": [{"role": "user", "content": content}]}
        _, tokens = await w.post(w.one, "/tokenize", chat)
        more = {"max_tokens": 6, "temperature": 0}
        _, doc = await w.post(w.one, "/v1/chat/completions", {**chat, **more})
        counts.append((tokens["tokens"], doc["choices"][0]["message"]["content"]))
    assert counts[0] == counts[1]


async def _chat_tokens(w: World) -> None:
    chat = {"model": w.traits.model, "messages": [{"role": "user", "content": "as tokens"}]}
    _, doc = await w.post(w.one, "/tokenize", chat)
    path = "/v1/chat/completions"
    more = {"max_tokens": 9, "ignore_eos": True, "temperature": 0}
    _, plain = await w.post(w.one, path, {**chat, **more})
    other = {**chat, **more, "prompt_token_ids": w.prompt(doc["count"])}
    _, other = await w.post(w.one, path, other)
    assert plain["usage"]["prompt_tokens"] == doc["count"]
    assert plain["choices"] == other["choices"]


async def _event_sources(w: World) -> None:
    async with w.http.get(w.one.serving().engine_url + "/kv_event_sources") as response:
        doc = await response.json()
    assert set(doc) == {"0"}
    assert doc["0"]["endpoint"].startswith("ipc://@")
    assert doc["0"]["replay_endpoint"].startswith("tcp://")
    assert isinstance(doc["0"]["topic"], str)


# --------------------------------------------------------------------------- hand-over


async def _stale(w: World) -> None:
    prompt = _prompt(w)
    params = await w.handover(prompt)
    first = await _load(w, prompt, params)
    again = await _load(w, prompt, params)
    assert (first[0], again[0]) == (200, 200)
    assert _answer(first[1]) == _answer(again[1]) == await _alone(w, prompt)


async def _foreign(w: World) -> None:
    prompt = _prompt(w)
    params = await w.handover(prompt)
    await _fails(w, prompt, {**params, "remote_engine_id": "somebody-else"})
    far = [[block + 10**6 for block in params["remote_block_ids"][0]]]
    await _fails(w, prompt, {**params, "remote_block_ids": far})
    status, doc, read, _ = await _load(w, prompt, {**params, "remote_request_id": "nobody"})
    assert (status, read) == (200, 1)
    assert _answer(doc) == await _alone(w, prompt)
    # Blocks of somebody else within the pool are read as they are.
    prompt = _prompt(w)
    params = await w.handover(prompt)
    others = [[block + 1 for block in params["remote_block_ids"][0]]]
    status, doc, read, failed = await _load(w, prompt, {**params, "remote_block_ids": others})
    assert (status, read, failed) == (200, 1, 0)
    assert _answer(doc) != await _alone(w, prompt)


async def _other_prompt(w: World) -> None:
    short, long = _prompt(w, 1.2), _prompt(w, 2.3)
    status, doc, read, failed = await _load(w, short, await w.handover(long))
    assert (status, read, failed) == (200, 1, 0)
    assert _answer(doc) != await _alone(w, short)
    await _kills(w, w.d, _prompt(w, 2.3), await w.handover(_prompt(w, 1.2)))


async def _malformed(w: World) -> None:
    params = await w.handover(_prompt(w))
    lacking = {k: v for k, v in params.items() if k != "remote_engine_id"}
    body = {"model": w.traits.model, "prompt": _prompt(w), "max_tokens": 2}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(HANGS_S):
            await w.post(w.p, "/v1/completions", {**body, "kv_transfer_params": lacking})
    await _ends(w.p)


async def _kills(
    w: World, engine: EnginePort, prompt: list[int], params: Mapping[str, Any]
) -> None:
    """The request is a 500 and the engine's process ends, which the port says."""
    body = {"model": w.traits.model, "prompt": prompt, "max_tokens": 2}
    async with asyncio.timeout(ENDS_WITHIN_S):
        status, _ = await w.post(
            engine, "/v1/completions", {**body, "kv_transfer_params": dict(params)}
        )
    assert status == 500
    await _ends(engine)


async def _ends(engine: EnginePort) -> None:
    async with asyncio.timeout(ENDS_WITHIN_S):
        while engine.returncode is None:
            await asyncio.sleep(0.2)
    with pytest.raises(Unavailable):
        await engine.generate([5, 6], max_tokens=1)
    assert not await engine.is_idle()


async def _expired(w: World) -> None:
    before = await w.metric(w.p, EXPIRED)
    prompt = _prompt(w)
    params = await w.handover(prompt)
    await asyncio.sleep(w.traits.hold_s + 1.0)
    await w.until(w.p.is_idle)
    assert await w.metric(w.p, EXPIRED) == before + 1
    # The freed blocks still hold what they held, until somebody else is given them.
    status, doc, read, _ = await _load(w, prompt, params)
    assert (status, read) == (200, 1)
    assert _answer(doc) == await _alone(w, prompt)


async def _nobody(w: World) -> None:
    prompt = _prompt(w)
    params = await w.handover(prompt)
    # Engines that have met are not asked again: the address is not looked at.
    status, doc, read, _ = await _load(w, prompt, {**params, "remote_port": 1})
    assert (status, read) == (200, 1)
    assert _answer(doc) == await _alone(w, prompt)
    await _fails(w, _prompt(w), {**params, "remote_engine_id": "new-here", "remote_port": 1})


# --------------------------------------------------------------------------- aborts


async def _abort_path(w: World) -> None:
    status, _ = await w.post(w.one, "/abort_requests", {"request_ids": ["long"]})
    assert status == 404


async def _abort_held(w: World) -> None:
    await w.until(w.p.is_idle, limit_s=w.traits.hold_s + 5)
    expired = await w.metric(w.p, EXPIRED)
    params = await w.handover(_prompt(w))
    status, _ = await w.post(w.p, "/abort_requests", {"request_ids": [params["remote_request_id"]]})
    assert status == 404
    assert not await w.p.is_idle()
    await w.until(w.p.is_idle, limit_s=w.traits.hold_s + 5)
    assert await w.metric(w.p, EXPIRED) == expired + 1


DIFFERENCES: Mapping[str, Difference] = {
    "chat_parts": Difference("puts a line break between the parts", _chat_parts),
    "chat_tokens": Difference("ignores tokens beside messages and writes them out", _chat_tokens),
    "path_event_sources": Difference("one object by rank instead of a list", _event_sources),
    "handover_stale": Difference("freed blocks are read again as they are: 200", _stale),
    "handover_foreign": Difference(
        "another engine or blocks beyond the pool: 500, counted; another request or other blocks of the "
        "pool: read as they are, 200",
        _foreign,
    ),
    "handover_other_prompt": Difference(
        "KV of a longer prompt is taken as it is, 200; of a shorter one: 500, and D ends",
        _other_prompt,
    ),
    "handover_expired": Difference(
        "freed and counted; D reads the freed blocks as they are: 200", _expired
    ),
    "handover_nobody": Difference(
        "500 within seconds for an engine it has not met; no address is needed for one it has",
        _nobody,
    ),
    "handover_malformed": Difference(
        "no answer, and once its client leaves the engine ends", _malformed
    ),
    "abort_by_id": Difference("404: held KV stays until its lease runs out", _abort_held),
    "abort_running": Difference("404: only a client that leaves aborts", _abort_path),
}
"""By the name of the suite's function."""

LAST = ("handover_other_prompt", "handover_malformed")
"""Checks that end an engine: D first, then P."""
