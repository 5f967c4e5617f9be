"""Shared memory that vLLM's processes leave behind when they are killed.

Owns finding it while they live and removing it when all are gone. vLLM's processes talk over rings of
some 200 MB in /dev/shm, made by Python's `shared_memory`; a process that is killed removes nothing,
and the helper that would do it for its parent is ended with the rest of the process group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108 - where the kernel has it, not a place of ours
PREFIX = "psm_"  # names that Python's `shared_memory` makes


def shared_by(pids: Iterable[int]) -> frozenset[Path]:
    """Files of such memory that these processes have mapped; of one that is gone none is known."""
    found = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            path = Path(line.split(maxsplit=5)[-1])
            if path.parent == FOLDER and path.name.startswith(PREFIX):
                found.add(path)
    return frozenset(found)


def remove(paths: Iterable[Path]) -> None:
    """Take what is left of them away; what its owner has removed is gone already."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
