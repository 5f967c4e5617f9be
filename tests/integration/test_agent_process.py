"""Real agents with real modelled engines, over real gRPC, judged by the real router's gate."""

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from readyplane.core.startup import SegmentName, WeightTier, critical_path
from readyplane.core.worker import WorkerState
from readyplane_agent.lifecycle import ExitCode
from readyplane_lab.up.demo_model import DemoModel, make_demo_model
from tests.integration.agent_cluster import LIMIT_S, Cluster, cluster


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoModel:
    folder = tmp_path_factory.mktemp("demo")
    return make_demo_model(folder, size_bytes=12 * 2**20, shards=2, max_model_len=4096)


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
        await asyncio.to_thread(psutil.wait_procs, [engine], timeout=60)
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
        assert gone is not None and gone.state is WorkerState.GONE and gone.progress is not None
        assert gone.progress.dead_end in ("identity", "bytes"), "the planner orders no more (B132)"


@pytest.mark.parametrize(
    "more, says",
    [
        (("--profile", "nothing"), "profile 'nothing' is not known"),
        (("--role", "both-ways"), "--role: 'both-ways' is not valid; write one of"),
        (("--work-dir", "/proc/no"), "--work-dir: '/proc/no' is not valid"),
        (("--trust-file", "/proc/no"), "trust_file: '/proc/no' is not valid"),
        (("--staging-bytes", "1000"), "--staging-bytes: 1000 is not valid"),
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
