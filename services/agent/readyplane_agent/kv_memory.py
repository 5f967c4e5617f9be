"""The device's memory as an engine will find it: how much, how much is free, and who else is there.

Owns the looking, before the engine starts, so that everything in use belongs to others. Hands
`MemoryFacts` to `core.kv_profile`. What could not be found out is None, never zero.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from readyplane.core.compile_environment import review_arguments
from readyplane.core.compile_key import Seen, known, unknown
from readyplane.core.identity import Manifest
from readyplane.core.kv_profile import MemoryFacts
from readyplane_agent.compile_inspect import DEFAULT, DRIVER_SIGNS, ProbeFailed, Run, run
from readyplane_agent.engines.port import EngineSpec

MIB = 2**20
MEMORY_SHARE = 0.9
CGROUP_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
UNLIMITED_BYTES = 2**60  # an older kernel writes a number so large for `max`


@dataclass(frozen=True, slots=True)
class Device:
    """A device's memory now, bytes; None where it is not known.

    Attributes:
        free: as it is told; its problem where it is not.
    """

    total_bytes: int | None = None
    taken_bytes: int | None = None
    takers: int | None = None
    free: Seen = unknown("no device is described")  # noqa: RUF009 - a frozen value


class MemoryProbe:
    """One look at the memory on behalf of one engine. Blocking: call it in a thread.

    Args:
        engine: `modelled` or `vllm`. environ: of the agent. run, exists: as `Inspector` has them.
    """

    def __init__(
        self,
        engine: str,
        environ: Mapping[str, str],
        *,
        run: Run = run,
        exists: Callable[[str], bool] = os.path.exists,
    ) -> None:
        self._engine, self._environ, self._run, self._exists = engine, environ, run, exists

    def look(self, spec: EngineSpec, manifest: Manifest) -> tuple[MemoryFacts, Seen]:
        """(what a KV size depends on, free bytes now)."""
        given = flags_of(spec.extra_args)
        device = self._modelled(given) if self._engine == "modelled" else self._cuda()
        counted = review_arguments(spec.extra_args).counted
        facts = MemoryFacts(
            device_total_bytes=device.total_bytes,
            co_tenant_bytes=device.taken_bytes,
            co_tenants=device.takers,
            container_limit_bytes=container_limit_bytes(),
            memory_share=_number(given.get("--gpu-memory-utilization"), MEMORY_SHARE),
            block_size=_whole(given.get("--block-size"), manifest.config.get("block_size", 16)),
            max_batch_tokens=spec.max_batch_tokens,
            max_num_seqs=spec.max_num_seqs,
            # What a staged start measures has no graphs in it yet (R14.1).
            graph_sizes=counted.get("--cuda-graph-sizes", DEFAULT)
            + (", first stage" if spec.graph_stages else ""),
            mm_limits=counted.get("--limit-mm-per-prompt", "none"),
            lora=_said(counted, "lora"),
            encoder=_said(counted, "encoder", "--mm-processor", "--language-model-only"),
        )
        return facts, device.free

    def _modelled(self, given: Mapping[str, str]) -> Device:
        total = _whole(given.get("--device-bytes"), 0)
        taken = _whole(given.get("--device-taken-bytes"), 0)
        if not total or taken is None:
            return Device()
        return Device(total, taken, int(taken > 0), known(max(0, total - taken)))

    def _cuda(self) -> Device:
        if not any(self._exists(path) for path in DRIVER_SIGNS):
            return Device()
        one = self._environ.get("CUDA_VISIBLE_DEVICES", "")
        words = ["nvidia-smi", *([f"--id={one}"] if one else [])]
        shape = "--format=csv,noheader,nounits"
        try:
            rows = self._rows([*words, "--query-gpu=memory.total,memory.used,memory.free", shape])
            pids = self._rows([*words, "--query-compute-apps=pid", shape])
        except (ProbeFailed, ValueError) as error:
            return Device(free=unknown(f"nvidia-smi: {error}"))
        if len(rows) != 1 or len(rows[0]) != 3:
            return Device(free=unknown(f"{len(rows)} devices are visible; give one to each worker"))
        total, used, free = (number * MIB for number in rows[0])
        return Device(total, used, len(pids), known(free))

    def _rows(self, command: list[str]) -> list[list[int]]:
        lines = self._run(command, self._environ).splitlines()
        return [[int(word) for word in line.split(",")] for line in lines if line.strip()]


def _said(counted: Mapping[str, str], *words: str) -> str:
    """Every flag that one of the words is part of, with its value; `none` without any."""
    found = [f"{n}={v}" for n, v in sorted(counted.items()) if any(w in n for w in words)]
    return " ".join(found) or "none"


def flags_of(words: tuple[str, ...]) -> dict[str, str]:
    """`--flag value` and `--flag=value` by flag, those that do not count for code included."""
    found: dict[str, str] = {}
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            after = words[index + 1] if index + 1 < len(words) else ""
            found[flag.replace("_", "-")] = value if equals else after
    return found


def container_limit_bytes() -> int | None:
    """Memory limit of this container; 0 without one, None when nobody says."""
    for name in CGROUP_FILES:
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text == "max":
            return 0
        if text.isdigit():
            return int(text) if int(text) < UNLIMITED_BYTES else 0
        return None
    # No such file: the root group of a machine without limits has none.
    return 0 if Path("/sys/fs/cgroup").is_dir() else None


def _whole(text: str | None, default: object) -> int | None:
    found = default if text is None else text
    return int(str(found)) if str(found).isdigit() else None


def _number(text: str | None, default: float) -> float | None:
    try:
        return default if text is None else float(text)
    except ValueError:
        return None
