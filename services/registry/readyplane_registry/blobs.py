"""The bytes of artifacts: the one port of all byte stores, and its memory twin.

Owns what a store promises, whatever it is made of: a blob is named by the sha256 of its content and
appears whole or not at all; bytes that are not what their name says are never stored (B115); what
is there is asked of the storage itself, never of a memory of it (B124); ranges are streamed, so
that a blob never lies whole in memory. `blob_files` keeps the promises in a folder or a mount,
`blob_objects` in an object store, and one contract suite holds all to them.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from readyplane.core.errors import InvalidField, NotFound, Unavailable
from readyplane.core.identity import FileEntry, Manifest, check_digest
from readyplane.core.startup import WeightTier

BLOB_BYTES_MAX = 1024**4
PIECE_BYTES = 1024 * 1024
HEAD_BYTES = 256


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What a check of one stored file found; `problem` is empty when all is well."""

    path: str
    size_bytes: int
    problem: str = ""


class Blobs(Protocol):
    """The bytes of artifacts, as the service needs to know them."""

    async def missing(self, files: Sequence[FileEntry]) -> tuple[str, ...]:
        """One reason for each file that is not here whole, by length; empty when all are."""
        ...

    async def inspect(self, manifest: Manifest, *, content: bool) -> tuple[FileCheck, ...]:
        """Compare stored bytes with the manifest's chunk tables and tensor headers.

        With `content` each file's sha256 is computed anew as well, and a file whose content is
        not its name's is taken out of the store.
        """
        ...


class ByteStore(Blobs, Protocol):
    """Blobs by the sha256 of their content."""

    @property
    def name(self) -> str:
        """What it is called in messages: a URL without credentials."""
        ...

    @property
    def tier(self) -> WeightTier:
        """L4 for an object store and the registry's own disk, L3 for a mount of all nodes."""
        ...

    async def length(self, sha256: str) -> int | None:
        """Bytes of a stored blob, asked of the storage; None when it is not there.

        Raises:
            InvalidField: not a digest.
            Unavailable: the storage cannot be asked; it is named, with the remedy.
        """
        ...

    async def has(self, sha256: str, size_bytes: int) -> bool:
        """True when the blob is there in its full length."""
        ...

    def stream(self, sha256: str, *, begin: int, end: int) -> AsyncIterator[bytes]:
        """The bytes [begin, end) in pieces of about a mebibyte, exactly as many, or an error.

        Raises:
            NotFound: it is not stored.
            Unavailable: the storage cannot be read, or gave fewer bytes than there should be.
        """
        ...

    async def put_stream(
        self, sha256: str, pieces: AsyncIterator[bytes], *, size_max: int = BLOB_BYTES_MAX
    ) -> bool:
        """Store a blob from a stream, hashing on the way; True when it was not here before.

        Any number may bring the same blob at once; whoever breaks off leaves nothing that is seen.

        Raises:
            InvalidField: the content is not what its name says, or is longer than `size_max`;
                nothing is kept.
            Unavailable: the storage is full or away.
        """
        ...

    async def put_file(
        self, sha256: str, path: Path, *, progress: Callable[[int], None] | None = None
    ) -> bool:
        """Copy a file in; as `put_stream`."""
        ...

    async def presigned(self, sha256: str, *, ttl_s: float) -> str | None:
        """A URL from which the blob can be read without the registry; None if there is none."""
        ...


def not_stored(sha256: str) -> NotFound:
    """The error for a blob that is not here."""
    return NotFound("blob", sha256, "upload it with PUT /v1/blobs/sha256/HEX")


def kind_of_body(head: bytes, size_bytes: int) -> str:
    """What came instead of the bytes, by its beginning: the usual faults have a name (B122)."""
    if size_bytes == 0:
        return "an empty body"
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:HEAD_BYTES].lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head")):
        return f"an HTML page of {size_bytes} bytes"
    if start.startswith(b"<?xml"):
        return f"an XML document of {size_bytes} bytes"
    return f"{size_bytes} bytes"


def other_content(wanted: str, found: str, head: bytes, size_bytes: int) -> InvalidField:
    """The error for bytes that are not what their name says; digests with their prefix."""
    return InvalidField(
        "sha256",
        wanted,
        f"send the bytes of that digest; {kind_of_body(head, size_bytes)} with {found} came, "
        "nothing was kept",
    )


def too_long(size_max: int) -> InvalidField:
    """The error for a body that is longer than it may be."""
    return InvalidField("body", f"over {size_max} bytes", f"send {size_max} at most")


def ended_early(store: str, sha256: str, at: int, end: int) -> Unavailable:
    """The error for a storage that gave fewer bytes than it has to."""
    kind = "an empty body" if at == 0 else f"an early end at byte {at}"
    return Unavailable(
        f"{store}: blob {sha256} gave {kind} instead of bytes up to {end}",
        "read it from another source, and verify the artifact",
    )


class MemoryBlobs:
    """The twin: bytes in memory, or for the simulator lengths without bytes.

    Args:
        name, tier: see `ByteStore`.
    """

    def __init__(self, *, name: str = "memory:", tier: WeightTier = WeightTier.L4_OBJECT) -> None:
        self.name, self.tier = name, tier
        self._sizes: dict[str, int] = {}
        self._bytes: dict[str, bytes] = {}

    def put(self, files: Sequence[FileEntry]) -> None:
        """Pretend that these files are stored."""
        self._sizes.update({entry.sha256: entry.size_bytes for entry in files})

    async def missing(self, files: Sequence[FileEntry]) -> tuple[str, ...]:
        """See `Blobs`."""
        return tuple(
            f"{entry.path}: no bytes of {entry.sha256} are stored"
            for entry in files
            if self._sizes.get(entry.sha256) != entry.size_bytes
        )

    async def inspect(self, manifest: Manifest, *, content: bool) -> tuple[FileCheck, ...]:
        """See `Blobs`."""
        lost = await self.missing(manifest.files) if content else ()
        told = {text.partition(":")[0]: text for text in lost}
        return tuple(FileCheck(f.path, f.size_bytes, told.get(f.path, "")) for f in manifest.files)

    async def length(self, sha256: str) -> int | None:
        """See `ByteStore`."""
        return self._sizes.get(check_digest(sha256, where="sha256"))

    async def has(self, sha256: str, size_bytes: int) -> bool:
        """See `ByteStore`."""
        return await self.length(sha256) == size_bytes

    async def stream(self, sha256: str, *, begin: int, end: int) -> AsyncIterator[bytes]:
        """See `ByteStore`."""
        size = await self.length(sha256)
        if size is None:
            raise not_stored(sha256)
        data = self._bytes.get(sha256, b"")
        if end > len(data):
            raise ended_early(self.name, sha256, len(data), end)
        for at in range(begin, end, PIECE_BYTES):
            yield data[at : min(at + PIECE_BYTES, end)]

    async def put_stream(
        self, sha256: str, pieces: AsyncIterator[bytes], *, size_max: int = BLOB_BYTES_MAX
    ) -> bool:
        """See `ByteStore`."""
        check_digest(sha256, where="sha256")
        data = b""
        async for piece in pieces:
            data += piece
            if len(data) > size_max:
                raise too_long(size_max)
        found = "sha256:" + hashlib.sha256(data).hexdigest()
        if found != sha256:
            raise other_content(sha256, found, data[:HEAD_BYTES], len(data))
        created = self._sizes.get(sha256) != len(data)
        self._sizes[sha256], self._bytes[sha256] = len(data), data
        return created

    async def put_file(
        self, sha256: str, path: Path, *, progress: Callable[[int], None] | None = None
    ) -> bool:
        """See `ByteStore`."""

        async def whole() -> AsyncIterator[bytes]:
            yield path.read_bytes()

        created = await self.put_stream(sha256, whole())
        if progress is not None:
            progress(self._sizes[sha256])
        return created

    async def presigned(self, sha256: str, *, ttl_s: float) -> str | None:
        """See `ByteStore`."""
        del sha256, ttl_s
        return None

    async def remove(self, sha256: str) -> int:
        """Delete a blob; the bytes that it took, 0 when it was gone."""
        self._bytes.pop(sha256, None)
        return self._sizes.pop(sha256, 0)
