"""Where to measure, in which order, and when to stop (pure but for counting what was spent).

The coarsest grid comes first, so that a measurement that runs out of time still spans its range.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

ISL_MIN = 64
KV_FILL = 0.8
"""Share of the KV pool that a decode point may fill: more, and the engine preempts."""
CONTEXTS = 3
CONTEXT_FILL = 0.75
"""Share of the longest context that a decode point's prompt may take: the rest is for its answer,
which grows while the others of its batch prefill."""


@dataclass(frozen=True, slots=True)
class Span:
    """What an endpoint allows: longest prompt to send, prompt with its answer, KV tokens, and
    sequences at once.
    """

    isl_max: int
    context_max: int
    kv_tokens: int
    sequences_max: int


def prompt_lengths(span: Span, points: int) -> tuple[int, ...]:
    """Prompt lengths from `ISL_MIN` on, evenly in the logarithm, ends first and then the middles."""
    low = min(ISL_MIN, span.isl_max)
    grid = _geometric(low, span.isl_max, points)
    return tuple(grid[i] for i in coarse_first(len(grid)))


def decode_loads(span: Span, steps: int) -> tuple[tuple[int, int], ...]:
    """(sequences, context) of the decode points: short, middle and long contexts, each from one
    sequence to as many as fit, coarse first.
    """
    loads: list[tuple[int, int]] = []
    room = min(CONTEXT_FILL * span.context_max, KV_FILL * span.kv_tokens / 2)
    longest = max(ISL_MIN, min(span.isl_max, int(room)))
    for context in _geometric(min(2 * ISL_MIN, longest), longest, CONTEXTS):
        most = max(1, min(span.sequences_max, int(KV_FILL * span.kv_tokens / (context * 1.1))))
        counts = _geometric(1, most, steps)
        loads += [(count, context) for count in counts]
    return tuple(loads[i] for i in coarse_first(len(loads)))


def coarse_first(count: int) -> tuple[int, ...]:
    """Indices of a grid: both ends, then the middle of the widest gap, again and again."""
    order = [0, count - 1] if count > 1 else list(range(count))
    while len(order) < count:
        known = sorted(order)
        gaps = [(b - a, -a) for a, b in pairwise(known)]
        width, start = max(gaps)
        order.append(-start + width // 2)
    return tuple(order)


def _geometric(low: int, high: int, points: int) -> list[int]:
    if points < 2 or high <= low:
        return [high]
    ratio = (high / low) ** (1.0 / (points - 1))
    return sorted({round(low * ratio**i) for i in range(points)})


@dataclass(slots=True)
class Budget:
    """What may be spent; `requests` and `until_s` bound each other's blind spots.

    Attributes:
        until_s: on the clock that `allows` is asked with. spent: requests sent so far.
    """

    until_s: float
    requests: int
    spent: int = 0

    def allows(self, requests: int, *, now_s: float) -> bool:
        """Whether so many more may be sent now."""
        return now_s < self.until_s and self.spent + requests <= self.requests

    def spend(self, requests: int) -> None:
        """Count them."""
        self.spent += requests
