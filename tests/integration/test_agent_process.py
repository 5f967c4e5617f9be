"""Real agents with real modelled engines, over real gRPC, judged by the real router's gate."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest

from readyplane import profiles
from readyplane.core.startup import SegmentName, WeightTier, critical_path
from readyplane.core.worker import Worker, WorkerState
from readyplane.kit.auth import TokenCheck
from readyplane.kit.clock import SystemClock
from readyplane.kit.rpc import OPTIONS, Guard
from readyplane_agent.lifecycle import ExitCode
from readyplane_lab.up.demo_model import DemoModel, make_demo_model
from readyplane_registry import rpc as registry_rpc
from readyplane_registry.ingest import Facts, build_manifest
from readyplane_router import rpc as router_rpc
from readyplane_router.epochs import MemoryEpochs
from readyplane_router.service import RouterService
from readyplane_router.store import MemoryStore
from tests.unit.agent_twins import Fault, TwinRegistry, serving, source

MODEL = "demo"
LIMIT_S = 40.0
SEGMENTS = "parallel_init=0.1,compile=0.3,cuda_graph=0.2,kv_profile=0.1,warmup=0.1"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoModel:
    folder = tmp_path_factory.mktemp("demo")
    return make_demo_model(folder, size_bytes=12 * 2**20, shards=2, max_model_len=4096)


class Cluster:
    """Router and registry of this process, and agents as children."""

    def __init__(self, folder: Path, router: RouterService, digest: str) -> None:
        self.folder, self.router, self.digest = folder, router, digest
        self.address = ""
        self.agents: dict[str, asyncio.subprocess.Process] = {}

    async def agent(self, name: str, role: str, *more: str) -> asyncio.subprocess.Process:
        log = (self.folder / f"{name}.log").open("ab")
        words = [
            *("--worker-id", name, "--role", role, "--model", MODEL, "--manifest", self.digest),
            *("--worker-class", "h200-llama8b-fp8", "--registry", self.address),
            *("--router", self.address, "--work-dir", str(self.folder / "work" / name)),
            *("--scale-decision-id", "d-7", "--cache-dir", str(self.folder / f"cache-{name}")),
            f"--engine-arg=--modelled-segments={SEGMENTS}",
            *more,
        ]
        ordered = {"READYPLANE_ORDERED_AT_MONOTONIC_S": repr(time.monotonic())}
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "readyplane_agent", *words),
            env={**os.environ, **ordered},
            stdout=log,
            stderr=log,
        )
        log.close()
        self.agents[name] = started
        return started

    async def worker(self, name: str) -> Worker | None:
        return (await self.router.list_workers(MODEL)).workers.get(name)

    async def until(self, true: Callable[[Worker], bool], name: str) -> Worker:
        async with asyncio.timeout(LIMIT_S):
            while True:
                found = await self.worker(name)
                if found is not None and true(found):
                    return found
                if self.agents[name].returncode is not None:
                    pytest.fail((self.folder / f"{name}.log").read_text())
                await asyncio.sleep(0.05)

    async def ready(self, name: str) -> Worker:
        return await self.until(lambda w: w.state is WorkerState.READY, name)

    async def ended(self, name: str) -> int:
        return await asyncio.wait_for(self.agents[name].wait(), LIMIT_S)

    def engine(self, name: str) -> psutil.Process:
        (child,) = psutil.Process(self.agents[name].pid).children()
        return child


@asynccontextmanager
async def cluster(
    tmp_path: Path, demo: DemoModel, fault: Fault | None = None
) -> AsyncIterator[Cluster]:
    facts = Facts(config=demo.config, canary=demo.canary)
    manifest, *_ = build_manifest(demo.folder, model=MODEL, facts=facts)
    files: Mapping[str, bytes] = {
        e.path: (demo.folder / e.path).read_bytes() for e in manifest.files
    }
    clock = SystemClock()
    registry: Any = TwinRegistry(manifest)
    router = RouterService(
        store=MemoryStore(clock),
        epochs=MemoryEpochs(),
        clock=clock,
        registry=registry,
        profiles={name: profiles.load(name) for name in profiles.names()},
        incarnation="router-1",
    )
    await router.start()
    server = grpc.aio.server(interceptors=[Guard(TokenCheck(""))], options=OPTIONS)
    registry_rpc.register(server, registry)
    router_rpc.register(server, router, clock)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    background = asyncio.create_task(router.run())
    with serving(files, fault) as store:
        registry.sources = [source(store.url)]
        world = Cluster(tmp_path, router, manifest.digest)
        world.address = f"127.0.0.1:{port}"
        try:
            yield world
        finally:
            for agent in world.agents.values():
                if agent.returncode is None:
                    agent.kill()
                    await agent.wait()
            background.cancel()
            await server.stop(0)


async def test_two_workers_from_order_to_the_end(tmp_path: Path, demo: DemoModel) -> None:
    async with cluster(tmp_path, demo) as c:
        await c.agent("p1", "prefill")
        first = await c.ready("p1")
        assert first.serving is not None and first.serving.tier is WeightTier.L4_OBJECT
        assert first.offer.scale_decision_id == "d-7"
        assert all(check.passed for check in first.checks)

        # The second hands KV to the first and back before it may join.
        await c.agent("d1", "decode")
        second = await c.ready("d1")
        connector = next(k for k in second.checks if k.name == "kv_connector")
        assert "to p1: ok; from p1: ok" in connector.evidence["detail"]

        # R6: what was told after admission explains the start.
        whole = await c.until(
            lambda w: w.progress is not None and all(s.end_s for s in w.progress.segments), "d1"
        )
        assert whole.progress is not None and whole.ready_s is not None
        segments = whole.progress.segments
        end_s = max(s.end_s or 0.0 for s in segments)
        path = critical_path(segments, start_s=min(s.start_s for s in segments), end_s=end_s)
        assert path.unexplained_fraction < 0.05, path
        assert segments[0].name is SegmentName.SCHEDULE
        modelled = {s.name for s in segments if s.modelled}
        assert SegmentName.CUDA_GRAPH in modelled and SegmentName.CANARY not in modelled

        # SIGTERM: drained, left, nothing behind.
        engine = c.engine("d1")
        c.agents["d1"].terminate()
        assert await c.ended("d1") == ExitCode.LEFT
        assert not engine.is_running()
        assert not (tmp_path / "work" / "d1").exists()

        # SIGKILL: the engine never outlives its agent.
        engine = c.engine("p1")
        c.agents["p1"].kill()
        await c.ended("p1")
        await asyncio.to_thread(psutil.wait_procs, [engine], timeout=5)
        assert not engine.is_running()


async def test_an_engine_that_dies_takes_its_worker_along(tmp_path: Path, demo: DemoModel) -> None:
    async with cluster(tmp_path, demo) as c:
        await c.agent("p1", "prefill")
        await c.ready("p1")
        c.engine("p1").send_signal(signal.SIGKILL)
        assert await c.ended("p1") == ExitCode.ENGINE_DIED
        gone = await c.worker("p1")
        assert gone is None or gone.state is WorkerState.GONE


async def test_a_lying_store_never_leads_to_a_worker(tmp_path: Path, demo: DemoModel) -> None:
    """B117 through real processes: one byte of one tensor."""

    def flip(path: str, start: int, count: int, data: bytes) -> bytes | None:
        if path.endswith(".safetensors") and len(data) > 5_000_000:
            return data[:5_000_000] + bytes([data[5_000_000] ^ 1]) + data[5_000_001:]
        return None

    async with cluster(tmp_path, demo, flip) as c:
        agent = await c.agent("p1", "prefill")
        assert await asyncio.wait_for(agent.wait(), LIMIT_S) == ExitCode.START_FAILED
        assert "is not what the manifest says" in (tmp_path / "p1.log").read_text()
        gone = await c.worker("p1")
        assert gone is None or gone.state is WorkerState.GONE


@pytest.mark.parametrize(
    "more, says",
    [
        (("--profile", "nothing"), "profile 'nothing' is not known"),
        (("--role", "both-ways"), "--role: 'both-ways' is not valid; write one of"),
        (("--work-dir", "/proc/no"), "--work-dir: '/proc/no' is not valid"),
    ],
)
async def test_wrong_settings_are_said_at_once(
    tmp_path: Path, demo: DemoModel, more: tuple[str, ...], says: str
) -> None:
    c = Cluster(tmp_path, None, "sha256:" + "0" * 64)  # type: ignore[arg-type]
    c.address = "127.0.0.1:1"
    await c.agent("w1", "prefill", *more)
    assert await c.ended("w1") == ExitCode.USAGE
    assert says in (tmp_path / "w1.log").read_text()
