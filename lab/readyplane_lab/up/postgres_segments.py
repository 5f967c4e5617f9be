"""The one thing of a PostgreSQL server that lies outside its folder: a System V memory segment.

Owns its removal after a server was killed whose cluster will not be started again; a server that starts
on the same cluster does it itself. The segment is 56 bytes, but the kernel has only 4,096 of them.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

IPC_RMID = 0
SEGMENT_LINE = 6  # of postmaster.pid: "key id"


def drop_segments(postgres_dir: Path) -> None:
    """Remove the segments that killed servers of the clusters in this folder left attached to nobody."""
    left = _unattached()
    for pid_file in postgres_dir.glob("*/data/postmaster.pid"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            line = pid_file.read_text(encoding="utf-8").splitlines()[SEGMENT_LINE]
            key, segment_id = (int(word) for word in line.split())
            if left.get(segment_id) == key:
                ctypes.CDLL(None).shmctl(segment_id, IPC_RMID, None)


def _unattached() -> dict[int, int]:
    """Key by id of all segments that no process has attached."""
    table = Path("/proc/sysvipc/shm")
    if not table.exists():
        return {}
    heads, *rows = (line.split() for line in table.read_text(encoding="ascii").splitlines())
    key, segment_id, attached = (heads.index(name) for name in ("key", "shmid", "nattch"))
    return {
        int(row[segment_id]): int(row[key]) & 0xFFFFFFFF for row in rows if row[attached] == "0"
    }
