"""The real vLLM of `bench.startup`: its tiny model, the answer that is known of it, what agents are told.

Owns what has to be there before the first start: a model with fixed random weights, made by vLLM's own
environment, and the known answer and class profile, asked once of a vLLM that reads the folder by itself
and kept beside the build for the next time.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

from bench.startup_site import Engine, NotStarted
from readyplane.kit.clock import SystemClock
from readyplane_lab.up.processes import ProcessTable
from readyplane_lab.up.real_engine import RealEngine, find_engine
from readyplane_lab.up.reference import Subject, reference, worker_class
from readyplane_registry.ingest import Facts, build_manifest

ROOT = Path(__file__).resolve().parents[1]
TINY_MODEL = ROOT / "tests" / "vllm" / "tiny_model.py"
KEEP = ROOT / "build" / "bench-startup"
NAME = "tiny"
ENGINE_ARGS = ("--max-num-seqs", "8", "--max-model-len", "2048")
SEQUENCES = 8
LIMIT_S = 420.0
STALL_S = 300.0
MAKE_S_MAX = 300.0


async def vllm_engine(folder: Path) -> tuple[Engine, Path, Facts]:
    """How agents start it, the folder of its model, and what is published beside its files.

    Raises:
        InvalidField: there is no vLLM. NotStarted: its model cannot be made. Unavailable: it does not
            come up.
    """
    given = os.environ.get("READYPLANE_VLLM_BIN")
    found = find_engine(Path(given) if given else None)
    model = folder / NAME
    await asyncio.to_thread(_make_model, found, model)
    environment = {**os.environ, **found.environment(os.environ)}
    bare, *_ = await asyncio.to_thread(build_manifest, model, model=NAME, facts=Facts())
    subject = Subject(NAME, model, bare.digest, found, ENGINE_ARGS, SEQUENCES)
    async with ProcessTable(folder / "reference") as table:
        known = await reference(
            subject,
            keep=KEEP,
            table=table,
            log_path=folder / "reference" / "engine.log",
            environment=environment,
            clock=SystemClock(),
            say=lambda text: print(f"vllm: {text}", flush=True),
        )
    profile = folder / f"{known.profile.name}.json"
    profile.write_text(json.dumps(known.profile.document()))
    engine = Engine(
        "vllm",
        args=(
            *("--worker-class", worker_class(found), "--profile", str(profile)),
            *("--stall-s", repr(STALL_S)),
            *(f"--engine-arg={word}" for word in ENGINE_ARGS),
        ),
        environment={**found.environment(os.environ), "READYPLANE_VLLM_BIN": str(found.program)},
        limit_s=LIMIT_S,
        partner=True,
    )
    config = {"canary_ends": True} if known.ends else {}
    return engine, model, Facts(config=config, canary=known.canary)


def _make_model(engine: RealEngine, folder: Path) -> None:
    done = subprocess.run(
        [str(engine.program.with_name("python")), str(TINY_MODEL), str(folder)],
        capture_output=True,
        text=True,
        timeout=MAKE_S_MAX,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode != 0:
        raise NotStarted(f"the tiny model could not be made: {done.stderr.strip()[-300:]}")
