"""Workers for the router benches, in a process of their own: they pass the gate, then renew.

`python -m bench.router_fleet --router HOST:PORT --registry HOST:PORT --prefills N --decodes N
--ready-file FILE`; the file appears once all are routable.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from readyplane import profiles
from readyplane.client import RegistryClient, RouterClient
from readyplane.core.startup import SegmentName
from readyplane.core.worker import Role
from readyplane.kit.clock import SystemClock
from readyplane.ports import Order
from readyplane_lab.demo import MODEL
from readyplane_lab.simulator.artifact import Artifacts
from readyplane_lab.simulator.ledger import Ledger
from readyplane_lab.simulator.nodes import Nodes
from readyplane_lab.simulator.site import Site
from readyplane_lab.simulator.sources import WeightSources
from readyplane_lab.simulator.startup import Draws, StartUpModel
from readyplane_lab.simulator.worker import SimWorker

WORKER_CLASS = "h200-llama8b-fp8"
BLOCK_SIZE = 64
READY_S_MAX = 60.0


async def _serve(router: str, registry: str, prefills: int, decodes: int, ready: Path) -> None:
    clock = SystemClock()
    startup = StartUpModel(
        provision_s=0.0, segments=dict.fromkeys(SegmentName, 0.0), weight_bytes=1.0
    )
    profile = profiles.load(WORKER_CLASS)
    artifacts, ledger = Artifacts(MODEL), Ledger(clock)
    publisher = RegistryClient(registry)
    await publisher.publish_manifest(artifacts.newest.document(), bytes_elsewhere=True)
    await publisher.aclose()
    client = RouterClient(router)
    nodes = Nodes({}, startup, gpus_of=lambda _: profile.gpus)
    sources = WeightSources(startup, clock=clock)
    site = Site(client, artifacts, startup, sources, nodes, Draws(1), clock, block_size=BLOCK_SIZE)
    workers = [
        SimWorker(
            Order(f"{role[0]}-{i}", role, MODEL, WORKER_CLASS, artifacts.newest.digest),
            site=site,
            profile=profile,
            role=role,
            start=(role, i),
            account=ledger.open(role, profile.gpus),
            reopen=lambda pool: ledger.open(pool, profile.gpus),
            on_released=lambda _: None,
        )
        for role, count in ((Role.PREFILL, prefills), (Role.DECODE, decodes))
        for i in range(count)
    ]
    async with asyncio.timeout(READY_S_MAX):
        while not all(worker.ready_s is not None for worker in workers):
            if failures := {w.failure for w in workers if w.failure}:
                raise SystemExit(f"workers were not admitted: {failures}")
            await asyncio.sleep(0.1)
    ready.write_text("ready")
    await asyncio.gather(*(worker.task for worker in workers), return_exceptions=True)


def main() -> int:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="workers for the router benches")
    parser.add_argument("--router", required=True)
    parser.add_argument("--registry", required=True)
    parser.add_argument("--prefills", type=int, required=True)
    parser.add_argument("--decodes", type=int, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    told = parser.parse_args()
    asyncio.run(_serve(told.router, told.registry, told.prefills, told.decodes, told.ready_file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
