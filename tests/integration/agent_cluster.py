"""Router and registry of the test's process, and agents with modelled engines as its children."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
import psutil
import pytest

from readyplane import profiles
from readyplane.core.identity import Manifest
from readyplane.core.worker import Worker, WorkerState
from readyplane.kit.auth import TokenCheck
from readyplane.kit.clock import SystemClock
from readyplane.kit.rpc import OPTIONS, Guard
from readyplane_lab.up.demo_model import DemoModel
from readyplane_registry import rpc as registry_rpc
from readyplane_registry.blobs import MemoryBlobs
from readyplane_registry.fetching import RegistryPolicy
from readyplane_registry.ingest import Facts, build_manifest
from readyplane_registry.live import MemoryLive
from readyplane_registry.service import RegistryService
from readyplane_registry.store import MemoryCatalog
from readyplane_router import rpc as router_rpc
from readyplane_router.epochs import MemoryEpochs
from readyplane_router.service import RouterService
from readyplane_router.store import MemoryStore
from tests.unit.agent_twins import ByteServer, Fault, TwinRegistry, serving, source

MODEL = "demo"
LIMIT_S = 120.0
SEGMENTS = "parallel_init=0.1,compile=0.3,cuda_graph=0.2,kv_profile=0.1,warmup=0.1"


class Cluster:
    """Router and registry of this process, and agents as children."""

    def __init__(self, folder: Path, router: RouterService, digest: str) -> None:
        self.folder, self.router, self.digest = folder, router, digest
        self.address = ""
        self.store: ByteServer | None = None
        self.agents: dict[str, asyncio.subprocess.Process] = {}

    async def agent(self, name: str, role: str, *more: str) -> asyncio.subprocess.Process:
        log = (self.folder / f"{name}.log").open("ab")
        words = [
            *("--worker-id", name, "--role", role, "--model", MODEL, "--manifest", self.digest),
            *("--worker-class", "h200-llama8b-fp8", "--registry", self.address),
            *("--router", self.address, "--work-dir", str(self.folder / "work" / name)),
            *("--scale-decision-id", "d-7", "--cache-dir", str(self.folder / f"cache-{name}")),
            *(() if "--engine" in more else (f"--engine-arg=--modelled-segments={SEGMENTS}",)),
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


async def real_registry(manifest: Manifest, storage_url: str) -> RegistryService:
    """The registry's own use-cases over memory stores, with the bytes of one artifact."""
    clock, ids, blobs = SystemClock(), count(), MemoryBlobs()
    blobs.put(manifest.files)
    service = RegistryService(
        store=MemoryCatalog(),
        live=MemoryLive(clock, weight=0.3),
        blobs=blobs,
        clock=clock,
        make_id=lambda: f"transfer-{next(ids)}",
        storage_url=lambda: storage_url,
        policy=RegistryPolicy(),
    )
    await service.publish_manifest(manifest.document())
    return service


@asynccontextmanager
async def cluster(
    tmp_path: Path,
    demo: DemoModel,
    fault: Fault | None = None,
    *,
    peers: bool = False,
    placed: Callable[[Manifest], Manifest] = lambda manifest: manifest,
) -> AsyncIterator[Cluster]:
    """Everything but agents; with `peers` the registry is the real one, which knows of them.

    `placed` says how the artifact was published.
    """
    facts = Facts(config=demo.config, canary=demo.canary)
    manifest, *_ = build_manifest(demo.folder, model=MODEL, facts=facts)
    files: Mapping[str, bytes] = {
        e.path: (demo.folder / e.path).read_bytes() for e in manifest.files
    }
    with serving(files, fault) as store:
        async with _cluster(tmp_path, placed(manifest), store, peers=peers) as world:
            yield world


@asynccontextmanager
async def _cluster(
    tmp_path: Path, manifest: Manifest, store: ByteServer, *, peers: bool
) -> AsyncIterator[Cluster]:
    registry: Any = TwinRegistry(manifest)
    if peers:
        registry = await real_registry(manifest, store.url.rpartition("/")[0])
    else:
        registry.sources = [source(store.url)]
    async with running(Cluster, tmp_path, registry, manifest.digest) as world:
        world.store = store
        yield world


C = TypeVar("C", bound=Cluster)


@asynccontextmanager
async def running(make: type[C], folder: Path, registry: Any, digest: str) -> AsyncIterator[C]:
    """A router of this process beside a registry on one port; its agents end with it."""
    clock = SystemClock()
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
    world = make(folder, router, digest)
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
