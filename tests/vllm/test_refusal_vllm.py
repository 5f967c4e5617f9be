"""Weights that are not what the manifest says never reach a vLLM."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from readyplane.core.identity import Canary
from readyplane_lab.up.demo_model import DemoModel
from readyplane_lab.up.real_engine import RealEngine
from tests.integration.agent_cluster import MODEL, cluster
from tests.vllm.vllm_world import make_tiny_model

ENDS_WITHIN_S = 180.0
pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(400)]


def flipped(path: str, _start: int, _count: int, data: bytes) -> bytes | None:
    """The last bit of whatever is read of the weights is another."""
    if not path.endswith(".safetensors") or not data:
        return None
    return data[:-1] + bytes([data[-1] ^ 1])


async def test_a_corrupted_chunk_is_refused_before_the_engine_has_weights(
    engine: RealEngine, tmp_path: Path
) -> None:
    folder = make_tiny_model(engine, tmp_path / "tiny")
    model = DemoModel(folder, {}, Canary((5, 6, 7), (8,)), {}, 0, 0)
    log = tmp_path / "agent.log"
    async with cluster(tmp_path, model, flipped) as world:
        words = [
            *("--worker-id", "p0", "--role", "prefill", "--model", MODEL),
            *("--manifest", world.digest, "--registry", world.address, "--router", world.address),
            *("--work-dir", str(tmp_path / "work"), "--profile", "unknown"),
            *("--engine", "vllm", "--vllm-bin", str(engine.program), "--fetch-limit-s", "30"),
        ]
        with log.open("wb") as out:
            agent = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "readyplane_agent", *words),
                env={**os.environ, **engine.environment(os.environ)},
                stdout=out,
                stderr=out,
            )
        try:
            engines: set[psutil.Process] = set()
            async with asyncio.timeout(ENDS_WITHIN_S):
                while agent.returncode is None:
                    engines |= _below(agent.pid)
                    await asyncio.sleep(0.2)
        finally:
            if agent.returncode is None:
                agent.kill()
            await agent.wait()
        assert world.store is not None and world.store.asked
    said = log.read_text()
    assert agent.returncode not in (0, None), said
    assert "model.safetensors" in said, said
    assert "weights_verified" not in said, said
    assert "engine_up" not in said, said
    _, left = psutil.wait_procs(engines, timeout=20.0)
    assert not left, left


def _below(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return set()
