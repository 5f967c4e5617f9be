"""`readyplane profile measure` on a modelled engine finds the profile that the engine was given."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from readyplane import profiles
from readyplane_planner.policy import pool_profiles, read_policy
from tests.engine.engine_world import modelled_factory

LIMIT_S = 180.0
TRIES = 4
SLOW = 3.0
"""So that a busy machine's own delays are small beside the engine's."""


async def measure(*argv: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "readyplane_lab.cli", "profile", "measure", *argv),
        env={**os.environ, "NO_COLOR": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(LIMIT_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_measured_engine_is_the_engine_that_was_modelled(tmp_path: Path) -> None:
    given = tmp_path / "given.json"
    document = {"extends": "h200-llama8b-fp8", "name": "given", "slow_factor": SLOW}
    given.write_text(json.dumps(document))
    factory = modelled_factory(tmp_path)
    out = tmp_path / "b300.json"
    options = ("--worker-class", "b300", "--kv-bytes-per-token", "65536", "--out", str(out))
    quick = ("--points", "5", "--steps", "2", "--repeats", "1", "--window", "12")
    async with factory.start(
        "measured", profile=str(given), extra=("--coalesce-ms", "20")
    ) as engine:
        url = engine.serving().engine_url
        ask = (url, *options, *quick, "--max-num-seqs", "10", "--isl-max", "3000")
        code, said, told = await measure(*ask)
        for _ in range(TRIES - 1):
            if "measure longer" not in told:  # it refuses what a busy machine spoilt, and says so
                break
            code, said, told = await measure(*ask)
    assert code == 0, told
    found, real = profiles.load(str(out)), profiles.load(str(given))
    assert found.measured and found.worker_class == "b300"
    assert found.kv_capacity_tokens == pytest.approx(real.kv_capacity_tokens, rel=1e-3)
    assert found.max_num_seqs == 10 and "measured" in found.source
    for tokens in (100, 1000, 2900):
        late_s = 0.02  # a busy machine adds as much to the shortest
        assert found.prefill_s(tokens) == pytest.approx(real.prefill_s(tokens), rel=0.2, abs=late_s)
    for sequences, context in ((1, 200), (10, 200), (5, 1000), (10, 2500)):
        kv_tokens = sequences * context
        assert found.iteration_s(sequences, kv_tokens) == pytest.approx(
            real.iteration_s(sequences, kv_tokens), rel=0.15
        )
    assert {f.stage for f in found.fit} == {"prefill", "decode", "cached"}
    assert all(f.error < 0.2 for f in found.fit if f.stage != "cached")
    assert "held out" in said and str(out) in told
    pool = {"worker_class": "b300", "profile": str(out)}
    plan = read_policy({"model": "demo", "prefill": pool, "decode": pool})
    assert pool_profiles(plan) == (found, found)
