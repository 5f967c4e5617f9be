"""The arena: shared memory that holds a model's files byte for byte, at their final address.

Owns the layout, what is verified of it, and the seal. `pipeline` writes each chunk into `window`
and marks it once verified; `transfer` gives verified bytes to peers; the engine maps `path` without
a copy.

Once sealed no process can change a byte of it, not even the agent (B126).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane.core.identity import FileEntry, Manifest
from readyplane_agent.arena_memory import ArenaMemory
from readyplane_agent.chunk_order import VERIFIED
from readyplane_agent.engines.layout import ARENA_ALIGN_BYTES, arena_layout, tensor_table_document

PREFAULT_BYTES = 32 * 2**20


class Arena:
    """Memory for all files of one manifest: weights in the engine's layout, the others after it.

    Args:
        manifest: what will be loaded.
        memory: where, of at least as many bytes; new memory without.
        places: offset of each file, and the arena's length; the engine's layout without.
        align_bytes: of what the offset of each file is a multiple, in that layout.

    Attributes:
        size_bytes: length of the memory file. offsets: file path -> its first byte.
        chunks: (file path, place in it) of every chunk, in the manifest's order (`core.chunks`).
        progress: a byte for each of them: `MISSING`, `COMING` or `VERIFIED`.
        whole_files: whether the memory holds the files as they are, so that peers can read there.
        tell_whole: announces that all of it can be had here; called before the load gives its
            places back, since in between others would see one that loads from nobody.
    """

    whole_files = True
    tell_whole: Callable[[], Awaitable[object]] | None = None

    def __init__(
        self,
        manifest: Manifest,
        memory: ArenaMemory | None = None,
        *,
        places: tuple[Mapping[str, int], int] | None = None,
        align_bytes: int = ARENA_ALIGN_BYTES,
    ) -> None:
        self.manifest, self._align_bytes = manifest, align_bytes
        if places is None:
            places = places_of(manifest, align_bytes=align_bytes)
        self.offsets, self.size_bytes = places
        self._entries = {entry.path: entry for entry in manifest.files}
        self.chunks: tuple[tuple[str, int], ...] = tuple(
            (entry.path, index) for entry in manifest.files for index in range(len(entry.chunks))
        )
        self._numbers = {chunk: number for number, chunk in enumerate(self.chunks)}
        self.progress = bytearray(len(self.chunks))
        self._missing = set(self.chunks)
        if memory is not None and memory.size_bytes < self.size_bytes:
            raise InvalidField("arena.memory", memory.size_bytes, f"give {self.size_bytes} B")
        self.memory = ArenaMemory(self.size_bytes) if memory is None else memory

    @property
    def fd(self) -> int:
        """The memory file; -1 once closed."""
        return self.memory.fd

    @property
    def sealed(self) -> bool:
        """Whether no process can change a byte any more."""
        return self.memory.sealed

    @property
    def path(self) -> Path:
        """Where another process of this user can open the arena while this one lives."""
        return self.memory.path

    def locate(self, path: str, start: int = 0) -> tuple[int, int]:
        """Where a byte of a file lies: (which of the memory's `descriptors`, offset)."""
        return self.memory.locate(self.offsets[path] + start)

    def entry(self, path: str) -> FileEntry | None:
        """The manifest's line about a file, None when it has no such file."""
        return self._entries.get(path)

    def purpose(self, path: str) -> str:
        """What a file is for: `weights`, `tokenizer`, …"""
        return self._entries[path].purpose

    def prefault(self, start: int = 0, size_bytes: int | None = None) -> bool:
        """Fault pages in, in parallel with discovery; see `ArenaMemory.prefault`."""
        return self.memory.prefault(
            start, self.size_bytes - start if size_bytes is None else size_bytes
        )

    def prefault_chunk(self, path: str, index: int) -> None:
        """Fault in where a chunk will lie, unless that was done ahead."""
        start, size = self.span(path, index)
        self.memory.prefault(self.offsets[path] + start, size)

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
        return self.memory.view[at : at + size]

    def view(self, path: str) -> memoryview:
        """The bytes of a whole file."""
        at = self.offsets[path]
        return self.memory.view[at : at + self._entries[path].size_bytes]

    def header(self, path: str) -> memoryview:
        """The first bytes of a weight file, at least up to its first tensor."""
        return self.view(path)

    def pieces(self, path: str, size_bytes: int) -> Iterator[memoryview]:
        """The bytes of a whole file, in pieces of at most so many.

        Raises:
            IdentityMismatch: memory that does not hold files as they are lost some.
        """
        view = self.view(path)
        for start in range(0, len(view), size_bytes):
            yield view[start : start + size_bytes]

    @property
    def rank_paths(self) -> tuple[Path, ...]:
        """Each rank's memory, by its number, as `path`."""
        return (self.path,)

    def placed(self) -> tuple[int, ...]:
        """Bytes that each rank's memory holds so far, by its number; not counted for one rank."""
        return (0,)

    def tables(self) -> tuple[dict[str, Any], ...]:
        """Each rank's tensor table, by its number."""
        layout = arena_layout(self.manifest, align_bytes=self._align_bytes)
        return (tensor_table_document(layout, manifest_digest=self.manifest.digest),)

    @property
    def world(self) -> int:
        """How many ranks have their memory here."""
        return 1

    def uncovered(self) -> list[str]:
        """Tensors of which not every part is with some rank, once; none where files lie whole."""
        return []

    def held_by_ranks(self) -> dict[str, list[int]]:
        """Tensors and bytes of each rank, by its number; nothing for one rank."""
        return {}

    @property
    def memories(self) -> tuple[tuple[ArenaMemory, int], ...]:
        """All memory files, and how much of each is used."""
        return ((self.memory, self.size_bytes),)

    def mark(self, path: str, index: int) -> None:
        """A chunk's bytes were verified in place."""
        self.progress[self._numbers[path, index]] = VERIFIED
        self._missing.discard((path, index))

    def drop(self, path: str, index: int) -> None:
        """A chunk came to nothing; its place is written again by the next try."""

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
        self.memory.seal()

    def close(self) -> None:
        """Give the memory back (to the kernel once the engine is gone too). Idempotent."""
        self.memory.close()


def arena_bytes(manifest: Manifest) -> int:
    """How much memory the arena of a manifest takes."""
    return places_of(manifest)[1]


def places_of(
    manifest: Manifest, *, align_bytes: int = ARENA_ALIGN_BYTES
) -> tuple[Mapping[str, int], int]:
    """(offset of each file, length of the arena): weights as the engine sees them, then the rest."""
    layout = arena_layout(manifest, align_bytes=align_bytes)
    offsets = dict(layout.file_offsets)
    end = layout.size_bytes
    for entry in manifest.files:
        if entry.path not in offsets:
            offsets[entry.path] = end
            end += -(-entry.size_bytes // align_bytes) * align_bytes
    return offsets, max(end, align_bytes)


async def prefault(arena: Arena, *, stop: Callable[[], bool] = lambda: False) -> float:
    """Fault the arena's pages in ahead of the loader, in file order; returns the bytes done."""
    done = 0
    for memory, size_bytes in arena.memories:
        for start in range(0, size_bytes, PREFAULT_BYTES):
            size = min(PREFAULT_BYTES, size_bytes - start)
            if stop() or not await asyncio.to_thread(memory.prefault, start, size):
                return float(done)
            done += size
    return float(done)
