"""What a modelled engine is told at its start: the flags of `python -m …engines.modelled`.

Owns parsing and checking only; plain argparse, because import time is part of a start (R6).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from readyplane.core.errors import InvalidField
from readyplane.core.profile import LinkClass
from readyplane.core.startup import SegmentName, StartMode
from readyplane_agent.engines.modelled.plants import Plant
from readyplane_agent.engines.ranks import STEPS

# Seconds that real engines spend there for an 8B model, shortened by about ten for a demo.
MODELLED_SEGMENTS = "parallel_init=0.2,compile=1.2,cuda_graph=0.8,kv_profile=0.3,warmup=0.2"


@dataclass(frozen=True, slots=True)
class ModelledSettings:
    """Every flag, checked."""

    engine_id: str
    model: str
    manifest_digest: str
    arena: Path
    tensor_table: Path
    config: Path
    tokenizer: Path | None
    profile: str
    host: str
    port: int
    side_channel_port: int
    kv_events_port: int
    kv_replay_port: int
    block_size: int
    kv_tokens: int
    kv_reuse_bytes: int
    device_bytes: int
    device_taken_bytes: int
    max_num_seqs: int
    max_batch_tokens: int
    mode: StartMode
    eager_factor: float
    segments: dict[SegmentName, float]
    compile_cache: Path | None
    compile_hit_s: float | None
    stall_in: SegmentName | None
    coalesce_s: float
    kv_hold_s: float
    kv_answer_limit_s: float
    kv_buffer_steps: int
    link: LinkClass
    startup_file: Path | None
    wait_weights_s: float
    graph_stages: bool
    parent_pid: int
    max_waiting: int
    prefix_caching: bool
    plants: frozenset[Plant]
    rank: int = 0
    world: int = 1
    rendezvous: Path | None = None
    hold: tuple[int, str] | None = None


def parse(argv: Sequence[str]) -> ModelledSettings:
    """Settings from the command line.

    Raises:
        InvalidField: a value that makes no sense. Unknown flags and `--help` exit as argparse does.
    """
    given = _parser().parse_args(argv)
    for flag in ("port", "side_channel_port", "kv_events_port", "kv_replay_port"):
        _within(flag, getattr(given, flag), 0, 65535)
    for flag in ("kv_tokens", "max_num_seqs", "max_batch_tokens", "block_size"):
        _within(flag, getattr(given, flag), 0, 2**40)
    for flag in ("kv_reuse_bytes", "device_bytes", "device_taken_bytes"):
        _within(flag, getattr(given, flag), 0, 2**50)
    for flag in ("coalesce_ms", "kv_hold_s", "kv_answer_limit_s", "wait_weights_s", "link_setup_s"):
        _within(flag, getattr(given, flag), 0, 1e6)
    _within("eager_factor", given.eager_factor, 1, 100)
    if given.compile_hit_s is not None:
        _within("compile_hit_s", given.compile_hit_s, 0, 1e6)
    _within("link_bytes_per_s", given.link_bytes_per_s, 1, 1e15)
    _within("world", given.world, 1, 4096)
    _within("rank", given.rank, 0, given.world - 1)
    return ModelledSettings(
        engine_id=given.engine_id or f"engine-{os.getpid()}-{os.urandom(4).hex()}",
        model=given.model,
        manifest_digest=given.manifest_digest,
        arena=given.arena,
        tensor_table=given.tensor_table,
        config=given.config,
        tokenizer=given.tokenizer,
        profile=given.profile,
        host=given.host,
        port=given.port,
        side_channel_port=given.side_channel_port,
        kv_events_port=given.kv_events_port,
        kv_replay_port=given.kv_replay_port,
        block_size=given.block_size,
        kv_tokens=given.kv_tokens,
        kv_reuse_bytes=given.kv_reuse_bytes,
        device_bytes=given.device_bytes,
        device_taken_bytes=given.device_taken_bytes,
        max_num_seqs=given.max_num_seqs,
        max_batch_tokens=given.max_batch_tokens,
        mode=StartMode(given.mode),
        eager_factor=given.eager_factor,
        segments=_segments(given.modelled_segments),
        compile_cache=given.compile_cache,
        compile_hit_s=given.compile_hit_s,
        stall_in=SegmentName(given.stall_in) if given.stall_in else None,
        coalesce_s=given.coalesce_ms / 1000.0,
        kv_hold_s=given.kv_hold_s,
        kv_answer_limit_s=given.kv_answer_limit_s,
        kv_buffer_steps=given.kv_buffer_steps,
        link=LinkClass(given.link_name, given.link_bytes_per_s, given.link_setup_s),
        startup_file=given.startup_file,
        wait_weights_s=given.wait_weights_s,
        graph_stages=_staged(given),
        parent_pid=given.parent_pid,
        max_waiting=given.max_waiting,
        prefix_caching=not given.no_prefix_caching,
        plants=frozenset(Plant(name) for name in given.plant),
        rank=given.rank,
        world=given.world,
        rendezvous=given.rendezvous,
        hold=_hold(given.hold),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m readyplane_agent.engines.modelled",
        description="An inference engine whose latencies come from a measured profile and whose "
        "answers come from the tensors it loaded; it speaks what vLLM speaks.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="name that requests use")
    add("--arena", type=Path, required=True, help="file that holds the verified weight files")
    add("--tensor-table", type=Path, required=True, help="JSON: where each tensor lies in it")
    add("--config", type=Path, required=True, help="JSON of the manifest's config")
    add("--profile", required=True, help="class profile: a name, or a file ending in .json")
    add("--tokenizer", type=Path, help="the artifact's tokenizer.json (bytes)")
    add("--engine-id", default="", help="id of this engine life in KV hand-overs")
    add("--manifest-digest", default="", help="identity of the weights; peers must have the same")
    add("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    add("--port", type=int, default=0, help="HTTP port, 0: a free one")
    add("--side-channel-port", type=int, default=0, help="KV hand-over port, 0: a free one")
    add("--kv-events-port", type=int, default=0, help="KV event port (ZMQ PUB), 0: a free one")
    add("--kv-replay-port", type=int, default=0, help="KV replay port (ZMQ ROUTER), 0: a free one")
    add("--kv-buffer-steps", type=int, default=10_000, help="event batches kept for replay")
    add("--block-size", type=int, default=0, help="tokens a KV block, 0: as the config says")
    add("--kv-tokens", type=int, default=0, help="KV pool, 0: as the profile says")
    add("--device-bytes", type=int, default=0, help="memory of a modelled device, 0: none")
    add("--device-taken-bytes", type=int, default=0, help="what others hold of it")
    add("--kv-reuse-bytes", type=int, default=0, help="KV pool measured before, 0: measure")
    add("--max-num-seqs", type=int, default=0, help="sequences at once, 0: as the profile says")
    add("--max-batch-tokens", type=int, default=0, help="tokens an iteration, 0: as the profile")
    add("--max-waiting", type=int, default=4096, help="requests queued before 503")
    add("--no-prefix-caching", action="store_true", help="forget blocks when a request ends")
    faults = [str(plant) for plant in Plant]
    add("--plant", action="append", default=[], choices=faults, help="a fault, for tests")
    add("--mode", default="jit", choices=[str(m) for m in StartMode], help="start mode")
    add("--graph-stages", action="store_true", help="ready without graphs, capture when asked")
    add("--eager-factor", type=float, default=1.3, help="how much slower eager iterations are")
    add("--modelled-segments", default=MODELLED_SEGMENTS, help="seconds of start-up that is slept")
    add("--compile-cache", type=Path, help="folder of compile artifacts")
    add("--compile-hit-s", type=float, help="seconds of a cached compilation (default: 0.4 of it)")
    add("--stall-in", choices=[str(s) for s in SegmentName], help="hang there, to rehearse it")
    add("--coalesce-ms", type=float, default=250.0, help="tokens of this long go in one chunk")
    add("--kv-hold-s", type=float, default=30.0, help="how long a prefill leg's KV waits")
    add("--kv-answer-limit-s", type=float, default=5.0, help="a silent giver is gone after this")
    add("--link-name", default="rdma-400g", help="link class of KV hand-overs")
    add("--link-bytes-per-s", type=float, default=46e9, help="its bandwidth")
    add("--link-setup-s", type=float, default=0.002, help="its set-up time")
    add("--startup-file", type=Path, help="JSON with segments and ports, kept up to date")
    add("--wait-weights-s", type=float, default=0.0, help="wait so long for the tensor table")
    add("--parent-pid", type=int, default=0, help="exit when this process, our parent, is gone")
    add("--rank", type=int, default=0, help="which rank of a group; 0 is the one that serves")
    add("--world", type=int, default=1, help="ranks of the group")
    add("--rendezvous", type=Path, help="file in which rank 0 says where it is")
    add("--hold", default="", metavar="RANK:STEP", help="a rank stays there, to rehearse it")
    return parser


def _hold(text: str) -> tuple[int, str] | None:
    rank, _, step = text.partition(":")
    if not text:
        return None
    if not rank.isdigit() or step not in STEPS:
        remedy = "write RANK:STEP with a step of " + ", ".join(STEPS)
        raise InvalidField("--hold", text, remedy)
    return int(rank), step


def _staged(given: argparse.Namespace) -> bool:
    if given.graph_stages and given.mode == str(StartMode.EAGER):
        raise InvalidField("--graph-stages", "eager", "an eager engine never has graphs; take jit")
    return bool(given.graph_stages)


def _segments(text: str) -> dict[SegmentName, float]:
    found: dict[SegmentName, float] = {}
    for part in filter(None, text.split(",")):
        name, _, seconds = part.partition("=")
        try:
            found[SegmentName(name)] = _within(name, float(seconds), 0, 1e6)
        except ValueError:
            raise InvalidField(
                "--modelled-segments", part, "write NAME=SECONDS with names of R6.1"
            ) from None
    return found


def _within(name: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:
        flag = "--" + name.replace("_", "-")
        raise InvalidField(flag, value, f"use a number from {low:g} to {high:g}")
    return value
