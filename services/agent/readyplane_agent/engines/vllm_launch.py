"""A vLLM server whose imports come before its order: the process that an agent starts.

Owns the way from a bare Python to vLLM's own `serve`: marks, the fork server, the imports, and the
order, one line of JSON on standard input (`{"words": [...], "environment": {...}, "folder": "..."}`).
Until it comes the process holds neither weights nor KV memory; a standard input that ends without
one ends it. Run with the Python of vLLM's environment:

    python -m readyplane_agent.engines.vllm_launch
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane_agent.engines import vllm_kept
from readyplane_agent.engines.vllm_hooks import mark
from readyplane_agent.engines.vllm_marks import SERVER_PID_ENV

DEVICE_ENV = "VLLM_TARGET_DEVICE"
# vLLM sets these on a CPU when it has read its command line; what is imported before needs them too.
ON_CPU = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}
SERVER = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.model_executor.models.registry",
    "readyplane_agent.engines.vllm_plugin",
)


def read_order(line: bytes) -> tuple[list[str], dict[str, str], str]:
    """Words of the command line after `vllm`, variables to set, folder to work in.

    Raises:
        InvalidField: not such a line.
    """
    try:
        doc: Any = json.loads(line)
        words = [str(word) for word in doc["words"]]
        environment = {str(k): str(v) for k, v in doc["environment"].items()}
        return words, environment, str(doc["folder"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidField(
            "order", line[:80], f"write words, environment and folder ({error!r})"
        ) from error


def main() -> None:
    """Import, wait for the order, serve."""
    mark("launched")
    os.environ[SERVER_PID_ENV] = str(os.getpid())
    on_cpu = os.environ.get(DEVICE_ENV) == "cpu"
    if on_cpu:
        for name, value in ON_CPU.items():
            os.environ.setdefault(name, value)
    keeps = vllm_kept.may_keep(os.environ, on_cpu=on_cpu)
    wanted = (*vllm_kept.PRELOAD, *(vllm_kept.PRELOAD_CPU if on_cpu else vllm_kept.PRELOAD_GPU))
    if keeps:
        vllm_kept.begin_importing(wanted)
    for name in SERVER:
        importlib.import_module(name)
    missing = vllm_kept.wait_imported(wanted) if keeps else []
    if missing:
        sys.stderr.write(f"not imported beforehand: {', '.join(missing)}\n")
    mark("imported", "forked processes" if keeps else "spawned processes")
    line = sys.stdin.buffer.readline()
    if not line:
        return
    words, environment, folder = read_order(line)
    mark("ordered")
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["vllm", *words]
    importlib.import_module("vllm.entrypoints.cli.main").main()


if __name__ == "__main__":
    main()
