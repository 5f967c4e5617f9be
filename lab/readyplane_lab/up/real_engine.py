"""The vLLM that `readyplane up --engine vllm` runs: where it is, what it is, what it is told.

Owns finding it, before anything is started; vLLM lives in an environment of its own and is never
imported here.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from readyplane.core.errors import InvalidField

FOUND_WITHIN_S = 60.0
DEFAULT_ENVIRONMENT = ".venv-vllm"
REMEDY = (
    "run `make vllm-env`, or give the `vllm` program of an environment that has vLLM and NIXL"
    " (--vllm-bin PATH)"
)
# Asked without importing vLLM, which takes many seconds.
_ASK = (
    "import importlib.metadata as m, importlib.util as u, json;"
    "print(json.dumps({'vllm': m.version('vllm'), 'torch': m.version('torch'),"
    "'nixl': any(u.find_spec(n) is not None for n in ('nixl', 'nixl_ep', 'nixl_cu12'))}))"
)
ON_CPU: Mapping[str, str] = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "UCX_TLS": "tcp,self,sm",
}


@dataclass(frozen=True, slots=True)
class RealEngine:
    """An environment with vLLM.

    Attributes:
        program: `vllm` in it. version: of vLLM. on_cpu: it computes on the processor.
    """

    program: Path
    version: str
    on_cpu: bool

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """What vLLM is to read from its environment where `own` does not say otherwise."""
        wanted = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if self.on_cpu:
            wanted |= ON_CPU
        return {name: own.get(name, value) for name, value in wanted.items()}


def default_program() -> Path:
    """The program that `make vllm-env` makes, whether or not it is there."""
    root = Path(__file__).resolve().parents[3]
    return root / DEFAULT_ENVIRONMENT / "bin" / "vllm"


def find_engine(given: Path | None) -> RealEngine:
    """The environment that was given, else the one of `make vllm-env`.

    Raises:
        InvalidField: there is none, or it has no vLLM or no NIXL; says what to do.
    """
    program = (given or default_program()).absolute()
    if not (program.is_file() and os.access(program, os.X_OK)):
        raise _refusal(program, "no program is there")
    python = program.with_name("python")
    try:
        asked = subprocess.run(
            [str(python), "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=FOUND_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _refusal(program, str(error)) from error
    if asked.returncode != 0:
        why = (asked.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise _refusal(program, why)
    found = json.loads(asked.stdout)
    if not found["nixl"]:
        raise _refusal(program, "it has vLLM and no NIXL")
    on_cpu = "cpu" in f"{found['vllm']} {found['torch']}"
    return RealEngine(program, found["vllm"], on_cpu)


def _refusal(program: Path, why: str) -> InvalidField:
    told = f"--vllm-bin: {program} cannot run vLLM: {why}; {REMEDY}"
    return InvalidField("--vllm-bin", str(program), REMEDY, told)
