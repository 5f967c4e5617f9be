"""What was measured, before it is a profile: single readings, their medians, and where they are from.

Pure values. Milliseconds and tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

SAME_LOAD = 0.02
"""Readings whose KV tokens differ by less, of as many sequences, are one point measured again."""


@dataclass(frozen=True, slots=True)
class PrefillReading:
    """Time to the first token of one prompt that was alone; `cached` tokens were held already."""

    tokens: int
    milliseconds: float
    cached: int = 0


@dataclass(frozen=True, slots=True)
class DecodeReading:
    """Mean iteration with so many sequences running over so many KV tokens, and none joining."""

    sequences: float
    kv_tokens: float
    milliseconds: float


@dataclass(slots=True)
class Readings:
    """Everything that one measurement or one file holds.

    Attributes:
        repeats: the prompts sent again, of whose tokens `cached` were said to be held.
        notes: what a reader of the profile should know.
    """

    prefill: list[PrefillReading] = field(default_factory=list)
    decode: list[DecodeReading] = field(default_factory=list)
    repeats: list[PrefillReading] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Readings) -> None:
        """Take what another file holds, too."""
        self.prefill += other.prefill
        self.decode += other.decode
        self.repeats += other.repeats
        self.notes += [note for note in other.notes if note not in self.notes]


def prefill_points(readings: Iterable[PrefillReading]) -> tuple[tuple[float, float], ...]:
    """(tokens, median milliseconds) by prompt length; prompts with a cached part are left out."""
    found: dict[int, list[float]] = defaultdict(list)
    for reading in readings:
        if not reading.cached:
            found[reading.tokens].append(reading.milliseconds)
    return tuple((float(n), median(found[n])) for n in sorted(found))


def decode_points(readings: Iterable[DecodeReading]) -> tuple[tuple[float, float, float], ...]:
    """(sequences, KV tokens, median milliseconds), repeated readings of one load as one point."""
    groups: list[list[DecodeReading]] = []
    for reading in sorted(readings, key=lambda r: (r.sequences, r.kv_tokens)):
        first = groups[-1][0] if groups else None
        if (
            first is not None
            and first.sequences == reading.sequences
            and reading.kv_tokens <= first.kv_tokens * (1.0 + SAME_LOAD)
        ):
            groups[-1].append(reading)
        else:
            groups.append([reading])
    return tuple(
        (
            g[0].sequences,
            median(r.kv_tokens for r in g),
            median(r.milliseconds for r in g),
        )
        for g in groups
    )
