"""Stored bytes against the manifest that names them: size, content, chunks, tensors.

Owns the comparison and its sentences; where the bytes come from is the store's business. Handed to
`blob_files` (an open file) and to `blob_objects` (a stream).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from readyplane.core.errors import InvalidField
from readyplane.core.identity import FileEntry, Manifest, TensorEntry, chunk_hash
from readyplane_registry.safetensors import header_bytes, tensors_of


@dataclass(frozen=True, slots=True)
class Content:
    """What reading a blob once showed: length, sha256 (empty when not asked for), chunk hashes."""

    size_bytes: int
    sha256: str
    chunks: tuple[str, ...]


async def content_of(pieces: AsyncIterator[bytes], *, chunk_bytes: int, content: bool) -> Content:
    """Read a stream to its end, a chunk of memory at a time."""
    whole = hashlib.sha256()
    chunks: list[str] = []
    held = bytearray()
    size = 0
    async for piece in pieces:
        size += len(piece)
        if content:
            whole.update(piece)
        held += piece
        while len(held) >= chunk_bytes:
            chunks.append(chunk_hash(held[:chunk_bytes]))
            held = held[chunk_bytes:]
    if held:
        chunks.append(chunk_hash(bytes(held)))
    return Content(size, "sha256:" + whole.hexdigest() if content else "", tuple(chunks))


def has_tensors(entry: FileEntry) -> bool:
    """True for a file whose header lists tensors that the manifest has to list too."""
    return entry.purpose == "weights" and entry.path.endswith(".safetensors")


def size_fault(entry: FileEntry, size: int) -> str:
    """Empty, or that the length is another one."""
    return "" if size == entry.size_bytes else f"{size} bytes are stored, not {entry.size_bytes}"


def content_fault(entry: FileEntry, found: Content) -> str:
    """Empty, or that the content is not the one of its name; said after it was taken out."""
    if found.sha256 in {"", entry.sha256}:
        return ""
    return (
        f"{found.size_bytes} bytes with {found.sha256} are stored under {entry.sha256}; taken out "
        "of the store, publish the file again"
    )


def chunk_fault(entry: FileEntry, chunks: Sequence[str], chunk_bytes: int) -> str:
    """Empty, or the first chunk that is another one."""
    for place, (wanted, found) in enumerate(zip(entry.chunks, chunks, strict=True)):
        if wanted != found:
            return f"chunk {place} (from byte {place * chunk_bytes}) is {found}, not {wanted}"
    return ""


def tensor_fault(entry: FileEntry, held: Sequence[TensorEntry], manifest: Manifest) -> str:
    """The tensors that a file says it has, against those of the manifest."""
    listed = {t.name: t for t in manifest.tensors if t.file == entry.path}
    for tensor in held:
        told = listed.pop(tensor.name, None)
        if told is None:
            return f"tensor {tensor.name!r} of the file is not in the manifest"
        for name in ("dtype", "shape", "offset_bytes", "size_bytes"):
            left, right = getattr(told, name), getattr(tensor, name)
            if left != right:
                return (
                    f"tensor {tensor.name!r}: {name} is {right} in the file, {left} in the manifest"
                )
    return f"tensor {next(iter(listed))!r} of the manifest is not in the file" if listed else ""


def header_length(prefix: bytes, entry: FileEntry) -> int:
    """Bytes of the header after the prefix of a safetensors file. Raises InvalidField."""
    return header_bytes(prefix, size_bytes=entry.size_bytes, file=entry.path)


def header_fault(header: bytes, entry: FileEntry, manifest: Manifest) -> str:
    """Empty, or how the tensors of a header differ from those of the manifest."""
    try:
        held = tensors_of(header, size_bytes=entry.size_bytes, file=entry.path)
    except InvalidField as error:
        return str(error)
    return tensor_fault(entry, held, manifest)
