"""Which chunk to ask which source for, of those that are missing. Pure.

Owns the choice that makes many starters of one artifact help each other (R8.4): each begins at a
place of its own (`begin_at`), asks a source first for what fewest others hold or are bringing
(rarest first), and spares storage whatever a peer can give. `fanout` keeps the account.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

# The state of a chunk, a byte each (`Arena.progress`).
MISSING, COMING, VERIFIED = 0, 1, 2
# A choice looks at so many chunks, half of them the next ones and half spread over all the others.
LOOKED_AT = 128


@dataclass(frozen=True, slots=True)
class Held:
    """What a source was last known to hold.

    Attributes:
        progress: a byte for each chunk (`Arena.progress`); None when it holds everything.
        storage: a byte store: asked only for what no peer holds.
    """

    progress: bytes | None = None
    storage: bool = False

    def has(self, chunk: int) -> bool:
        """Whether the chunk is verified there."""
        return self.progress is None or self.progress[chunk] == VERIFIED


def begin_at(incarnation: str, total: int) -> int:
    """Where a starter begins: spread evenly over starters, the same for each life."""
    return xxh3_64_intdigest(incarnation.encode()) % max(1, total)


def own_order(missing: Sequence[int], first: Sequence[int], begin: int) -> list[int]:
    """All missing chunks: `first` ones first, then from `begin` on and round."""
    early = set(first)
    rest = [chunk for chunk in missing if chunk not in early]
    return [
        *(chunk for chunk in first if chunk in set(missing)),
        *(chunk for chunk in rest if chunk >= begin),
        *(chunk for chunk in rest if chunk < begin),
    ]


def next_chunk(
    order: Sequence[int], ours: Sequence[int], source: Held, others: Sequence[Held]
) -> int | None:
    """The chunk to ask `source` for now, None when it has nothing that is missing.

    Args:
        order: chunks in this starter's own order; those that are no longer missing are passed over.
        ours: what we hold and are bringing (`Arena.progress`).
        others: the other sources that we read from.
    """
    partial = [other.progress for other in others if other.progress is not None]
    whole_peer = any(other.progress is None and not other.storage for other in others)
    if source.storage and whole_peer:
        return None
    best, least = None, 1 << 30
    for chunk in _looked_at(order, ours, source):
        count = 0
        spared = False
        for progress in partial:
            state = progress[chunk]
            if state:
                count += 1
                spared = spared or state == VERIFIED
        if source.storage and spared:
            continue
        if count < least:
            best, least = chunk, count
            if count == 0:
                break
    return best


def _looked_at(order: Sequence[int], ours: Sequence[int], source: Held) -> Iterator[int]:
    """The next chunks that the source can give, and a spread of the later ones."""
    left = LOOKED_AT // 2
    stopped = len(order)
    for place, chunk in enumerate(order):
        if ours[chunk] == MISSING and source.has(chunk):
            yield chunk
            left -= 1
            if not left:
                stopped = place + 1
                break
    step = max(1, (len(order) - stopped) // (LOOKED_AT // 2))
    for place in range(stopped, len(order), step):
        chunk = order[place]
        if ours[chunk] == MISSING and source.has(chunk):
            yield chunk
