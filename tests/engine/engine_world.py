"""Engines for the port suite: a small model on disk, and a factory of modelled engines over it.

`Factory` is what an engine must offer to be put through `port_suite`; another engine brings its
own.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from readyplane.core.identity import Canary, Manifest
from readyplane.core.startup import StartMode
from readyplane.core.worker import Role
from readyplane_agent.engines.modelled.adapter import ModelledEngine
from readyplane_agent.engines.port import (
    EnginePort,
    EngineSpec,
    arena_layout,
    tensor_table_document,
)
from readyplane_lab.up.demo_model import DemoModel, make_demo_model
from readyplane_registry.ingest import Facts, build_manifest

MODEL = "demo"
HOLD_S = 3.0


@dataclass(frozen=True)
class Traits:
    """What differs between engines without being a fault.

    Attributes:
        canary: a question with its known answer. hold_s: how long a prefill leg's KV waits.
        silent: fields of the suite that this engine does not offer, with the reason.
    """

    model: str
    canary: Canary
    hold_s: float
    silent: Mapping[str, str] = field(default_factory=dict)


class Factory(Protocol):
    """Starts engines of one kind."""

    traits: Traits

    def start(
        self, name: str, *, alter: Callable[[bytearray], None] | None = None
    ) -> Any:  # an async context manager that gives an EnginePort
        """A ready engine; `alter` changes the weights after they were verified."""
        ...


@dataclass
class ModelledFactory:
    """Modelled engines over one small demo model."""

    folder: Path
    demo: DemoModel
    manifest: Manifest
    traits: Traits
    _names: Any = field(default_factory=count)

    def spec(
        self,
        name: str,
        *,
        alter: Callable[[bytearray], None] | None = None,
        extra: tuple[str, ...] = (),
        profile: str = "h200-llama8b-fp8",
        mode: StartMode = StartMode.JIT,
        kv_tokens: int = 0,
    ) -> EngineSpec:
        """Files and settings of one engine life."""
        work = self.folder / f"{name}-{next(self._names)}"
        work.mkdir()
        layout = arena_layout(self.manifest)
        arena = bytearray(layout.size_bytes)
        for path, offset in layout.file_offsets.items():
            data = (self.demo.folder / path).read_bytes()
            arena[offset : offset + len(data)] = data
        if alter is not None:
            alter(arena)
        (work / "arena").write_bytes(arena)
        table = tensor_table_document(layout, manifest_digest=self.manifest.digest)
        (work / "tensors.json").write_text(json.dumps(table))
        (work / "config.json").write_text(json.dumps(dict(self.manifest.config)))
        return EngineSpec(
            engine_id=work.name,
            role=Role.BOTH,
            model=MODEL,
            manifest_digest=self.manifest.digest,
            arena_path=work / "arena",
            tensor_table_path=work / "tensors.json",
            config_path=work / "config.json",
            tokenizer_path=self.demo.folder / "tokenizer.json",
            profile=profile,
            work_dir=work,
            log_path=work / "engine.log",
            mode=mode,
            kv_tokens=kv_tokens,
            extra_args=(
                *("--modelled-segments", "", "--kv-hold-s", str(HOLD_S)),
                *("--kv-answer-limit-s", "3"),
                *extra,
            ),
        )

    @asynccontextmanager
    async def start(
        self, name: str, *, alter: Callable[[bytearray], None] | None = None, **options: Any
    ) -> AsyncIterator[EnginePort]:
        """A ready engine, stopped at the end."""
        engine = ModelledEngine()
        await engine.start(self.spec(name, alter=alter, **options))
        try:
            await engine.wait_ready(stall_s=30.0, limit_s=60.0)
            yield engine
        finally:
            await engine.stop(grace_s=5.0)
            assert engine.returncode is not None


def modelled_factory(folder: Path) -> ModelledFactory:
    """A factory with a model of its own under `folder`."""
    demo = make_demo_model(folder / "model", size_bytes=12 * 2**20, shards=2, max_model_len=4096)
    facts = Facts(config=demo.config, canary=demo.canary)
    manifest, *_ = build_manifest(demo.folder, model=MODEL, facts=facts)
    return ModelledFactory(folder, demo, manifest, Traits(MODEL, demo.canary, HOLD_S))
