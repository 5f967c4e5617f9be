"""What an agent is told at its start: flags, then environment, then defaults.

Plain argparse and a frozen dataclass, because an agent's import time is part of T_ready (R6).
Hands `AgentSettings` to `__main__`. Fixed for the life of the process.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane.core.identity import CHUNK_BYTES_DEFAULT, CHUNK_BYTES_MIN
from readyplane.core.startup import StartMode
from readyplane.core.worker import Holds, Role
from readyplane_agent.engines.ranks import TP_MAX

ORDERED_AT = "READYPLANE_ORDERED_AT_MONOTONIC_S"


class WrongSetting(InvalidField):
    """A setting that only the ordered artifact shows to be wrong: the agent ends as for any other."""


WISHES = ("tcp", "nixl", "auto")
ENGINES = ("modelled", "vllm", "sglang", "attached")


HELP: Mapping[str, str] = {
    "worker_id": "name of the worker, given by whoever ordered it",
    "role": "prefill, decode or both",
    "model": "model name that requests use",
    "router": "gRPC address of the router, host:port",
    "work_dir": "folder for this worker's own files; emptied at exit",
    "registry": "gRPC address of the registry, host:port",
    "manifest": "digest or tag of the weights to serve; empty: what the model name resolves to",
    "convertible_tpot_s": "above 0: a decode worker that also takes prompts in short chunks, between "
    "iterations that keep this time per output token",
    "standby": "true: wait until the router activates it, by default with everything loaded and proved",
    "holds": "what a standby waits with: weights (gate passed, serves at once), process (the engine "
    "has imported everything and holds neither weights nor device memory) or asleep (gate passed, "
    "device given back)",
    "graph_stages": "true: ready with few graphs, more are captured while it serves",
    "trust_file": "trust policy (JSON): whose signatures a manifest needs before it is loaded",
    "worker_class": "worker class, as the planner names it",
    "tp": "ranks of this worker, on this machine; each maps its part of the weights alone",
    "generation": "rollout generation of the group",
    "mode": "eager, jit or aot",
    "scale_decision_id": "decision that ordered this worker",
    "node": "machine name, for placement",
    "engine": "modelled, vllm, sglang or attached",
    "engine_url": "base URL of a running engine (with --engine attached)",
    "vllm_bin": "vLLM's program, or the folder of it, in an environment that has readyplane too; empty: PATH",
    "engine_args": "one argument for the engine's command line; repeatable",
    "profile": "profile file, or the name of one that ships with readyplane",
    "kv_tokens": "size of the KV pool in tokens; 0: what the profile says",
    "cache_dir": "node's weight cache, shared by its workers (tier L2)",
    "cache_bytes_max": "most bytes the weight cache keeps",
    "compile_bytes_max": "most bytes of compiled code kept beside the weight cache",
    "pool_dir": "node's pool of arenas in shared memory, kept across restarts (tier L1)",
    "pool_bytes_max": "most bytes of all arenas of the pool, in use or not",
    "weights_memory": "map (files of the weight cache that lie in the page cache are mapped, verified there "
    "and not copied; others are read) or copy (always memory of its own, which nobody can change)",
    "staging_bytes": "most bytes read and not yet verified at once",
    "staging_node_bytes": "most staging of all processes of this node together",
    "node_processes": "workers or ranks of this node that may load at once; each has its share",
    "read_connections": "connections to one source at once",
    "transfer_readers_max": "peers that may read our weights at once",
    "transfer_bytes_per_s": "most bytes per second given to peers; 0: no limit",
    "transport": "tcp, auto (NIXL with peers where both sides have it) or nixl (the same; bytes that "
    "come over TCP are warned of)",
    "nixl_python": "interpreter in which NIXL can be imported; empty: the agent's own",
    "serving_ttft_s": "time to first token that peers' reading must not endanger; 0: no target",
    "serving_tpot_s": "time per output token that it must not endanger; 0: no slower than without",
    "fetch_limit_s": "give up fetching weights after this long, waiting for a source included; sooner "
    "when their bytes are wrong or missing wherever they are offered",
    "stall_s": "a start without any progress for this long has failed",
    "start_limit_s": "a start that takes longer has failed",
    "drain_deadline_s": "longest drain after SIGTERM",
    "host": "address to bind",
    "http_port": "port for chunks, health and metrics; 0: a free one",
    "token": "bearer token for registry and router",
    "otlp_endpoint": "where the trace of the start goes (OTLP gRPC); empty: nowhere",
    "log_level": "debug, info, warning or error",
    "ready_file": "JSON written when the worker is ready",
    "ordered_at_s": "CLOCK_MONOTONIC seconds when the order was given",
}

# Of a default that follows from another setting.
DEFAULTS_SHOWN = {"cache_dir": "WORK_DIR/../weight-cache"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Every setting of an agent; the help text of each flag says what it is."""

    worker_id: str
    role: Role
    model: str
    router: str
    work_dir: Path
    registry: str = ""
    manifest: str = ""
    trust_file: Path | None = None
    worker_class: str = "default"
    tp: int = 1
    convertible_tpot_s: float = 0.0
    standby: bool = False
    holds: Holds = Holds.WEIGHTS
    graph_stages: bool = False
    generation: int = 1
    mode: StartMode = StartMode.JIT
    scale_decision_id: str = ""
    node: str = "local"
    engine: str = "modelled"
    engine_url: str = ""
    vllm_bin: Path | None = None
    engine_args: tuple[str, ...] = ()
    profile: str = ""
    kv_tokens: int = 0
    cache_dir: Path | None = None
    cache_bytes_max: int = 200 * 2**30
    compile_bytes_max: int = 20 * 2**30
    pool_dir: Path | None = None
    pool_bytes_max: int = 64 * 2**30
    weights_memory: str = "map"
    staging_bytes: int = 64 * 2**20
    staging_node_bytes: int = 2 * 2**30
    node_processes: int = 8
    read_connections: int = 4
    transfer_readers_max: int = 2
    transfer_bytes_per_s: float = 0.0
    transport: str = "tcp"
    nixl_python: str = ""
    serving_ttft_s: float = 0.0
    serving_tpot_s: float = 0.0
    fetch_limit_s: float = 1800.0
    stall_s: float = 60.0
    start_limit_s: float = 3600.0
    drain_deadline_s: float = 300.0
    host: str = "127.0.0.1"
    http_port: int = 0
    token: str = ""
    otlp_endpoint: str = ""
    log_level: str = "info"
    ready_file: Path | None = None
    ordered_at_s: float | None = None

    @property
    def serves(self) -> Role:
        """The stages that the engine takes: both, for a convertible decode worker."""
        return Role.BOTH if self.convertible_tpot_s > 0 else self.role


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> AgentSettings:
    """Settings from flags over `READYPLANE_*` variables over defaults.

    Raises:
        InvalidField: names the flag, the value and the remedy. Unknown flags and `--help` leave
        through argparse (exit status 2 and 0).
    """
    parser = argparse.ArgumentParser(
        prog="readyplane_agent",
        description="Turns a wanted worker into a ready one, beside its engine.",
        epilog=f"Each flag may be given as READYPLANE_<FLAG>; {ORDERED_AT} says when the order "
        "was given.",
        allow_abbrev=False,
    )
    for item in fields(AgentSettings):
        flag = "--engine-arg" if item.name == "engine_args" else "--" + item.name.replace("_", "-")
        shown = DEFAULTS_SHOWN.get(item.name, item.default)
        default = "required" if item.default is MISSING else f"default: {shown!s}"
        parser.add_argument(
            flag,
            dest=item.name,
            default=None,
            action="append" if item.name == "engine_args" else "store",
            help=f"{HELP[item.name]} ({default})",
        )
    given = vars(parser.parse_args(list(argv)))
    values: dict[str, Any] = {}
    for item in fields(AgentSettings):
        name = ORDERED_AT if item.name == "ordered_at_s" else f"READYPLANE_{item.name.upper()}"
        raw = given[item.name]
        if raw is None and environ.get(name):
            raw = environ[name]
        if raw is None:
            if item.default is MISSING:
                raise InvalidField(_flag(item.name), None, f"give this flag or set {name}")
            values[item.name] = item.default
        else:
            values[item.name] = _typed(item.name, str(item.type), raw)
    return _checked(AgentSettings(**values))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _typed(name: str, kind: str, raw: Any) -> Any:
    try:
        if kind == "tuple[str, ...]":
            return tuple(raw) if isinstance(raw, list) else tuple(raw.split())
        if kind == "int":
            return int(raw)
        if kind == "bool":
            return {"true": True, "false": False}[raw.lower()]
        if kind.startswith("float"):
            number = float(raw)
            if not math.isfinite(number):
                raise ValueError(raw)
            return number
        if kind.startswith("Path"):
            return Path(raw).absolute()
        if kind == "Role":
            return Role(raw)
        if kind == "StartMode":
            return StartMode(raw)
        if kind == "Holds":
            return Holds(raw)
    except (ValueError, KeyError):
        remedies = {
            "bool": "write true or false",
            "Role": "write one of " + ", ".join(Role),
            "StartMode": "write one of " + ", ".join(StartMode),
            "Holds": "write one of " + ", ".join(Holds),
        }
        raise InvalidField(_flag(name), raw, remedies.get(kind, "write a finite number")) from None
    return str(raw)


def _checked(s: AgentSettings) -> AgentSettings:
    _check_words(s)
    if (s.engine == "attached") != bool(s.engine_url):
        raise InvalidField(
            "--engine-url", s.engine_url, "give it with --engine attached, only then"
        )
    if s.engine != "attached" and not s.registry:
        raise InvalidField("--registry", "", "give the registry's address, host:port")
    for name in (
        "generation",
        "pool_bytes_max",
        "staging_bytes",
        "staging_node_bytes",
        "node_processes",
        "read_connections",
        "cache_bytes_max",
        "compile_bytes_max",
    ):
        if getattr(s, name) < 1:
            raise InvalidField(_flag(name), getattr(s, name), "use a whole number from 1")
    _check_staging(s)
    _check_convertible(s)
    _check_waits(s)
    _check_ranks(s)
    from_zero = ("kv_tokens", "convertible_tpot_s", "serving_ttft_s", "serving_tpot_s")
    for name in (*from_zero, "transfer_readers_max", "transfer_bytes_per_s"):
        if getattr(s, name) < 0:
            raise InvalidField(_flag(name), getattr(s, name), "use a number from 0")
    for name in ("fetch_limit_s", "stall_s", "start_limit_s", "drain_deadline_s"):
        if getattr(s, name) <= 0:
            raise InvalidField(_flag(name), getattr(s, name), "use seconds above 0")
    return s


def _check_words(s: AgentSettings) -> None:
    for name in ("worker_id", "model", "router"):
        if not getattr(s, name):
            raise InvalidField(_flag(name), "", "give a non-empty text")
    for name, words in (
        ("engine", ENGINES),
        ("transport", WISHES),
        ("weights_memory", ("copy", "map")),
    ):
        if getattr(s, name) not in words:
            raise InvalidField(_flag(name), getattr(s, name), "write one of " + ", ".join(words))


def _check_staging(s: AgentSettings) -> None:
    """Whether the smallest chunk fits; how large an artifact's are, its manifest says."""
    share = s.staging_node_bytes // s.node_processes
    chunk = f"one chunk: {CHUNK_BYTES_MIN} bytes at least, {CHUNK_BYTES_DEFAULT} as a rule"
    if s.staging_bytes < CHUNK_BYTES_MIN:
        raise InvalidField("--staging-bytes", s.staging_bytes, f"make room for {chunk}")
    if share < CHUNK_BYTES_MIN:
        remedy = f"make room in each of {s.node_processes} shares (--node-processes) for {chunk}"
        raise InvalidField("--staging-node-bytes", s.staging_node_bytes, remedy)


def _check_ranks(s: AgentSettings) -> None:
    if not 1 <= s.tp <= TP_MAX:
        raise InvalidField("--tp", s.tp, f"use 1 to {TP_MAX}")
    if s.tp > 1 and s.engine != "modelled":
        remedy = f"leave it out: engine {s.engine} starts its own ranks, see --engine-arg"
        raise InvalidField("--tp", s.tp, remedy)


def _check_waits(s: AgentSettings) -> None:
    if s.holds is not Holds.WEIGHTS and not s.standby:
        raise InvalidField("--holds", str(s.holds), "give it with --standby true, only then")
    if s.graph_stages and s.mode is StartMode.EAGER:
        raise InvalidField("--graph-stages", "true with --mode eager", "take jit or aot")
    if s.engine == "attached" and (s.graph_stages or s.holds is not Holds.WEIGHTS):
        remedy = "leave it out: an attached engine was started by somebody else"
        raise InvalidField("--graph-stages, --holds", str(s.holds), remedy)


def _check_convertible(s: AgentSettings) -> None:
    if s.convertible_tpot_s > 0 and (s.role is not Role.DECODE or s.engine == "attached"):
        what = f"{s.convertible_tpot_s:g} with --role {s.role} --engine {s.engine}"
        raise InvalidField("--convertible-tpot-s", what, "give it to a decode worker of our own")
