"""How a vLLM is told what it is to do: its program, its command line, its environment.

Owns the words, all of them values of an `EngineSpec` and of this machine; `vllm` starts a process with them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from readyplane.core.errors import Unavailable
from readyplane.core.startup import StartMode
from readyplane.core.worker import Role
from readyplane_agent.compile_inspect import DRIVER_SIGNS, OTHER_DEVICES
from readyplane_agent.engines.port import EngineSpec

PROGRAM = "vllm"
PROGRAM_ENV = "READYPLANE_VLLM_BIN"
DEVICE_ENV = "VLLM_TARGET_DEVICE"
LOAD_FORMAT = "readyplane"
LAUNCH = ("-m", "readyplane_agent.engines.vllm_launch")
KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}
# Tokens of a KV block where nobody says another number (vLLM 0.32).
BLOCK_SIZES = {"cpu": 128}
BLOCK_SIZE = 16
# vLLM's server gives its engine ten minutes; ours may wait for verified weights for longer.
ENGINE_READY_LIMIT_S = 7200
TABLE_LIMIT_S = 5  # where the weights are said to be there already


def find_program(given: Path | None, environ: Mapping[str, str]) -> Path:
    """The `vllm` program: the one given, else of `READYPLANE_VLLM_BIN`, else on PATH.

    A folder stands for the program in it.

    Raises:
        Unavailable: there is none, or no Python beside it.
    """
    told = str(given) if given is not None else environ.get(PROGRAM_ENV, "")
    remedy = f"run `make vllm-env` and give its .venv-vllm/bin/vllm to --vllm-bin or {PROGRAM_ENV}"
    if told:
        program = Path(told).expanduser().absolute()
        program = program / PROGRAM if program.is_dir() else program
        if not os.access(program, os.X_OK):
            raise Unavailable(f"the engine's program {str(program)!r} cannot be run", remedy)
    else:
        found = shutil.which(PROGRAM, path=environ.get("PATH"))
        if found is None:
            raise Unavailable(f"the engine's program {PROGRAM!r} is not on PATH", remedy)
        program = Path(found).absolute()
    if not python_of(program).exists():
        raise Unavailable(f"{program} has no python beside it", remedy)
    return program


def python_of(program: Path) -> Path:
    """The Python of the environment that a program belongs to."""
    beside = program.parent / "python"
    return beside if beside.exists() else program.resolve().parent / "python"


def device_of(environ: Mapping[str, str], *, exists: Callable[[str], bool] = os.path.exists) -> str:
    """`cpu` where vLLM is told so or there is no sign of a device, else empty: vLLM finds it."""
    told = environ.get(DEVICE_ENV, "")
    if told:
        return "cpu" if told == "cpu" else ""
    return "" if any(exists(path) for path in (*DRIVER_SIGNS, *OTHER_DEVICES)) else "cpu"


def block_size_of(spec: EngineSpec, *, device: str) -> int:
    """Tokens of a KV block: as its arguments or its model's configuration say, else vLLM's own."""
    words = spec.extra_args
    for at, word in enumerate(words):
        value = word.partition("=")[2] if word.startswith("--block-size=") else ""
        if word == "--block-size" and at + 1 < len(words):
            value = words[at + 1]
        if value.isdigit() and int(value) > 0:
            return int(value)
    return BLOCK_SIZES.get(device, BLOCK_SIZE)


def loader_words(spec: EngineSpec) -> list[str]:
    """Weights from the arena, and from nowhere else (`vllm_plugin`)."""
    order = {
        "arena": str(spec.arena_path),
        "tensor_table": str(spec.tensor_table_path),
        "manifest_digest": spec.manifest_digest,
        "wait_s": ENGINE_READY_LIMIT_S if spec.wait_weights else TABLE_LIMIT_S,
    }
    return ["--load-format", LOAD_FORMAT, "--model-loader-extra-config", json.dumps(order)]


def events_endpoint(spec: EngineSpec, *, port: int) -> str:
    """Where it publishes KV events: a socket of this machine without a name in the file system.

    vLLM binds for `*` (the whole world) and `ipc://`; to an address of TCP it connects, and nobody
    would ever hear from it.
    """
    name = hashlib.sha256(f"{spec.engine_id} {port}".encode()).hexdigest()[:32]
    return f"ipc://@readyplane-kv-{name}"


def command(
    spec: EngineSpec, *, model_dir: Path, port: int, replay_port: int, device: str = ""
) -> list[str]:
    """The command line of one engine.

    Args:
        model_dir: folder with configuration and tokenizer. port: of its API. replay_port: of
            KV events. device: `cpu`, empty for what vLLM finds.
    """
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events_endpoint(spec, port=port),
        "replay_endpoint": f"tcp://{spec.host}:{replay_port}",
    }
    transfer: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": KV_ROLES[spec.role],
        "engine_id": spec.engine_id,
    }
    if device:
        transfer["kv_buffer_device"] = device
    words = [
        *(PROGRAM, "serve", str(model_dir)),
        *("--served-model-name", spec.model),
        *("--host", spec.host, "--port", str(port)),
        *loader_words(spec),
        *("--kv-events-config", json.dumps(events)),
        *("--kv-transfer-config", json.dumps(transfer)),
        "--enable-prompt-tokens-details",  # else nobody is told what a prefix cache saved
    ]
    if spec.mode is StartMode.EAGER:
        words.append("--enforce-eager")
    if spec.kv_tokens:
        blocks = -(-spec.kv_tokens // block_size_of(spec, device=device))
        words += ["--num-gpu-blocks-override", str(blocks)]
    if spec.kv_reuse_bytes:
        words += ["--kv-cache-memory-bytes", str(spec.kv_reuse_bytes)]
    if spec.max_batch_tokens:
        # vLLM fills an iteration with tokens of what decodes first; the rest is a prompt's chunk.
        words += ["--enable-chunked-prefill"]
        words += ["--max-num-batched-tokens", str(spec.max_batch_tokens)]
    if spec.max_num_seqs:
        words += ["--max-num-seqs", str(spec.max_num_seqs)]
    return [*words, *spec.extra_args]


def process_environment(spec: EngineSpec, *, device: str) -> dict[str, str]:
    """What is read while vLLM is imported, and so must be there before its order."""
    found = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if device:
        found[DEVICE_ENV] = device
    return {**found, **spec.environment}


def environment(spec: EngineSpec, *, side_channel_port: int) -> dict[str, str]:
    """What vLLM reads from the environment once it knows its order."""
    found = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": spec.host,  # else it asks the routing table, and may bind to the world
        "VLLM_ENGINE_READY_TIMEOUT_S": str(ENGINE_READY_LIMIT_S),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": spec.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
    }
    if spec.compile_cache_dir is not None:
        # One folder for all that is compiled: what lies outside of it would not be there next time.
        found["VLLM_CACHE_ROOT"] = str(spec.compile_cache_dir)
        found["TORCHINDUCTOR_CACHE_DIR"] = str(spec.compile_cache_dir / "torchinductor")
        found["TRITON_CACHE_DIR"] = str(spec.compile_cache_dir / "triton")
    return {**found, **spec.environment}
