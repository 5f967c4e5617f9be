"""The arena: shared memory that holds a model's files byte for byte, at their final address.

Owns the memory file, its layout and its seal. `loader` writes each chunk into `window` and marks
it once verified; `transfer` gives verified bytes to peers; the engine maps `path` without a copy.

The file has no name in any folder (memfd): it ends with its last user, so a killed agent leaves
nothing behind. Once sealed no process can change a byte of it, not even the agent (B126).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from readyplane.core.errors import InvalidField, Unavailable
from readyplane.core.identity import FileEntry, Manifest
from readyplane_agent.engines.layout import ARENA_ALIGN_BYTES, arena_layout

PREFAULT_BYTES = 32 * 2**20
MISSING, COMING, VERIFIED = 0, 1, 2
_MADV_POPULATE_WRITE = 23  # Linux 5.14; faults pages in without changing them
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Arena:
    """Memory for all files of one manifest: weights in the engine's layout, the others after it.

    Args:
        manifest: what will be loaded.

    Attributes:
        size_bytes: length of the memory file. offsets: file path -> its first byte.
        chunks: (file path, place in it) of every chunk, in the manifest's order (`core.chunks`).
        progress: a byte for each of them: `MISSING`, `COMING` or `VERIFIED`.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        layout = arena_layout(manifest)
        offsets = dict(layout.file_offsets)
        end = layout.size_bytes
        for entry in manifest.files:
            if entry.path not in offsets:
                offsets[entry.path] = end
                end += -(-entry.size_bytes // ARENA_ALIGN_BYTES) * ARENA_ALIGN_BYTES
        self.offsets: Mapping[str, int] = offsets
        self.size_bytes = max(end, ARENA_ALIGN_BYTES)
        self._entries = {entry.path: entry for entry in manifest.files}
        self.chunks: tuple[tuple[str, int], ...] = tuple(
            (entry.path, index) for entry in manifest.files for index in range(len(entry.chunks))
        )
        self._numbers = {chunk: number for number, chunk in enumerate(self.chunks)}
        self.progress = bytearray(len(self.chunks))
        self._missing = set(self.chunks)
        self.sealed = False
        self.fd = os.memfd_create("readyplane-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size_bytes)
            self._map = mmap.mmap(self.fd, self.size_bytes)
        except OSError as error:
            os.close(self.fd)
            raise Unavailable(
                f"cannot get {self.size_bytes} B of shared memory for the weights ({error})",
                "free memory on this node or raise the container's memory limit",
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A kernel without huge pages for shared memory is only slower.
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)

    @property
    def path(self) -> Path:
        """Where another process of this user can open the arena while this one lives."""
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}")

    def entry(self, path: str) -> FileEntry | None:
        """The manifest's line about a file, None when it has no such file."""
        return self._entries.get(path)

    def prefault(self, start: int = 0, size_bytes: int | None = None) -> bool:
        """Fault pages in, in parallel with discovery; first touch costs more than reading.

        Returns False where the kernel cannot (the pages are then faulted in while loading).
        Blocking, and lets other threads run: call it in one.
        """
        size = self.size_bytes - start if size_bytes is None else size_bytes
        libc = ctypes.CDLL(None, use_errno=True)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        done: int = libc.madvise(
            ctypes.c_void_p(base + start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE
        )
        if done != 0 and ctypes.get_errno() == 12:
            raise Unavailable(
                f"no memory for an arena of {self.size_bytes} B", "free memory on this node"
            )
        return done == 0

    def span(self, path: str, index: int) -> tuple[int, int]:
        """(offset in its file, length) of a chunk."""
        chunk = self.manifest.chunk_bytes
        start = index * chunk
        return start, min(chunk, self._entries[path].size_bytes - start)

    def window(self, path: str, index: int) -> memoryview:
        """Writable memory of a chunk at its final address, until it is verified or sealed.

        A verified chunk may be on its way to a peer or be read by the engine: nobody writes it
        again, not even with the same bytes.
        """
        if self.sealed:
            raise InvalidField("arena", path, "write only before the arena is sealed")
        if (path, index) not in self._missing:
            raise InvalidField("arena", f"{path}[{index}]", "leave a verified chunk as it is")
        start, size = self.span(path, index)
        at = self.offsets[path] + start
        return self._view[at : at + size]

    def view(self, path: str) -> memoryview:
        """The bytes of a whole file."""
        at = self.offsets[path]
        return self._view[at : at + self._entries[path].size_bytes]

    def mark(self, path: str, index: int) -> None:
        """A chunk's bytes were verified in place."""
        self.progress[self._numbers[path, index]] = VERIFIED
        self._missing.discard((path, index))

    def missing(self) -> list[tuple[str, int]]:
        """Chunks not yet verified: small files first (an engine asks for them), then in order."""
        missing = list(self._missing)  # in one step: other threads mark chunks meanwhile
        return sorted(missing, key=lambda c: (self._entries[c[0]].purpose == "weights", *c))

    def verified(self, path: str, start: int, size_bytes: int) -> bool:
        """Whether every chunk that a range of a file touches was verified."""
        first, end = start // self.manifest.chunk_bytes, start + size_bytes
        last = -(-end // self.manifest.chunk_bytes)
        return not any((path, index) in self._missing for index in range(first, last))

    def has(self, path: str) -> bool:
        """Whether every chunk of a file was verified."""
        return not any(missing == path for missing, _ in list(self._missing))

    @property
    def complete(self) -> bool:
        """Whether every chunk of every file was verified."""
        return not self._missing

    def seal(self) -> None:
        """Make the bytes unchangeable for everybody, for good.

        Raises:
            InvalidField: a chunk is not verified. Unavailable: somebody still maps it writable.
        """
        if self.sealed:
            return
        if self._missing:
            path, index = min(self._missing)
            raise InvalidField("arena", f"{path}[{index}]", "verify every chunk before the seal")
        self._view.release()
        self._map.close()
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            raise Unavailable(
                f"the arena cannot be sealed ({error})", "keep no writable map of it"
            ) from error
        self._map = mmap.mmap(self.fd, self.size_bytes, prot=mmap.PROT_READ)
        self._view = memoryview(self._map)
        self.sealed = True

    def close(self) -> None:
        """Give the memory back (to the kernel once the engine is gone too). Idempotent."""
        if self.fd < 0:
            return
        self._view.release()
        with contextlib.suppress(BufferError):  # a reader's view keeps the map until it ends
            self._map.close()
        os.close(self.fd)
        self.fd = -1


async def prefault(arena: Arena, *, stop: Callable[[], bool] = lambda: False) -> float:
    """Fault the arena's pages in ahead of the loader, in file order; returns the bytes done."""
    done = 0
    for start in _pieces(arena.size_bytes):
        size = min(PREFAULT_BYTES, arena.size_bytes - start)
        if stop() or not await asyncio.to_thread(arena.prefault, start, size):
            break
        done += size
    return float(done)


def _pieces(size_bytes: int) -> Iterable[int]:
    return range(0, size_bytes, PREFAULT_BYTES)
