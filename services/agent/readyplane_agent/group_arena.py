"""The memory of all ranks of one worker: each chunk is read once and placed with whoever needs it.

Owns a memory file for every rank, which holds that rank's parts and nothing else, and one for what
belongs to no rank (small files, headers). For the loader it is one arena of one artifact: it asks
for every chunk once, whatever the number of ranks, and a chunk is verified before any rank gets
of it. Hands each rank's memory to its process, and whole files back to the node's cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from readyplane.core.errors import IdentityMismatch, InvalidField
from readyplane.core.identity import Manifest, chunk_hash
from readyplane_agent.arena import Arena
from readyplane_agent.arena_memory import ArenaMemory
from readyplane_agent.engines.layout import RankTable, TensorPart, tensor_table_document
from readyplane_agent.group_plan import GroupPlan, uncovered
from readyplane_agent.rank_arena import Buffers, lift, place
from readyplane_agent.rank_plan import Placement, RankPlan


@dataclass(slots=True)
class RankMemory:
    """What one rank maps. `placed_bytes`: of its parts, so far."""

    plan: RankPlan
    memory: ArenaMemory
    placed_bytes: int = 0


class GroupArena(Arena):
    """As `Arena`, for several ranks.

    Args:
        manifest, plan: of the same artifact.
        poison: overwrite each buffer when it is done with, so that a view that somebody kept shows.

    Attributes:
        ranks: memory of each rank, by its number.

    Raises:
        Unavailable: the machine has not that much memory; nothing is held then.
    """

    whole_files = False

    def __init__(self, manifest: Manifest, plan: GroupPlan, *, poison: bool = False) -> None:
        small = {path: at for (path, _), at in plan.offsets.items() if path not in plan.rest}
        super().__init__(manifest, places=(small, plan.shared_bytes))
        self.plan = plan
        self.ranks: tuple[RankMemory, ...] = ()
        try:
            for each in plan.ranks:
                self.ranks += (RankMemory(each, ArenaMemory(each.size_bytes)),)
        except BaseException:
            self.close()
            raise
        self._buffers = Buffers(manifest.chunk_bytes, poison=poison)
        self._counting = threading.Lock()
        self._by_file: dict[str, list[tuple[RankMemory, Placement]]] = {}
        for rank in self.ranks:
            for placed in rank.plan.placements:
                self._by_file.setdefault(placed.tensor.file, []).append((rank, placed))

    @property
    def path(self) -> Path:
        """Rank 0's memory."""
        return self.rank_paths[0]

    @property
    def rank_paths(self) -> tuple[Path, ...]:
        """Each rank's memory, by its number."""
        return tuple(rank.memory.path for rank in self.ranks)

    def placed(self) -> tuple[int, ...]:
        """Bytes that each rank's memory holds so far, by its number."""
        return tuple(rank.placed_bytes for rank in self.ranks)

    def tables(self) -> tuple[dict[str, Any], ...]:
        """Each rank's tensor table, by its number."""
        return tuple(self._table(number) for number in range(self.world))

    def _table(self, number: int) -> dict[str, Any]:
        plan, canary = self.ranks[number].plan, self.manifest.canary
        parts = {
            p.tensor.name: TensorPart(p.dtype, p.axis, p.start, p.stop, whole_shape(p))
            for p in plan.placements
        }
        table = RankTable(
            rank=number,
            world=self.world,
            names=tuple(tensor.name for tensor in self.manifest.tensors),
            parts=parts,
            prompt=() if canary is None else canary.prompt_token_ids,
            golden=() if canary is None else canary.golden_token_ids,
        )
        document = tensor_table_document(plan.layout, manifest_digest=self.manifest.digest)
        return {**document, "rank": table.document()}

    @property
    def world(self) -> int:
        """How many ranks have their memory here."""
        return len(self.ranks)

    def uncovered(self) -> list[str]:
        """Tensors of which not every part is with some rank, once."""
        return uncovered(self.manifest, [rank.plan for rank in self.ranks])

    def held_by_ranks(self) -> dict[str, list[int]]:
        """Tensors and bytes of each rank, by its number."""
        return {
            "rank_tensors": [len(rank.plan.placements) for rank in self.ranks],
            "rank_bytes": list(self.placed()),
        }

    @property
    def memories(self) -> tuple[tuple[ArenaMemory, int], ...]:
        """The ranks' memory first: it is the large one."""
        return (
            *((rank.memory, rank.plan.size_bytes) for rank in self.ranks),
            (self.memory, self.size_bytes),
        )

    # ----------------------------------------------------------------------- while it is filled

    def prefault_chunk(self, path: str, index: int) -> None:
        """Where a chunk's parts will lie is known only to its tensors: nothing is done ahead."""

    def window(self, path: str, index: int) -> memoryview:
        """Memory to read a chunk into, until `mark` or `drop`."""
        if path in self.offsets:
            return super().window(path, index)
        if self.sealed:
            raise InvalidField("arena", path, "write only before the arena is sealed")
        if (path, index) not in self._missing:
            raise InvalidField("arena", f"{path}[{index}]", "leave a verified chunk as it is")
        return self._buffers.take((path, index), self.span(path, index)[1])

    def mark(self, path: str, index: int) -> None:
        """A chunk was verified: every rank gets what it needs of it."""
        if path not in self.offsets:
            start, size = self.span(path, index)
            data = self._buffers.held((path, index))[:size]
            try:
                for rank, placed in self._by_file.get(path, ()):
                    done = place(placed, start, data, rank.memory.view)
                    with self._counting:
                        rank.placed_bytes += done
                for low, high, at in self._rest(path, start, start + size):
                    self.memory.view[at : at + high - low] = data[low - start : high - start]
            finally:
                data.release()
                self._buffers.give((path, index))
        super().mark(path, index)

    def drop(self, path: str, index: int) -> None:
        """A chunk came to nothing: its buffer is free."""
        self._buffers.give((path, index))

    def seal(self) -> None:
        """Make the bytes of all ranks unchangeable, once every chunk is verified."""
        super().seal()
        for rank in self.ranks:
            rank.memory.seal()

    def close(self) -> None:
        """Give all memory back."""
        for rank in self.ranks:
            rank.memory.close()
        super().close()

    # ----------------------------------------------------------------------- what it holds

    def header(self, path: str) -> memoryview:
        """The bytes of a weight file before its first tensor."""
        rest = self.plan.rest[path]
        end = rest[0][1] if rest and rest[0][0] == 0 else 0
        at = self.plan.offsets[path, 0] if end else 0
        return self.memory.view[at : at + end]

    def view(self, path: str) -> memoryview:
        """The bytes of a whole small file.

        Raises:
            InvalidField: a weight file is held in parts; see `pieces`.
        """
        if path not in self.offsets:
            raise InvalidField("path", path, "its tensors are with their ranks: take pieces of it")
        return super().view(path)

    def pieces(self, path: str, size_bytes: int) -> Iterator[memoryview]:
        """A whole file as it was published, put together chunk by chunk, each verified again.

        Raises:
            IdentityMismatch: a chunk is not what was loaded.
        """
        if path in self.offsets:
            yield from super().pieces(path, size_bytes)
            return
        entry = self._entries[path]
        for index, wanted in enumerate(entry.chunks):
            start, size = self.span(path, index)
            chunk = memoryview(bytearray(size))
            for rank, placed in self._by_file.get(path, ()):
                lift(placed, start, chunk, rank.memory.view)
            for low, high, at in self._rest(path, start, start + size):
                chunk[low - start : high - start] = self.memory.view[at : at + high - low]
            if chunk_hash(chunk) != wanted:
                raise IdentityMismatch(
                    "weights",
                    [f"{path}[{index}]: the ranks' parts are not the chunk that was loaded"],
                    "start the worker anew",
                )
            for begin in range(0, size, size_bytes):
                yield chunk[begin : begin + size_bytes]

    def _rest(self, path: str, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """What of [start, end) of a file is no tensor's: (low, high, where it lies)."""
        for begin, stop in self.plan.rest[path]:
            low, high = max(start, begin), min(end, stop)
            if low < high:
                yield low, high, self.plan.offsets[path, begin] + low - begin


def whole_shape(placed: Placement) -> tuple[int, ...]:
    """Shape of the tensor that a part was cut from; a scalar has none."""
    return placed.tensor.shape if placed.shape else ()
