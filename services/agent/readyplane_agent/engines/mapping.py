"""The map of an arena, as an engine and its agent have it: one run of read-only memory.

Owns how it comes about. An arena is one file in shared memory, or the files of the node's cache one
after another at the arena's offsets: then the page cache itself is the memory and nothing is copied.
Names no tensor; the table that says where they lie is `layout`'s.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from readyplane.core.errors import InvalidField
from readyplane_agent.engines.layout import HUGE_BYTES

_PROT_NONE = 0
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
# A look at one page is over before the interpreter's lock is given away and had back.
_brief_libc = ctypes.PyDLL(None)
_brief_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

SAMPLE_BYTES = 4 * 2**20
SAMPLES_MIN = 16


@dataclass(frozen=True, slots=True)
class FilePart:
    """One file of an arena that is made of files: its name in their folder, and where it lies."""

    name: str
    offset_bytes: int
    size_bytes: int


def read_file_parts(tensor_table: str | bytes) -> tuple[FilePart, ...]:
    """The files that a tensor table says the arena is made of; empty when it is one file.

    Raises:
        InvalidField: not such a list, a name with a folder in it, or files that overlap.
    """
    where = "tensor_table.files"
    try:
        doc = json.loads(tensor_table)
        parts = tuple(FilePart(str(n), int(o), int(b)) for n, o, b in doc.get("files", ()))
        end = int(doc["arena_bytes"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidField(where, repr(error), "list [name, offset, bytes] of each file") from error
    at = 0
    for part in parts:
        if part.name != os.path.basename(part.name) or part.name in {"", ".", ".."}:  # noqa: PTH119
            raise InvalidField(where, part.name, "name a file of the arena's folder")
        if part.offset_bytes < at or part.offset_bytes % mmap.PAGESIZE or part.size_bytes < 0:
            raise InvalidField(
                f"{where}.{part.name}", part.offset_bytes, "begin at a page behind the file before"
            )
        at = part.offset_bytes + part.size_bytes
    if at > end:
        raise InvalidField(where, at, f"stay within {end} B")
    return parts


class ArenaMap:
    """All bytes of an arena.

    Args:
        path: the arena's file, or with `parts` the folder of the files.
        size_bytes: length of the arena. parts: the files of it, empty for an arena of one file.

    Attributes:
        view: all of it, read-only. files: by name, the open descriptor of each part.

    Raises:
        InvalidField: a file is too short, or no plain file. OSError: it cannot be opened or mapped.
    """

    def __init__(self, path: Path, size_bytes: int, parts: Sequence[FilePart] = ()) -> None:
        self.size_bytes = size_bytes
        self.files: dict[str, int] = {}
        self._base, self._parts = 0, tuple(parts)
        try:
            self.view = self._stitched(path, parts) if parts else self._whole(path)
        except BaseException:
            self._close_files()
            raise

    def _whole(self, path: Path) -> memoryview:
        fd = self._open(path)
        found = os.fstat(fd).st_size
        if found < self.size_bytes:
            raise InvalidField(
                "arena", f"{found} B", f"give a file of at least {self.size_bytes} B"
            )
        return memoryview(mmap.mmap(fd, found, prot=mmap.PROT_READ))

    def _stitched(self, folder: Path, parts: Sequence[FilePart]) -> memoryview:
        for part in parts:
            fd = self.files.get(part.name)
            found = os.fstat(self._open(folder / part.name) if fd is None else fd).st_size
            if found != part.size_bytes:
                raise InvalidField(
                    f"arena.{part.name}", f"{found} B", f"give a file of {part.size_bytes} B"
                )
        length = -(-self.size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE + HUGE_BYTES
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        base = _libc.mmap(None, length, _PROT_NONE, private, -1, 0)
        if base == _FAILED:
            raise OSError(ctypes.get_errno(), f"cannot map {length} B")
        begin = -(-base // HUGE_BYTES) * HUGE_BYTES
        whole = (ctypes.c_char * self.size_bytes).from_address(begin)
        # Views of it may outlive this object: the memory goes with the last of them.
        weakref.finalize(whole, _libc.munmap, base, length)
        for part in parts:
            if part.size_bytes == 0:
                continue
            how = mmap.MAP_SHARED | _MAP_FIXED
            fd = self.files[part.name]
            at = begin + part.offset_bytes
            if _libc.mmap(at, part.size_bytes, mmap.PROT_READ, how, fd, 0) == _FAILED:
                raise OSError(ctypes.get_errno(), f"cannot map {part.name}")
        self._base = begin
        return memoryview(whole).cast("B").toreadonly()

    def _open(self, path: Path) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.files[path.name] = fd
        # Who evicts or lends it again asks for this lock; a mount without locks has nobody who does.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return fd

    def resident_share(self) -> float | None:
        """Share of stitched files that lies in the page cache, by samples; None where nobody says.

        Asked without reading. Of somebody else's file the kernel says that all of it is there.
        """
        if not self._base:
            return None
        if any(os.geteuid() not in {0, os.fstat(fd).st_uid} for fd in self.files.values()):
            return None
        found = ctypes.c_ubyte()
        look, into = _brief_libc.mincore, ctypes.byref(found)
        samples = resident = 0
        for part in self._parts:
            step = max(mmap.PAGESIZE, min(SAMPLE_BYTES, part.size_bytes // SAMPLES_MIN))
            step -= step % mmap.PAGESIZE
            for start in range(part.offset_bytes, part.offset_bytes + part.size_bytes, step):
                if look(self._base + start, 1, into) != 0:
                    return None
                samples += 1
                resident += found.value & 1
        return resident / samples if samples else 1.0

    def close(self) -> None:
        """Let go of it; while a view is still held the memory stays, and its locks. Idempotent."""
        try:
            owner = self.view.obj
            self.view.release()
            if isinstance(owner, mmap.mmap):
                owner.close()
        except (BufferError, ValueError):
            return
        self._close_files()

    def _close_files(self) -> None:
        for fd in self.files.values():
            os.close(fd)
        self.files = {}
