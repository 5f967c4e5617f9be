"""Byte ranges of local files: the node's cache (tier L2) and a rack's mount (tier L3).

Owns how a file of this machine is read. Hands `pipeline` bytes in the memory it was given, or a
`Fault` as a value; never judges content (the pipeline hashes).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from readyplane.core.identity import FileEntry
from readyplane_agent.ranges import Fault


class FileReader:
    """Ranges of local files, by positioned reads.

    Args:
        locate: where the file of a manifest entry lies.
    """

    def __init__(self, locate: Callable[[FileEntry], Path]) -> None:
        self._locate = locate
        self._open: dict[str, int] = {}

    def read_into(self, entry: FileEntry, start: int, into: memoryview) -> Fault | None:
        try:
            fd = self._open.get(entry.path)
            if fd is None:
                fd = os.open(self._locate(entry), os.O_RDONLY | os.O_CLOEXEC)
                self._open[entry.path] = fd
            size = os.fstat(fd).st_size
            if size != entry.size_bytes:
                return Fault("corrupt", f"{entry.path} has {size} of {entry.size_bytes} B")
            done = 0
            while done < len(into):
                got = os.preadv(fd, [into[done:]], start + done)
                if got == 0:
                    return Fault("corrupt", f"{entry.path} ended at {start + done} B")
                done += got
        except OSError as error:
            return Fault("dead", f"{entry.path}: {error.strerror or error}")
        return None

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
