"""What a worker tells of its prefix cache: events in the router's hash scheme, numbered in batches."""

from __future__ import annotations

from dataclasses import dataclass

GPU, CPU, DISK = "gpu", "cpu", "disk"


@dataclass(frozen=True, slots=True)
class KvEvent:
    """Blocks gained (`stored`), lost (`removed`), or all lost (`cleared`).

    Attributes:
        parent_hash: the block before the first one stored; None when it is not known, or there is
            none.
        tier: where the blocks lie: GPU, CPU or DISK; a clearing is of all of them.
    """

    kind: str
    block_hashes: tuple[int, ...] = ()
    parent_hash: int | None = None
    tier: str = GPU


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Events of one worker; `sequence` grows by one per batch and incarnation."""

    sequence: int
    events: tuple[KvEvent, ...]
