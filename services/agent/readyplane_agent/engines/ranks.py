"""Engines of several ranks: what each rank is started with, and what it says of itself.

Owns the values beside `EngineSpec` and the Protocol of an adapter whose engine is several processes,
one a rank. Rank 0's process is the engine that serves; its memory is `EngineSpec.arena_path`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

TP_MAX = 64
# Exit status of a rank that ended because another one was gone: it is not to blame.
LOST_STATUS = 4
STEPS = ("scheduled", "verified", "connected", "placed", "canary_passed")


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank beside rank 0: its number, its memory, and the table of what lies there."""

    rank: int
    arena_path: Path
    tensor_table_path: Path


@dataclass(frozen=True, slots=True)
class RankStep:
    """How far one rank's process is.

    Attributes:
        step: of `STEPS`, the last it passed. progress: grows while it gets on.
        pid: of its process. returncode: once that is gone. detail: what it says, or why it ended.
        lost: the rank that it ended for, None when it did not or does not know.
    """

    rank: int
    step: str
    progress: int = 0
    pid: int = 0
    returncode: int | None = None
    detail: str = ""
    lost: int | None = None


@runtime_checkable
class HasRanks(Protocol):
    """An adapter that starts `EngineSpec.ranks` as processes and knows how far they are."""

    def ranks(self) -> tuple[RankStep, ...]:
        """Every rank, rank 0 included, by number; empty for an engine of one rank or before `start`."""
        ...


def first_gone(ranks: Iterable[RankStep]) -> RankStep | None:
    """The rank to blame for the end of a group; None while all run.

    That is one that ended by itself, else one that those that ended had lost: it hangs, or is
    stopped, and its process is there. Else one of those that only lost another.
    """
    known = {rank.rank: rank for rank in ranks}
    gone = [rank for rank in known.values() if rank.returncode is not None]
    by_itself = [rank for rank in gone if rank.returncode != LOST_STATUS]
    named = {rank.lost for rank in gone if rank.lost is not None}
    hung = [known[n] for n in named if n in known and known[n].returncode is None]
    return min(by_itself or hung or gone, key=lambda rank: rank.rank, default=None)
