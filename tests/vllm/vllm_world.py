"""Real vLLM engines for the port suite: a tiny model on disk, and a factory of engines over it.

Owns the environment's absence, too: `engine_or_why` says in words why nothing can be run.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane.core.identity import Canary, Manifest
from readyplane.core.startup import StartMode
from readyplane.core.worker import Role
from readyplane.kit.clock import SystemClock
from readyplane_agent.engines.port import (
    EnginePort,
    EngineSpec,
    arena_layout,
    tensor_table_document,
)
from readyplane_agent.engines.vllm import VllmEngine
from readyplane_lab.up.real_engine import RealEngine, find_engine
from readyplane_registry.ingest import Facts, build_manifest
from tests.engine.engine_world import Traits

ASKED = "READYPLANE_TEST_VLLM"
MODEL = "tiny"
LEASE_S = 6
"""How long a prefill engine holds KV for a reader that says nothing (vLLM: 30 s)."""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TINY_MODEL = Path(__file__).with_name("tiny_model.py")
SEQUENCES = 8


def engine_or_why() -> RealEngine | str:
    """The environment with vLLM, or why these tests are not run."""
    if not os.environ.get(ASKED):
        return "they start real engines for minutes: run `make test-vllm`"
    try:
        return find_engine(None)
    except InvalidField as error:
        return str(error)


def make_tiny_model(engine: RealEngine, folder: Path, *more: str) -> Path:
    """A model of 5 MB with fixed random weights, made by the environment's own Python."""
    python = engine.program.with_name("python")
    done = subprocess.run(
        [str(python), str(TINY_MODEL), str(folder), *more],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder


@dataclass
class VllmFactory:
    """vLLM engines over one tiny model, started without compilation."""

    folder: Path
    model: Path
    engine: RealEngine
    manifest: Manifest
    traits: Traits
    _names: Any = field(default_factory=count)

    def spec(
        self,
        name: str,
        *,
        alter: Callable[[bytearray], None] | None = None,
        extra: tuple[str, ...] = (),
        mode: StartMode = StartMode.EAGER,
    ) -> EngineSpec:
        """Files and settings of one engine life."""
        work = self.folder / f"{name}-{next(self._names)}"
        (work / "files").mkdir(parents=True)
        layout = arena_layout(self.manifest)
        arena = bytearray(layout.size_bytes)
        for path, offset in layout.file_offsets.items():
            data = (self.model / path).read_bytes()
            arena[offset : offset + len(data)] = data
        if alter is not None:
            alter(arena)
        (work / "arena").write_bytes(arena)
        for entry in self.manifest.files:
            if entry.purpose != "weights":
                (work / "files" / entry.path).write_bytes((self.model / entry.path).read_bytes())
        table = tensor_table_document(layout, manifest_digest=self.manifest.digest)
        (work / "tensors.json").write_text(json.dumps(table))
        (work / "config.json").write_text(json.dumps(dict(self.manifest.config)))
        (work / "chat.jinja").write_text(TEMPLATE)
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
        return EngineSpec(
            engine_id=work.name,
            role=Role.BOTH,
            model=MODEL,
            manifest_digest=self.manifest.digest,
            arena_path=work / "arena",
            tensor_table_path=work / "tensors.json",
            config_path=work / "config.json",
            tokenizer_path=work / "files" / "tokenizer.json",
            profile="unknown",
            work_dir=work,
            log_path=work / "engine.log",
            mode=mode,
            max_num_seqs=SEQUENCES,
            extra_args=(
                *("--chat-template", str(work / "chat.jinja")),
                *("--kv-transfer-config", json.dumps(transfer)),
                *extra,
            ),
            environment=self.engine.environment(os.environ) | {"OMP_NUM_THREADS": "1"},
        )

    @asynccontextmanager
    async def start(
        self, name: str, *, alter: Callable[[bytearray], None] | None = None, **options: Any
    ) -> AsyncIterator[EnginePort]:
        """A ready engine, stopped at the end."""
        engine = VllmEngine(clock=SystemClock(), program=self.engine.program)
        await engine.start(self.spec(name, alter=alter, **options))
        try:
            await engine.wait_ready(stall_s=240.0, limit_s=420.0)
            yield engine
        finally:
            await engine.stop(grace_s=10.0)
            assert engine.returncode is not None


def vllm_factory(folder: Path, engine: RealEngine) -> VllmFactory:
    """A factory with a model of its own under `folder`; its canary is recorded later."""
    model = make_tiny_model(engine, folder / "model")
    manifest, *_ = build_manifest(model, model=MODEL, facts=Facts())
    traits = Traits(MODEL, Canary((5, 6, 7), (1,)), float(LEASE_S))
    return VllmFactory(folder, model, engine, manifest, traits)
