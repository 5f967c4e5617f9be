"""Agents with SGLang's protocol double beside them: proved with one another, admitted, paired."""

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from readyplane.core.identity import Canary
from readyplane.core.work import RequestShape, pack_tokens
from readyplane.core.worker import WorkerState
from readyplane_lab.up.demo_model import make_demo_model
from tests.engine import sglang_double
from tests.integration.agent_cluster import MODEL, Cluster, cluster

ROOT = Path(__file__).parents[2]
ENGINE = ("--engine", "sglang")


@pytest_asyncio.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """`python3 -m sglang.launch_server` runs the double here."""
    program = tmp_path / "bin" / "python3"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\n[ "$2" = sglang.launch_server ] || exit 9\nshift 2\n'
        f'exec {sys.executable} -m tests.engine.sglang_double "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    demo = make_demo_model(tmp_path / "m", size_bytes=6 * 2**20, shards=1, max_model_len=4096)
    prompt = sglang_double.question_for(demo.folder, 8)
    canary = Canary(prompt, sglang_double.answer_of(demo.folder, prompt, 8))
    config = {**demo.config, "canary_ends": False}
    async with cluster(tmp_path, replace(demo, canary=canary, config=config)) as found:
        yield found


async def test_two_that_start_prove_each_other_and_serve_as_a_pair(world: Cluster) -> None:
    """A server of one stage answers nobody alone: the first waits for one to be proved with."""
    await world.agent("p1", "prefill", *ENGINE)
    await world.until(lambda w: w.progress is not None and "canary" in str(w.progress), "p1")
    await asyncio.sleep(1.0)
    waiting = await world.worker("p1")
    assert waiting is not None and waiting.state is WorkerState.PROVISIONED
    await world.agent("d1", "decode", *ENGINE)
    p, d = await asyncio.gather(world.ready("p1"), world.ready("d1"))
    asked = sglang_double.question_for(world.folder / "m", 8)
    golden = list(sglang_double.answer_of(world.folder / "m", asked, 8))
    for worker in (p, d):
        checks = {c.name: c for c in worker.checks}
        assert checks["canary"].evidence["token_ids"] == golden
        assert checks["kv_connector"].evidence["detail"] == "met"
    prompt = [40 + i % 50 for i in range(64)]
    shape = RequestShape("r1", MODEL, len(prompt), token_ids=pack_tokens(prompt), max_tokens=8)
    pair = await world.router.route(shape)
    host, _, port = pair.prefill.bootstrap.rpartition(":")
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    body |= {"bootstrap_host": host, "bootstrap_port": int(port)}
    body["bootstrap_room"] = pair.bootstrap_room
    async with aiohttp.ClientSession() as http:

        async def leg(url: str) -> str:
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                return str((await answer.json())["choices"][0]["text"])

        _, text = await asyncio.gather(leg(pair.prefill.engine_url), leg(pair.decode.engine_url))
    assert text == sglang_double.text_of(sglang_double.answer_of(world.folder / "m", prompt, 8))


async def test_one_that_serves_both_stages_needs_nobody(world: Cluster) -> None:
    await world.agent("b1", "both", *ENGINE)
    worker = await world.ready("b1")
    assert worker.serving is not None and worker.serving.kv.connector == "none"
    pair = await world.router.route(RequestShape("r1", MODEL, 64, max_tokens=8))
    assert pair.local and pair.bootstrap_room is None


async def test_weights_that_were_changed_on_the_way_to_the_engine_are_refused(
    world: Cluster,
) -> None:
    """The known answer says so, of a pair as of one alone."""
    bad = world.folder / "bin" / "python3"
    spoil = 'for f in files/*.safetensors; do printf "x" >> "$f"; done\nexec'
    bad.write_text(bad.read_text().replace("exec", spoil))
    agent = await world.agent("b1", "both", *ENGINE)
    async with asyncio.timeout(120):
        await agent.wait()
    assert agent.returncode != 0
    assert "canary" in (world.folder / "b1.log").read_text()


@asynccontextmanager
async def gateway(world: Cluster) -> AsyncIterator[str]:
    """A gateway process before the cluster's router; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = (world.folder / "gateway.log").open("ab")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "readyplane_gateway", "--router", world.address),
        *("--http-port", str(port), "--host", "127.0.0.1"),
        stdout=log,
        stderr=log,
    )
    log.close()
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(120):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(url + "/health") as answer:
                        if answer.status == 200:
                            break
                assert process.returncode is None, (world.folder / "gateway.log").read_text()
                await asyncio.sleep(0.05)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def test_a_gateway_serves_over_engines_that_meet_and_over_the_death_of_one(
    world: Cluster,
) -> None:
    """Completions, streams and chats by the double's own answer; then kill -9 of a prefill server."""
    await asyncio.gather(
        *(world.agent(f"{r[0]}{n}", r, *ENGINE) for r in ("prefill", "decode") for n in (1, 2))
    )
    await asyncio.gather(*(world.ready(name) for name in ("p1", "p2", "d1", "d2")))
    prompt = [40 + i % 50 for i in range(64)]
    wanted = sglang_double.text_of(sglang_double.answer_of(world.folder / "m", prompt, 12))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "ignore_eos": True}
    async with gateway(world) as url, aiohttp.ClientSession() as http:

        async def complete(**more: object) -> str:
            async with http.post(f"{url}/v1/completions", json={**body, **more}) as answer:
                text = await answer.text()
                assert answer.status == 200, text
                assert answer.headers["x-readyplane-handover"] == "kv"
            if not more.get("stream"):
                return str(json.loads(text)["choices"][0]["text"])
            events = [line[6:] for line in text.split("\n\n") if line.startswith("data: {")]
            return "".join(c["text"] for e in events for c in json.loads(e)["choices"])

        assert await complete() == wanted
        assert await complete(stream=True) == wanted
        assert set(await asyncio.gather(*(complete(stream=n % 2 == 0) for n in range(16)))) == {
            wanted
        }
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        async with http.post(f"{url}/v1/chat/completions", json=chat) as answer:
            assert answer.status == 200, await answer.text()
        asked = asyncio.gather(*(complete(stream=n % 2 == 0) for n in range(24)))
        await asyncio.sleep(0.02)
        server = next(c for c in world.engine("p1").children() or [world.engine("p1")])
        server.kill()
        assert set(await asked) == {wanted}
        assert await complete(stream=True) == wanted
