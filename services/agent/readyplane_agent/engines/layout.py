"""Where the files and tensors of an artifact lie in the arena: agreed by loader and engine.

Owns the layout and the JSON table that tells it; a module of its own, so that an engine process
need not import the whole port.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane.core.identity import Manifest, digest_of

TENSOR_TABLE_SCHEMA = "readyplane/tensor-table/1"
ARENA_ALIGN_BYTES = 4096
HUGE_BYTES = 2 * 2**20
"""A huge page: what maps as one is a multiple of it, in memory and in its file."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where one tensor lies in the arena: `[offset_bytes, offset_bytes + size_bytes)`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Where files and tensors of an artifact lie in the arena file.

    Attributes:
        file_offsets: file path -> offset of its first byte. tensors: in manifest order.
        size_bytes: length of the arena file.
    """

    file_offsets: Mapping[str, int]
    tensors: tuple[TensorSlot, ...]
    size_bytes: int


def arena_layout(manifest: Manifest, *, align_bytes: int = ARENA_ALIGN_BYTES) -> ArenaLayout:
    """The one layout that loader and engine agree on: weight files one after another.

    Files of purpose `weights` in path order, each starting at a multiple of
    `align_bytes`, byte for byte as published; a tensor lies at its file's offset plus its
    own.
    """
    offsets: dict[str, int] = {}
    end = 0
    for entry in manifest.files:
        if entry.purpose == "weights":
            offsets[entry.path] = end
            end += -(-entry.size_bytes // align_bytes) * align_bytes
    slots = tuple(
        TensorSlot(t.name, t.dtype, t.shape, offsets[t.file] + t.offset_bytes, t.size_bytes)
        for t in manifest.tensors
        if t.file in offsets
    )
    return ArenaLayout(offsets, slots, end)


def tensor_table_document(layout: ArenaLayout, *, manifest_digest: str) -> dict[str, Any]:
    """The JSON document that an adapter hands to its engine as `EngineSpec.tensor_table_path`."""
    return {
        "schema": TENSOR_TABLE_SCHEMA,
        "manifest_digest": manifest_digest,
        "arena_bytes": layout.size_bytes,
        "tensors": [
            [slot.name, slot.dtype, list(slot.shape), slot.offset_bytes, slot.size_bytes]
            for slot in layout.tensors
        ],
    }


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Which part of a tensor a rank has: [start, stop) along `axis` of the whole `shape`."""

    dtype: str
    axis: int
    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def full(self) -> int:
        """Length of the whole along `axis`."""
        return self.shape[self.axis] if self.shape else 1

    @property
    def whole(self) -> bool:
        """Whether the rank has all of it."""
        return (self.start, self.stop) == (0, self.full)


@dataclass(frozen=True, slots=True)
class RankTable:
    """What a rank's table says beside the slots.

    Attributes:
        rank, world: which of how many. names: of all tensors of the artifact, in its order.
        parts: by name, of the tensors that this rank has.
        prompt, golden: the artifact's question and its known answer, empty without.
    """

    rank: int
    world: int
    names: tuple[str, ...]
    parts: Mapping[str, TensorPart]
    prompt: tuple[int, ...] = ()
    golden: tuple[int, ...] = ()

    def document(self) -> dict[str, Any]:
        """As it stands in the tensor table, under `rank`."""
        return {
            "rank": self.rank,
            "world": self.world,
            "names": list(self.names),
            "parts": {
                name: [part.dtype, part.axis, part.start, part.stop, list(part.shape)]
                for name, part in self.parts.items()
            },
            "prompt": list(self.prompt),
            "golden": list(self.golden),
        }

    @classmethod
    def from_document(cls, doc: Any) -> RankTable:
        """The way back. Raises InvalidField: not such a document."""
        try:
            return cls(
                rank=int(doc["rank"]),
                world=int(doc["world"]),
                names=tuple(str(name) for name in doc["names"]),
                parts={
                    str(name): TensorPart(
                        str(dtype), int(axis), int(start), int(stop), tuple(int(n) for n in shape)
                    )
                    for name, (dtype, axis, start, stop, shape) in doc["parts"].items()
                },
                prompt=tuple(int(token) for token in doc["prompt"]),
                golden=tuple(int(token) for token in doc["golden"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidField(
                "tensor_table.rank", repr(error), "give the table of a rank to a rank"
            ) from error


def read_rank_table(text: str | bytes) -> RankTable:
    """What a tensor table says of its rank.

    Raises:
        InvalidField: it is the table of an engine of one rank, or not such a document.
    """
    try:
        doc = json.loads(text)
    except ValueError as error:
        raise InvalidField("tensor_table", repr(error), "write JSON") from error
    return RankTable.from_document(doc.get("rank") if isinstance(doc, dict) else None)


def layout_digest(manifest: Manifest) -> str:
    """Identity of the weights as they lie in memory, beside that of the files (B108).

    Equal files may still be laid out or prepared differently; peers whose digests differ give each
    other nothing.
    """
    layout = arena_layout(manifest)
    return digest_of(
        {
            "table": tensor_table_document(layout, manifest_digest=manifest.digest),
            "files": dict(layout.file_offsets),
            "layout": manifest.layout,
            "quantisation": manifest.quantisation,
            "loader_version": manifest.loader_version,
            "parallel": [manifest.tp, manifest.pp, manifest.ep],
        }
    )


def read_tensor_table(text: str | bytes) -> tuple[tuple[TensorSlot, ...], int]:
    """Slots and arena size of a tensor table.

    Raises:
        InvalidField: not such a document, or a tensor outside the arena.
    """
    where = "tensor_table"
    try:
        doc = json.loads(text)
        schema, size = doc["schema"], int(doc["arena_bytes"])
        slots = tuple(
            TensorSlot(str(n), str(d), tuple(int(v) for v in s), int(o), int(b))
            for n, d, s, o, b in doc["tensors"]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidField(where, repr(error), f"write a {TENSOR_TABLE_SCHEMA} document") from error
    if schema != TENSOR_TABLE_SCHEMA:
        raise InvalidField(f"{where}.schema", schema, f"write {TENSOR_TABLE_SCHEMA}")
    for slot in slots:
        if slot.offset_bytes < 0 or slot.offset_bytes + slot.size_bytes > size:
            raise InvalidField(f"{where}.{slot.name}", slot.offset_bytes, f"stay within {size} B")
    return slots, size
