"""The node's compiled code: one folder for each key, whole or not there (B138, B142).

Owns the folder that the workers of a node share. An entry is written beside, verified, synced and
then renamed; nobody writes into one that is there. An engine never works in here: it gets a copy
of its own, each file compared with the index on the way, so that no engine can spoil what others
read. What is not as listed is a miss and goes to quarantine; a start wipes nothing.

`entries/<key>/{index.json,files/…}`, `writing/…` (under its writer's lock), `quarantine/…`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

from readyplane.core.compile_key import differences, key_digest
from readyplane.core.errors import IdentityMismatch, InvalidField, Unavailable
from readyplane_agent.compile_archive import INDEX, Index, copy_verified, read_index, unpack

QUARANTINED_MAX = 8
ENTRIES_MAX = 1000
OWN_ATTEMPTS_MAX = 10


@dataclass(frozen=True, slots=True)
class Taken:
    """What an engine's folder was given: the files' count and bytes; or why it was given nothing.

    Attributes:
        miss: empty on a hit; else `absent`, `incomplete`, `corrupt`, `differs` or `unreadable`.
    """

    files: int = 0
    size_bytes: int = 0
    miss: str = ""
    detail: str = ""


class CompileStore:
    """Compiled code by the digest of its key.

    Args:
        folder: shared by the workers of a node; made when something is brought in.
        bytes_max: most bytes kept; the least recently used entries go first.
        make_id: a fresh name each time.
    """

    def __init__(self, folder: Path, *, bytes_max: int, make_id: Callable[[], str]) -> None:
        self._bytes_max, self._make_id = bytes_max, make_id
        self._entries, self._writing = folder / "entries", folder / "writing"
        self._quarantine = folder / "quarantine"

    def entry(self, digest: str) -> Path:
        """Where the entry of a key lies if it is here."""
        return self._entries / digest.removeprefix("sha256:")

    # ---------------------------------------------------------------------------------- reading

    def take(self, factors: Mapping[str, str], into: Path) -> Taken:
        """Fill an engine's own folder with the entry of a key, all of it or nothing. Blocking.

        `into` must not exist or be empty; after a miss it is as before. Never raises for what it
        finds in the store.
        """
        entry = self.entry(key_digest(factors))
        part = into.with_name(f"{into.name}.{self._make_id()}")
        try:
            with self._shared(entry) as folder:
                taken = self._copy(folder, factors, part)
        except FileNotFoundError:
            return Taken(miss="absent")
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            return Taken(miss="unreadable", detail=error.strerror or str(error))
        if taken.miss:
            shutil.rmtree(part, ignore_errors=True)
            self.quarantine(key_digest(factors))
            return taken
        part.rename(into)
        with contextlib.suppress(OSError):
            os.utime(entry)  # used: it goes last
        return taken

    def _copy(self, folder: int, factors: Mapping[str, str], part: Path) -> Taken:
        try:
            index = self._index(folder)
            unequal = differences(factors, index.factors)
            if unequal:
                return Taken(miss="differs", detail="; ".join(str(d) for d in unequal[:4]))
            part.mkdir(parents=True, mode=0o700)
            for listed in index.files:
                source = _open_in(folder, ("files", *listed.path.split("/")))
                try:
                    copy_verified(listed, source, part / listed.path)
                finally:
                    os.close(source)
        except FileNotFoundError as error:
            return Taken(miss="incomplete", detail=f"{error.filename or 'a file'} is not there")
        except (IdentityMismatch, InvalidField) as error:
            return Taken(miss="corrupt", detail=str(error))
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                return Taken(miss="corrupt", detail="a link stands where a file should be")
            raise
        return Taken(len(index.files), index.size_bytes)

    @staticmethod
    def _index(folder: int) -> Index:
        descriptor = _open_in(folder, (INDEX,))
        with os.fdopen(descriptor, "rb") as file:
            return read_index(file.read())

    @contextmanager
    def _shared(self, entry: Path) -> Iterator[int]:
        """The entry's folder, kept from being evicted meanwhile."""
        folder = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_SH)
            if os.fstat(folder).st_nlink == 0:  # it was evicted while we waited
                raise FileNotFoundError(errno.ENOENT, "evicted", str(entry))
            yield folder
        finally:
            os.close(folder)

    # ---------------------------------------------------------------------------------- writing

    def install(self, archive: bytes | mmap, index: Index, *, wanted: Mapping[str, str]) -> bool:
        """Bring an entry in; False when somebody else has brought it in already. Blocking.

        Raises:
            IdentityMismatch: it is for another key, or not what its index says; nothing is kept.
            Unavailable: the disk is full or cannot be written; nothing is kept.
        """
        unequal = differences(wanted, index.factors)
        if unequal:
            raise IdentityMismatch("compile archive", [str(d) for d in unequal], "compile again")
        if index.size_bytes > self._bytes_max:
            what = f"compiled code of {index.size_bytes} B, with {self._bytes_max} B to keep it in"
            raise Unavailable(what, "raise --cache-bytes-max")
        final = self.entry(key_digest(wanted))
        try:
            with self._own() as part:
                unpack(archive, index, part / "files")
                (part / INDEX).write_bytes(index.document())
                _sync_tree(part)
                self._make_room(index.size_bytes, keep=final.name)
                return self._publish(part, final)
        except OSError as error:
            why = error.strerror or str(error)
            raise Unavailable(f"compiled code cannot be kept ({why})", "free disk space") from error

    def _publish(self, part: Path, final: Path) -> bool:
        try:
            part.rename(final)
        except OSError as error:
            if error.errno in {errno.EEXIST, errno.ENOTEMPTY}:
                return False
            raise
        _sync(final.parent)
        return True

    @contextmanager
    def _own(self) -> Iterator[Path]:
        """A folder of this writer alone; one whose writer was killed is removed on the way."""
        for path in (self._entries, self._writing, self._quarantine):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sweep()
        for _ in range(OWN_ATTEMPTS_MAX):
            part = self._writing / self._make_id()
            part.mkdir(mode=0o700)
            try:
                descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:  # another writer swept it: it had no lock yet
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.fstat(descriptor).st_nlink == 0:  # swept before it was ours
                    continue
                yield part
            finally:
                os.close(descriptor)
                shutil.rmtree(part, ignore_errors=True)
            return
        raise OSError(errno.EAGAIN, "no folder of our own")

    def _sweep(self) -> None:
        for path in self._writing.iterdir():
            with contextlib.suppress(OSError), _alone(path):  # its writer is dead
                shutil.rmtree(path, ignore_errors=True)

    def quarantine(self, digest: str) -> bool:
        """Take an entry out that is not what it says; False when it is gone already."""
        entry = self.entry(digest)
        try:
            entry.rename(self._quarantine / f"{entry.name}.{self._make_id()}")
        except OSError:
            return False
        with contextlib.suppress(OSError):  # another process may tidy up at the same time
            kept = sorted(self._quarantine.iterdir(), key=lambda p: p.stat().st_mtime)
            for path in kept[:-QUARANTINED_MAX]:
                shutil.rmtree(path, ignore_errors=True)
        return True

    def _make_room(self, size_bytes: int, *, keep: str) -> None:
        found = [(p.stat().st_mtime, _tree_bytes(p), p) for p in self._entries.iterdir()]
        total, count = sum(item[1] for item in found), len(found)
        for _, length, path in sorted(found):
            if total + size_bytes <= self._bytes_max and count < ENTRIES_MAX:
                return
            if path.name == keep:
                continue
            with contextlib.suppress(OSError), _alone(path):
                gone = self._writing / self._make_id()
                path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
                total, count = total - length, count - 1


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a folder that nobody reads or writes; raises OSError when somebody does."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _open_in(folder: int, parts: tuple[str, ...]) -> int:
    """Open a file below a folder without following a link on the way."""
    here = os.dup(folder)
    try:
        for part in parts[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            below = os.open(part, flags, dir_fd=here)
            os.close(here)
            here = below
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(parts[-1], flags, dir_fd=here)
    finally:
        os.close(here)


def _tree_bytes(path: Path) -> int:
    return sum(
        (Path(here) / name).lstat().st_size for here, _, names in os.walk(path) for name in names
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    """Names and bytes on disk, the deepest first, so that a lost machine finds whole entries."""
    for here, _, names in os.walk(folder, topdown=False):
        if INDEX in names:
            _sync(Path(here) / INDEX)
        _sync(Path(here))
