"""Which chunks of an artifact somebody holds or lacks, as a short list of ranges. Pure.

Chunks are numbered through the whole artifact: the files in the manifest's order (by path), and in
each file its chunks in order of offset. A set of chunks is a sorted tuple of half-open ranges that
neither overlap nor touch, `((0, 12), (40, 41))`, so that a source that loads in order says what it
holds in two numbers. An empty tuple is no chunk at all; that everything is meant is said beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from readyplane.core.errors import InvalidField
from readyplane.core.identity import Manifest

ChunkRanges = tuple[tuple[int, int], ...]
RANGES_MAX = 4096


def ranges_of(chunks: Iterable[int]) -> ChunkRanges:
    """Single chunks as ranges."""
    return union((chunk, chunk + 1) for chunk in chunks)


def union(*parts: Iterable[tuple[int, int]]) -> ChunkRanges:
    """Everything that lies in any of them; ranges may come unsorted and overlap."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(pair for part in parts for pair in part if pair[0] < pair[1]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return tuple(found)


def common(left: ChunkRanges, right: ChunkRanges) -> ChunkRanges:
    """What lies in both."""
    found: list[tuple[int, int]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            found.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def without(left: ChunkRanges, right: ChunkRanges) -> ChunkRanges:
    """What lies in the first and not in the second."""
    found: list[tuple[int, int]] = []
    j = 0
    for begin, end in left:
        at = begin
        while j < len(right) and right[j][1] <= at:
            j += 1
        k = j
        while k < len(right) and right[k][0] < end:
            if at < right[k][0]:
                found.append((at, right[k][0]))
            at = max(at, right[k][1])
            k += 1
        if at < end:
            found.append((at, end))
    return tuple(found)


def count(ranges: ChunkRanges) -> int:
    """How many chunks."""
    return sum(end - begin for begin, end in ranges)


def check_ranges(ranges: Sequence[tuple[int, int]], *, where: str) -> ChunkRanges:
    """Ranges as they come from outside, in order. Raises InvalidField naming the field."""
    if len(ranges) > RANGES_MAX:
        raise InvalidField(where, f"{len(ranges)} ranges", f"give {RANGES_MAX} at most")
    for begin, end in ranges:
        if not 0 <= begin < end < 2**40:
            raise InvalidField(where, (begin, end), "give half-open ranges, 0 <= begin < end")
    return union(ranges)


class ChunkTable:
    """The chunks of one manifest by number.

    Attributes:
        total: how many there are.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._chunk_bytes = manifest.chunk_bytes
        self._sizes = [entry.size_bytes for entry in manifest.files]
        self._paths = {entry.path: place for place, entry in enumerate(manifest.files)}
        # The first chunk of each file, and the end of the last one.
        self._first = [0, *accumulate(len(entry.chunks) for entry in manifest.files)]
        self._bytes = [0, *accumulate(self._sizes)]
        self.total = self._first[-1]

    @property
    def whole(self) -> ChunkRanges:
        """All chunks."""
        return ((0, self.total),) if self.total else ()

    def number(self, path: str, chunk: int) -> int:
        """The number of a file's chunk in the artifact. Raises InvalidField for an unknown file."""
        place = self._paths.get(path)
        if place is None or not 0 <= chunk < self._first[place + 1] - self._first[place]:
            raise InvalidField("chunk", f"{path}[{chunk}]", "name a chunk of the manifest")
        return self._first[place] + chunk

    def size_bytes(self, ranges: ChunkRanges) -> int:
        """Bytes of these chunks; numbers beyond the artifact count nothing."""
        return sum(self._before(end) - self._before(begin) for begin, end in ranges)

    def _before(self, chunk: int) -> int:
        """Bytes of all chunks with a smaller number."""
        if chunk >= self.total:
            return self._bytes[-1]
        low, high = 0, len(self._sizes)
        while high - low > 1:  # the file in which the chunk lies
            middle = (low + high) // 2
            low, high = (middle, high) if self._first[middle] <= chunk else (low, middle)
        while self._first[low + 1] <= chunk:  # files without a chunk
            low += 1
        inside = (chunk - self._first[low]) * self._chunk_bytes
        return self._bytes[low] + min(self._sizes[low], inside)
