"""What a run serves: the demo model on modelled engines, or a folder on a real vLLM.

Owns what follows from that choice: the files and facts that are published, the policy that the planner
begins with, what agents are told, and how requests are put.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from readyplane.kit.clock import Clock
from readyplane_lab.demo import MODEL, MODEL_TAG, VLLM_POLICY
from readyplane_lab.up.demo_model import make_demo_model
from readyplane_lab.up.demo_policy import demo_policy
from readyplane_lab.up.folder import DataFolder
from readyplane_lab.up.model import ServedModel
from readyplane_lab.up.options import UpOptions
from readyplane_lab.up.processes import ProcessTable, write_atomically
from readyplane_lab.up.prompts import Body, as_text, as_tokens
from readyplane_lab.up.real_engine import RealEngine, find_engine
from readyplane_lab.up.reference import Subject, reference, worker_class
from readyplane_registry.ingest import Facts, build_manifest

SEQUENCES_ON_CPU = 8
SEQUENCES_ON_GPU = 256
SILENT_S = 300.0
"""A first start compiles for a minute or more on a small machine, and says little meanwhile."""
FIRST_PAIR_WITHIN_S = {"modelled": 120.0, "vllm": 900.0}


@dataclass(frozen=True, slots=True)
class Serving:
    """What is served.

    Attributes:
        model: what is published. policy: that the planner begins with. body: how requests are put.
    """

    model: ServedModel
    policy: Mapping[str, Any]
    body: Body


class Choice:
    """What is known before anything is started.

    Args:
        options: what was asked.

    Raises:
        InvalidField: there is no such engine, or the policy cannot be.
    """

    def __init__(self, options: UpOptions) -> None:
        self._options = options
        self.engine: RealEngine | None = None
        if options.engine == "vllm":
            self.engine = find_engine(options.vllm_bin)
        else:
            demo_policy(options.policy_file, quick=options.quick)

    @property
    def name(self) -> str:
        """The model name that requests use: the folder's."""
        folder = self._options.model_dir
        return MODEL if folder is None else folder.absolute().name

    def agent_args(self) -> tuple[str, ...]:
        """What every agent is told beside its order."""
        if self.engine is None:
            return ()
        return (
            *("--stall-s", repr(SILENT_S)),
            *(f"--engine-arg={argument}" for argument in self._engine_args(self.engine)),
        )

    def environment(self) -> dict[str, str]:
        """What agents and engines find in their environment beside what services do."""
        if self.engine is None:
            return {}
        found = self.engine.environment(os.environ)
        found["READYPLANE_VLLM_BIN"] = str(self.engine.program)
        # What looks at the environment's packages looks for the program, too.
        found["PATH"] = f"{self.engine.program.parent}:{os.environ.get('PATH', '')}"
        if self.engine.on_cpu:  # a prefill and a decode worker share the machine
            found["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 2) // 2))
        return found

    async def serving(
        self,
        folder: DataFolder,
        *,
        table: ProcessTable,
        environment: Mapping[str, str],
        clock: Clock,
        say: Callable[[str], None],
    ) -> Serving:
        """Make or ask what is still needed; a real engine is started for it, the first time.

        Raises:
            InvalidField: the folder or the policy. Unavailable: that engine did not come up.
        """
        if self.engine is None:
            return await asyncio.to_thread(self._demo, folder)
        options, where = self._options, self._options.model_dir
        assert where is not None
        bare, *_ = await asyncio.to_thread(build_manifest, where, model=self.name, facts=Facts())
        subject = Subject(
            name=self.name,
            folder=where.absolute(),
            digest=bare.digest,
            engine=self.engine,
            args=self._engine_args(self.engine),
            sequences_max=SEQUENCES_ON_CPU if self.engine.on_cpu else SEQUENCES_ON_GPU,
        )
        found = await reference(
            subject,
            keep=folder.cache / "references",
            table=table,
            log_path=folder.logs / "reference-engine.log",
            environment={**environment, **self.environment()},
            clock=clock,
            say=say,
        )
        profile = folder.cache / "references" / f"{found.profile.name}.json"
        write_atomically(profile, json.dumps(found.profile.document(), indent=1))
        facts = Facts(config={"canary_ends": True} if found.ends else {}, canary=found.canary)
        tag = f"{self.name}:latest"
        return Serving(
            ServedModel(self.name, tag, where, facts),
            vllm_policy(self.name, tag, self.engine, profile, options.policy_file),
            as_text(
                self.name, context=found.context, characters_per_token=found.characters_per_token
            ),
        )

    def _demo(self, folder: DataFolder) -> Serving:
        options = self._options
        made = make_demo_model(folder.cache / "demo-model", size_bytes=options.model_bytes)
        facts = Facts(config=made.config, canary=made.canary)
        return Serving(
            ServedModel(MODEL, MODEL_TAG, made.folder, facts),
            demo_policy(options.policy_file, quick=options.quick),
            as_tokens(MODEL),
        )

    def _engine_args(self, engine: RealEngine) -> tuple[str, ...]:
        given = self._options.engine_args
        if engine.on_cpu and not any(a.startswith("--max-num-seqs") for a in given):
            return ("--max-num-seqs", str(SEQUENCES_ON_CPU), *given)
        return given


def vllm_policy(
    model: str, tag: str, engine: RealEngine, profile: Path, over: Path | None
) -> dict[str, Any]:
    """One prefill and one decode worker, with the fields of a file laid over that.

    Raises:
        InvalidField: the file cannot be read, or a field is wrong. UnknownField: with its place.
    """
    from readyplane_lab.up.options import read_policy
    from readyplane_planner.policy import overlay
    from readyplane_planner.policy import read_policy as check

    pool = {"worker_class": worker_class(engine), "profile": str(profile)}
    wanted = overlay(
        dict(VLLM_POLICY),
        {"model": model, "manifest": tag, "prefill": dict(pool), "decode": dict(pool)},
    )
    if over is not None:
        wanted = overlay(wanted, read_policy(over))
    check(wanted)
    return wanted
