"""Stages and bare standbys in real processes: what an agent promises, its engine has, the router believes."""

import asyncio
from pathlib import Path

import pytest

from readyplane.core import gate_checks as gc
from readyplane.core.errors import Unavailable
from readyplane.core.stage import UpgradeState
from readyplane.core.startup import SegmentName
from readyplane.core.worker import Holds, Worker, WorkerState
from readyplane_agent.engines.openai import OpenAiEngine
from readyplane_agent.lifecycle import ExitCode
from readyplane_lab.up.demo_model import DemoModel, make_demo_model
from readyplane_planner.starts import path_of
from tests.integration.agent_cluster import MODEL, Cluster, cluster

DEVICE = f"--engine-arg=--device-bytes={4 * 2**30}"
STAGED = ("--graph-stages", "true", DEVICE)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoModel:
    folder = tmp_path_factory.mktemp("demo")
    return make_demo_model(folder, size_bytes=12 * 2**20, shards=2, max_model_len=4096)


def state_of(worker: Worker) -> UpgradeState | None:
    return (
        None
        if worker.serving is None or worker.serving.stage is None
        else worker.serving.stage.state
    )


async def test_a_worker_serves_at_once_and_gets_its_graphs_beside_its_requests(
    tmp_path: Path, demo: DemoModel
) -> None:
    async with cluster(tmp_path, demo) as c:
        await c.agent("d1", "decode", *STAGED)
        first = await c.ready("d1")
        (seat,) = c.router.desk(MODEL).decodes
        assert first.serving is not None and first.serving.stage is not None
        began = first.serving.stage
        assert not began.compiled and seat.times.name.endswith("-eager")
        engine = OpenAiEngine(first.serving.engine_url, model=MODEL)
        prompt = tuple(range(10, 60))
        under_way = asyncio.create_task(
            engine.generate(prompt, max_tokens=400, ignore_eos=True, timeout_s=60.0)
        )
        done = await c.until(lambda w: state_of(w) is UpgradeState.COMPLETE, "d1")
        assert done.serving is not None and done.serving.stage is not None
        stage, load = done.serving.stage, await engine.load()
        assert not seat.times.name.endswith("-eager") and stage.digest != began.digest
        # The KV that is left is the same number everywhere: engine, profile, seat.
        assert load.kv_total_blocks == done.serving.kv_total_blocks == seat.kv_total_blocks
        assert stage.kv_tokens == seat.kv_total_blocks * seat.block_size
        # What the graphs take is promised away before they are captured: that may be what was seen.
        if began.state is UpgradeState.FIRST:
            assert stage.kv_tokens < began.kv_tokens
        else:
            assert began.state is UpgradeState.CAPTURING and stage.kv_tokens <= began.kv_tokens
        assert stage.graph_bytes is not None and stage.graph_bytes > 0
        (check,) = [check for check in done.checks if check.name == gc.GRAPH_STAGE]
        assert check.passed and len(check.evidence["answers"]) >= 2
        # Nobody was stalled, and the answer that was under way is what it is now.
        again = await engine.generate(prompt, max_tokens=400, ignore_eos=True, timeout_s=60.0)
        assert (await under_way).token_ids == again.token_ids and load.preemptions_total == 0
        told = await c.until(lambda w: later(w) is not None, "d1")
        found, _begun_s = path_of(told) or (None, 0.0)
        assert found is not None and SegmentName.GRAPH_STAGE not in found.inclusive_s


def later(worker: Worker) -> float | None:
    segments = () if worker.progress is None else worker.progress.segments
    return next((s.end_s for s in segments if s.name is SegmentName.GRAPH_STAGE), None)


async def test_graphs_that_answer_otherwise_are_never_used_and_it_serves_on(
    tmp_path: Path, demo: DemoModel
) -> None:
    async with cluster(tmp_path, demo) as c:
        planted = ("--engine-arg=--plant", "--engine-arg=graph_tokens")
        await c.agent("d1", "decode", *STAGED, *planted)
        back = await c.until(lambda w: state_of(w) is UpgradeState.ROLLED_BACK, "d1")
        assert back.state is WorkerState.READY
        assert back.serving is not None and back.serving.stage is not None
        assert "other tokens" in back.serving.stage.failure
        engine = OpenAiEngine(back.serving.engine_url, model=MODEL)
        (seat,) = c.router.desk(MODEL).decodes
        load = await engine.load()
        assert load.kv_total_blocks == seat.kv_total_blocks == back.serving.kv_total_blocks
        assert seat.times.name.endswith("-eager")


def is_told(worker: Worker) -> bool:
    """Whether the end of its start has come: that is told after the admission."""
    return worker.progress is not None and all(s.end_s for s in worker.progress.segments)


async def bare(c: Cluster, name: str) -> Worker:
    await c.agent(name, "decode", "--standby", "true", "--holds", "process")
    return await c.until(lambda w: w.holds is Holds.PROCESS, name)


async def test_a_process_waits_without_weights_and_serves_sooner_when_it_is_told(
    tmp_path: Path, demo: DemoModel
) -> None:
    async with cluster(tmp_path, demo) as c:
        waits = await bare(c, "d1")
        assert waits.state is WorkerState.STANDBY and waits.serving is None
        pid = c.engine("d1").pid
        assert not list((tmp_path / "work" / "d1").rglob("tensors*.json"))
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "memfd:" not in maps and "arena" not in maps, "no weights are mapped"
        await c.router.activate("d1", deadline_s=120.0)
        serves = await c.ready("d1")
        assert c.engine("d1").pid == pid and serves.progress is not None
        saved = [s.saved_s for s in serves.progress.segments if s.saved_s > 0]
        assert len(saved) == 1 and saved[0] > 0.05
        whole = await c.until(is_told, "d1")
        path, _ = path_of(whole) or (None, 0.0)
        assert path is not None and path.unexplained_fraction < 0.05, path
        assert serves.holds is None and c.router.desk(MODEL).decodes


async def test_a_process_that_is_killed_while_it_waits_takes_its_worker_along(
    tmp_path: Path, demo: DemoModel
) -> None:
    async with cluster(tmp_path, demo) as c:
        await bare(c, "d1")
        c.engine("d1").kill()
        assert await c.ended("d1") == ExitCode.START_FAILED


async def test_an_engine_sleeps_after_the_gate_and_serves_the_same_when_it_is_woken(
    tmp_path: Path, demo: DemoModel
) -> None:
    async with cluster(tmp_path, demo) as c:
        await c.agent("d1", "decode", "--standby", "true", "--holds", "asleep")
        sleeps = await c.until(lambda w: w.holds is Holds.ASLEEP, "d1")
        assert sleeps.state is WorkerState.STANDBY and sleeps.serving is not None
        engine = OpenAiEngine(sleeps.serving.engine_url, model=MODEL)
        with pytest.raises(Unavailable, match="asleep"):
            await engine.generate((10, 11, 12), max_tokens=2)
        await c.router.activate("d1", deadline_s=60.0)
        serves = await c.ready("d1")
        assert serves.holds is None and len(serves.checks) == len(gc.GATE_CHECKS)
        assert demo.canary is not None
        golden = demo.canary.golden_token_ids
        found = await engine.generate(demo.canary.prompt_token_ids, max_tokens=len(golden))
        assert found.token_ids == golden
