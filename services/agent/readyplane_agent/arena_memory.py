"""The shared memory of an arena: made, faulted in with huge pages, sealed, given back.

Owns the memory file and its pages. First touch costs more than reading: the kernel clears each page
and walks its tables. Pages of 2 MiB make that some ten times cheaper. Shared memory gets them when
`shmem_enabled` allows it, which most machines do not; asked for range by range (MADV_COLLAPSE,
Linux 6.1) they come without any setting. Where they do not, 4 KiB pages serve, and it is told.

The file has no name in any folder (memfd): it ends with its last user, so a killed agent leaves
nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from readyplane.core.errors import Unavailable
from readyplane_agent.engines.layout import HUGE_BYTES

_MADV_POPULATE_WRITE = 23  # Linux 5.14; faults pages in without changing them
_MADV_COLLAPSE = 25  # Linux 6.1
_NO_MEMORY = 12
_FREE, _CLAIMED, _DONE = 0, 1, 2  # a part of `HUGE_BYTES`: nobody's, somebody is at it, faulted in
_ALIGN_TRIES = 32
_PROT_NONE, _MAP_NORESERVE = 0, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_SEAL_TRIES, _SEAL_PAUSE_S = 10, 0.05
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
]


@dataclass(slots=True)
class Faulted:
    """What was faulted in ahead of the loader, by size of page."""

    huge_bytes: int = 0
    small_bytes: int = 0
    why_small: str = ""

    def text(self) -> str:
        """One line for the segment's detail."""
        parts = [f"{self.huge_bytes / 1e6:.1f} MB in pages of 2 MiB"]
        if self.small_bytes:
            why = f" ({self.why_small})" if self.why_small else ""
            parts.append(f"{self.small_bytes / 1e6:.1f} MB in pages of 4 KiB{why}")
        return ", ".join(parts)


class ArenaMemory:
    """Zeroed shared memory, mapped writable until it is sealed.

    Args:
        size_bytes: length of the memory file.
        fd: the file, which is ours from now on; a new one without a name if none is given.

    Attributes:
        view: all of it. faulted: what `prefault` has done so far.
        one_file: whether `fd` is all of it, from its first byte on.

    Raises:
        Unavailable: the machine has not that much memory.
    """

    one_file = True

    def __init__(self, size_bytes: int, *, fd: int | None = None) -> None:
        self.size_bytes = size_bytes
        self.sealed = False
        self.faulted = Faulted()
        self._claims = threading.Condition()
        self._parts = bytearray(-(-size_bytes // HUGE_BYTES))
        self._left = len(self._parts)
        self._cannot = False
        if fd is None:
            fd = os.memfd_create("readyplane-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.fd = fd
        try:
            os.ftruncate(self.fd, size_bytes)
            self._map = _aligned(self.fd, size_bytes)
        except OSError as error:
            os.close(self.fd)
            raise Unavailable(
                f"cannot get {size_bytes} B of shared memory for the weights ({error})",
                "free memory on this node or raise the container's memory limit",
            ) from error
        self.view = memoryview(self._map)
        self._base = _address(self._map)

    @property
    def path(self) -> Path:
        """Where another process of this user can open the memory while this one lives."""
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}")

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The files that hold the memory."""
        return (self.fd,)

    def locate(self, at: int) -> tuple[int, int]:
        """The file that holds a byte: (which of `descriptors`, offset in it)."""
        return 0, at

    def prefault(self, start: int, size_bytes: int) -> bool:
        """Fault a range in, changing no byte of it, also while somebody writes there.

        Several threads may ask side by side: each part is done once, and whoever wants one that
        another is at waits for it. A page that was written to before it is a huge one costs a
        copy, so the loader asks for its own range before it reads there.

        Returns False where the kernel cannot (the pages are then faulted in while loading).
        Blocking, and lets other threads run: call it in one.

        Raises:
            Unavailable: no memory is left.
        """
        if self._left == 0 or self._cannot:
            return not self._cannot
        first = start // HUGE_BYTES
        end = min(-(-(start + size_bytes) // HUGE_BYTES), len(self._parts))
        for number in range(first, end):
            if self._parts[number] != _DONE and not self._part(number):
                return False
        return True

    def _part(self, number: int) -> bool:
        with self._claims:
            while self._parts[number] == _CLAIMED:
                self._claims.wait()
            if self._parts[number] == _DONE or self._base == 0:
                return self._base != 0
            self._parts[number] = _CLAIMED
        done = False
        try:
            done = self._fault(number * HUGE_BYTES)
        finally:
            with self._claims:
                self._parts[number] = _DONE if done else _FREE
                self._left -= done
                self._cannot = not done
                self._claims.notify_all()
        return done

    def _fault(self, at: int) -> bool:
        """One part of `HUGE_BYTES`; the last may be shorter."""
        size = min(HUGE_BYTES, self.size_bytes - at)
        if size < HUGE_BYTES:
            return self._small(at, size, "")
        if self._base % HUGE_BYTES:
            return self._small(at, size, "the memory is not mapped at a multiple of 2 MiB")
        # A range without a single page has no table to put a huge one in.
        if not self._advise(at, mmap.PAGESIZE, _MADV_POPULATE_WRITE):
            return False
        if not self._advise(at, HUGE_BYTES, _MADV_COLLAPSE):
            return self._small(at, size, f"no huge page: {os.strerror(ctypes.get_errno())}")
        with self._claims:
            self.faulted.huge_bytes += HUGE_BYTES
        return True

    def _small(self, start: int, size_bytes: int, why: str) -> bool:
        if not self._advise(start, size_bytes, _MADV_POPULATE_WRITE):
            return False
        with self._claims:
            self.faulted.small_bytes += size_bytes
            self.faulted.why_small = why or self.faulted.why_small
        return True

    def _advise(self, start: int, size_bytes: int, advice: int) -> bool:
        if _libc.madvise(self._base + start, size_bytes, advice) == 0:
            return True
        if ctypes.get_errno() == _NO_MEMORY and advice == _MADV_POPULATE_WRITE:
            raise Unavailable(
                f"no memory for an arena of {self.size_bytes} B", "free memory on this node"
            )
        return False

    def seal(self) -> None:
        """Make the bytes unchangeable for everybody, for good; `view` is then read-only.

        Raises:
            Unavailable: somebody still maps it writable.
        """
        if self.sealed:
            return
        self.view.release()
        self._map.close()
        self._stop_faulting()
        self._protect()
        self._map = mmap.mmap(self.fd, self.size_bytes, prot=mmap.PROT_READ)
        self.view = memoryview(self._map)
        self.sealed = True

    def _protect(self) -> None:
        for tried in range(1, _SEAL_TRIES + 1):
            try:
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            except OSError as error:
                # Also while the kernel itself moves or counts a page, or a socket still sends one.
                if error.errno == errno.EBUSY and tried < _SEAL_TRIES:
                    time.sleep(_SEAL_PAUSE_S)
                    continue
                raise Unavailable(
                    f"the arena cannot be sealed ({error})", "keep no writable map of it"
                ) from error
            return

    def _stop_faulting(self) -> None:
        """Nothing is faulted in any more, and nobody is at it: the map is about to go."""
        with self._claims:
            self._base = 0
            while _CLAIMED in self._parts:
                self._claims.wait()

    def close(self) -> None:
        """Give the memory back (to the kernel once the engine is gone too). Idempotent."""
        if self.fd < 0:
            return
        self._stop_faulting()
        self.view.release()
        with contextlib.suppress(BufferError):  # a reader's view keeps the map until it ends
            self._map.close()
        os.close(self.fd)
        self.fd = -1


def _aligned(fd: int, size_bytes: int) -> mmap.mmap:
    """Map the file at a multiple of 2 MiB, so that huge pages fit its tables; unaligned at last.

    `mmap.mmap` takes no address, and the kernel the highest gap that is long enough: so a gap of
    just that length is made at such a place. One that is up to 4 MiB longer may lie higher, or
    another thread come first: that map stays in the way while it is tried again.
    """
    in_the_way: list[mmap.mmap] = []
    try:
        for _ in range(_ALIGN_TRIES):
            ends = _make_gap(size_bytes)
            try:
                mapped = mmap.mmap(fd, size_bytes)
            finally:
                for start, length in ends:
                    _libc.munmap(start, length)
            if _address(mapped) % HUGE_BYTES == 0:
                return mapped
            in_the_way.append(mapped)
        return in_the_way.pop()
    finally:
        for mapped in in_the_way:
            mapped.close()


def _make_gap(size_bytes: int) -> tuple[tuple[int, int], ...]:
    """A gap of so many bytes, in whole pages, at a multiple of 2 MiB.

    Returns the (start, length) that are reserved before and behind it; nothing where no address
    space is left.
    """
    length = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = length + 2 * HUGE_BYTES
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = _libc.mmap(None, whole, _PROT_NONE, private, -1, 0)
    if base == _FAILED:
        return ()
    begin = (base // HUGE_BYTES + 1) * HUGE_BYTES
    _libc.munmap(begin, length)
    return (base, begin - base), (begin + length, base + whole - begin - length)


def _address(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))
