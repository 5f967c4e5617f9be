"""The engine port: what an agent may ask of an inference engine, in our words.

Owns `EngineSpec` (what is started), the values that come back, and the Protocol that every
adapter (`modelled`, `vllm`, `sglang`, attached) implements; one suite (`tests/engine/port_suite.py`,
listed field by field in `docs/engine-port.md`) is run over all of them. Times are seconds on
CLOCK_MONOTONIC of this machine, so that an agent can lay them beside its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from readyplane.core.kv import KvEventBatch
from readyplane.core.startup import Segment, StartMode
from readyplane.core.worker import LoadReport, Role, Serving
from readyplane_agent.engines.layout import (
    ARENA_ALIGN_BYTES,
    TENSOR_TABLE_SCHEMA,
    ArenaLayout,
    TensorSlot,
    arena_layout,
    read_tensor_table,
    tensor_table_document,
)
from readyplane_agent.engines.ranks import RankSpec
from readyplane_agent.pacing import ServingTimes

__all__ = [
    "ARENA_ALIGN_BYTES",
    "TENSOR_TABLE_SCHEMA",
    "ArenaLayout",
    "EnginePort",
    "EngineSpec",
    "GenerateResult",
    "TensorSlot",
    "arena_layout",
    "read_tensor_table",
    "tensor_table_document",
]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything an engine needs to start.

    Attributes:
        engine_id: id of this engine life (the worker's incarnation); names it in KV hand-overs.
        role: stage served. model: name that requests use. manifest_digest: weights to serve.
        arena_path: shared-memory file that holds the verified weight files (`arena_layout`).
        tensor_table_path: JSON of `tensor_table_document`.
        config_path: JSON of `manifest.config` (`max_model_len`, `vocab_size`, `eos_token_id`,
            `block_size`, `kv_dtype`, ...). tokenizer_path: the artifact's tokenizer file.
        profile: path of a profile file, or the name of one in `readyplane.profiles`.
        work_dir: folder for the engine's own files (startup file, sockets).
        log_path: file that gets its stdout and stderr.
        host, port: where it serves HTTP; port 0 lets it choose.
        kv_side_channel_port, kv_events_port, kv_replay_port: 0 lets it choose.
        mode: start mode (R13). compile_cache_dir: folder of its compile cache, None without.
        max_batch_tokens, max_num_seqs: bounds of one iteration, 0 for what the profile says. Role
            BOTH computes prompts in chunks that keep within `max_batch_tokens` beside what decodes.
        kv_tokens: size of the KV pool, 0 for what the profile says.
        kv_reuse_bytes: size of the KV pool that was measured before (R16), 0 to measure it.
        wait_weights: the process may start before the weights are there: it imports and sets up
            what needs no weights, and waits until `tensor_table_path` exists (write it last, by
            rename, when every chunk is verified).
        graph_stages: ready with few graphs; more are captured afterwards (`offers.StagesGraphs`).
            Never set for an engine that has no such stages.
        ranks: the ranks beside rank 0, whose memory is `arena_path`; empty for an engine that is
            one process to us, however many it starts itself.
        extra_args: appended to its command line.
        environment: added to its environment.
    """

    engine_id: str
    role: Role
    model: str
    manifest_digest: str
    arena_path: Path
    tensor_table_path: Path
    config_path: Path
    tokenizer_path: Path | None
    profile: str
    work_dir: Path
    log_path: Path
    host: str = "127.0.0.1"
    port: int = 0
    kv_side_channel_port: int = 0
    kv_events_port: int = 0
    kv_replay_port: int = 0
    mode: StartMode = StartMode.JIT
    compile_cache_dir: Path | None = None
    kv_tokens: int = 0
    kv_reuse_bytes: int = 0
    max_batch_tokens: int = 0
    max_num_seqs: int = 0
    wait_weights: bool = False
    graph_stages: bool = False
    ranks: tuple[RankSpec, ...] = ()
    extra_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A finished, unstreamed answer of the engine.

    Attributes:
        token_ids: output tokens. text: the same as text. finish_reason: `stop` or `length`.
        prompt_tokens, cached_tokens: as the engine counted them.
        kv_transfer_params: hand-over parameters of a prefill leg, verbatim; None without.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int | None = None
    kv_transfer_params: Mapping[str, Any] | None = None


class EnginePort(Protocol):
    """One engine life. Errors: `Unavailable` (not reachable, died: the log's end is in the text),
    `InvalidField` / `Unsupported` (the engine refused the request), all of `core.errors`.
    """

    @property
    def returncode(self) -> int | None:
        """Exit status once the process is gone (negative: signal), else None."""
        ...

    @property
    def pid(self) -> int:
        """Process id, 0 before the start and for an attached engine."""
        ...

    async def start(self, spec: EngineSpec) -> None:
        """Start the process; returns as soon as it exists. Raises Unavailable, InvalidField."""
        ...

    async def wait_ready(self, *, stall_s: float = 60.0, limit_s: float = 1800.0) -> None:
        """Return when `/health` is 200.

        Raises Unavailable when the process died, when nothing progressed (segment, log, CPU time)
        for `stall_s`, or after `limit_s`.
        """
        ...

    def startup_segments(self) -> tuple[Segment, ...]:
        """Segments measured so far (running ones with `end_s` None), CLOCK_MONOTONIC seconds."""
        ...

    def serving(self) -> Serving:
        """How it is reached and what it holds; only after `wait_ready`.

        `tier` is left UNKNOWN: the agent knows where the weights came from.
        """
        ...

    async def load_report(self) -> LoadReport:
        """What the engine says about its load. Never raises for one bad read: unknown is None."""
        ...

    async def serving_times(self) -> ServingTimes:
        """What the engine has measured of its requests since its start, for the pace of what else
        this machine does. Never raises for one bad read: unknown is None.
        """
        ...

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        ignore_eos: bool = False,
        kv_transfer_params: Mapping[str, Any] | None = None,
        timeout_s: float = 30.0,
    ) -> GenerateResult:
        """One greedy answer, for canaries and probes."""
        ...

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of a text as the engine's tokenizer sees it."""
        ...

    def kv_events(self) -> AsyncIterator[KvEventBatch]:
        """Events of the prefix cache from now on, in our hash scheme, sequence gapless.

        A gap is repaired by the engine's replay; where that fails a batch with one `cleared`
        event comes first, so that nobody believes in blocks that may be gone.
        """
        ...

    async def is_idle(self) -> bool:
        """No sequence running or waiting, and no KV held for a reader. False when not known."""
        ...

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """SIGTERM, after `grace_s` SIGKILL to its whole process group; returns when it is gone."""
        ...

    def log_tail(self, lines: int = 20) -> str:
        """End of the engine's log."""
        ...
