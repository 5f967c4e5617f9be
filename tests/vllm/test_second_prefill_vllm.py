"""Two prefill workers and a decode worker on real vLLMs: one of the two is killed during hand-overs.

Its requests are paired with the other one, those that follow are as well, and it is replaced. Three
vLLMs at once, none of which compiles.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from readyplane_lab.up.prompts import words_of
from readyplane_lab.up.real_engine import RealEngine
from tests.vllm.system import Client, System, running
from tests.vllm.vllm_world import make_tiny_model

POLICY = "start_mode: eager\nprefill: {min: 2, max: 2}\n"
KV_BLOCKS = 512  # of 128 tokens; some 130 MB
BOTH_WITHIN_S = 420.0
AGAIN_WITHIN_S = 420.0
ANSWER_WITHIN_S = 150.0
SEEN_WITHIN_S = 60.0
IDLE_WITHIN_S = 90.0
LONG_CHARACTERS = 2400  # some 1,650 tokens of the tiny model's
CHARACTERS = 900
HAND_OVERS = 6
NEXT = 4
TOKENS = 8
XFER = "vllm:nixl_xfer_time_seconds_count"
RUNNING = "vllm:num_requests_running"
DONE = "vllm:request_success_total"
REPAIRS = "readyplane_gateway_repairs_total"
LEGS = "readyplane_gateway_leg_seconds_count"
TYPED = (429, 502, 503, 504)
CLOSE = 0.25
"""Nats between two tokens of which another batch may choose the other one: logits are bfloat16."""
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def system(engine: RealEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("second")
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    small = f"--engine-arg=--num-gpu-blocks-override={KV_BLOCKS}"
    model = make_tiny_model(engine, folder / "tiny")
    with running(folder, model, "--policy", str(policy), small) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(system: System) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=ANSWER_WITHIN_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield Client(system, session)


async def test_requests_of_a_killed_prefill_worker_are_paired_with_the_other(
    system: System, client: Client
) -> None:
    p = await _two(system)
    (d,) = system.ready("decode")
    prompts = [words_of(60 + i, LONG_CHARACTERS) for i in range(HAND_OVERS)]
    # The first of these that ask for log-probabilities: what that takes was done before the start's end.
    more = {"ignore_eos": True, "return_token_ids": True, "logprobs": 1}
    asked = [
        asyncio.create_task(client.complete(prompt=text, max_tokens=TOKENS, **more))
        for text in prompts
    ]
    async with asyncio.timeout(SEEN_WITHIN_S):
        killed = await _busy(client, p, asked)
    system.kill_engine(killed["worker_id"])
    (other,) = [w for w in p if w["worker_id"] != killed["worker_id"]]

    by_other, outcomes = 0, []
    for text, (status, doc, headers) in zip(prompts, await asyncio.gather(*asked), strict=True):
        if status != 200:
            assert status in TYPED, doc
            assert doc["error"]["message"] and doc["error"]["type"], doc
            outcomes.append(f"{status} {doc['error'].get('code')}")
            continue
        assert doc["usage"]["completion_tokens"] == TOKENS, doc
        assert len(doc["choices"][0]["logprobs"]["token_logprobs"]) == TOKENS, doc
        await _as_alone(client, other, text, doc)
        by_other += headers["x-readyplane-prefill"] == other["worker_id"]
        outcomes.append("answered")
    repairs = await client.metric(system.book["gateway_http"], REPAIRS)
    print(
        f"\nkilled with another there: {outcomes}, {repairs:.0f} re-paired, {by_other} by the other"
    )
    assert repairs >= 1, outcomes
    assert by_other >= 1, outcomes

    # Those that come next: each is handed over by the other one, and NIXL has counted it.
    before = await client.metric(d["engine_url"], XFER)
    for number in range(NEXT):
        text = words_of(80 + number, CHARACTERS)
        status, doc, headers = await client.complete(
            prompt=text, max_tokens=TOKENS, ignore_eos=True, return_token_ids=True
        )
        assert status == 200, doc
        assert headers["x-readyplane-prefill"] == other["worker_id"]
        assert headers["x-readyplane-decode"] == d["worker_id"]
        await _as_alone(client, other, text, doc)
    assert await client.metric(d["engine_url"], XFER) == before + NEXT

    # Nothing hangs at those that are left, and another one comes in its place.
    for worker in (other, d):
        async with asyncio.timeout(IDLE_WITHIN_S):
            while await client.metric(worker["engine_url"], RUNNING) > 0:
                await asyncio.sleep(0.5)
    now = await _two(system, without=killed["worker_id"], within_s=AGAIN_WITHIN_S)
    assert other["worker_id"] in {w["worker_id"] for w in now}
    left = [w for w in system.workers() if w["worker_id"] == killed["worker_id"]]
    assert not [w for w in left if w["state"] == "ready"], left


async def test_the_one_that_came_instead_hands_over_as_well(system: System, client: Client) -> None:
    p = await _two(system)
    (d,) = system.ready("decode")
    before = await client.metric(d["engine_url"], XFER)
    prompts = [words_of(90 + number, LONG_CHARACTERS) for number in range(HAND_OVERS)]
    done = await asyncio.gather(
        *(client.complete(prompt=text, max_tokens=TOKENS, ignore_eos=True) for text in prompts)
    )
    assert [status for status, *_ in done] == [200] * HAND_OVERS, done
    by = {headers["x-readyplane-prefill"] for *_, headers in done}
    assert by == {w["worker_id"] for w in p}, "long prompts at once are for both"
    assert await client.metric(d["engine_url"], XFER) == before + HAND_OVERS


async def test_kv_that_a_killed_prefill_worker_took_with_it_is_computed_by_the_other(
    system: System, client: Client
) -> None:
    """The reader says 500 and no more: the gateway looks for the source, and blames that one (B60).

    The decode engine stands still meanwhile, so that it asks for the KV when nobody has it any more.
    """
    p = await _two(system)
    (d,) = system.ready("decode")
    gateway = system.book["gateway_http"]
    unsaid = {"leg": "handover", "trouble": "http_500"}
    before = await client.metric(gateway, REPAIRS, **unsaid)
    ended = await client.metric(gateway, LEGS, leg="prefill", outcome="ok")
    done = {w["worker_id"]: await client.metric(w["engine_url"], DONE) for w in p}
    text = words_of(110, CHARACTERS)
    _, *engine = system.engine_processes(d["worker_id"])  # its server goes on
    assert engine, "the engine is a process of its own"
    with standing_still(engine):
        asked = asyncio.create_task(
            client.complete(prompt=text, max_tokens=TOKENS, ignore_eos=True, return_token_ids=True)
        )
        async with asyncio.timeout(SEEN_WITHIN_S):
            killed = await _computed(client, p, done)
            while await client.metric(gateway, LEGS, leg="prefill", outcome="ok") == ended:
                await asyncio.sleep(0.02)
        gone = system.kill_engine(killed["worker_id"])
        _, left = await asyncio.to_thread(psutil.wait_procs, gone, timeout=SEEN_WITHIN_S)
        assert not left, left
        assert not asked.done(), asked.result()
    status, doc, headers = await asked
    blamed = await client.metric(gateway, REPAIRS, **unsaid) - before
    print(f"\nkilled before its KV was read: {status}, {blamed:.0f} blamed for what D did not say")
    assert status == 200, doc
    assert blamed == 1
    (other,) = [w for w in p if w["worker_id"] != killed["worker_id"]]
    assert headers["x-readyplane-prefill"] == other["worker_id"]
    assert headers["x-readyplane-decode"] == d["worker_id"], "which keeps its good name"
    await _as_alone(client, other, text, doc)
    status, doc, headers = await client.complete(prompt=words_of(111, CHARACTERS), max_tokens=4)
    assert status == 200, doc
    assert headers["x-readyplane-prefill"] == other["worker_id"]


@contextmanager
def standing_still(processes: list[psutil.Process]) -> Iterator[None]:
    """They compute nothing and answer nobody until the end, and are none the worse for it."""
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            process.resume()


async def _two(
    system: System, *, without: str = "", within_s: float = BOTH_WITHIN_S
) -> list[dict[str, Any]]:
    """Both prefill workers that serve; `without`: one that is none of them any more."""

    def two() -> list[dict[str, Any]]:
        found = [w for w in system.ready("prefill") if w["worker_id"] != without]
        return found if len(found) == 2 else []

    found: list[dict[str, Any]] = await asyncio.to_thread(system.until, two, within_s=within_s)
    return found


async def _computed(
    client: Client, workers: list[dict[str, Any]], done: dict[str, float]
) -> dict[str, Any]:
    """The worker that has answered one more than it had."""
    while True:
        for worker in workers:
            if await client.metric(worker["engine_url"], DONE) > done[worker["worker_id"]]:
                return worker
        await asyncio.sleep(0.02)


async def _busy(
    client: Client, workers: list[dict[str, Any]], asked: list[asyncio.Task[Any]]
) -> dict[str, Any]:
    """A worker that computes a request right now."""
    while True:
        for worker in workers:
            if await client.metric(worker["engine_url"], RUNNING) >= 1:
                return worker
        assert not all(one.done() for one in asked), "no request was seen at a prefill worker"
        await asyncio.sleep(0.02)


async def _as_alone(
    client: Client, worker: dict[str, Any], prompt: str, doc: dict[str, Any]
) -> None:
    """An answer is what one engine gives by itself, up to a token where two were as good."""
    alone = await client.ask_engine(
        worker["engine_url"],
        prompt=prompt,
        max_tokens=TOKENS,
        ignore_eos=True,
        logprobs=2,
        return_tokens_as_token_ids=True,
    )
    own = alone["choices"][0]["logprobs"]
    got = [f"token_id:{number}" for number in doc["choices"][0]["token_ids"]]
    assert len(got) == TOKENS, doc
    for token, expected, best in zip(got, own["tokens"], own["top_logprobs"], strict=True):
        if token != expected:
            assert best[expected] - best.get(token, float("-inf")) <= CLOSE, (token, best)
            return
