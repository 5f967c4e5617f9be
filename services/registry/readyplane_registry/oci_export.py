"""Writing an artifact into a folder as an OCI image layout, every byte verified on the way.

Owns the folder's files and that each appears whole: blobs are written aside and renamed when their
sha256 is their name, and `index.json` comes last, so that what was broken off is no layout yet and
is taken up again by the same call. Used by `readyplane artifact export`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from readyplane.core.errors import IdentityMismatch, InvalidField
from readyplane.core.identity import FileEntry, Manifest
from readyplane_registry.blobs import HEAD_BYTES, kind_of_body
from readyplane_registry.oci import LAYOUT, Layout, layout_of


async def export(
    manifest: Manifest,
    folder: Path,
    *,
    read: Callable[[FileEntry], AsyncIterator[bytes]],
    name: str = "",
) -> tuple[Layout, int]:
    """Write the layout; returns it and the bytes that had to be read.

    Args:
        folder: made when it is not there; one that holds something else is refused.
        read: the bytes of a file.

    Raises:
        InvalidField: the folder holds another thing, or cannot be written.
        IdentityMismatch: the bytes of a file are not what the manifest says.
    """
    layout = layout_of(manifest, name=name)
    blobs = folder / "blobs" / "sha256"
    try:
        held = {path.name for path in folder.iterdir()} if folder.exists() else set()
        foreign = held - {"blobs", "index.json", "oci-layout"}
        if foreign:
            remedy = f"give an empty folder; it holds {min(foreign)!r}"
            raise InvalidField("oci", str(folder), remedy)
        blobs.mkdir(parents=True, exist_ok=True)
        (folder / "oci-layout").write_bytes(LAYOUT)
        fetched = 0
        for entry in layout.files:
            fetched += await _fetch(entry, blobs, read)
        for digest, data in layout.documents.items():
            _write(blobs / digest.removeprefix("sha256:"), data)
        _write(folder / "index.json", layout.index)
    except OSError as error:
        raise InvalidField(
            "oci", str(folder), f"give a folder that can be written ({error.strerror})"
        ) from error
    return layout, fetched


async def _fetch(
    entry: FileEntry, blobs: Path, read: Callable[[FileEntry], AsyncIterator[bytes]]
) -> int:
    """Bring one file; 0 when it is there already, which is looked at and not believed."""
    path = blobs / entry.sha256.removeprefix("sha256:")
    if path.exists() and await asyncio.to_thread(_sha256_of, path) == entry.sha256:
        return 0
    whole, size, head = hashlib.sha256(), 0, b""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            async for piece in read(entry):
                await asyncio.to_thread(file.write, piece)
                whole.update(piece)
                head = head or piece[:HEAD_BYTES]
                size += len(piece)
        found = "sha256:" + whole.hexdigest()
        if found != entry.sha256:
            told = f"{entry.path}: {kind_of_body(head, size)} with {found} came, not {entry.sha256}"
            raise IdentityMismatch("artifact", [told], "verify it: readyplane artifact verify REF")
        os.replace(part, path)  # noqa: PTH105 - atomic, over what was found wrong
    finally:
        part.unlink(missing_ok=True)
    return size


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)  # noqa: PTH105 - atomic
