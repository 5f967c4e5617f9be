"""The arena of one rank: verified chunks are cut, cast and placed; their buffers are used again.

Owns the buffers between reading and placing. The pipeline reads a chunk into one, verifies it, and
marks it; only then are the rank's elements copied to their final address, and the buffer goes to the
next chunk. Nobody is ever given a view of a buffer (B126). Their bytes are those that the
pipeline's budget counts; a cast needs `CAST_BYTES` more a thread.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from readyplane.core.errors import InvalidField
from readyplane.core.identity import DTYPE_BYTES, Manifest
from readyplane_agent.arena import Arena
from readyplane_agent.arena_memory import ArenaMemory
from readyplane_agent.dtypes import CASTS, STORED, Bits
from readyplane_agent.engines.layout import HUGE_BYTES
from readyplane_agent.rank_plan import Placement, RankPlan

CAST_BYTES = 2**20
SMALL_BYTES = 2**20
POISON = 0xA5


class RankArena(Arena):
    """As `Arena`, holding what a plan says of the artifact instead of its files.

    Args:
        manifest, plan: of the same artifact. memory: see `Arena`.
        poison: overwrite each buffer when it is done with, so that a view that somebody kept shows.

    Attributes:
        plan: what is placed where; `plan.layout` is the engine's tensor table.
    """

    def __init__(
        self,
        manifest: Manifest,
        plan: RankPlan,
        memory: ArenaMemory | None = None,
        *,
        poison: bool = False,
    ) -> None:
        memory = ArenaMemory(plan.size_bytes) if memory is None else memory
        super().__init__(manifest, memory, places=(dict(plan.file_offsets), plan.size_bytes))
        self.plan = plan
        self._missing = set(plan.chunks)
        self._buffers = Buffers(manifest.chunk_bytes, poison=poison)
        self._by_file: dict[str, list[Placement]] = {}
        for placed in plan.placements:
            self._by_file.setdefault(placed.tensor.file, []).append(placed)

    def prefault_chunk(self, path: str, index: int) -> None:
        """Where a chunk's parts will lie is known only to its tensors: nothing is done ahead."""

    def window(self, path: str, index: int) -> memoryview:
        """Memory to read a chunk into, until `mark` or `drop`."""
        if self.sealed:
            raise InvalidField("arena", path, "write only before the arena is sealed")
        if (path, index) not in self._missing:
            raise InvalidField("arena", f"{path}[{index}]", "leave a verified chunk as it is")
        if path in self.offsets:
            return super().window(path, index)
        return self._buffers.take((path, index), self.span(path, index)[1])

    def mark(self, path: str, index: int) -> None:
        """A chunk was verified: place what the rank needs of it."""
        if path not in self.offsets:
            start, size = self.span(path, index)
            data = self._buffers.held((path, index))[:size]
            try:
                for placed in self._by_file.get(path, ()):
                    self._place(placed, start, data)
            finally:
                data.release()
                self._buffers.give((path, index))
        super().mark(path, index)

    def _place(self, placed: Placement, start: int, data: memoryview) -> None:
        place(placed, start, data, self.memory.view)

    def drop(self, path: str, index: int) -> None:
        """A chunk came to nothing: its buffer is free."""
        self._buffers.give((path, index))


def place(placed: Placement, chunk_start: int, data: memoryview, arena: memoryview) -> int:
    """Copy what a verified chunk holds of a tensor's part to its final address.

    Args:
        chunk_start: offset of `data` in the tensor's file. arena: writable, whole.

    Returns the bytes that were written.
    """
    tensor = placed.tensor
    low, high = _shared(placed, chunk_start, len(data))
    if low >= high:
        return 0
    if placed.dtype == tensor.dtype:
        # Byte for byte: a chunk may end inside an element.
        kind, cast, unit = "u1", None, DTYPE_BYTES[tensor.dtype]
    else:
        kind, cast, unit = STORED[tensor.dtype], CASTS[tensor.dtype, placed.dtype], 1
    held = np.frombuffer(data[low - chunk_start : high - chunk_start], kind)
    out_kind = kind if cast is None else STORED[placed.dtype]
    out = np.frombuffer(arena[placed.offset_bytes :][: placed.size_bytes], out_kind)
    first = (low - tensor.offset_bytes) // held.itemsize
    done = 0
    for source, target in _parts(placed, unit, first, held, out):
        done += target.nbytes
        if cast is None:
            np.copyto(target, source)
            continue
        step = max(1, CAST_BYTES // (16 * max(1, source[0].size)))
        for at in range(0, len(source), step):
            target[at : at + step] = cast(source[at : at + step])
    return done


def lift(placed: Placement, start: int, into: memoryview, arena: memoryview) -> None:
    """The way back: write what a part holds of a piece of the tensor's file to its place there.

    Args:
        start: offset of `into` in the file. arena: whole; the part lies there uncast.
    """
    tensor = placed.tensor
    if placed.dtype != tensor.dtype:
        raise InvalidField(tensor.name, placed.dtype, "keep the type of a part that is given back")
    low, high = _shared(placed, start, len(into))
    if low >= high:
        return
    held = np.frombuffer(into[low - start : high - start], "u1")
    out = np.frombuffer(arena[placed.offset_bytes :][: placed.size_bytes], "u1")
    unit, first = DTYPE_BYTES[tensor.dtype], low - tensor.offset_bytes
    for target, source in _parts(placed, unit, first, held, out):
        np.copyto(target, source)


def _shared(placed: Placement, start: int, size_bytes: int) -> tuple[int, int]:
    """[low, high) of the file in which a piece and the tensor meet; empty for an empty part."""
    tensor = placed.tensor
    low = max(start, tensor.offset_bytes)
    high = min(start + size_bytes, tensor.offset_bytes + tensor.size_bytes)
    return (low, high) if placed.size_bytes else (low, low)


def _parts(
    placed: Placement, unit: int, first: int, held: Bits, out: Bits
) -> Iterator[tuple[Bits, Bits]]:
    """(of the piece, of the part) views of equal shape, of all items that are the rank's.

    Whole rows come as one two-dimensional view, a row that the piece cuts as one run.

    Args:
        unit: items an element has. first: the piece's first item in the tensor.
    """
    begin, end = (n * unit for n in placed.run)
    row, width, after = placed.row * unit, (placed.run[1] - placed.run[0]) * unit, first + len(held)
    whole = range(-(-first // row), after // row)
    if len(whole) > 1:
        low, high = whole.start, whole.stop
        source = held[low * row - first : high * row - first].reshape(-1, row)[:, begin:end]
        yield source, out[low * width : high * width].reshape(-1, width)
    for number in range(first // row, -(-after // row)):
        if len(whole) > 1 and number in whole:
            continue
        low = max(first, number * row + begin)
        high = min(after, number * row + end)
        if low < high:
            at = number * width + low - number * row - begin
            yield held[low - first : high - first], out[at : at + high - low]


class Buffers:
    """Buffers of one chunk each, on huge pages: a direct read into small ones takes twice as long."""

    def __init__(self, chunk_bytes: int, *, poison: bool) -> None:
        self._size = math.ceil(chunk_bytes / HUGE_BYTES) * HUGE_BYTES
        self._poison = poison
        self._free: list[memoryview] = []
        self._used: dict[tuple[str, int], memoryview] = {}
        self._lock = threading.Lock()

    def take(self, chunk: tuple[str, int], size: int) -> memoryview:
        with self._lock:
            buffer = self._used.get(chunk)
            if buffer is None:
                small = size <= SMALL_BYTES
                if small:
                    buffer = memoryview(bytearray(size))
                else:
                    buffer = self._free.pop() if self._free else self._made()
                self._used[chunk] = buffer
        return buffer[:size]

    def held(self, chunk: tuple[str, int]) -> memoryview:
        with self._lock:
            return self._used[chunk]

    def give(self, chunk: tuple[str, int]) -> None:
        with self._lock:
            buffer = self._used.pop(chunk, None)
            if buffer is None:
                return
            if self._poison:
                ctypes.memset(
                    ctypes.addressof(ctypes.c_char.from_buffer(buffer)), POISON, len(buffer)
                )
            if len(buffer) > SMALL_BYTES:
                self._free.append(buffer)

    def _made(self) -> memoryview:
        """One more, aligned to huge pages."""
        mapped = mmap.mmap(-1, self._size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        begin = -base % HUGE_BYTES
        return memoryview(mapped)[begin : begin + self._size]
