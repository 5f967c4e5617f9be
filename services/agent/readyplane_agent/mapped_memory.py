"""An arena made of the node's cache: its files mapped one after another, verified where they lie.

Owns when that is done and what it proves. Nothing is copied, so a start from a warm page cache costs
one pass of hashing, and all workers of a node share one copy. It is done where the cache holds every
file and nearly all of it lies in the page cache; otherwise the reason is told, and the weights are
read into memory of their own.
"""

from __future__ import annotations

import asyncio
import bisect
import os
from collections.abc import Mapping
from pathlib import Path

from readyplane.core.errors import InvalidField
from readyplane.core.identity import Manifest
from readyplane.core.startup import SegmentName, WeightTier
from readyplane.kit.clock import Clock
from readyplane_agent.arena import Arena, places_of
from readyplane_agent.arena_memory import ArenaMemory, Faulted
from readyplane_agent.cache import WeightCache
from readyplane_agent.engines.layout import HUGE_BYTES
from readyplane_agent.engines.mapping import ArenaMap, FilePart
from readyplane_agent.files import CACHED_LANES
from readyplane_agent.in_place import verify_in_place
from readyplane_agent.source_use import SourceUse
from readyplane_agent.trace import StartTrace

RESIDENT_SHARE_MIN = 0.95
"""Of less, what is missing is read faster past the page cache (`files`)."""


class MappedMemory(ArenaMemory):
    """Files of a folder as an arena's memory; sealed from the start.

    Args:
        folder: where they are. parts: each of them, in the order of their offsets.
        size_bytes: length of the arena.

    Attributes:
        use: the account of what was verified in place.

    Raises:
        InvalidField: a file has another length. OSError: one cannot be opened or mapped.
    """

    one_file = False

    def __init__(self, folder: Path, parts: tuple[FilePart, ...], size_bytes: int) -> None:
        self._folder, self._files = folder, parts
        self._mapped = ArenaMap(folder, size_bytes, parts)
        self.size_bytes, self.view = size_bytes, self._mapped.view
        self.sealed, self.faulted = True, Faulted()
        self.use: SourceUse | None = None
        # As they were before a byte was looked at: what changes during the proof is seen as well.
        self._known = {name: _identity(fd) for name, fd in self._mapped.files.items()}
        # Not the arena's file, there is none: what says that it is not closed yet.
        self.fd = min(self._mapped.files.values())

    @property
    def path(self) -> Path:
        """The folder of the files: the tensor table names them."""
        return self._folder

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Of each file, in the order of their offsets."""
        return tuple(self._mapped.files[part.name] for part in self._files)

    def locate(self, at: int) -> tuple[int, int]:
        """The file that holds a byte of the arena: (which of `descriptors`, offset in it)."""
        number = bisect.bisect_right(self._files, at, key=lambda part: part.offset_bytes) - 1
        return number, at - self._files[number].offset_bytes

    def files_before(self, size_bytes: int) -> tuple[FilePart, ...]:
        """The files of the first part of the arena, for a tensor table."""
        return tuple(part for part in self._files if part.offset_bytes < size_bytes)

    def resident_share(self) -> float | None:
        """Share of the files that lies in the page cache; None where the kernel does not say."""
        return self._mapped.resident_share()

    def changed(self) -> dict[str, str]:
        """Files that somebody has written to or cut since they were opened: by name, what is seen.

        Told by length and time of change. Neither is another's use of the file (it touches the time
        of access alone), its removal or replacement under its name: what is mapped stays.
        """
        found = {}
        for name, fd in self._mapped.files.items() if self.fd >= 0 else ():
            size_bytes, changed_ns = self._known[name]
            now_bytes, now_ns = _identity(fd)
            if now_bytes != size_bytes:
                found[name] = f"{now_bytes} B instead of {size_bytes}"
            elif now_ns != changed_ns:
                found[name] = "written to after it was verified"
        return found

    def is_file(self, path: Path) -> bool:
        """Whether the file of that name in the folder is the one that is mapped."""
        fd = self._mapped.files.get(path.name)
        try:
            return fd is not None and os.path.samestat(path.lstat(), os.fstat(fd))
        except OSError:
            return False

    def forsake(self) -> None:
        """No byte of it is read here any more: pages of a file that was cut would end this process."""
        self.view = memoryview(b"")

    def prefault(self, start: int, size_bytes: int) -> bool:  # noqa: ARG002 - the memory is there
        """Nothing to do: the pages are there."""
        return True

    def seal(self) -> None:
        """It is."""

    def close(self) -> None:
        """Let the files go. Idempotent."""
        if self.fd < 0:
            return
        self.fd = -1
        self._mapped.close()


def _identity(fd: int) -> tuple[int, int]:
    """(length in bytes, time of the last change of its bytes in ns)."""
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns


def open_mapped(manifest: Manifest, cache: WeightCache) -> Arena | str:
    """The cache's files as an arena in which nothing is verified yet, or why it cannot be one."""
    # The kernel maps 2 MiB at a time only where memory and file are alike in their last 21 bits.
    offsets, size_bytes = places_of(manifest, align_bytes=HUGE_BYTES)
    entries = sorted((e for e in manifest.files if e.size_bytes), key=lambda e: offsets[e.path])
    parts = tuple(FilePart(cache.locate(e).name, offsets[e.path], e.size_bytes) for e in entries)
    try:
        memory = MappedMemory(cache.folder, parts, size_bytes)
    except (OSError, InvalidField) as error:
        return f"the cache's files cannot be mapped ({error})"
    share = memory.resident_share()
    if share is None or share < RESIDENT_SHARE_MIN:
        memory.close()
        if share is None:
            return "the kernel does not say what is in the page cache"
        return f"{share:.0%} of it is in the page cache"
    return Arena(manifest, memory, align_bytes=HUGE_BYTES)


async def mapped_arena(
    manifest: Manifest, cache: WeightCache, *, node: str, clock: Clock, trace: StartTrace
) -> Arena | str:
    """The cache's files as a verified arena, or why the weights have to be read.

    The segment `weight_read` tells which, unless the cache does not hold all of them; a file that is
    not what its name says leaves the cache.
    """
    if not cache.holds(manifest):
        return "the node's cache does not hold all of it"
    with trace.span(SegmentName.WEIGHT_READ) as span:
        found = await asyncio.to_thread(open_mapped, manifest, cache)
        if isinstance(found, str):
            span.detail = f"not mapped: {found}"
            return found
        use = SourceUse(f"mapped:{node}", WeightTier.L1_HOST, way="mapped, nothing copied")
        begun_s = clock.monotonic_s()
        try:
            wrong = await asyncio.to_thread(
                verify_in_place, found, use, clock, threads_max=CACHED_LANES
            )
        except BaseException:
            found.close()
            raise
        use.elapsed_s = clock.monotonic_s() - begun_s
        if wrong:
            for entry in manifest.files:
                if entry.path in wrong:
                    cache.discard(entry)
            found.close()
            why = f"{wrong[0]} is not what the manifest says: taken out of the cache"
            span.detail = f"not mapped: {why}"
            return why
        assert isinstance(found.memory, MappedMemory)
        found.memory.use = use
        cache.used(manifest)
        span.detail = use.text()
        return found


def files_of(arena: Arena, size_bytes: int) -> Mapping[str, object]:
    """What a tensor table says beside the tensors when the arena is made of files; else nothing.

    Args:
        size_bytes: the first part of the arena, which is the engine's.
    """
    if not isinstance(arena.memory, MappedMemory):
        return {}
    parts = arena.memory.files_before(size_bytes)
    return {"files": [[p.name, p.offset_bytes, p.size_bytes] for p in parts]}
