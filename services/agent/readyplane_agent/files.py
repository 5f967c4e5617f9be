"""Byte ranges of local files: the node's cache (tier L2) and a rack's mount (tier L3).

Owns how a file of this machine is read. What lies in the page cache is copied from there; what
does not is read past it (O_DIRECT): a third of the CPU time, and nobody else's pages are pushed
out. Where a direct read is not possible it is a buffered one, counted by reason. Hands `pipeline`
hashed bytes in the memory it was given, or a `Fault` as a value; never judges content.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from readyplane.core.identity import FileEntry
from readyplane_agent.ranges import Fault

BLOCK_BYTES = 4096
"""What a direct read's memory, file offset and length are multiples of."""

CACHED_PIECE_BYTES = 2**20
"""Copied from the page cache at once: hashed while it is still in the processor's own cache."""

DIRECT_PIECE_BYTES = 4 * 2**20
"""Asked of the disk at once."""

RESIDENT_SHARE_MIN = 0.75
"""A chunk of which less is in the page cache is read past it."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class ReadWays:
    """How the bytes of local files came: a direct read, the page cache, or a fall-back.

    Attributes:
        direct_bytes: past the page cache. cached_bytes: copied out of it. tail_bytes: ends of
            files that are no whole block, which only a buffered read gives.
        fallback_bytes: read buffered although not cached, by reason.
    """

    direct_bytes: int = 0
    cached_bytes: int = 0
    tail_bytes: int = 0
    fallback_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, other: ReadWays) -> None:
        """Take another reader's bytes in."""
        self.direct_bytes += other.direct_bytes
        self.cached_bytes += other.cached_bytes
        self.tail_bytes += other.tail_bytes
        for reason, size in other.fallback_bytes.items():
            self.fallback_bytes[reason] = self.fallback_bytes.get(reason, 0) + size

    def text(self) -> str:
        """One part of the segment's detail; empty when no local file was read."""
        parts = [
            f"{size / 1e6:.1f} MB {what}"
            for what, size in (
                ("direct", self.direct_bytes),
                ("from the page cache", self.cached_bytes),
            )
            if size
        ]
        parts += [
            f"{size / 1e6:.1f} MB buffered ({reason})"
            for reason, size in sorted(self.fallback_bytes.items())
        ]
        return ", ".join(parts)


class OpenFile:
    """One file of the artifact, open for both ways of reading.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.direct, self.no_direct = -1, ""
        self._pages: mmap.mmap | None = None
        self._base = 0
        # Of somebody else's file the kernel says that all of it is cached, whatever is.
        told = os.geteuid() in (0, os.fstat(self.buffered).st_uid) or os.access(path, os.W_OK)
        self._told = told
        try:
            self.direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except (OSError, AttributeError):
            self.no_direct = "the file system has no direct reads"

    def resident_share(self, start: int, size: int) -> float | None:
        """Share of a range that lies in the page cache, None where the kernel does not say.

        Asked of the page tables' owner (mincore), which reads nothing in: a probing read would.
        """
        if not self._told:
            return None
        if self._pages is None:
            try:
                # Written to by nobody: only a writable map gives ctypes its address.
                self._pages = mmap.mmap(
                    self.buffered, self.size_bytes, flags=mmap.MAP_PRIVATE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )  # fmt: skip
            except (OSError, ValueError):
                return None
            anchor = ctypes.c_char.from_buffer(self._pages)
            self._base = ctypes.addressof(anchor)
            del anchor
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        length = min(start + size, self.size_bytes) - first
        pages = -(-length // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        done = _libc.mincore(
            ctypes.c_void_p(self._base + first), ctypes.c_size_t(length), ctypes.byref(found)
        )
        return bytes(found).count(1) / pages if done == 0 else None

    def close(self) -> None:
        """End it. Idempotent."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None
        for fd in (self.buffered, self.direct):
            if fd >= 0:
                os.close(fd)
        self.buffered = self.direct = -1


class FileReader:
    """Ranges of local files, by positioned reads.

    Args:
        locate: where the file of a manifest entry lies. direct: whether to read past the page
            cache what is not in it.
    """

    def __init__(self, locate: Callable[[FileEntry], Path], *, direct: bool = True) -> None:
        self._locate, self._direct = locate, direct
        self._open: dict[str, OpenFile] = {}
        self.ways = ReadWays()

    def read_into(self, entry: FileEntry, start: int, into: memoryview) -> Fault | None:
        """Fill `into` with the file's bytes from `start`; None when all of them arrived."""
        found = self.read_hashed(entry, start, into)
        return found if isinstance(found, Fault) else None

    def read_hashed(self, entry: FileEntry, start: int, into: memoryview) -> Fault | str:
        """As `read_into`; returns the xxh3-128 (32 hex digits) of what was read.

        Hashed piece by piece as it comes, while it is near: a second pass over a whole chunk
        would fetch it from memory again.
        """
        try:
            opened = self._opened(entry)
            size = os.fstat(opened.buffered).st_size
            if size != entry.size_bytes:
                return Fault("corrupt", f"{entry.path} has {size} of {entry.size_bytes} B")
            return self._read(opened, entry, start, into)
        except OSError as error:
            return Fault("dead", f"{entry.path}: {error.strerror or error}")

    def close(self) -> None:
        """End it."""
        for opened in self._open.values():
            opened.close()
        self._open.clear()

    def _opened(self, entry: FileEntry) -> OpenFile:
        opened = self._open.get(entry.path)
        if opened is None:
            opened = OpenFile(self._locate(entry), entry.size_bytes)
            self._open[entry.path] = opened
        return opened

    def _read(
        self, opened: OpenFile, entry: FileEntry, start: int, into: memoryview
    ) -> Fault | str:
        why = self._why_buffered(opened, start, into)
        whole = 0 if why is not None else len(into) // BLOCK_BYTES * BLOCK_BYTES
        running = xxhash.xxh3_128()
        done = 0
        while done < len(into):
            direct = done < whole
            most = (whole if direct else len(into)) - done
            piece = into[
                done : done + min(most, DIRECT_PIECE_BYTES if direct else CACHED_PIECE_BYTES)
            ]
            try:
                got = os.preadv(opened.direct if direct else opened.buffered, [piece], start + done)
            except OSError:
                if not direct:
                    raise
                # Some file systems take the flag and refuse the read: only buffered, from here on.
                opened.no_direct = why = "the file system refused a direct read"
                whole = done
                continue
            if got == 0:
                return Fault("corrupt", f"{entry.path} ended at {start + done} B")
            running.update(piece[:got])
            done += got
            if direct and got % BLOCK_BYTES:
                whole = done  # cut in the middle of a block: what is left is no longer aligned
            self._count(got, direct=direct, why=why)
        return running.hexdigest()

    def _why_buffered(self, opened: OpenFile, start: int, into: memoryview) -> str | None:
        """None for a direct read; empty when the page cache has it; else why it cannot be one."""
        if not self._direct:
            return ""
        share = opened.resident_share(start, len(into))
        if share is not None and share >= RESIDENT_SHARE_MIN:
            return ""
        if share is None:
            return "the kernel does not say what is cached"
        if opened.no_direct:
            return opened.no_direct
        if start % BLOCK_BYTES or address(into) % BLOCK_BYTES:
            return "the chunk does not begin at a whole block"
        return None

    def _count(self, size: int, *, direct: bool, why: str | None) -> None:
        ways = self.ways
        if direct:
            ways.direct_bytes += size
        elif why is None:
            ways.tail_bytes += size
        elif not why:
            ways.cached_bytes += size
        else:
            ways.fallback_bytes[why] = ways.fallback_bytes.get(why, 0) + size


def address(view: memoryview) -> int:
    """Where writable memory lies in this process."""
    if not len(view):
        return 0
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
