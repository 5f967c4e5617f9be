"""A small seeded search: evolution of a diagonal normal distribution, best half first.

Owns the search and nothing of what is searched: a point is a list of numbers, a cost is a number, less
is better. Equal arguments give equal results. Ranges are kept by reflection, so that the edges of a
range are no trap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SPREAD = 0.25
"""Of the whole range, to begin with."""
LEARN = 0.5
"""How much of the new spread is that of the best of a generation."""


@dataclass(frozen=True, slots=True)
class Found:
    """One point that was tried, in which evaluation, and what it costs."""

    point: tuple[float, ...]
    cost: float
    evaluation: int


def search(
    cost: Callable[[Sequence[float]], float],
    ranges: Sequence[tuple[float, float]],
    *,
    begin: Sequence[float],
    seed: int,
    generation: int = 6,
) -> Iterator[Found]:
    """Endless: every point that is tried, the beginning first; whoever asks decides when to stop.

    Args:
        ranges: (least, most) of each number. begin: the first point. generation: points that are
            drawn before the distribution is moved to the best half of them.
    """
    random = np.random.Generator(np.random.Philox(key=seed))
    low = np.array([least for least, _most in ranges])
    span = np.array([most - least for least, most in ranges])
    middle = (np.asarray(begin, dtype=float) - low) / span
    spread = np.full(len(ranges), SPREAD)
    tried = 0

    def tell(unit: NDArray[np.float64]) -> Found:
        nonlocal tried
        point = tuple(float(x) for x in low + span * unit)
        tried += 1
        return Found(point, cost(point), tried)

    first = tell(middle)
    yield first
    best = [(first.cost, middle)]
    while True:
        drawn = []
        for _ in range(generation):
            unit = reflected(middle + spread * random.standard_normal(len(ranges)))
            found = tell(unit)
            yield found
            drawn.append((found.cost if math.isfinite(found.cost) else math.inf, unit))
        # The best point so far takes part again: a generation of bad luck loses nothing.
        best = sorted([*drawn, best[0]], key=lambda pair: pair[0])
        half = np.array([unit for _cost, unit in best[: max(2, generation // 2)]])
        middle = half.mean(axis=0)
        spread = np.maximum(0.02, (1 - LEARN) * spread * 0.9 + LEARN * half.std(axis=0))


def reflected(unit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Into 0 to 1, turned back at the edges."""
    folded = np.abs(np.mod(unit, 2.0))
    turned: NDArray[np.float64] = np.where(folded > 1.0, 2.0 - folded, folded)
    return turned
