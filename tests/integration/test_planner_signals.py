"""Sources beyond the router over real sockets: Prometheus, engines' pages, forward passes.

A planner without a router stands on them alone; a target that hangs costs the bound and no more.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
import zmq
import zmq.asyncio
from aiohttp import web

from readyplane.core.errors import InvalidField
from readyplane.core.worker import Role
from readyplane.kit.settings import parse_settings
from readyplane_planner.__main__ import Settings
from readyplane_planner.journal import MemoryJournal, decision_document, decode_inputs, replay
from readyplane_planner.leadership import Leadership, MemoryLeaseStore
from readyplane_planner.service import PlannerService
from readyplane_planner.signal_sources import SignalSources, load_signals, make_sources
from readyplane_planner.signals import Kind
from readyplane_planner.sources import NoRouter, Sources
from tests.unit.planner_world import MODEL, HandClock, World, policy

WITHIN_S = 2.0  # for any target: a busy machine is no target that hangs
SELECTOR = f'model_name="{MODEL}",namespace="prod"'


class Fakes:
    """A Prometheus and engines on one port; what they answer is set by the test."""

    def __init__(self) -> None:
        self.url = ""
        self.values: dict[str, Any] = {}
        self.forms: list[dict[str, str]] = []
        self.pages: dict[str, str] = {}
        self.hanging: set[str] = set()
        self.freed = asyncio.Event()

    async def query(self, request: web.Request) -> web.Response:
        form = {k: str(v) for k, v in (await request.post()).items()}
        self.forms.append(form)
        name = form["query"].partition("{")[0].removeprefix("test:")
        if name in self.hanging:
            await self.freed.wait()
        value = self.values.get(name)
        result = [] if value is None else [{"metric": {}, "value": [1.0, str(value)]}]
        body = {"status": "success", "data": {"resultType": "vector", "result": result}}
        return web.json_response(body)

    async def page(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name in self.hanging:
            await self.freed.wait()
        return web.Response(text=self.pages[name])


@asynccontextmanager
async def fakes() -> AsyncIterator[Fakes]:
    made = Fakes()
    app = web.Application()
    app.router.add_post("/api/v1/query", made.query)
    app.router.add_get("/{name}/metrics", made.page)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    made.url = f"http://{host}:{port}"
    try:
        yield made
    finally:
        made.freed.set()
        await runner.cleanup()


def vllm(at_s: float, *, running: int, waiting: int = 0, usage: float = 0.1) -> str:
    """A page as vLLM writes it."""
    labels = f'engine="0",model_name="{MODEL}"'
    return "\n".join(
        [
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{{{labels}}} {running}.0",
            f"vllm:num_requests_waiting{{{labels}}} {waiting}.0",
            f"vllm:kv_cache_usage_perc{{{labels}}} {usage}",
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="59000"} 1.0',
            f"vllm:prompt_tokens_total{{{labels}}} {at_s * 3000:.1f}",
            f"vllm:generation_tokens_total{{{labels}}} {at_s * 500:.1f}",
            "process_start_time_seconds 1.7e+09",
        ]
    )


def queries(**changes: Any) -> dict[str, Any]:
    units = {
        "arrivals": "requests/min",
        "prompt_work": "tokens/s",
        "prefill_work": "tokens/s",
        "finished": "requests/s",
        "generated": "tokens/s",
        "waiting": "requests",
    }
    made: dict[str, Any] = {
        name: {"query": f"test:{name}{{$selector}}", "unit": unit} for name, unit in units.items()
    }
    for part in ("p50", "p90", "p99", "count"):
        unit = "requests" if part == "count" else "ms"
        made[f"ttft_{part}"] = {
            "query": f"test:ttft_{part}{{$selector}}",
            "unit": unit,
            "window_s": 20.0,
        }
    return made | changes


def document(made: Fakes, workers: dict[str, str], **changes: Any) -> dict[str, Any]:
    return {
        "within_s": WITHIN_S,
        "prometheus": {
            "url": made.url,
            "selector": {"model_name": MODEL, "namespace": "prod"},
            "queries": queries(),
        },
        "engines": {
            "targets": [
                {
                    "url": f"{made.url}/{name}/metrics",
                    "engine": "vllm",
                    "worker_id": name,
                    "role": role,
                    "worker_class": "h200-slow10",
                }
                for name, role in workers.items()
            ]
        },
    } | changes


def sources_of(
    tmp_path: Path, doc: dict[str, Any], clock: HandClock, *, alone: bool
) -> SignalSources:
    path = tmp_path / "signals.yaml"
    path.write_text(yaml.safe_dump(doc))
    return make_sources(load_signals(path), model=MODEL, clock=clock, alone=alone)


LOAD = {
    "arrivals": 330.0,
    "prompt_work": 6352.0,
    "prefill_work": 6352.0,
    "finished": 5.5,
    "generated": 1160.0,
    "waiting": 2,
    "ttft_p50": 400.0,
    "ttft_p90": 700.0,
    "ttft_p99": 900.0,
    "ttft_count": 110,
}


async def test_a_planner_without_a_router_advises_from_queries_and_engines(tmp_path: Path) -> None:
    """Fleet from the targets, demand from queries, units normalised, one target hanging (B06)."""
    clock = HandClock()
    workers = {"p-1": "prefill", "p-2": "prefill", "d-1": "decode", "d-2": "decode"}
    async with fakes() as made:
        made.values = dict(LOAD)
        sources = sources_of(tmp_path, document(made, workers), clock, alone=True)
        journal = MemoryJournal()
        lease = MemoryLeaseStore(clock.monotonic_s)
        service = PlannerService(
            policy=policy(),
            router=NoRouter(),  # type: ignore[arg-type]
            actuator=None,
            registry=None,
            journal=journal,
            leadership=Leadership(
                lease, name=MODEL, holder="one", ttl_s=1e6, now_s=clock.monotonic_s
            ),
            clock=clock,
            make_id=iter(str(n) for n in range(1000)).__next__,
            beyond=sources,
        )
        await service.begin()
        decision = None
        for _ in range(25):
            clock.now_s += 1.0
            for name in workers:
                made.pages[name] = vllm(clock.now_s, running=4 if name[0] == "d" else 1)
            decision = await service.tick()
        assert decision is not None
        assert decision.signals["arrivals"].value == pytest.approx(5.5)
        assert decision.signals["decoding"].value == 8.0
        assert decision.signals["decoding"].unit == "sequences"
        assert decision.signals["queue"].value == pytest.approx(2 * 1155.0, rel=0.01)
        assert decision.prefill.counts.ready == 2
        assert decision.prefill.load.actual_s == pytest.approx(0.7)
        assert 3 <= decision.prefill.target <= 6, "5.5 requests/s need more than two workers"
        assert f"test:arrivals{{{SELECTOR}}}" in {f["query"] for f in made.forms}
        assert {f["lookback_delta"] for f in made.forms} == {"30s"}
        shown = decision_document(decision, at_s=0.0, leader_epoch=1, inputs_digest="x")
        assert shown["signals"]["ttft_p90"]["unit"] == "s"

        before = decision
        made.hanging = {"p-2"}
        began = time.perf_counter()
        clock.now_s += 1.0
        decision = await service.tick()
        assert time.perf_counter() - began < 4 * WITHIN_S
        assert any(f"p-2: no metrics within {WITHIN_S:g} s" in r.text for r in decision.why)
        assert decision.prefill.counts.ready == 2, "one missed page is no lost worker"
        assert decision.prefill.target >= before.prefill.target

        made.hanging, made.values = set(), {}
        clock.now_s += 1.0
        decision = await service.tick()
        assert decision.signals["arrivals"].kind is Kind.MISSING
        assert "no data" in decision.degraded
        assert decision.prefill.target >= before.prefill.target and not decision.drains
        kept = (await journal.newest(MODEL, limit=1))[0]
        record, _ = await journal.get(kept.decision_id)
        assert replay(record).signals == decode_inputs(record.inputs).observation.signals()
        await sources.aclose()


async def test_loop_time_does_not_grow_with_the_targets_that_hang(tmp_path: Path) -> None:
    """B06: seven of eight in time, the eighth named; eight hang no longer than one."""
    clock = HandClock()
    names = {f"p-{n}": "prefill" for n in range(8)}
    async with fakes() as made:
        made.values = dict(LOAD)
        made.pages = {name: vllm(1.0, running=1) for name in names}
        # Eight in turn would take eight times as long.
        told = document(made, names)
        sources = sources_of(tmp_path, told, clock, alone=True)
        for hanging in (1, 8):
            made.hanging = set(list(names)[:hanging])
            began = time.perf_counter()
            seen = await sources.look(())
            assert time.perf_counter() - began < 4 * WITHIN_S
            assert len(seen.engines) == 8 - hanging
            assert {s.source for s in seen.outside.silent} == made.hanging
        made.hanging = {"arrivals"}
        seen = await sources.look(())
        by_name = {r.signal: r for r in seen.outside.readings}
        assert by_name["arrivals"].value is None and by_name["finished"].value == 5.5
        assert any(s.source == "prometheus" for s in seen.outside.silent)
        await sources.aclose()


async def test_engines_of_the_routers_fleet_are_found_and_joined_by_life(tmp_path: Path) -> None:
    """B08: what is read belongs to the life that was in the fleet; another life's is ignored."""
    clock = HandClock()
    async with fakes() as made:
        world = World(clock)
        world.add(Role.DECODE, 1)
        box = next(iter(world.boxes.values()))
        made.pages = {"d": vllm(1.0, running=3, usage=0.5)}
        whole = world.worker

        def at_fake(b: Any) -> Any:
            found = whole(b)
            serving = found.serving
            assert serving is not None
            load = replace(found.load, running=None, kv_used_blocks=None, kv_total_blocks=None)
            return replace(found, load=load, serving=replace(serving, engine_url=f"{made.url}/d"))

        world.worker = at_fake  # type: ignore[assignment,method-assign]
        beyond = sources_of(
            tmp_path, {"within_s": 0.5, "engines": {"discover": "vllm"}}, clock, alone=False
        )
        looks = Sources(
            world,  # type: ignore[arg-type]
            world,
            model=MODEL,
            clock=clock,
            timeout_s=1.0,
            beyond=beyond,
        )
        await looks.look()
        seen = (await looks.look()).router
        assert seen is not None
        sample = seen.engines[0]
        assert sample.key == (box.order.worker_id, f"{box.order.worker_id}/1")
        assert sample.load.running == 3
        assert sample.load.kv_tokens == pytest.approx(0.5 * 59_000 * 16)
        await beyond.aclose()


def passing(worker_id: str, *, queued: int, count: int) -> bytes:
    now = {
        "num_prefill_requests": 1 if count else 0,
        "sum_prefill_tokens": 100,
        "sum_prefill_kv_tokens": 0,
        "num_decode_requests": 0,
        "sum_decode_kv_tokens": 0,
    }
    waits = {"num_prefill_requests": queued and 1, "sum_prefill_tokens": queued}
    doc = {
        "version": 1,
        "worker_id": worker_id,
        "dp_rank": 0,
        "counter_id": count,
        "wall_time": 0.01,
        "scheduled_requests": now,
        "queued_requests": {**waits, "num_decode_requests": 0},
    }
    return msgspec.msgpack.encode(doc)


async def test_forward_passes_are_heard(tmp_path: Path) -> None:
    clock = HandClock()
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    doc = {"engines": {"targets": [{"url": f"tcp://127.0.0.1:{port}", "engine": "fpm"}]}}
    sources = sources_of(tmp_path, doc, clock, alone=False)
    try:
        seen = await sources.look(())
        assert "no forward pass was heard yet" in seen.outside.silent[0].why
        for _ in range(100):
            await publisher.send_multipart([b"topic", passing("w-1", queued=4096, count=7)])
            await asyncio.sleep(0.02)
            seen = await sources.look(())
            if seen.engines:
                break
        assert seen.engines[0].worker_id == "w-1"
        assert seen.engines[0].load.waiting_prefill_tokens == 4096
        clock.now_s += 60.0
        silent = await sources.look(())
        assert not silent.engines and "not idle" in silent.outside.silent[0].why
    finally:
        await sources.aclose()
        publisher.close(linger=0)
        context.term()


def given(*flags: str) -> None:
    settings = parse_settings(Settings, flags, "planner", "")
    settings.first_sources(MODEL, HandClock())


def changed(**query: Any) -> dict[str, Any]:
    made = Fakes()
    made.url = "http://127.0.0.1:9"
    doc = document(made, {"p-1": "prefill"})
    doc["prometheus"]["queries"] = queries(
        queue={"query": "x{$selector}", "unit": "tokens", **query}
    )
    return doc


@pytest.mark.parametrize(
    ("doc", "settings", "field"),
    [
        (changed(unit=None), {}, "signals.prometheus.queries.queue.unit"),
        (changed(unit="parsecs"), {}, "signals.prometheus.queries.queue.unit"),
        (changed(query="sum(x)"), {}, "signals.prometheus.queries.queue.query"),
        (changed(query="x{$selector} / y"), {}, "signals.prometheus.queries.queue.query"),
        (changed(window="1m"), {}, "signals.prometheus.queries.queue.window"),
        (changed() | {"engines": None}, {}, "signals.engines.targets"),
        (changed(), {"actuator": "127.0.0.1:1"}, "actuator"),
        (
            {"prometheus": {**changed()["prometheus"], "selector": {}}},
            {},
            "signals.prometheus.selector",
        ),
        (
            {"engines": {"targets": [{"url": "http://h/metrics", "engine": "fpm"}]}},
            {"router": "127.0.0.1:1"},
            "signals.engines.targets.0.url",
        ),
        (
            {"engines": {"targets": [{"url": "file:///etc/passwd", "engine": "vllm"}]}},
            {"router": "127.0.0.1:1"},
            "signals.engines.targets.0.url",
        ),
    ],
)
async def test_a_file_that_would_need_a_guess_is_refused(
    tmp_path: Path, doc: dict[str, Any], settings: dict[str, Any], field: str
) -> None:
    """B10, B11: no unit, no selector, a router nobody is: the field is named, nothing starts."""
    path = tmp_path / "signals.yaml"
    path.write_text(yaml.safe_dump(doc))
    with pytest.raises(InvalidField) as refused:
        given("--signals", str(path), *(f"--{name}={value}" for name, value in settings.items()))
    assert refused.value.field == field


async def test_without_router_and_signals_nothing_starts() -> None:
    with pytest.raises(InvalidField, match="--signals"):
        given()


def test_the_files_of_the_guide_are_taken(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "signals.md"
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for text, router in zip(blocks, ("127.0.0.1:1", ""), strict=True):
        path = tmp_path / "signals.yaml"
        path.write_text(text)
        given("--signals", str(path), "--router", router)


async def test_the_process_plans_without_a_router_and_advises(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    """`python -m readyplane_planner --signals FILE`: the fleet, the load and the advice are shown."""
    workers = {"p-1": "prefill", "d-1": "decode"}
    async with fakes() as made:
        made.values = dict(LOAD)
        made.pages = {name: vllm(1.0, running=3) for name in workers}
        (tmp_path / "signals.yaml").write_text(yaml.safe_dump(document(made, workers)))
        wanted = {**policy().document(), "tick_s": 0.2, "down": {"cooldown_s": 1.0}}
        (tmp_path / "policy.yaml").write_text(yaml.safe_dump(wanted))
        ready = tmp_path / "ready.json"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "readyplane_planner", "--policy", tmp_path / "policy.yaml"),
            *("--signals", tmp_path / "signals.yaml", "--registry", "127.0.0.1:1"),
            *("--database-url", database_url, "--redis-url", redis_url, "--ready-file", ready),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(180):
                while not ready.exists():
                    assert process.returncode is None, "it ended by itself"
                    await asyncio.sleep(0.1)
                url = json.loads(ready.read_text())["http"]
                async with aiohttp.ClientSession(url) as http:
                    desired, state = 0, dict[str, Any]()
                    missing: dict[str, int] | None = None
                    # Of a page that did not come in time more is missing, for that moment.
                    while missing != {"iterations_total": 1} or desired < 3:
                        await asyncio.sleep(0.2)
                        state = await (await http.get("/v1/state")).json()
                        pools = state.get("pools", {})
                        desired = pools.get("prefill", {}).get("desired", 0)
                        missing = pools.get("decode", {}).get("missing_capability")
                    assert [w["worker_id"] for w in state["workers"][:2]] == ["d-1", "p-1"]
                    assert "advisory" in state["degraded"]
                    text = await (await http.get("/metrics")).text()
            process.send_signal(signal.SIGTERM)
            _out, log = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, log.decode()[-2000:]
    assert b"Traceback" not in log
    assert re.search(r'readyplane_desired_replicas\{[^}]*pool="prefill"[^}]*\} [3-6]\.0', text)
    assert re.search(r'readyplane_signal_unknown\{[^}]*signal="arrivals"[^}]*\} 0\.0', text)
