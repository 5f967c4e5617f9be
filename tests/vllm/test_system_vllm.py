"""The whole system on a real vLLM: one prefill and one decode worker, from order to drain.

One run serves every test here, in this order; each leaves a pair of workers that serves.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from readyplane_lab.up.prompts import words_of
from readyplane_lab.up.real_engine import RealEngine
from tests.vllm.system import Client, System, running
from tests.vllm.vllm_world import make_tiny_model

AGAIN_WITHIN_S = 420.0
ANSWER_WITHIN_S = 150.0
LONG_TOKENS = 1500
LONG_CHARACTERS = 4800  # some 3,300 tokens of the tiny model's
HAND_OVERS = 8
IDLE_S, IDLE_CORES_MAX = 10.0, 0.2
XFER = "vllm:nixl_xfer_time_seconds_count"
HITS = "vllm:prefix_cache_hits_total"
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def system(engine: RealEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("system")
    model = make_tiny_model(engine, folder / "tiny")
    with running(folder, model) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(system: System) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=ANSWER_WITHIN_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield Client(system, session)


def pair(system: System) -> tuple[dict[str, Any], dict[str, Any]]:
    """The prefill and the decode worker that serve."""
    (p,), (d,) = system.ready("prefill"), system.ready("decode")
    return p, d


async def test_every_check_of_the_gate_was_made_on_real_answers(system: System) -> None:
    for worker in pair(system):
        told = system.worker(worker["worker_id"])
        checks = {c["name"]: c for c in told["checks"]}
        assert all(c["passed"] for c in checks.values()), checks
        assert checks["canary"]["evidence"]["token_ids"], checks["canary"]
        assert checks["kv_hashes"]["evidence"]["told"], checks["kv_hashes"]
        assert checks["kv_connector"]["evidence"]["outbound"] is True
        assert checks["kv_connector"]["evidence"]["inbound"] is True


async def test_an_idle_engine_leaves_the_cores_alone(system: System) -> None:
    """NIXL's own progress thread polls without rest: 0.3 to 1 core for nothing."""
    shares = []
    for worker in pair(system):
        processes = system.engine_processes(worker["worker_id"])
        before = {p: sum(p.cpu_times()[:2]) for p in processes}
        await asyncio.sleep(IDLE_S)
        shares += [(sum(p.cpu_times()[:2]) - used_s) / IDLE_S for p, used_s in before.items()]
    print(f"\nstart: cores of idle engine processes: {[round(share, 3) for share in shares]}")
    assert len(shares) >= 4, shares
    assert max(shares) <= IDLE_CORES_MAX, shares


async def test_a_request_is_handed_over_once(system: System, client: Client) -> None:
    p, d = pair(system)
    prompt = words_of(11, 900)
    before = await client.metric(d["engine_url"], XFER)
    status, doc, headers = await client.complete(prompt=prompt, max_tokens=24, ignore_eos=True)
    assert status == 200, doc
    assert headers["x-readyplane-prefill"] == p["worker_id"]
    assert headers["x-readyplane-decode"] == d["worker_id"]
    assert doc["usage"]["completion_tokens"] == 24
    assert await client.metric(d["engine_url"], XFER) == before + 1
    alone = await client.ask_engine(p["engine_url"], prompt=prompt, max_tokens=24, ignore_eos=True)
    assert doc["choices"][0]["text"] == alone["choices"][0]["text"]


async def test_a_chat_is_written_out_by_the_models_own_template(client: Client) -> None:
    """Which is a file of its own in the folder, and comes with the artifact."""
    status, doc = await client.chat(words_of(15, 300), max_tokens=6, ignore_eos=True)
    assert status == 200, doc
    assert doc["choices"][0]["message"]["role"] == "assistant"
    assert doc["usage"]["completion_tokens"] == 6


async def test_a_shared_prefix_hits_as_the_router_predicted(
    system: System, client: Client, tmp_path: Path
) -> None:
    """Wherever the router sends it: to the prefill worker, or to a decode worker that was given it."""
    prefix = words_of(12, 2400)
    status, doc, _ = await client.complete(prompt=prefix + " one", max_tokens=4, ignore_eos=True)
    assert status == 200, doc
    file = tmp_path / "prompt.txt"
    file.write_text(prefix + " two, which nobody has asked")

    def predicted() -> dict[str, Any]:
        told = json.loads(system.command("route", "--prompt-file", str(file), "--json"))
        return dict(told["prefill"]) if told["prefill"]["cached_tokens"] else {}

    end = await asyncio.to_thread(system.until, predicted, within_s=30.0)
    (holder,) = [w for w in pair(system) if w["worker_id"] == end["worker_id"]]
    before = await client.metric(holder["engine_url"], HITS)
    status, doc, headers = await client.complete(
        prompt=file.read_text(), max_tokens=4, ignore_eos=True
    )
    assert status == 200, doc
    assert headers["x-readyplane-prefill"] == end["worker_id"]
    hits = await client.metric(holder["engine_url"], HITS) - before
    print(
        f"\nprefix: {end['cached_tokens']} tokens predicted at {end['worker_id']}, "
        f"{hits:.0f} hit by its vLLM"
    )
    assert hits == end["cached_tokens"] > 0


async def test_the_planner_sees_the_engines_load(system: System, client: Client) -> None:
    book = system.book
    headers = {"authorization": f"Bearer {book['token']}"}
    load = asyncio.create_task(
        client.complete(prompt=words_of(13, 600), max_tokens=LONG_TOKENS, ignore_eos=True)
    )
    seen: list[Any] = []
    async with aiohttp.ClientSession(headers=headers) as session:
        while not load.done():
            url = f"{book['planner_http']}/v1/state?model={system.model}"
            async with session.get(url) as response:
                state = await response.json()
            workers = [w for w in state["workers"] if w["state"] == "ready"]
            seen += [w["load"] for w in workers if w["role"] == "decode" and w.get("load")]
            await asyncio.sleep(0.5)
    status, doc, _ = await load
    assert status == 200, doc
    assert any((told.get("running") or 0) >= 1 for told in seen), seen[-3:]


async def test_a_drain_cuts_no_stream_and_the_next_start_reuses_what_was_compiled(
    system: System, client: Client
) -> None:
    _, d = pair(system)
    first = _start(system, d["worker_id"])
    stream = asyncio.create_task(
        client.stream(prompt=words_of(14, 300), max_tokens=LONG_TOKENS, ignore_eos=True)
    )
    while await client.metric(d["engine_url"], "vllm:num_requests_running") < 1:
        assert not stream.done(), stream.result()
        await asyncio.sleep(0.1)
    await asyncio.to_thread(system.command, "drain", d["worker_id"])
    assert await stream == (LONG_TOKENS, True, "")

    def replaced() -> list[dict[str, Any]]:
        return [w for w in system.ready("decode") if w["worker_id"] != d["worker_id"]]

    (second,) = await asyncio.to_thread(system.until, replaced, within_s=AGAIN_WITHIN_S)
    again = _start(system, second["worker_id"])
    print(f"\ncompile: first {first}, second {again}, ratio {again[0] / max(first[0], 1e-9):.2f}")
    assert again[1].startswith("cache=hit"), again
    status, doc, _ = await client.complete(prompt="after the drain", max_tokens=4)
    assert status == 200, doc


def _start(system: System, worker_id: str) -> tuple[float, str]:
    """Seconds and detail of a start's compile segment."""
    report = json.loads(system.command("startup", "report", "--json"))
    found = [s for s in report["starts"] if s["worker_id"] == worker_id]
    segments = {s["name"]: s for s in found[0]["segments"]}
    compiled = segments["compile"]
    return compiled["end_s"] - compiled["start_s"], compiled.get("detail", "")


async def test_a_prefill_worker_that_is_killed_during_hand_overs_loses_nobody_silently(
    system: System, client: Client
) -> None:
    p, _ = pair(system)
    asked = [
        asyncio.create_task(
            client.complete(prompt=words_of(20 + i, LONG_CHARACTERS), max_tokens=8, ignore_eos=True)
        )
        for i in range(HAND_OVERS)
    ]
    while await client.metric(p["engine_url"], "vllm:num_requests_running") < 1:
        assert not all(one.done() for one in asked), [one.result()[:2] for one in asked]
        await asyncio.sleep(0.02)
    system.kill_engine(p["worker_id"])
    outcomes = []
    for status, doc, _ in await asyncio.gather(*asked):
        if status == 200:
            assert doc["usage"]["completion_tokens"] == 8, doc
            outcomes.append("answered")
        else:
            assert status in (429, 502, 503, 504), doc
            assert doc["error"]["message"] and doc["error"]["type"]
            outcomes.append(f"{status} {doc['error'].get('code')}")
    print(f"\nkilled during hand-overs: {outcomes}")

    def another() -> list[dict[str, Any]]:
        return [w for w in system.ready("prefill") if w["worker_id"] != p["worker_id"]]

    await asyncio.to_thread(system.until, another, within_s=AGAIN_WITHIN_S)
    status, doc, _ = await client.complete(prompt="after the kill", max_tokens=4)
    assert status == 200, doc


async def test_ctrl_c_ends_it_and_leaves_nothing(system: System) -> None:
    own = psutil.Process(system.process.pid).children(recursive=True)
    assert await asyncio.to_thread(system.end) == 0, system.text
    psutil.wait_procs(own, timeout=10.0)
    left = [p for p in own if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not left, left
