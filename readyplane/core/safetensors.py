"""The header of a safetensors file, read as hostile input (B128, B133, B134).

Owns the proof that every tensor lies inside its file, that none overlap, that no byte is left
over, and that each size is what shape and type say: before anything is allocated. The registry
compares stored bytes with a manifest by it, and an agent the bytes that it has loaded.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane.core.identity import DTYPE_BYTES, TensorEntry, parse

PREFIX_BYTES = 8
HEADER_BYTES_MAX = 100_000_000
TENSORS_MAX = 1_000_000
SHAPE_DIMENSIONS_MAX = 32
WHOLE_MAX = 2**63 - 1
# What lies in a safetensors file's place when a download went wrong; as a length, each of these
# beginnings is longer than any file.
IN_ITS_PLACE = (
    (b"version ", "a git-lfs pointer", "fetch the file itself with `git lfs pull`"),
    (b"<!doctyp", "an HTML page", "download the file again: the server sent a page instead"),
    (b"<html", "an HTML page", "download the file again: the server sent a page instead"),
    (b"<?xml", "an XML document", "download the file again: the server sent an error instead"),
)


def header_bytes(prefix: bytes, *, size_bytes: int, file: str) -> int:
    """Length of the JSON header that follows the 8 bytes of `prefix`.

    Raises:
        InvalidField: the file is shorter than its header, or the header longer than
            `HEADER_BYTES_MAX`.
    """
    if size_bytes < PREFIX_BYTES or len(prefix) < PREFIX_BYTES:
        raise InvalidField(file, f"{size_bytes} bytes", "give a whole safetensors file")
    for begin, what, remedy in IN_ITS_PLACE:
        if prefix[:PREFIX_BYTES].lower().startswith(begin):
            raise InvalidField(file, f"{what} of {size_bytes} bytes", remedy)
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    most = min(HEADER_BYTES_MAX, size_bytes - PREFIX_BYTES)
    if not 2 <= length <= most:
        raise InvalidField(
            f"{file}: header length",
            length,
            f"a header of this file has 2 to {most} bytes; write the file anew",
        )
    return length


def tensors_of(header: bytes, *, size_bytes: int, file: str) -> tuple[TensorEntry, ...]:
    """Every tensor of the file, by offset; `offset_bytes` counts from the file's first byte.

    Args:
        header: the JSON text whose length `header_bytes` gave.
        size_bytes: of the whole file.
        file: name for errors, and the `file` of the entries.

    Raises:
        InvalidField: names the file and the tensor, and what is wrong with it.
    """
    where = f"{file}: header"
    if header[:1] != b"{":
        raise InvalidField(where, header[:20], "begin the header with {")
    document = parse(header, where=where)
    if not isinstance(document, dict):
        raise InvalidField(where, document, "use an object")
    _check_metadata(document.pop("__metadata__", {}), where)
    if not document:
        raise InvalidField(where, "no tensor", "list at least one tensor")
    if len(document) > TENSORS_MAX:
        raise InvalidField(where, f"{len(document)} tensors", f"list at most {TENSORS_MAX}")
    data_begin = PREFIX_BYTES + len(header)
    data_bytes = size_bytes - data_begin
    entries = [
        _tensor(name, entry, data_begin=data_begin, data_bytes=data_bytes, file=file)
        for name, entry in document.items()
    ]
    entries.sort(key=lambda t: (t.offset_bytes, t.size_bytes, t.name))
    _check_cover(entries, data_begin=data_begin, size_bytes=size_bytes, file=file)
    return tuple(entries)


def _check_metadata(metadata: object, where: str) -> None:
    if not isinstance(metadata, dict):
        raise InvalidField(f"{where}.__metadata__", metadata, "use an object of texts")
    for name, value in metadata.items():
        if not isinstance(value, str):
            raise InvalidField(f"{where}.__metadata__.{name}", value, "use text")


def _tensor(name: str, entry: Any, *, data_begin: int, data_bytes: int, file: str) -> TensorEntry:
    where = f"{file}: tensor {name!r}"
    if not name or not unicodedata.is_normalized("NFC", name):
        raise InvalidField(where, name, "give tensors non-empty names in Unicode form NFC")
    if "\0" in name:
        raise InvalidField(where, name, "leave the character U+0000 out of its name")
    if not name.isascii() and any("\ud800" <= c <= "\udfff" for c in name):
        raise InvalidField(where, name, "write whole characters: a surrogate needs its other half")
    if not isinstance(entry, Mapping) or set(entry) != {"dtype", "shape", "data_offsets"}:
        found = sorted(entry) if isinstance(entry, Mapping) else entry
        raise InvalidField(where, found, "give exactly dtype, shape and data_offsets")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise InvalidField(f"{where}.dtype", dtype, "use one of " + ", ".join(DTYPE_BYTES))
    shape = entry["shape"]
    if not isinstance(shape, list) or not all(_whole(n) for n in shape):
        remedy = f"use a list of whole numbers from 0 to {WHOLE_MAX}"
        raise InvalidField(f"{where}.shape", shape, remedy)
    if len(shape) > SHAPE_DIMENSIONS_MAX:
        raise InvalidField(f"{where}.shape", shape, f"use at most {SHAPE_DIMENSIONS_MAX} numbers")
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_whole(n) for n in offsets):
        raise InvalidField(f"{where}.data_offsets", offsets, "use two whole numbers from 0")
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise InvalidField(
            f"{where}.data_offsets",
            offsets,
            f"use begin <= end <= {data_bytes}, the bytes after the header",
        )
    wanted = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != wanted:
        raise InvalidField(
            f"{where}.data_offsets",
            offsets,
            f"span {wanted} bytes, which shape {shape} of {dtype} needs",
        )
    return TensorEntry(name, dtype, tuple(shape), file, data_begin + begin, end - begin)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= WHOLE_MAX


def _check_cover(
    entries: list[TensorEntry], *, data_begin: int, size_bytes: int, file: str
) -> None:
    """The tensors tile the data exactly: an overlap or a gap hides bytes that nobody checks."""
    at, before = data_begin, "the header"
    for entry in entries:
        if entry.offset_bytes != at:
            fault = "overlaps" if entry.offset_bytes < at else "leaves a gap after"
            raise InvalidField(
                f"{file}: tensor {entry.name!r}.data_offsets",
                entry.offset_bytes - data_begin,
                f"it {fault} {before}; begin at {at - data_begin}",
            )
        at, before = entry.offset_bytes + entry.size_bytes, f"tensor {entry.name!r}"
    if at != size_bytes:
        raise InvalidField(
            f"{file}: data", f"{size_bytes} bytes", f"end the file at {at}, after {before}"
        )
