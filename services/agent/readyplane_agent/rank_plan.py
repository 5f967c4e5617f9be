"""What one rank of a tensor-parallel group needs of an artifact, and where it goes (R11, R17). Pure.

Owns the plan: which part of each tensor, which chunks have to be read for it, where its bytes lie in
the rank's arena and in which type. A chunk is the least that can be verified, so the chunks that hold
a needed byte are read whole: for a split along the first axis that is the rank's rows and at most two
chunk ends a tensor; for a split along a later axis the rank's columns are in every row, so all chunks
of the tensor are read and the columns copied out. `read_bytes` says what it comes to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from readyplane.core.errors import InvalidField
from readyplane.core.identity import DTYPE_BYTES, Manifest, TensorEntry
from readyplane_agent.dtypes import CASTS
from readyplane_agent.engines.layout import ARENA_ALIGN_BYTES, ArenaLayout, TensorSlot

TENSOR_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How tensors whose name matches a pattern are divided.

    Attributes:
        pattern: shell pattern of names. axis: cut into equal parts along it; None: every rank has
            all of it.
    """

    pattern: str
    axis: int | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """One tensor's part for a rank.

    Attributes:
        tensor: in the artifact. dtype: in the arena. axis, start, stop: the part, along that axis;
            all of it for axis 0 with the whole range. shape: of the part. offset_bytes: in the arena.
    """

    tensor: TensorEntry
    dtype: str
    axis: int
    start: int
    stop: int
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        """Length in the arena."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def row(self) -> int:
        """Elements of the tensor from one index before the axis to the next."""
        return math.prod(self.tensor.shape[self.axis :])

    @property
    def run(self) -> tuple[int, int]:
        """[first, end) elements of each row that are the rank's."""
        inner = math.prod(self.tensor.shape[self.axis + 1 :])
        return self.start * inner, self.stop * inner


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Everything a rank loads.

    Attributes:
        placements: by arena offset. file_offsets: files that are no weights, whole, in the arena.
        chunks: (path, index) of what is read, in file order. size_bytes: of the arena.
        read_bytes: of all chunks read. placed_bytes: of what the rank keeps of them.
    """

    placements: tuple[Placement, ...]
    file_offsets: Mapping[str, int]
    chunks: tuple[tuple[str, int], ...]
    size_bytes: int
    read_bytes: int
    placed_bytes: int

    @property
    def layout(self) -> ArenaLayout:
        """What the engine is told."""
        slots = tuple(
            TensorSlot(p.tensor.name, p.dtype, p.shape, p.offset_bytes, p.size_bytes)
            for p in self.placements
        )
        return ArenaLayout({}, slots, self.size_bytes)


def plan_rank(
    manifest: Manifest,
    *,
    rank: int,
    tp: int,
    rules: Sequence[SplitRule] = (),
    dtypes: Mapping[str, str] | None = None,
    small_files: bool = True,
) -> RankPlan:
    """The plan of one rank.

    Args:
        rank: from 0. tp: size of the group. rules: the first that matches counts; without one a
            tensor is whole on every rank. dtypes: type in the artifact -> type in the arena.
        small_files: whether the rank's memory holds the files that are no weights, too.

    Raises:
        InvalidField: names the tensor that cannot be divided or cast, and why.
    """
    if not 0 <= rank < tp:
        raise InvalidField("rank", rank, f"use 0 to {tp - 1}")
    placements: list[Placement] = []
    end = 0
    for tensor in manifest.tensors:
        if tensor.ranks and rank not in tensor.ranks:
            continue
        placed = _placement(tensor, manifest, rank, tp, rules, dtypes or {}, end)
        placements.append(placed)
        end = _up(placed.offset_bytes + placed.size_bytes, TENSOR_ALIGN_BYTES)
    offsets: dict[str, int] = {}
    end = _up(end, ARENA_ALIGN_BYTES)
    for entry in manifest.files:
        if entry.purpose != "weights" and small_files:
            offsets[entry.path] = end
            end = _up(end + entry.size_bytes, ARENA_ALIGN_BYTES)
    wanted = {
        (e.path, i) for e in manifest.files if e.path in offsets for i in range(len(e.chunks))
    }
    for placed in placements:
        wanted.update((placed.tensor.file, i) for i in _chunks(placed, manifest.chunk_bytes))
    sizes = {entry.path: entry.size_bytes for entry in manifest.files}
    step = manifest.chunk_bytes
    return RankPlan(
        placements=tuple(placements),
        file_offsets=offsets,
        chunks=tuple(sorted(wanted)),
        size_bytes=max(end, ARENA_ALIGN_BYTES),
        read_bytes=sum(min(step, sizes[path] - i * step) for path, i in wanted),
        placed_bytes=sum(p.size_bytes for p in placements) + sum(sizes[path] for path in offsets),
    )


def _placement(
    tensor: TensorEntry,
    manifest: Manifest,
    rank: int,
    tp: int,
    rules: Sequence[SplitRule],
    dtypes: Mapping[str, str],
    offset_bytes: int,
) -> Placement:
    dtype = dtypes.get(tensor.dtype, tensor.dtype)
    if dtype != tensor.dtype:
        _check_cast(tensor, dtype, manifest.chunk_bytes)
    rule = next((rule for rule in rules if fnmatchcase(tensor.name, rule.pattern)), None)
    axis = None if rule is None else rule.axis
    shape = tensor.shape
    if axis is None or tp == 1:
        whole = shape[0] if shape else 1
        return Placement(
            tensor if shape else _as_row(tensor), dtype, 0, 0, whole, shape, offset_bytes
        )
    if not 0 <= axis < len(shape) or shape[axis] % tp:
        found = f"shape {list(shape)}"
        raise InvalidField(tensor.name, found, f"give axis {axis} a multiple of {tp}")
    part = shape[axis] // tp
    cut = (*shape[:axis], part, *shape[axis + 1 :])
    return Placement(tensor, dtype, axis, rank * part, (rank + 1) * part, cut, offset_bytes)


def _as_row(tensor: TensorEntry) -> TensorEntry:
    """A scalar as a row of one, so that it has an axis."""
    return TensorEntry(
        tensor.name, tensor.dtype, (1,), tensor.file, tensor.offset_bytes, tensor.size_bytes
    )


def _check_cast(tensor: TensorEntry, dtype: str, chunk_bytes: int) -> None:
    if (tensor.dtype, dtype) not in CASTS:
        raise InvalidField(f"{tensor.name}.dtype", f"{tensor.dtype} to {dtype}", "see dtypes.CASTS")
    size = DTYPE_BYTES[tensor.dtype]
    if tensor.offset_bytes % size or chunk_bytes % size:
        raise InvalidField(
            f"{tensor.name}.offset_bytes",
            tensor.offset_bytes,
            f"publish it at a multiple of {size} B: a chunk must not end inside an element",
        )


def _chunks(placed: Placement, chunk_bytes: int) -> Iterator[int]:
    """Chunks of the tensor's file that hold a byte of the part."""
    tensor = placed.tensor
    size = DTYPE_BYTES[tensor.dtype]
    first, end = (n * size for n in placed.run)
    row = placed.row * size
    rows = tensor.size_bytes // row if row else 0
    if not rows or first == end:
        return
    if row - (end - first) < chunk_bytes:
        # No gap between two rows' runs has room for a whole chunk.
        begin = tensor.offset_bytes + first
        last = tensor.offset_bytes + (rows - 1) * row + end
        yield from range(begin // chunk_bytes, -(-last // chunk_bytes))
        return
    for number in range(rows):
        at = tensor.offset_bytes + number * row
        yield from range((at + first) // chunk_bytes, -(-(at + end) // chunk_bytes))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
