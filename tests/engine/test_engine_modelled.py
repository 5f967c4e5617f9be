"""The port suite on modelled engines, and what only they can be asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from readyplane import profiles
from readyplane.core.errors import Unavailable
from readyplane.core.startup import Segment, StartMode
from readyplane.core.work import pack_tokens, sequence_hashes
from readyplane.kit.clock import SystemClock
from readyplane_agent.engines.modelled import startup
from readyplane_agent.engines.modelled.adapter import ModelledEngine
from readyplane_agent.engines.modelled.answer import answer_length
from readyplane_agent.engines.port import EnginePort, EngineSpec, arena_layout
from tests.engine import port_suite
from tests.engine.engine_world import ModelledFactory, modelled_factory

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # The document's test is not asynchronous and does not mind.
    pytest.mark.filterwarnings("ignore:The test .* is marked with '@pytest.mark.asyncio'"),
]


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> ModelledFactory:
    return modelled_factory(tmp_path_factory.mktemp("engines"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(factory: ModelledFactory) -> AsyncIterator[port_suite.World]:
    async with AsyncExitStack() as stack:
        one, p, d = await asyncio.gather(
            *(stack.enter_async_context(factory.start(name)) for name in ("one", "p", "d"))
        )
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield port_suite.World(one, p, d, factory.traits, http, factory, count(1))


@pytest.mark.parametrize(
    "check", port_suite.CHECKS, ids=[f"{c.area}-{c.run.__name__}" for c in port_suite.CHECKS]
)
async def test_port(world: port_suite.World, check: port_suite.Check) -> None:
    await check.run(world)


# --------------------------------------------------------------------------- the canary


async def _canary(factory: ModelledFactory, alter: Callable[[bytearray], None]) -> bool:
    """Whether an engine over altered weights still gives the golden answer."""
    canary = factory.traits.canary
    async with factory.start("altered", alter=alter) as engine:
        got = await engine.generate(
            canary.prompt_token_ids, max_tokens=len(canary.golden_token_ids), ignore_eos=True
        )
        return got.token_ids == canary.golden_token_ids


async def test_the_canary_sees_one_flipped_bit_and_two_swapped_tensors(
    factory: ModelledFactory,
) -> None:
    """Loaded bytes, not files, make the answer (B108)."""
    slots = arena_layout(factory.manifest).tensors
    one, two = (s for s in slots if s.name.startswith("model.layers.0.self_attn"))
    assert one.size_bytes == two.size_bytes

    def flip(arena: bytearray) -> None:
        arena[slots[-1].offset_bytes + slots[-1].size_bytes - 1] ^= 1

    def swap(arena: bytearray) -> None:
        a, b, size = one.offset_bytes, two.offset_bytes, one.size_bytes
        arena[a : a + size], arena[b : b + size] = arena[b : b + size], arena[a : a + size]

    def nothing(arena: bytearray) -> None:
        assert len(arena) == arena_layout(factory.manifest).size_bytes

    same, flipped, swapped = await asyncio.gather(
        _canary(factory, nothing), _canary(factory, flip), _canary(factory, swap)
    )
    assert same and not flipped and not swapped


# --------------------------------------------------------------------------- what only it has


async def test_the_true_length_is_told_or_follows_from_the_prompt(world: port_suite.World) -> None:
    prompt = world.prompt()
    doc = await world.complete(
        world.one, prompt=prompt, max_tokens=500, vllm_xargs={"modelled_output_tokens": 37}
    )
    assert doc["usage"]["completion_tokens"] == 37
    assert doc["choices"][0]["finish_reason"] == "stop"
    natural = answer_length(pack_tokens(prompt))
    doc = await world.complete(world.one, prompt=prompt, max_tokens=None)
    assert doc["usage"]["completion_tokens"] == natural
    doc = await world.complete(world.one, prompt=prompt, max_tokens=5)
    assert doc["choices"][0]["finish_reason"] == ("length" if natural > 5 else "stop")
    doc = await world.complete(world.one, prompt=prompt, max_tokens=3000, min_tokens=natural + 9)
    assert doc["usage"]["completion_tokens"] == natural + 9


async def test_it_says_how_late_it_runs(world: port_suite.World) -> None:
    await world.one.generate(world.prompt(), max_tokens=20, ignore_eos=True)
    report = await world.one.load_report()
    assert report.lateness_p99_s is not None and report.lateness_p99_s > 0
    assert report.waiting_prefill_tokens == 0
    assert await world.metric(world.one, "readyplane_engine_lateness_seconds_count") > 0


async def test_a_cleared_cache_is_told(world: port_suite.World) -> None:
    size = world.one.serving().block_size
    prompt = world.prompt(4 * size)
    mine = set(sequence_hashes(pack_tokens(prompt), size))
    events = world.one.kv_events()
    await world.one.generate(prompt, max_tokens=1)
    assert mine <= await port_suite._next_stored(events, mine)
    status, doc = await world.post(world.one, "/reset_prefix_cache", {})
    assert (status, doc) == (200, {"success": True})
    async with asyncio.timeout(60):
        async for batch in events:
            if any(e.kind == "cleared" for e in batch.events):
                break
    await events.aclose()  # type: ignore[attr-defined]
    assert (await world.one.generate(prompt, max_tokens=1)).cached_tokens == 0


async def test_pipelined_and_broken_requests_on_one_connection(world: port_suite.World) -> None:
    host, _, port = world.one.serving().engine_url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    get = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"
    writer.write(get % b"version" + get % b"nowhere" + b"DELETE /health HTTP/1.1\r\n\r\n")
    writer.write(b"nonsense\r\n\r\n")
    answers = (await asyncio.wait_for(reader.read(), 60)).decode()
    writer.close()
    assert re.findall(r"HTTP/1\.1 (\d+) ", answers) == ["200", "404", "405", "400"]
    async with world.http.get(world.one.serving().engine_url + "/health") as response:
        assert response.status == 200


async def test_a_full_queue_says_so(factory: ModelledFactory) -> None:
    extra = ("--max-waiting", "2", "--max-num-seqs", "1")
    async with factory.start("small", extra=extra) as engine, aiohttp.ClientSession() as http:
        url = engine.serving().engine_url + "/v1/completions"
        body = {"model": "demo", "prompt": "x" * 50, "max_tokens": 3, "ignore_eos": True}
        long = await http.post(url, json={**body, "max_tokens": 4000, "stream": True})
        await long.content.readline()
        waiting = [asyncio.create_task(http.post(url, json=body)) for _ in range(2)]
        async with asyncio.timeout(60):
            while (await engine.load_report()).waiting != 2:
                await asyncio.sleep(0.02)
        assert [(await http.post(url, json=body)).status for _ in range(3)] == [503, 503, 503]
        long.close()
        assert [(await job).status for job in waiting] == [200, 200]


async def test_a_slow_profile_is_kept_in_real_time(factory: ModelledFactory) -> None:
    """Nothing comes before the profile's time for it, in the iterations that it takes."""
    profile = profiles.load("h200-slow10")
    async with factory.start("slow", profile="h200-slow10") as engine:
        clock = SystemClock()
        begun_s = clock.monotonic_s()
        await engine.generate([7] * 1000, max_tokens=11, ignore_eos=True)
        took_s = clock.monotonic_s() - begun_s
        assert (await engine.load_report()).iterations_total == 11
    wanted_s = profile.prefill_s(1000) + sum(profile.iteration_s(1, 1000 + i) for i in range(10))
    assert wanted_s <= took_s


async def test_a_reader_that_has_to_queue_keeps_its_kv_alive(
    factory: ModelledFactory, world: port_suite.World
) -> None:
    """It waits longer than a hold lasts; the giver hears of it and keeps the blocks."""
    async with factory.start("narrow", profile="h200-slow10", kv_tokens=640) as engine:
        busy = asyncio.create_task(
            engine.generate(world.prompt(400), max_tokens=140, ignore_eos=True)
        )
        await world.until(lambda: _running(engine))
        prompt = world.prompt(320)
        alone = await world.one.generate(prompt, max_tokens=3, ignore_eos=True)
        params = await world.handover(prompt)
        clock = SystemClock()
        begun_s = clock.monotonic_s()
        got = await engine.generate(
            prompt, max_tokens=3, ignore_eos=True, kv_transfer_params=params
        )
        assert clock.monotonic_s() - begun_s > factory.traits.hold_s
        assert got.token_ids == alone.token_ids
        await busy


async def test_many_hand_overs_and_clients_that_leave_leak_nothing(world: port_suite.World) -> None:
    rng = random.Random(5)
    answered: list[bool] = []

    async def one(i: int) -> None:
        prompt = world.prompt(rng.randint(1, 400))
        patience_s = rng.choice([0.02, 0.1, 0.3, 30.0, 30.0])
        body = {"model": "demo", "prompt": prompt, "max_tokens": rng.randint(1, 60)}
        body |= {"ignore_eos": True, "stream": bool(i % 2)}
        await asyncio.sleep(rng.random() * 0.5)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                params = await world.handover(prompt)
                if i % 7 == 0:
                    return  # nobody comes for it: it expires
                url = world.d.serving().engine_url + "/v1/completions"
                async with world.http.post(url, json={**body, "kv_transfer_params": params}) as r:
                    text = await r.text()
                    assert r.status == 200, text
                    answered.append('"error"' not in text)

    async with asyncio.timeout(120):
        await asyncio.gather(*(one(i) for i in range(120)))
    assert answered and all(answered)
    await world.until(world.d.is_idle)
    await world.until(world.p.is_idle, limit_s=world.traits.hold_s + 30)
    for engine in (world.p, world.d):
        load = await engine.load_report()
        assert (load.running, load.waiting, load.kv_used_blocks) == (0, 0, 0)
        assert load.waiting_prefill_tokens == 0


async def _running(engine: EnginePort) -> bool:
    return (await engine.load_report()).running == 1


# --------------------------------------------------------------------------- starts


async def _start(factory: ModelledFactory, name: str, **options: Any) -> ModelledEngine:
    engine = ModelledEngine()
    await engine.start(factory.spec(name, **options))
    return engine


async def test_segments_real_and_modelled_and_the_compile_cache(
    factory: ModelledFactory, tmp_path: Path
) -> None:
    extra = ("--modelled-segments", "parallel_init=0.05,compile=0.4,cuda_graph=0.05")

    async def segments(*more: str, mode: StartMode = StartMode.JIT) -> dict[str, Segment]:
        async with factory.start(
            "cached", extra=(*extra, "--compile-cache", str(tmp_path), *more), mode=mode
        ) as engine:
            return {str(s.name): s for s in engine.startup_segments()}

    cold = await segments()
    warm, other, eager = await asyncio.gather(
        segments(), segments("--max-num-seqs", "7"), segments(mode=StartMode.EAGER)
    )
    assert {n for n, s in cold.items() if s.modelled} == {"parallel_init", "compile", "cuda_graph"}
    real = {"runtime_import", "host_to_device", "warmup"}
    assert {n for n, s in cold.items() if not s.modelled} == real
    assert cold["warmup"].detail == "until it answered"
    assert cold["compile"].detail == "cache=miss:absent"
    assert warm["compile"].detail == "cache=hit"
    assert other["compile"].detail == "cache=miss:max_num_seqs"  # the differing field (R12.2)
    assert "compile" not in eager and "cuda_graph" not in eager
    took = {k: s["compile"].end_s - s["compile"].start_s for k, s in {"c": cold, "w": warm}.items()}  # type: ignore[operator]
    assert took["c"] >= 0.4
    assert took["w"] >= 0.4 * startup.CACHE_HIT_FACTOR
    for found in (cold, warm, other, eager):
        ordered = sorted(found.values(), key=lambda s: s.start_s)
        for before, after in pairwise(ordered):
            assert before.end_s is not None and before.end_s <= after.start_s
        span = ordered[-1].end_s - ordered[0].start_s  # type: ignore[operator]
        covered = sum(s.end_s - s.start_s for s in ordered if s.end_s is not None)
        assert covered > 0.98 * span


async def test_it_waits_for_weights_that_are_still_coming(factory: ModelledFactory) -> None:
    spec = replace(factory.spec("early"), wait_weights=True)
    table = spec.tensor_table_path.read_bytes()
    spec.tensor_table_path.unlink()
    engine = ModelledEngine()
    await engine.start(spec)
    try:
        waiting = asyncio.create_task(engine.wait_ready())
        async with asyncio.timeout(60):  # a bound against hanging, not what is tested
            while "waiting for" not in engine.log_tail():
                assert engine.returncode is None
                await asyncio.sleep(0.05)
        assert not waiting.done()
        part = spec.tensor_table_path.with_suffix(".part")
        part.write_bytes(table)
        part.replace(spec.tensor_table_path)
        await asyncio.wait_for(waiting, 60)
        canary = factory.traits.canary
        count = len(canary.golden_token_ids)
        got = await engine.generate(canary.prompt_token_ids, max_tokens=count, ignore_eos=True)
        assert got.token_ids == canary.golden_token_ids
    finally:
        await engine.stop()


async def test_a_start_that_cannot_be_says_why(
    factory: ModelledFactory, world: port_suite.World
) -> None:
    def broken(name: str, break_it: Callable[[EngineSpec], object]) -> EngineSpec:
        spec = factory.spec(name)
        break_it(spec)
        return spec

    taken = int(world.one.serving().engine_url.rpartition(":")[2])
    cases = [
        (broken("no-arena", lambda s: s.arena_path.unlink()), ["arena", "load the weights"]),
        (broken("short", lambda s: s.arena_path.write_bytes(b"short")), ["arena", "at least"]),
        (broken("no-table", lambda s: s.tensor_table_path.unlink()), ["tensor table", "agent"]),
        (broken("bad-table", lambda s: s.tensor_table_path.write_text("{}")), ["tensor_table"]),
        (
            broken("config", lambda s: s.config_path.write_text('{"max_model_len": 0}')),
            ["config.max_model_len"],
        ),
        (
            replace(factory.spec("tokenizer"), tokenizer_path=factory.demo.folder / "config.json"),
            ["tokenizer", '"offset": 3'],
        ),
        (replace(factory.spec("taken"), port=taken), [str(taken), "--port"]),
        (factory.spec("nameless", profile="no-such-profile"), ["h200-llama8b-fp8"]),
        (factory.spec("flags", extra=("--link-bytes-per-s", "-1")), ["--link-bytes-per-s"]),
    ]

    async def says(spec: EngineSpec, names: list[str]) -> None:
        engine = ModelledEngine()
        await engine.start(spec)
        with pytest.raises(Unavailable) as caught:
            await engine.wait_ready(stall_s=30)
        assert engine.returncode in (1, 2)
        for name in names:
            assert name in str(caught.value)

    await asyncio.gather(*(says(spec, names) for spec, names in cases))


async def test_no_such_python_is_one_clear_error(factory: ModelledFactory) -> None:
    engine = ModelledEngine(python="/no/such/python")
    with pytest.raises(Unavailable, match="/no/such/python"):
        await engine.start(factory.spec("nowhere"))


async def test_a_stalled_start_is_named_answers_503_and_can_be_killed(
    factory: ModelledFactory,
) -> None:
    """Hanging is noticed by the lack of progress, not by the age of the start."""
    engine = await _start(
        factory, "stalled", extra=("--modelled-segments", "warmup=0.1", "--stall-in", "warmup")
    )
    with pytest.raises(Unavailable, match="warmup"):
        await engine.wait_ready(stall_s=2.0)
    running = [s for s in engine.startup_segments() if s.end_s is None]
    assert [str(s.name) for s in running] == ["warmup"] and running[0].modelled
    assert "stalled in warmup" in engine.log_tail()
    facts = json.loads((engine._startup_path).read_text())
    async with aiohttp.ClientSession() as http:
        base = f"http://127.0.0.1:{facts['port']}"
        for path, method in (("/health", "GET"), ("/v1/completions", "POST"), ("/metrics", "GET")):
            async with http.request(method, base + path, data=b"{}") as response:
                assert response.status == 503  # an open port is not readiness (R18.2)
    os.kill(engine.pid, signal.SIGSTOP)  # it cannot hear SIGTERM any more
    await engine.stop(grace_s=0.2)
    assert engine.returncode == -signal.SIGKILL


async def test_it_goes_when_its_parent_goes(factory: ModelledFactory) -> None:
    spec = factory.spec("orphan")
    (spec.work_dir / "spec.txt").write_text(" ".join(ModelledEngine().command(spec)))
    program = (
        "import subprocess, sys, time, os, pathlib\n"
        f"command = pathlib.Path({str(spec.work_dir / 'spec.txt')!r}).read_text().split(' ')\n"
        "at = command.index('--parent-pid')\n"
        "command[at + 1] = str(os.getpid())\n"
        "child = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    startup = spec.work_dir / "engine-startup.json"
    async with asyncio.timeout(120):
        while not (startup.exists() and '"ready"' in startup.read_text()):
            await asyncio.sleep(0.05)
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(60):
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.05)


# --------------------------------------------------------------------------- the document


def test_the_document_lists_what_the_suite_checks() -> None:
    text = (ROOT / "docs" / "engine-port.md").read_text()
    begin, end = "<!-- checks begin -->\n", "<!-- checks end -->"
    assert text.partition(begin)[2].partition(end)[0].strip() == port_suite.table().strip(), (
        "write the table anew: python -m tests.engine.port_suite"
    )
