"""The gateway as a process, before a real router and modelled engines that are processes too."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from readyplane import profiles
from readyplane.core import gate_checks as gc
from readyplane.core.worker import Role
from readyplane.kit.clock import SystemClock
from readyplane.kit.server import ServiceServer
from readyplane.kit.settings import ServiceSettings
from readyplane_agent.engines.port import EnginePort
from readyplane_router import rpc
from readyplane_router.epochs import MemoryEpochs
from readyplane_router.policy import RouterPolicy
from readyplane_router.prefix.index import Limits
from readyplane_router.service import RouterService
from readyplane_router.store import MemoryStore
from tests.engine.engine_world import ModelledFactory, modelled_factory
from tests.router_world import FakeWorker, Registry, offer

PROFILE = "h200-slow10"
START_S_MAX = 120.0
MODEL = "demo"


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> ModelledFactory:
    return modelled_factory(tmp_path_factory.mktemp("gateway-engines"))


@dataclass
class Stack:
    """A router in this process, engines and a gateway as their own."""

    factory: ModelledFactory
    router: RouterService
    url: str
    http: aiohttp.ClientSession
    gateway: asyncio.subprocess.Process
    engines: dict[str, EnginePort]
    log: Path

    async def ask(
        self, path: str = "/v1/completions", *, headers: dict[str, str] | None = None, **body: Any
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        document = {"model": MODEL, **body}
        async with self.http.post(self.url + path, json=document, headers=headers) as response:
            return response, await response.read()

    async def signals(self) -> Any:
        return (await self.router.signals()).models[MODEL]

    async def all_free(self) -> None:
        """Soon nothing is reserved, in the router or in an engine."""
        for _ in range(1500):
            await asyncio.sleep(0.02)
            desk = self.router.desks[MODEL]
            living = [e for e in self.engines.values() if e.returncode is None]
            idle = all([(await engine.load_report()).running == 0 for engine in living])
            if idle and not desk.held and not desk.waiting:
                return
        raise AssertionError((self.router.desks[MODEL].held, self.log.read_text()[-2000:]))


@asynccontextmanager
async def running(factory: ModelledFactory, names: Sequence[str]) -> AsyncIterator[Stack]:
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        engines = dict(
            zip(
                names,
                await asyncio.gather(
                    *(
                        stack.enter_async_context(factory.start(name, profile=PROFILE))
                        for name in names
                    )
                ),
                strict=True,
            )
        )
        router = RouterService(
            store=MemoryStore(clock),
            epochs=MemoryEpochs(),
            clock=clock,
            registry=Registry(factory.manifest),
            profiles={PROFILE: profiles.load(PROFILE)},
            incarnation="router-1",
            # Nobody publishes an engine's events here: what was routed is known as long as the test lasts.
            policy=RouterPolicy(prefix=Limits(speculative_ttl_s=600.0, approximate_ttl_s=600.0)),
        )
        await router.start()
        server = ServiceServer("router", ServiceSettings())
        server.add_grpc(lambda s: rpc.register(s, router, clock), rpc.FULL_NAME)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(server.run([router.run]))]
        gateway: asyncio.subprocess.Process | None = None
        try:
            for name, engine in engines.items():
                renewing = await _worker(factory, router, name, engine, clock)
                tasks.append(asyncio.create_task(renewing))
            while not server.grpc_address:
                assert not tasks[0].done(), tasks[0].result()
                await asyncio.sleep(0.02)
            work = factory.folder / f"gateway-{os.urandom(3).hex()}"
            gateway, url = await _gateway(work, server.grpc_address)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            made = Stack(factory, router, url, http, gateway, engines, work / "log")
            await _until_healthy(made)
            yield made
        finally:
            if gateway is not None and gateway.returncode is None:
                gateway.kill()
                await gateway.wait()
            for task in tasks[1:]:
                task.cancel()
            server.stopping.set()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _worker(
    factory: ModelledFactory,
    router: RouterService,
    name: str,
    engine: EnginePort,
    clock: SystemClock,
) -> Any:
    """Bring an engine through the gate as its agent would; returns the work of renewing."""
    manifest, canary = factory.manifest, factory.traits.canary
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    made = FakeWorker(
        router, offer(name, role, worker_class=PROFILE, manifest_digest=manifest.digest)
    )
    await made.register()
    await made.form()
    serving = replace(engine.serving(), tokenizer_digest=manifest.tokenizer_digest)
    profile = profiles.load(PROFILE)
    changes: dict[str, Any] = {
        gc.MODEL_REVISION: {"manifest_digest": manifest.digest},
        gc.TOKENIZER_REVISION: {"tokenizer_digest": manifest.tokenizer_digest},
        gc.TENSOR_CHECKSUMS: {
            "chunks_verified": sum(len(f.chunks) for f in manifest.files),
            "chunks_total": sum(len(f.chunks) for f in manifest.files),
            "failed": [],
        },
        gc.SHARD_COVERAGE: {
            "tensors": len(manifest.tensors),
            "tensors_expected": len(manifest.tensors),
            "missing": [],
            "ranks": 1,
        },
        gc.CANARY: {
            "token_ids": list(canary.golden_token_ids),
            "eos_ok": True,
            "sampling_ok": True,
        },
        gc.PROFILE: {"name": PROFILE, "digest": profile.digest},
    }
    reasons = await made.admit(serves=serving, **changes)
    assert reasons == (), reasons
    return made.keep_renewing(clock)


async def _gateway(work: Path, router: str) -> tuple[asyncio.subprocess.Process, str]:
    work.mkdir()
    ready = work / "ready.json"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("READYPLANE_")}
    with (work / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "readyplane_gateway", "--router", router),
            *("--ready-file", str(ready)),
            stdout=log,
            stderr=log,
            env=environment,
        )
    for _ in range(int(START_S_MAX / 0.05)):
        if ready.exists():
            return process, str(json.loads(ready.read_text())["http"])
        if process.returncode is not None:
            break
        await asyncio.sleep(0.05)
    raise AssertionError((work / "log").read_text())


async def _until_healthy(stack: Stack) -> None:
    for _ in range(200):
        async with stack.http.get(stack.url + "/health") as response:
            if response.status == 200:
                return
        await asyncio.sleep(0.05)
    raise AssertionError(stack.log.read_text())


def parts(body: bytes) -> list[Any]:
    lines = [part.removeprefix("data: ") for part in body.decode().split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in lines]


def text_of(body: bytes) -> str:
    return "".join(
        e["choices"][0].get("text") or e["choices"][0].get("delta", {}).get("content", "")
        for e in parts(body)
        if e != "[DONE]" and e.get("choices")
    )


async def test_requests_over_real_processes(factory: ModelledFactory) -> None:
    async with running(factory, ("p1", "d1")) as stack:
        canary = factory.traits.canary
        prompt = list(canary.prompt_token_ids)
        count = len(canary.golden_token_ids)

        # Over both legs, the answer is the one that these weights give.
        response, body = await stack.ask(prompt=prompt, max_tokens=count, stream=True)
        assert response.status == 200, body
        assert response.headers["x-readyplane-handover"] == "kv"
        assert response.headers["x-readyplane-prefill"] == "p1"
        golden = bytes(t - 3 for t in canary.golden_token_ids).decode()
        assert text_of(body) == golden
        assert parts(body)[-1] == "[DONE]"
        assert not [e for e in parts(body)[:-1] if e.get("usage")]

        # Not streamed, as text, and as a chat.
        response, body = await stack.ask(prompt="hello world", max_tokens=6)
        assert response.status == 200, body
        assert json.loads(body)["usage"]["completion_tokens"] == 6
        assert json.loads(body)["usage"]["prompt_tokens"] == len("hello world")
        messages = [{"role": "user", "content": "hi"}]
        response, body = await stack.ask(
            "/v1/chat/completions", messages=messages, max_tokens=6, stream=True
        )
        assert (response.status, len(text_of(body))) == (200, 6), body

        # Counters of a real router.
        await stack.all_free()
        signals = await stack.signals()
        assert (signals.arrivals_total, signals.finished_total) == (3, 3)
        assert (signals.handovers_total, signals.aborted_total) == (3, 0)
        assert signals.output_tokens_total == count + 12
        assert signals.ttft_actual.count == 2

        # What a real engine refuses is passed on; what the gateway refuses names the field.
        response, body = await stack.ask(prompt=prompt, tools=[{"type": "function"}])
        assert (response.status, json.loads(body)["error"]["param"]) == (400, "tools"), body
        response, body = await stack.ask(prompt=[1] * 5000)
        assert (response.status, "4096" in json.loads(body)["error"]["message"]) == (400, True)
        response, body = await stack.ask(prompt=prompt, max_tokens=-1)
        assert (response.status, json.loads(body)["error"]["param"]) == (400, "max_tokens")
        async with stack.http.post(stack.url + "/v1/completions", data=b"{") as bad:
            assert (bad.status, (await bad.json())["error"]["code"]) == (400, "invalid_json")
        async with stack.http.get(stack.url + "/v1/models") as models:
            assert [card["id"] for card in (await models.json())["data"]] == [MODEL]
        async with stack.http.get(stack.url + "/metrics") as metrics:
            text = await metrics.text()
        assert 'readyplane_gateway_requests_total{code_class="2xx",model="demo"} 3.0' in text
        assert "readyplane_gateway_requests_in_flight 0.0" in text

        await _a_client_that_leaves(stack)

        # The end: a stream under way is finished, then the process goes.
        asked = asyncio.create_task(stack.ask(prompt=prompt, max_tokens=30, stream=True))
        await asyncio.sleep(0.5)
        stack.gateway.send_signal(signal.SIGTERM)
        response, body = await asked
        assert parts(body)[-1] == "[DONE]"
        assert await asyncio.wait_for(stack.gateway.wait(), 60) == 0
        await stack.all_free()


async def _a_client_that_leaves(stack: Stack) -> None:
    """While decoding: both engines are idle and nothing is reserved within moments."""
    before = (await stack.signals()).aborted_total
    body = {"model": MODEL, "prompt": "a long story", "max_tokens": 2000, "stream": True}
    body["vllm_xargs"] = {"modelled_output_tokens": 2000}
    async with stack.http.post(stack.url + "/v1/completions", json=body) as response:
        await response.content.readline()
    await stack.all_free()
    assert (await stack.signals()).aborted_total == before + 1


async def test_a_prefill_worker_killed_during_the_handover(factory: ModelledFactory) -> None:
    """kill -9 while it computes: paired again, served, and the answer is right."""
    async with running(factory, ("p1", "p2", "d1")) as stack:
        prompt = [3 + (7 * n) % 250 for n in range(3000)]  # about a second of prefill
        _, body = await stack.ask(prompt=prompt, max_tokens=8)
        wanted = json.loads(body)["choices"][0]["text"]
        for round_number, prompt[0] in enumerate((10, 11)):
            asked = asyncio.create_task(stack.ask(prompt=prompt, max_tokens=8, stream=True))
            await asyncio.sleep(0.3)
            (held,) = stack.router.desks[MODEL].held.values()
            victim = held.prefill.worker_id
            if round_number == 0:
                os.kill(stack.engines[victim].pid, signal.SIGKILL)
            response, body = await asked
            assert response.status == 200, body
            assert parts(body)[-1] == "[DONE]"
            if round_number == 0:
                assert response.headers["x-readyplane-prefill"] != victim
                assert len(text_of(body)) == 8
                assert text_of(body) != wanted  # another first token, another answer
        await stack.all_free()
        signals = await stack.signals()
        assert signals.repaired_total >= 1
        assert signals.finished_total == 3
        assert signals.aborted_total == 0


async def test_a_chat_of_several_turns_over_two_engines(factory: ModelledFactory) -> None:
    """Its answers are those of one engine alone, and each turn finds the last one's blocks."""
    async with running(factory, ("p1", "d1")) as stack, factory.start("alone") as alone:
        size = alone.serving().block_size
        messages: list[dict[str, Any]] = [{"role": "system", "content": "answer in letters"}]
        prefill = stack.engines["p1"]
        before = 0
        for turn in range(3):
            messages.append({"role": "user", "content": f"question {turn}: " + "why? " * 20})
            body: dict[str, Any] = {"messages": messages, "max_tokens": 24, "ignore_eos": True}
            path = "/v1/chat/completions"
            async with stack.http.post(
                alone.serving().engine_url + path, json={"model": MODEL, **body}
            ) as response:
                wanted = await response.json()
            old = await _counts(stack, prefill)
            response, streamed = await stack.ask(path, **body, stream=True)
            assert (response.status, text_of(streamed)) == (
                200,
                wanted["choices"][0]["message"]["content"],
            )
            assert response.headers["x-readyplane-handover"] == "kv"
            new = await _counts(stack, prefill)
            length = wanted["usage"]["prompt_tokens"]
            cached = before // size * size  # this turn begins with the last one's prompt
            assert new["prompt"] - old["prompt"] == length
            assert new["hits"] - old["hits"] == cached
            assert new["uncached"] - old["uncached"] <= length - cached  # the router knew

            # In one piece: the same text, and by now the whole prompt is cached on both sides.
            _, whole = await stack.ask(path, **body)
            answer = json.loads(whole)
            assert answer["choices"] == wanted["choices"]
            assert answer["object"] == "chat.completion"
            assert answer["usage"]["prompt_tokens"] == length
            cached = (length - 1) // size * size
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached > 0
            messages.append(answer["choices"][0]["message"])
            before = length
        async with stack.http.get(stack.url + "/metrics") as metrics:
            text = await metrics.text()
        assert 'tokenized_total{how="asked"} 3.0' in text  # once a turn, not once a leg
        assert 'tokenized_total{how="remembered"} 3.0' in text
        await stack.all_free()


async def _counts(stack: Stack, prefill: EnginePort) -> dict[str, int]:
    load, signals = await prefill.load_report(), await stack.signals()
    assert load.prefill_tokens_total is not None
    assert load.cached_tokens_total is not None
    return {
        "prompt": load.prefill_tokens_total,
        "hits": load.cached_tokens_total,
        "uncached": signals.arrival_uncached_tokens_total,
    }


async def test_a_pair_that_breaks_between_its_legs_leaves_no_kv(factory: ModelledFactory) -> None:
    """D is gone when the prompt is computed: P's blocks are free long before their hold ends."""
    async with running(factory, ("p1", "d1")) as stack:
        prompt = [3 + (5 * n) % 250 for n in range(2000)]  # about half a second of prefill
        asked = asyncio.create_task(stack.ask(prompt=prompt, max_tokens=8))
        while (await stack.engines["p1"].load_report()).running != 1:
            await asyncio.sleep(0.01)
        os.kill(stack.engines["d1"].pid, signal.SIGKILL)
        response, body = await asked
        assert response.status == 502, body
        async with asyncio.timeout(START_S_MAX):
            while not await stack.engines["p1"].is_idle():
                await asyncio.sleep(0.02)
        async with stack.http.get(stack.engines["p1"].serving().engine_url + "/metrics") as page:
            text = await page.text()
        assert 'readyplane_engine_kv_abandoned_total{model_name="demo",engine="0"} 1' in text
        assert 'vllm:nixl_num_kv_expired_reqs_total{model_name="demo",engine="0"} 0' in text
        async with stack.http.get(stack.url + "/metrics") as metrics:
            assert 'kv_abandoned_total{how="freed"} 1.0' in await metrics.text()
