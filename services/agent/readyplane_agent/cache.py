"""The node's weight cache (tier L2): files by content, shared by all workers of a node.

Owns the folder; hands the loader places to read from. What lies under its final name was verified
before it got there (B115), was on the disk before it got its name, and is verified again whenever
it is read (B117, B121). Several processes may write at once: one holds the file's lock and
publishes by rename, the others wait for it within a bound; a killed one holds nothing (B116).

A file that somebody reads is never evicted: readers hold a shared lock on it, the evictor asks for
an exclusive one (B120). Both kinds of lock end with their process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from readyplane.core.errors import IdentityMismatch, InvalidField
from readyplane.core.identity import FileEntry, Manifest
from readyplane_agent.arena import Arena

log = logging.getLogger("agent.cache")

PIECE_BYTES = 4 * 2**20
PART = ".part"
NAME_CHARS = 64
WRITER_WAIT_S = 120.0
WRITER_POLL_S = 0.1
ODD = ".odd"
ODD_MAX = 100

# utimensat(2): Python can only set both times, and would race with a writer for the second.
_AT_FDCWD, _UTIME_NOW, _UTIME_OMIT = -100, (1 << 30) - 1, (1 << 30) - 2
_libc = ctypes.CDLL(None, use_errno=True)


class _Time(ctypes.Structure):
    """`struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class WeightCache:
    """Files by sha256 under one folder.

    Args:
        folder: shared by the workers of a node; made when missing.
        bytes_max: most bytes kept, files in the making counted whole; the least recently used
            files go first, and never one that is being read.
    """

    def __init__(self, folder: Path, *, bytes_max: int) -> None:
        self.folder = folder
        self._bytes_max = bytes_max
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise InvalidField(
                "--cache-dir", str(folder), f"name a folder that can be made and written ({error})"
            ) from error

    def locate(self, entry: FileEntry) -> Path:
        """Where a file lies if it is here."""
        return self.folder / entry.sha256.removeprefix("sha256:")

    def holds(self, manifest: Manifest) -> bool:
        """Whether every file is here with its right length."""
        return all(self._present(entry) for entry in manifest.files)

    def used(self, manifest: Manifest) -> None:
        """Keep the files of a manifest longest: they were just read.

        The time of access alone: the other one tells who maps them that they were written to.
        """
        times = (_Time * 2)(_Time(0, _UTIME_NOW), _Time(0, _UTIME_OMIT))
        for entry in manifest.files:
            _libc.utimensat(_AT_FDCWD, os.fsencode(self.locate(entry)), times, 0)

    def discard(self, entry: FileEntry) -> None:
        """Take a file out that is not what its name says; readers keep what they have open."""
        _clear(self.locate(entry))

    def store(self, arena: Arena) -> int:
        """Publish the verified files of a sealed arena; returns the bytes written.

        Blocking: call it in a thread. Raises OSError (disk full, read-only folder) and
        IdentityMismatch (`Arena.pieces`); nothing is left under a final name then.
        """
        wanted = [e for e in arena.manifest.files if not self._present(e)]
        size = sum(entry.size_bytes for entry in wanted)
        if not wanted:
            return 0
        if arena.manifest.size_bytes > self._bytes_max:
            log.warning(
                "weight cache: %d B of %s never fit into %d B (--cache-bytes-max); the next start"
                " on this node reads them from elsewhere",
                *(arena.manifest.size_bytes, arena.manifest.digest[:19], self._bytes_max),
            )
            return 0
        if not self._make_room(size, keep={self.locate(e).name for e in arena.manifest.files}):
            log.warning("weight cache: what is left is being read; %d B are not cached", size)
            return 0
        written = 0
        others: list[FileEntry] = []
        for entry in wanted:
            with self._lock(entry) as mine:
                if not mine:
                    others.append(entry)
                elif not self._present(entry):
                    written += self._write(entry, arena)
        for entry in others:
            written += self._after_another(entry, arena)
        return written

    def _after_another(self, entry: FileEntry, arena: Arena) -> int:
        """Somebody else was writing it: theirs will do, or ours if they came to nothing."""
        for _ in range(int(WRITER_WAIT_S / WRITER_POLL_S)):
            with self._lock(entry) as mine:
                if mine:
                    return 0 if self._present(entry) else self._write(entry, arena)
            time.sleep(WRITER_POLL_S)
        log.warning("weight cache: %s is still being written by another", self.locate(entry).name)
        return 0

    def _present(self, entry: FileEntry) -> bool:
        try:
            found = self.locate(entry).lstat()
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == entry.size_bytes

    @contextmanager
    def _lock(self, entry: FileEntry) -> Iterator[bool]:
        with self._lock_name(self.locate(entry).name) as mine:
            yield mine

    @contextmanager
    def _lock_name(self, name: str) -> Iterator[bool]:
        """The right to write a content, among all processes of the node; False when taken."""
        path = self.folder / f"{name}.lock"
        how = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(path, how, 0o600)
        except OSError as error:
            if error.errno not in {errno.EISDIR, errno.ELOOP}:
                raise
            _clear(path)
            fd = os.open(path, how, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(fd)  # gives the lock back, as the end of a killed process does

    def _write(self, entry: FileEntry, arena: Arena) -> int:
        # Under the lock the part file of a killed writer is ours to remove.
        final = self.locate(entry)
        part = final.with_name(final.name + PART)
        _clear(part)
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            with contextlib.suppress(OSError):
                # Counted whole from now on, and a full disk is met at once; some cannot.
                os.posix_fallocate(fd, 0, entry.size_bytes)
            for piece in arena.pieces(entry.path, PIECE_BYTES):
                done = 0
                while done < len(piece):
                    done += os.write(fd, piece[done:])
            os.fsync(fd)
        except (OSError, IdentityMismatch):
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        try:
            if final.is_dir() and not final.is_symlink():
                _clear(final)
            part.replace(final)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._sync_folder()
        return entry.size_bytes

    def _sync_folder(self) -> None:
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _make_room(self, size: int, *, keep: set[str]) -> bool:
        """Evict until `size` more bytes fit, the longest unused first; False when they cannot."""
        found = []
        total = 0
        for path in self.folder.iterdir():
            try:
                seen = path.lstat()
            except OSError:
                continue  # another process has just evicted or published it
            if path.name.endswith(PART):
                total += self._part_bytes(path, seen)
            elif len(path.name) == NAME_CHARS and stat.S_ISREG(seen.st_mode):
                found.append((max(seen.st_atime, seen.st_mtime), seen.st_size, path))
                total += seen.st_size
        for _, length, path in sorted(found):
            if total + size <= self._bytes_max:
                break
            if path.name not in keep and _evict(path):
                total -= length
        return total + size <= self._bytes_max

    def _part_bytes(self, path: Path, seen: os.stat_result) -> int:
        """What a file in the making takes; what a killed writer has left is removed."""
        with self._lock_name(path.name.removesuffix(PART)) as mine:
            if mine:
                _clear(path)
                return 0
        return seen.st_size


def _evict(path: Path) -> bool:
    """Remove a file unless somebody reads it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return not path.exists()
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _clear(path: Path) -> None:
    """Nothing lies under this name any more: a file or link is removed, a folder is set aside.

    No agent makes a folder there, so whose it is, is not known: it keeps what is in it. Raises
    OSError when it can be neither.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError:
        if not path.is_dir():
            raise
    else:
        return
    for number in range(ODD_MAX):
        aside = path.with_name(f"{path.name}{ODD}-{number}")
        with contextlib.suppress(OSError):
            path.rename(aside)
            log.warning("weight cache: %s is a folder, set aside as %s", path.name, aside.name)
            return
    raise OSError(errno.EEXIST, f"a folder lies where a file belongs, remove it: {path}")
