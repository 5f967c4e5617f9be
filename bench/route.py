"""Route plus complete over gRPC, against a router process with real stores."""

from __future__ import annotations

import asyncio
import itertools
import math
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from bench.own_services import own_services, publish_demo
from readyplane import profiles
from readyplane.client import RouterClient
from readyplane.core.startup import SegmentName
from readyplane.core.work import EventKind, RequestEvent, RequestShape
from readyplane.core.worker import Role
from readyplane.kit.clock import SystemClock
from readyplane.ports import Order
from readyplane_lab.demo import MODEL, WORKER_CLASS
from readyplane_lab.simulator.artifact import Artifacts
from readyplane_lab.simulator.ledger import Ledger
from readyplane_lab.simulator.nodes import Nodes
from readyplane_lab.simulator.site import Site
from readyplane_lab.simulator.sources import WeightSources
from readyplane_lab.simulator.startup import Draws, StartUpModel
from readyplane_lab.simulator.worker import SimWorker

WORKERS_A_ROLE = 8
PROMPT_TOKENS = 1024
ALONE = 1500
TOGETHER = 4000
IN_FLIGHT = 16


def measure_routes() -> dict[str, float]:
    """route_p50_us, route_p99_us, route_per_s_16, route_cpu_us."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(Path(folder)))


async def _measure(folder: Path) -> dict[str, float]:
    async with own_services(folder) as own:
        services = own.services
        registry = services.plan("registry", args=("--blob-dir", str(folder / "blobs")))
        router = services.plan("router")
        router.environment["READYPLANE_REGISTRY"] = registry.grpc
        await asyncio.gather(services.start(registry), services.start(router))
        digest = await publish_demo(registry.grpc)
        pid = next(r.pid for r in own.table.running() if r.name == "router")
        return await _with_workers(router.grpc, digest, psutil.Process(pid))


async def _with_workers(address: str, digest: str, router: psutil.Process) -> dict[str, float]:
    clock = SystemClock()
    startup = StartUpModel(
        provision_s=0.0, segments=dict.fromkeys(SegmentName, 0.0), weight_bytes=1.0
    )
    sources = WeightSources(startup, clock=clock)
    profile = profiles.load(WORKER_CLASS)
    client, ledger, artifacts = RouterClient(address), Ledger(clock), Artifacts(MODEL)
    nodes = Nodes({}, startup, gpus_of=lambda _: profile.gpus)
    site = Site(client, artifacts, startup, sources, nodes, Draws(1), clock)
    workers = [
        SimWorker(
            Order(f"{role[0]}-{i}", role, MODEL, WORKER_CLASS, digest),
            site=site,
            profile=profile,
            role=role,
            start=(role, i),
            account=ledger.open(role, profile.gpus),
            reopen=lambda pool: ledger.open(pool, profile.gpus),
            on_released=lambda _: None,
        )
        for role in (Role.PREFILL, Role.DECODE)
        for i in range(WORKERS_A_ROLE)
    ]
    try:
        deadline_s = time.monotonic() + 30.0
        while not all(w.ready_s is not None for w in workers):
            if time.monotonic() > deadline_s:
                print("workers were not admitted:", {w.failure for w in workers}, flush=True)
                return dict.fromkeys(
                    ("route_p50_us", "route_p99_us", "route_per_s_16", "route_cpu_us"), math.nan
                )
            await asyncio.sleep(0.1)
        return await _drive(client, router)
    finally:
        await asyncio.gather(*(w.release() for w in workers))
        await client.aclose()


async def _drive(client: RouterClient, router: psutil.Process) -> dict[str, float]:
    generator = np.random.default_rng(1)
    prompts = [generator.integers(3, 259, PROMPT_TOKENS, np.uint32).tobytes() for _ in range(256)]
    numbers = itertools.count()

    async def once() -> float:
        number = next(numbers)
        shape = RequestShape(
            f"b{number}", MODEL, PROMPT_TOKENS, prompts[number % len(prompts)], max_tokens=64
        )
        began_s = time.perf_counter()
        pair = await client.route(shape)
        took_s = time.perf_counter() - began_s
        await client.complete(
            [
                RequestEvent(pair.reservation_id, EventKind.PREFILL_DONE, cached_tokens=0),
                RequestEvent(
                    pair.reservation_id,
                    EventKind.FINISHED,
                    ttft_s=0.1,
                    tpot_s=0.05,
                    output_tokens=32,
                    attained=True,
                ),
            ]
        )
        return took_s

    for _ in range(200):
        await once()
    alone = np.array([await once() for _ in range(ALONE)])

    async def stream() -> None:
        for _ in range(TOGETHER // IN_FLIGHT):
            await once()

    before, began_s = router.cpu_times(), time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(IN_FLIGHT)))
    took_s, after = time.perf_counter() - began_s, router.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    return {
        "route_p50_us": 1e6 * float(np.quantile(alone, 0.5)),
        "route_p99_us": 1e6 * float(np.quantile(alone, 0.99)),
        "route_per_s_16": TOGETHER / took_s,
        "route_cpu_us": 1e6 * cpu_s / TOGETHER,
    }
