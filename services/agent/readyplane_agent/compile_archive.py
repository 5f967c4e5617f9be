"""A folder of compiled code as an archive: an index that lists every file, and their bytes.

Owns the format. The archive is the files' contents one after another in the order of the index,
compressed; names, lengths and hashes stand in the index alone. So a link, a device or a path out
of the folder cannot even be written down, and a length that lies is found by the hash beside it.
Handed to `compile_store`, which keeps such folders on a node, and `compile_publish`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

from readyplane.core.errors import IdentityMismatch, InvalidField, Unavailable
from readyplane.core.identity import canonical, check_digest, parse

SCHEMA = "readyplane/compile-archive/1"
LAYOUT = "compile-archive/1"
ARCHIVE, INDEX = "archive.zst", "index.json"
FILES_MAX = 100_000
UNPACKED_BYTES_MAX = 16 * 2**30
ARCHIVE_BYTES_MAX = 4 * 2**30
INDEX_BYTES_MAX = 64 * 2**20
WINDOW_BYTES_MAX = 128 * 2**20
PIECE_BYTES = 2**20
LEVEL = 3
LEFT_OUT_SHOWN_MAX = 20
# Names under which programs keep what is not finished, or not for others.
UNFINISHED = (".lock", ".tmp", ".part", ".pid", ".sock")


@dataclass(frozen=True, slots=True)
class Listed:
    """One file of an archive: relative POSIX path, exact length, `sha256:<64 hex>`."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Index:
    """What an archive holds.

    Attributes:
        factors: the key under which it was compiled. files: sorted by path.
        left_out: names that were not packed, and why; the first of them.
    """

    factors: Mapping[str, str]
    files: tuple[Listed, ...]
    left_out: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, unpacked."""
        return sum(entry.size_bytes for entry in self.files)

    def document(self) -> bytes:
        """Canonical JSON."""
        files = [
            {"path": e.path, "size_bytes": e.size_bytes, "sha256": e.sha256} for e in self.files
        ]
        return canonical(
            {
                "schema": SCHEMA,
                "factors": dict(self.factors),
                "files": files,
                "left_out": list(self.left_out),
            }
        )


def read_index(data: bytes | memoryview) -> Index:
    """An index, strictly: what it lists can be laid into a folder and stays in it.

    Raises:
        InvalidField: not such a document, a path that leaves the folder, or too much of anything.
    """
    if len(data) > INDEX_BYTES_MAX:
        raise InvalidField("index", f"{len(data)} bytes", f"stay below {INDEX_BYTES_MAX}")
    doc = parse(bytes(data), where="index")
    if not isinstance(doc, dict) or doc.get("schema") != SCHEMA:
        raise InvalidField("index.schema", str(doc)[:60], f"write {SCHEMA}")
    files, factors = doc.get("files"), doc.get("factors")
    if not isinstance(files, list) or not 0 < len(files) <= FILES_MAX:
        raise InvalidField("index.files", type(files).__name__, f"list 1 to {FILES_MAX} files")
    if not isinstance(factors, dict) or not all(isinstance(v, str) for v in factors.values()):
        raise InvalidField("index.factors", type(factors).__name__, "give texts by name")
    listed = tuple(_listed(item) for item in files)
    _distinct(listed)
    left_out = tuple(str(name) for name in doc.get("left_out") or ())
    return Index(factors, tuple(sorted(listed, key=lambda e: e.path)), left_out)


def _listed(item: Any) -> Listed:
    if not isinstance(item, dict) or set(item) != {"path", "size_bytes", "sha256"}:
        raise InvalidField("index.files[]", str(item)[:60], "give path, size_bytes and sha256")
    path, size = item["path"], item["size_bytes"]
    parts = path.split("/") if isinstance(path, str) else [""]
    bad = set(parts) & {"", ".", ".."} or "\\" in path or not path.isprintable()
    if bad or any(len(os.fsencode(part)) > 255 for part in parts) or len(path) > 1024:
        raise InvalidField("index.files[].path", path, "use a relative path that stays inside")
    if type(size) is not int or not 0 <= size <= UNPACKED_BYTES_MAX:
        raise InvalidField(f"index.files[{path}].size_bytes", size, "give a length in bytes")
    return Listed(path, size, check_digest(str(item["sha256"]), where=f"index.files[{path}]"))


def _distinct(files: tuple[Listed, ...]) -> None:
    paths = {entry.path for entry in files}
    if len(paths) != len(files):
        raise InvalidField("index.files", len(files), "list each path once")
    for path in paths:
        parts = path.split("/")
        for count in range(1, len(parts)):
            if "/".join(parts[:count]) in paths:
                raise InvalidField("index.files", path, "no file may also be a folder")
    total = sum(entry.size_bytes for entry in files)
    if total > UNPACKED_BYTES_MAX:
        raise InvalidField("index.files", f"{total} bytes", f"stay below {UNPACKED_BYTES_MAX}")


# ----------------------------------------------------------------------------------------- packing


def scan(folder: Path) -> tuple[list[tuple[str, Path]], list[str]]:
    """(relative path, path) of every file that can be packed, sorted; and what is left out.

    Left out are links and whatever is no regular file, unfinished files, and empty ones: a
    program that broke off while it wrote leaves an empty file, which later starts would load.
    """
    found: list[tuple[str, Path]] = []
    left_out: list[str] = []
    for here, folders, names in os.walk(folder):
        folders.sort()
        for name in [*folders, *names]:
            path = Path(here) / name
            mode = path.lstat().st_mode
            relative = path.relative_to(folder).as_posix()
            if stat.S_ISLNK(mode) or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                left_out.append(f"{relative}: not a regular file")
            elif stat.S_ISREG(mode):
                why = _unpackable(relative, path)
                if why:
                    left_out.append(f"{relative}: {why}")
                else:
                    found.append((relative, path))
    return sorted(found), sorted(left_out)


def _unpackable(relative: str, path: Path) -> str:
    if path.name.endswith(UNFINISHED) or path.name.startswith("."):
        return "unfinished or hidden"
    if path.lstat().st_size == 0:
        return "empty"
    if not relative.isprintable() or "\\" in relative:
        return "a name that not every machine can have"
    return ""


def pack(folder: Path, archive: Path, *, factors: Mapping[str, str]) -> Index:
    """Write the archive of a folder; the same contents give the same bytes. Blocking.

    Raises:
        InvalidField: nothing to pack, or too much. Unavailable: a file changed meanwhile.
        OSError: it cannot be read or written.
    """
    import zstandard

    found, left_out = scan(folder)
    if not 0 < len(found) <= FILES_MAX:
        raise InvalidField("compile cache", f"{len(found)} files", f"pack 1 to {FILES_MAX}")
    if sum(path.lstat().st_size for _, path in found) > UNPACKED_BYTES_MAX:
        raise InvalidField("compile cache", str(folder), f"stay below {UNPACKED_BYTES_MAX} bytes")
    listed: list[Listed] = []
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    with archive.open("xb") as out, compressor.stream_writer(out, closefd=False) as into:
        for relative, path in found:
            digest, size = hashlib.sha256(), 0
            for piece in _pieces(path):
                digest.update(piece)
                into.write(piece)
                size += len(piece)
            listed.append(Listed(relative, size, f"sha256:{digest.hexdigest()}"))
    return Index(dict(factors), tuple(listed), tuple(left_out[:LEFT_OUT_SHOWN_MAX]))


def _pieces(path: Path) -> Iterator[bytes]:
    """The bytes of a file that does not change while it is read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        before = os.fstat(descriptor)
        while piece := os.read(descriptor, PIECE_BYTES):
            yield piece
        after = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise Unavailable(f"{path.name} changed while it was packed", "pack it again later")


# --------------------------------------------------------------------------------------- unpacking


def unpack(archive: bytes | mmap, index: Index, folder: Path) -> None:
    """Lay an archive's files into a folder that is new, every one verified and on disk. Blocking.

    Raises:
        IdentityMismatch: a byte, a length or the end is not what the index says.
        OSError: the disk is full or cannot be written.
    """
    import zstandard

    opener = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
    try:
        with opener.stream_reader(memoryview(archive)) as source:
            for entry in index.files:
                _write_verified(source, entry, folder / entry.path)
            if source.read(1):
                raise _mismatch("the end", "bytes that no file lists")
    except zstandard.ZstdError as error:
        raise _mismatch("the archive", str(error)) from error


def _write_verified(source: Any, entry: Listed, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        digest, left = hashlib.sha256(), entry.size_bytes
        while left:
            piece = source.read(min(PIECE_BYTES, left))
            if not piece:
                raise _mismatch(entry.path, f"{left} of {entry.size_bytes} bytes are missing")
            digest.update(piece)
            _write_all(descriptor, piece)
            left -= len(piece)
        if f"sha256:{digest.hexdigest()}" != entry.sha256:
            raise _mismatch(entry.path, "sha256 is another")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_verified(entry: Listed, source: int, path: Path) -> None:
    """Copy one listed file from an open descriptor, comparing length and hash on the way.

    Raises:
        IdentityMismatch: it is not what the index lists. OSError: it cannot be written.
    """
    if os.fstat(source).st_size != entry.size_bytes:
        raise _mismatch(entry.path, f"{os.fstat(source).st_size} of {entry.size_bytes} bytes")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    into = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        digest = hashlib.sha256()
        while piece := os.read(source, PIECE_BYTES):
            digest.update(piece)
            _write_all(into, piece)
    finally:
        os.close(into)
    if f"sha256:{digest.hexdigest()}" != entry.sha256:
        raise _mismatch(entry.path, "sha256 is another")


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _mismatch(what: str, why: str) -> IdentityMismatch:
    return IdentityMismatch("compile archive", [f"{what}: {why}"], "compile again")
