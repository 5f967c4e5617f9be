"""The bytes of artifacts as the service needs to know them: the port, and its memory twin.

Owns the questions (are these files here whole, are they what the manifest says); `blob_files`
answers them from a folder. Handed to the service.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from readyplane.core.errors import NotFound
from readyplane.core.identity import FileEntry, Manifest


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


class MemoryBlobs:
    """The twin for the simulator: lengths by sha256, no bytes."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}

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


def not_stored(sha256: str) -> NotFound:
    """The error for a blob that is not here."""
    return NotFound("blob", sha256, "upload it with PUT /v1/blobs/sha256/HEX")
