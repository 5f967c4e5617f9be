"""Workers of two real ranks: each its part, one answer; one killed at each step fails the whole (R17)."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from readyplane.core.identity import Manifest
from readyplane.core.startup import SegmentName, WeightTier
from readyplane.core.worker import Worker, WorkerState
from readyplane_agent.engines.openai import OpenAiEngine
from readyplane_agent.engines.ranks import STEPS
from readyplane_agent.lifecycle import ExitCode
from readyplane_lab.cli.workers import worker_row
from readyplane_lab.up.demo_model import DemoModel, make_demo_model
from tests.integration.agent_cluster import LIMIT_S, MODEL, Cluster, cluster

TWO = ("--tp", "2", "--engine-arg=--modelled-segments=")
FACTS = {0: "engine-startup.json", 1: "rank-1.json"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoModel:
    folder = tmp_path_factory.mktemp("demo")
    return make_demo_model(folder, size_bytes=12 * 2**20, shards=2, max_model_len=4096)


def facts(c: Cluster, name: str, rank: int) -> dict[str, Any]:
    """What a rank's process says of itself, empty before it says anything."""
    try:
        found = json.loads((c.folder / "work" / name / FACTS[rank]).read_bytes())
    except (OSError, ValueError):
        return {}
    assert isinstance(found, dict)
    return found


async def standing_at(c: Cluster, name: str, rank: int, step: str) -> psutil.Process:
    """The process of a rank that has come to a step, and is held there."""
    async with asyncio.timeout(LIMIT_S):
        while facts(c, name, rank).get("step") != step:
            assert c.agents[name].returncode is None, log(c, name)
            await asyncio.sleep(0.02)
    return await process_of(c, name, rank)


async def process_of(c: Cluster, name: str, rank: int) -> psutil.Process:
    async with asyncio.timeout(LIMIT_S):
        while "pid" not in facts(c, name, rank):
            await asyncio.sleep(0.02)
    return psutil.Process(facts(c, name, rank)["pid"])


def log(c: Cluster, name: str) -> str:
    return (c.folder / f"{name}.log").read_text()


async def answer(worker: Worker, prompt: list[int]) -> tuple[int, ...]:
    assert worker.serving is not None
    engine = OpenAiEngine(worker.serving.engine_url, model=MODEL)
    return (await engine.generate(prompt, max_tokens=12, ignore_eos=True)).token_ids


@asynccontextmanager
async def watched(c: Cluster, name: str) -> AsyncIterator[set[tuple[str, WorkerState]]]:
    """(incarnation, state) of everything that the router ever said of a worker meanwhile."""
    seen: set[tuple[str, WorkerState]] = set()

    async def look() -> None:
        while True:
            worker = await c.worker(name)
            if worker is not None:
                seen.add((worker.offer.incarnation, worker.state))
            await asyncio.sleep(0.01)

    looking = asyncio.create_task(look())
    try:
        yield seen
    finally:
        looking.cancel()


async def test_two_ranks_have_their_parts_and_answer_as_one(
    tmp_path: Path, demo: DemoModel
) -> None:
    async with cluster(tmp_path, demo) as c:
        await asyncio.gather(c.agent("one", "prefill", TWO[-1]), c.agent("two", "prefill", *TWO))
        one, two = await asyncio.gather(c.ready("one"), c.ready("two"))
        prompt = [7, 99, 130, 41, 5, 77]
        assert await answer(two, prompt) == await answer(one, prompt)

        # Each rank maps its own half of every tensor.
        row = worker_row(two)
        assert [rank["step"] for rank in row["ranks"]] == ["canary_passed"] * 2
        sizes = [rank["bytes"] for rank in row["ranks"]]
        assert sizes == [6 * 2**20] * 2
        mapped = [facts(c, "two", rank)["fingerprint"] for rank in (0, 1)]
        assert mapped == [f"{demo.fingerprint:016x}"] * 2
        assert two.serving is not None and two.serving.kv.tp == 2

        # What was cut is whole in the node's cache: the next start reads it there.
        await c.agent("three", "decode", *TWO, "--cache-dir", str(tmp_path / "cache-two"))
        three = await c.ready("three")
        assert three.serving is not None and three.serving.tier is WeightTier.L2_NVME

        # kill -9 of rank 1: the worker leaves the candidates, and rank 0 does not live on.
        engine = await process_of(c, "two", 0)
        (await process_of(c, "two", 1)).send_signal(signal.SIGKILL)
        assert await c.ended("two") == ExitCode.ENGINE_DIED
        assert not engine.is_running()
        gone = await c.worker("two")
        assert gone is None or gone.state is WorkerState.GONE
        assert (await c.ready("one")).state is WorkerState.READY

        # SIGTERM: drained, left, no rank left behind.
        ranks = [await process_of(c, "three", rank) for rank in (0, 1)]
        c.agents["three"].terminate()
        assert await c.ended("three") == ExitCode.LEFT
        assert not any(rank.is_running() for rank in ranks)


KILLS = [(1, step) for step in STEPS] + [(0, "connected"), (0, "canary_passed")]


@pytest.mark.parametrize(("victim", "step"), KILLS)
async def test_a_rank_killed_at_a_step_fails_the_generation_and_frees_the_other(
    tmp_path: Path, demo: DemoModel, victim: int, step: str
) -> None:
    async with cluster(tmp_path, demo) as c, watched(c, "w") as seen:
        await c.agent("w", "prefill", *TWO, f"--engine-arg=--hold={victim}:{step}")
        held = await standing_at(c, "w", victim, step)
        other = await process_of(c, "w", 1 - victim)
        forming = await c.worker("w")
        assert forming is not None and forming.state is WorkerState.PROVISIONED
        held.send_signal(signal.SIGKILL)
        assert await c.ended("w") == ExitCode.START_FAILED
        assert not other.is_running()
        assert not (tmp_path / "work" / "w").exists()
        says = "rank 1: ended with -9" if victim else "the engine ended with -9"
        assert says in log(c, "w"), log(c, "w")
        assert not {state for _, state in seen} & {WorkerState.READY, WorkerState.STANDBY}
        gone = await c.worker("w")
        assert gone is None or gone.state is WorkerState.GONE
        if (victim, step) == (1, "connected"):
            # Ordered anew it is a new generation of the group, which the old one does not hinder.
            await c.agent("w", "prefill", *TWO)
            again = await c.ready("w")
            assert again.epoch > forming.epoch
            assert again.offer.incarnation != forming.offer.incarnation
            assert await answer(again, [7, 99, 130]) != ()


async def test_ranks_read_from_a_worker_of_one(tmp_path: Path, demo: DemoModel) -> None:
    """A peer gives whole files; what comes is cut here. Memory of ranks is offered to nobody."""
    async with cluster(tmp_path, demo, peers=True) as c:
        await c.agent("one", "prefill", TWO[-1], "--node", "n1")
        await c.ready("one")
        await c.agent("two", "prefill", *TWO, "--node", "n2")
        two = await c.ready("two")
        assert two.serving is not None and two.serving.tier is WeightTier.L1_HOST
        assert two.progress is not None
        came = [s.detail for s in two.progress.segments if s.name is SegmentName.WEIGHT_TRANSFER]
        assert any("peer:one" in detail for detail in came), came

        # kill -9 of the agent: no rank outlives it.
        left = [await process_of(c, "two", rank) for rank in (0, 1)]
        c.agents["two"].kill()
        await c.ended("two")
        await asyncio.to_thread(psutil.wait_procs, left, timeout=60)
        assert not any(rank.is_running() for rank in left)


def by_turns(manifest: Manifest) -> Manifest:
    """Published for two ranks: every other tensor is rank 1's."""
    tensors = tuple(replace(t, ranks=(n % 2,)) for n, t in enumerate(manifest.tensors))
    return replace(manifest, tensors=tensors, tp=2)


async def test_an_artifact_placed_for_two_ranks(tmp_path: Path, demo: DemoModel) -> None:
    """R10.3: each rank has what it owns; a worker of another size does not start."""
    async with cluster(tmp_path, demo, placed=by_turns) as c:
        await asyncio.gather(
            c.agent("two", "prefill", *TWO),
            c.agent("one", "prefill", TWO[-1]),
            c.agent("four", "prefill", "--tp", "4", TWO[-1]),
        )
        two = await c.ready("two")
        ranks = worker_row(two)["ranks"]
        assert [rank["tensors"] for rank in ranks] == [3, 3]
        for name, says in (("one", "no rank of 1 owns it"), ("four", "placed for 2")):
            assert await c.ended(name) == ExitCode.START_FAILED
            assert says in log(c, name)


async def test_a_rank_that_hangs_ends_the_group(tmp_path: Path, demo: DemoModel) -> None:
    """SIGSTOP: nothing dies, and nobody answers the beats any more."""
    async with cluster(tmp_path, demo) as c:
        await c.agent("w", "prefill", *TWO)
        await c.ready("w")
        hung = await process_of(c, "w", 1)
        hung.suspend()
        assert await c.ended("w") == ExitCode.ENGINE_DIED
        assert "rank 1: it hangs" in log(c, "w")
        assert "cannot start" not in log(c, "w")
        assert not hung.is_running()


async def test_parts_that_do_not_fit_are_refused_before_the_canary(
    tmp_path: Path, demo: DemoModel
) -> None:
    """Swapped tensors in every rank: whole and disjoint, but another model, and the ranks say so."""
    async with cluster(tmp_path, demo) as c:
        plant = ("--engine-arg=--plant", "--engine-arg=swapped_tensors")
        await c.agent("w", "prefill", *TWO, *plant)
        assert await c.ended("w") == ExitCode.START_FAILED
        assert "the known answer is" in log(c, "w")
