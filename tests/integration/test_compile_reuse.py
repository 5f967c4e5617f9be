"""Real agents over a real registry: the first compiles and publishes, others reuse exactly that."""

import asyncio
import itertools
import re
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn

from readyplane.core.identity import ArtifactKind
from readyplane.core.startup import SegmentName
from readyplane.core.worker import Worker
from readyplane.kit.auth import TokenCheck
from readyplane.kit.clock import SystemClock
from readyplane.kit.http import make_app
from readyplane_lab.up.demo_model import DemoModel, make_demo_model
from readyplane_registry.blob_files import FileBlobs
from readyplane_registry.blob_http import BlobRoutes
from readyplane_registry.fetching import NoTally
from readyplane_registry.ingest import Facts, publish_directory
from readyplane_registry.live import MemoryLive
from readyplane_registry.service import RegistryService
from readyplane_registry.store import MemoryCatalog
from tests.integration.agent_cluster import MODEL, Cluster, running


class World(Cluster):
    """Agents, with a registry that really stores."""

    registry: RegistryService

    def metrics(self, name: str, worker: Worker) -> dict[str, float]:
        with urllib.request.urlopen(f"{worker.offer.agent_url}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        assert name in text
        found = re.findall(r"readyplane_compile_cache_(\w+)_total\{([^}]*)\} (\d+)", text)
        told = {}
        for what, labels, value in found:
            word = re.search(r'(?:reason|where|outcome)="(\w*)"', labels)
            assert word is not None
            told[f"{what} {word.group(1)}"] = float(value)
        return told

    def told(self, worker: Worker, what: str = "compiled code") -> list[str]:
        assert worker.progress is not None
        name = SegmentName.ARTIFACT_DISCOVERY
        details = [s.detail for s in worker.progress.segments if s.name is name]
        return [d for d in details if d.startswith(what)]

    def engine_says(self, worker: Worker, name: SegmentName) -> str:
        assert worker.progress is not None
        (found,) = [s for s in worker.progress.segments if s.name is name]
        return found.detail

    def compiling(self, worker: Worker) -> str:
        return self.engine_says(worker, SegmentName.COMPILE)

    async def published(self, count: int, kind: str = "compile") -> None:
        async with asyncio.timeout(60):
            while len(await self.registry.list_manifests(kind=kind)) < count:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def world_of(tmp_path: Path, demo: DemoModel) -> AsyncIterator[World]:
    clock, ids = SystemClock(), itertools.count()
    blobs = FileBlobs(tmp_path / "blobs")
    door = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{door.getsockname()[1]}"
    registry = RegistryService(
        store=MemoryCatalog(),
        live=MemoryLive(clock, weight=0.3),
        blobs=blobs,
        clock=clock,
        make_id=lambda: f"t{next(ids)}",
        storage_url=lambda: f"{url}/v1/blobs",
    )
    app = make_app("registry", TokenCheck(""), set(), lambda: (True, ""))
    app.include_router(BlobRoutes(registry, blobs, NoTally()).router)
    web = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    serving = asyncio.create_task(web.serve(sockets=[door]))
    facts = Facts(config=demo.config, canary=demo.canary)
    done = await publish_directory(
        demo.folder, model=MODEL, registry=registry, sink=blobs, facts=facts
    )
    try:
        async with running(World, tmp_path, registry, done.digest) as world:
            world.registry = registry
            yield world
    finally:
        web.should_exit = True
        await serving


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoModel:
    folder = tmp_path_factory.mktemp("demo")
    return make_demo_model(folder, size_bytes=8 * 2**20, shards=1, max_model_len=4096)


async def whole(world: World, name: str) -> Worker:
    """The worker once its finished segments were told."""
    await world.ready(name)
    return await world.until(
        lambda w: w.progress is not None and all(s.end_s for s in w.progress.segments), name
    )


async def test_the_first_compiles_and_the_others_reuse_exactly_that(
    tmp_path: Path, demo: DemoModel
) -> None:
    async with world_of(tmp_path, demo) as world:
        await world.agent("d1", "decode")
        first = await whole(world, "d1")
        assert world.told(first) == ["compiled code miss: absent"]
        assert world.compiling(first) == "cache=miss:absent"
        await world.published(1)
        (summary,) = await world.registry.list_manifests(kind="compile")
        manifest = await world.registry.get_manifest(summary.digest)
        assert manifest.kind is ArtifactKind.COMPILE
        assert {"driver", "model_structure", "captured_shapes"} <= set(manifest.key)

        # Another node: from the registry. The same node: from there. Another shape: neither.
        await world.agent("d2", "decode")
        same = str(tmp_path / "cache-d1")
        await world.agent("d3", "decode", "--cache-dir", same)
        await world.agent("d4", "decode", "--engine-arg=--max-num-seqs=7")
        second, third, fourth = await asyncio.gather(
            *(whole(world, name) for name in ("d2", "d3", "d4"))
        )
        (told,) = world.told(second)
        assert told.startswith(f"compiled code hit: registry, {summary.digest}")
        assert world.told(third)[0].startswith("compiled code hit: node")
        assert world.compiling(second) == world.compiling(third) == "cache=hit"
        (told,) = world.told(fourth)
        assert told.startswith("compiled code miss: differs, argument.--max-num-seqs: nothing != 7")
        assert world.compiling(fourth).startswith("cache=miss")
        await world.published(2)
        counted = {
            name: await asyncio.to_thread(world.metrics, name, w)
            for name, w in (
                ("d2", second),
                ("d3", third),
                ("d4", fourth),
            )
        }
        assert counted["d2"] == {"hit registry": 1}
        assert counted["d3"] == {"hit node": 1}
        assert counted["d4"]["miss differs"] == 1


async def test_a_kv_size_is_measured_once_and_again_beside_a_neighbour(
    tmp_path: Path, demo: DemoModel
) -> None:
    async with world_of(tmp_path, demo) as world:
        device = f"--engine-arg=--device-bytes={4 * 2**30}"
        await world.agent("k1", "decode", device)
        first = await whole(world, "k1")
        assert world.told(first, "KV size") == ["KV size to be measured: absent"]
        assert world.engine_says(first, SegmentName.KV_PROFILE) == "measured"
        await world.published(1, "kv_profile")
        await world.agent("k2", "decode", device)
        neighbour = f"--engine-arg=--device-taken-bytes={2**30}"
        await world.agent("k3", "decode", device, neighbour)
        second, third = await asyncio.gather(*(whole(world, name) for name in ("k2", "k3")))
        assert first.serving is not None and second.serving is not None
        assert third.serving is not None
        blocks = first.serving.kv_total_blocks
        assert second.serving.kv_total_blocks == blocks
        assert world.engine_says(second, SegmentName.KV_PROFILE) == f"reused: {blocks} blocks"
        (told,) = world.told(third, "KV size")
        assert "fingerprint_mismatch" in told and "kv.co_tenant_bytes" in told
        assert world.engine_says(third, SegmentName.KV_PROFILE) == "measured"
        assert third.serving.kv_total_blocks < blocks
