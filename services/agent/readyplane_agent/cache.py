"""The node's weight cache (tier L2): files by content, shared by all workers of a node.

Owns the folder; hands the loader places to read from. What lies under its final name was verified
before it got there (B115) and is verified again whenever it is read (B117, B121): a machine that
lost power may keep a name without the bytes. Several processes may write at once: one holds the
file's lock and publishes by rename, the others skip; a killed one holds nothing (B116).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from readyplane.core.identity import FileEntry, Manifest
from readyplane_agent.arena import Arena

PIECE_BYTES = 4 * 2**20


class WeightCache:
    """Files by sha256 under one folder.

    Args:
        folder: shared by the workers of a node; made when missing.
        bytes_max: most bytes kept; the least recently used files go first.
    """

    def __init__(self, folder: Path, *, bytes_max: int) -> None:
        self.folder = folder
        self._bytes_max = bytes_max
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def locate(self, entry: FileEntry) -> Path:
        """Where a file lies if it is here."""
        return self.folder / entry.sha256.removeprefix("sha256:")

    def holds(self, manifest: Manifest) -> bool:
        """Whether every file is here with its right length."""
        return all(self._present(entry) for entry in manifest.files)

    def used(self, manifest: Manifest) -> None:
        """Keep the files of a manifest longest: they were just read."""
        for entry in manifest.files:
            try:
                os.utime(self.locate(entry))
            except OSError:
                continue

    def discard(self, entry: FileEntry) -> None:
        """Take a file out that is not what its name says; readers keep what they have open."""
        self.locate(entry).unlink(missing_ok=True)

    def store(self, arena: Arena) -> int:
        """Publish the verified files of a sealed arena; returns the bytes written.

        Blocking: call it in a thread. Raises OSError (disk full, read-only folder); nothing is
        left under a final name then.
        """
        wanted = [e for e in arena.manifest.files if not self._present(e)]
        size = sum(entry.size_bytes for entry in wanted)
        if not wanted or arena.manifest.size_bytes > self._bytes_max:
            return 0
        self._make_room(size, keep={self.locate(e).name for e in arena.manifest.files})
        written = 0
        for entry in wanted:
            with self._lock(entry) as mine:
                if mine and not self._present(entry):
                    written += self._write(entry, arena.view(entry.path))
        return written

    def _present(self, entry: FileEntry) -> bool:
        try:
            return self.locate(entry).stat().st_size == entry.size_bytes
        except OSError:
            return False

    @contextmanager
    def _lock(self, entry: FileEntry) -> Iterator[bool]:
        path = self.folder / (self.locate(entry).name + ".lock")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(fd)  # gives the lock back, as the end of a killed process does

    def _write(self, entry: FileEntry, data: memoryview) -> int:
        # Under the lock the part file of a killed writer is ours to remove.
        final = self.locate(entry)
        part = final.with_name(final.name + ".part")
        part.unlink(missing_ok=True)
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            done = 0
            while done < len(data):
                done += os.write(fd, data[done : done + PIECE_BYTES])
        except OSError:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        part.replace(final)
        return len(data)

    def _make_room(self, size: int, *, keep: set[str]) -> None:
        found = []
        for path in self.folder.iterdir():
            if len(path.name) == 64:
                stat = path.stat()
                found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
        total = sum(item[1] for item in found)
        for _, length, path in sorted(found):
            if total + size <= self._bytes_max:
                return
            if path.name not in keep:
                path.unlink(missing_ok=True)
                total -= length
