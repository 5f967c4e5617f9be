"""Services of a bench as processes, on real Postgres and Redis of their own.

Owns the folder's layout, the stores' addresses in the environment, and that all of it ends.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from readyplane.client import RegistryClient
from readyplane.kit.clock import SystemClock
from readyplane_lab.demo import MODEL
from readyplane_lab.simulator.artifact import Artifacts
from readyplane_lab.up.processes import ProcessTable
from readyplane_lab.up.services import Services
from readyplane_lab.up.stores import connect_or_embed


@dataclass(frozen=True, slots=True)
class Own:
    """What runs; `environment` names the stores to whoever is started beside it."""

    table: ProcessTable
    services: Services
    environment: Mapping[str, str]


@asynccontextmanager
async def own_services(folder: Path) -> AsyncIterator[Own]:
    """Stores that run, and services to be planned and started; `folder` is empty or not there."""
    for name in ("pg", "redis", "logs", "run", "blobs"):
        (folder / name).mkdir(parents=True)
    async with (
        ProcessTable(folder / "run") as table,
        await connect_or_embed(folder / "pg", folder / "redis", logs_dir=folder / "logs") as stores,
    ):
        environment = {
            **os.environ,
            "READYPLANE_DATABASE_URL": stores.database_url,
            "READYPLANE_REDIS_URL": stores.redis_url,
        }
        services = Services(
            table,
            run_dir=folder / "run",
            logs_dir=folder / "logs",
            environment=environment,
            clock=SystemClock(),
            gave_up=print,
        )
        try:
            yield Own(table, services, environment)
        finally:
            await services.close()


async def publish_demo(registry: str) -> str:
    """Publish the demo model's manifest, without its bytes; returns its digest."""
    client = RegistryClient(registry)
    manifest = Artifacts(MODEL).newest
    await client.publish_manifest(manifest.document(), bytes_elsewhere=True)
    await client.aclose()
    return manifest.digest
