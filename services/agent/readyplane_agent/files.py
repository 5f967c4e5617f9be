"""Byte ranges of local files: the node's cache (tier L2) and a rack's mount (tier L3).

Owns how a file of this machine is read. What lies in the page cache is copied from there; what
does not is read past it (O_DIRECT): a third of the CPU time, and nobody else's pages are pushed
out. Where a direct read is not possible it is a buffered one, counted by reason. Hands `pipeline`
hashed bytes in the memory it was given, or a `Fault` as a value; never judges content.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from readyplane.core.identity import FileEntry
from readyplane_agent.ranges import Fault

BLOCK_BYTES = 4096
"""What a direct read's memory, file offset and length are multiples of."""

CACHED_PIECE_BYTES = 2**20
"""Copied from the page cache at once: hashed while it is still in the processor's own cache."""

DIRECT_PIECE_BYTES = 8 * 2**20
"""Asked of the disk at once."""

DIRECT_LANES = 8
"""Reads that a disk is given at once: while one thread hashes, the others keep it busy."""

CACHED_LANES = min(4, os.cpu_count() or 1)
"""Threads that copy out of the page cache: more than cores only wait for each other."""

RESIDENCE_SAMPLES = 3
RESIDENT_SHARE_MIN = 0.75
"""A chunk of which less is in the page cache is read past it."""

# Not CDLL: a look at one page is over before the interpreter's lock is given away and had back.
_libc = ctypes.PyDLL(None)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


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
    """One file of the artifact, open for both ways of reading; while it is, it is not evicted.

    Attributes:
        found_bytes: its length when it was opened. no_direct: why it cannot be read directly.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a mount without locks has no evictor of ours either
            fcntl.flock(self.buffered, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._direct, self.no_direct = -1, ""
        self._pages: mmap.mmap | None = None
        self._base = 0
        self._page = ctypes.c_ubyte()
        found = os.fstat(self.buffered)
        self.found_bytes = found.st_size
        # Of somebody else's file the kernel says that all of it is cached, whatever is.
        self._told = os.geteuid() in (0, found.st_uid) or os.access(path, os.W_OK)

    def direct(self) -> int:
        """The descriptor that reads past the page cache; -1 with `no_direct` where none does."""
        if self._direct < 0 and not self.no_direct:
            try:
                # The file that is open, whatever has its name by now.
                again = f"/proc/self/fd/{self.buffered}"
                self._direct = os.open(again, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except (OSError, AttributeError):
                self.no_direct = "the file system has no direct reads"
        return self._direct

    def resident_share(self, start: int, size: int) -> float | None:
        """Share of a range that lies in the page cache, by samples; None where nobody says.

        Asked without reading (mincore): a read that tries would have the kernel read ahead.
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
        end = min(start + size, self.size_bytes)
        step = max(mmap.PAGESIZE, -(-size // RESIDENCE_SAMPLES))
        look, base, page, into = _libc.mincore, self._base, self._page, ctypes.byref(self._page)
        samples = resident = 0
        for place in range(start, end, step):
            if look(base + place - place % mmap.PAGESIZE, 1, into) != 0:
                return None
            samples += 1
            resident += page.value & 1
        return resident / samples if samples else 1.0

    def close(self) -> None:
        """End it. Idempotent."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None
        for fd in (self.buffered, self._direct):
            if fd >= 0:
                os.close(fd)
        self.buffered = self._direct = -1


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
            size = opened.found_bytes
            if size != entry.size_bytes:
                return Fault("corrupt", f"{entry.path} has {size} of {entry.size_bytes} B")
            return self._read(opened, entry, start, into)
        except OSError as error:
            lasts = isinstance(error, FileNotFoundError)
            return Fault("dead", f"{entry.path}: {error.strerror or error}", lasts=lasts)

    def lanes(self, entries: Sequence[FileEntry]) -> int:
        """How many readers these files are worth, by where most of their bytes lie."""
        resident = total = 0.0
        for entry in entries:
            try:
                share = self._opened(entry).resident_share(0, entry.size_bytes)
            except OSError:
                continue
            resident += (share or 0.0) * entry.size_bytes
            total += entry.size_bytes
        cached = not self._direct or resident >= RESIDENT_SHARE_MIN * total
        return CACHED_LANES if cached else DIRECT_LANES

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
        running = xxhash.xxh3_128()
        why = self._why_buffered(opened, start, into)
        done = 0
        if why is None:
            whole = len(into) // BLOCK_BYTES * BLOCK_BYTES
            try:
                done = _hash_in(opened.direct(), start, into[:whole], running, BLOCK_BYTES)
            except OSError:
                # Some file systems take the flag and refuse the read: buffered from here on.
                opened.no_direct = why = "the file system refused a direct read"
                running = xxhash.xxh3_128()
            self.ways.direct_bytes += done
        rest = into[done:]
        got = _hash_in(opened.buffered, start + done, rest, running, 1)
        self._count(got, why)
        if got < len(rest):
            return Fault("corrupt", f"{entry.path} ended at {start + done + got} B")
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
        if opened.direct() < 0 or opened.no_direct:
            return opened.no_direct
        if start % BLOCK_BYTES or address(into) % BLOCK_BYTES:
            return "the chunk does not begin at a whole block"
        return None

    def _count(self, size: int, why: str | None) -> None:
        ways = self.ways
        if why is None:
            ways.tail_bytes += size
        elif not why:
            ways.cached_bytes += size
        else:
            ways.fallback_bytes[why] = ways.fallback_bytes.get(why, 0) + size


def _hash_in(
    fd: int, start: int, into: memoryview, running: xxhash.xxh3_128, block_bytes: int
) -> int:
    """Fill `into` piece by piece, hashing each while it is near; returns how far it came.

    Short of all only at the file's end, or where a read ended inside one of the blocks that this
    descriptor reads in.
    """
    piece_bytes = CACHED_PIECE_BYTES if block_bytes == 1 else DIRECT_PIECE_BYTES
    read, update, size = os.preadv, running.update, len(into)
    done = 0
    while done < size:
        piece = into[done : done + piece_bytes]
        got = read(fd, (piece,), start + done)
        if got == 0:
            break
        update(piece if got == len(piece) else piece[:got])
        done += got
        if got % block_bytes:
            break
    return done


def address(view: memoryview) -> int:
    """Where writable memory lies in this process."""
    if not len(view):
        return 0
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
