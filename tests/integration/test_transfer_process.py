"""Weights between real agents, known to the real registry: peers first, hand-over at a drain."""

import asyncio
import os
from pathlib import Path

import pytest

from readyplane.core.startup import SegmentName, WeightTier
from readyplane.core.worker import Worker
from readyplane_agent.lifecycle import ExitCode
from readyplane_lab.up.demo_model import DemoModel, make_demo_model
from tests.integration.agent_cluster import Cluster, cluster

NIXL_PYTHON = os.environ.get("READYPLANE_TEST_NIXL_PYTHON", "")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoModel:
    folder = tmp_path_factory.mktemp("demo")
    return make_demo_model(folder, size_bytes=24 * 2**20, shards=2, max_model_len=4096)


def came_from(worker: Worker) -> list[str]:
    """What each source gave, as the trace of the start says it: tier, source, bytes."""
    if worker.progress is None:
        return []
    ways = {SegmentName.WEIGHT_TRANSFER, SegmentName.WEIGHT_READ}
    return [s.detail for s in worker.progress.segments if s.name in ways]


async def test_b125_peers_spare_the_store_and_hand_over_when_they_leave(
    tmp_path: Path, demo: DemoModel
) -> None:
    """B125, R22.3: the store gives the first worker everything and nobody else anything."""
    slow = ("--transfer-bytes-per-s", "8e6")
    async with cluster(tmp_path, demo, peers=True) as c:
        assert c.store is not None
        await c.agent("p1", "prefill", *slow)
        first = await c.ready("p1")
        assert first.serving is not None
        assert first.serving.tier is WeightTier.L4_OBJECT
        asked = len(c.store.asked)

        # The second takes three seconds from the first, and reads on until the first has left.
        await c.agent("d1", "decode")
        await c.until(lambda w: any("L1 peer:p1:" in way for way in came_from(w)), "d1")
        c.agents["p1"].terminate()
        assert await c.ended("p1") == ExitCode.LEFT
        second = await c.ready("d1")
        assert second.serving is not None
        assert second.serving.tier is WeightTier.L1_HOST
        whole = await c.until(lambda w: all("efficiency" in way for way in came_from(w)), "d1")
        assert [way.split(" ")[:1] for way in came_from(whole)] == [["L1"]]
        assert len(c.store.asked) == asked

        await _two_at_once(c)
        assert len(c.store.asked) == asked


async def _two_at_once(c: Cluster) -> None:
    """Two that start together share one source: by its places, or one behind the other."""
    await asyncio.gather(c.agent("p2", "prefill"), c.agent("p3", "prefill"))
    for name in ("p2", "p3"):
        worker = await c.ready(name)
        assert worker.serving is not None
        assert worker.serving.tier is WeightTier.L1_HOST
        assert all(way.startswith("L1 ") for way in came_from(worker))


async def test_eight_that_start_at_once_on_nothing_spare_the_store(
    tmp_path: Path, demo: DemoModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R8.4: no peer holds anything yet; the store gives about one artifact, not eight."""
    monkeypatch.setattr("tests.integration.agent_cluster.LIMIT_S", 90.0)
    async with cluster(tmp_path, demo, peers=True) as c:
        assert c.store is not None
        size_bytes = sum(map(len, c.store.files.values()))
        names = [f"p{n}" for n in range(8)]
        await asyncio.gather(*(c.agent(name, "prefill") for name in names))
        for name in names:
            await c.until(
                lambda w: sum(map(megabytes, came_from(w))) > 0.99 * size_bytes / 1e6, name
            )
        ratio = sum(end - start for _, start, end in c.store.asked) / size_bytes
        print(f"the store gave {ratio:.2f} times the artifact to 8 starters")
        assert ratio <= 2.0


async def test_a_source_that_is_killed_costs_only_what_is_missing(
    tmp_path: Path, demo: DemoModel
) -> None:
    """R9.2: half of it came from the peer; the store gives the other half, once."""
    async with cluster(tmp_path, demo, peers=True) as c:
        assert c.store is not None
        await c.agent("p1", "prefill", "--transfer-bytes-per-s", "5e6")
        await c.ready("p1")
        told = len(c.store.asked)
        await c.agent("d1", "decode", "--read-connections", "1")  # chunk after chunk
        await c.until(lambda w: any(megabytes(way) > 8.0 for way in came_from(w)), "d1")
        c.agents["p1"].kill()
        whole = await c.until(lambda w: w.ready_s is not None and len(came_from(w)) > 1, "d1")
        ways = {way.split(" ")[0]: way for way in came_from(whole) if megabytes(way)}
        assert set(ways) == {"L1", "L4"}
        assert "dead" in ways["L1"]
        again = sum(end - start for _, start, end in c.store.asked[told:])
        assert again / 1e6 == pytest.approx(megabytes(ways["L4"]), abs=0.1)
        assert megabytes(ways["L1"]) + again / 1e6 == pytest.approx(
            sum(map(len, c.store.files.values())) / 1e6, abs=0.2
        )


@pytest.mark.skipif(not NIXL_PYTHON, reason="skipped: READYPLANE_TEST_NIXL_PYTHON is not set")
async def test_two_agents_with_nixl_pass_weights_on_that_way(
    tmp_path: Path, demo: DemoModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self,sm")
    words = ("--transport", "nixl", "--nixl-python", NIXL_PYTHON)
    async with cluster(tmp_path, demo, peers=True) as c:
        await c.agent("p1", "prefill", *words)
        await c.ready("p1")
        await asyncio.sleep(1.5)  # its NIXL process starts beside everything else
        await c.agent("d1", "decode", *words)
        (way,) = came_from(await c.ready("d1"))
        assert way.startswith("L1 peer:p1:") and way.endswith("25.2 MB over NIXL")


def megabytes(way: str) -> float:
    """Of `L1 peer:p1:…: 8.4 MB, …`."""
    return float(way.partition(" MB")[0].rpartition(" ")[2])
