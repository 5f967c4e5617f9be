"""The smallest margin with which the clairvoyant plan attains, and the bracket that follows (O_SIM).

The plan of the fluid bound misses some requests when it is played by events. Its need is multiplied
by `1 + alpha`; the smallest alpha that attains makes the achievable end of the bracket
[O_LB, O_SIM]. Owns the search only: the caller runs the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

TRIES = 12
STEP = 0.1
WIDTH = 0.01
SECOND_LOOKS = 2
NEAR_MISS = 0.02
"""Attainment that a failure may lack and still have been bad luck."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One margin as it was played: share of requests that attained, GPU-hours billed."""

    alpha: float
    attainment: float
    gpu_hours: float


@dataclass(frozen=True, slots=True)
class Bracket:
    """Where the true optimum lies.

    Attributes:
        lower_gpu_hours: O_LB. best: the cheapest that attains, None where none did.
        tried: in order of the trials.
    """

    lower_gpu_hours: float
    best: Tried | None
    tried: tuple[Tried, ...]

    @property
    def upper_gpu_hours(self) -> float | None:
        """O_SIM."""
        return None if self.best is None else self.best.gpu_hours


def bracket(
    run: Callable[[float], tuple[float, float]],
    *,
    attainment: float,
    lower_gpu_hours: float,
    least: float = -0.5,
    most: float = 3.0,
    tries: int = TRIES,
    width: float = WIDTH,
) -> Bracket:
    """Search by bisection.

    A run is deterministic, but its attainment is not monotone in alpha: the needs are rounded to
    whole workers, and who misses is chance. So the cheapest of all points that attain is taken,
    and not the last one; and when the bisection has closed, the surroundings of a near miss below are
    looked into, since that may have been bad luck.

    Args:
        run: alpha -> (attainment, GPU-hours). attainment: asked for, a fraction.
        lower_gpu_hours: O_LB, for the bracket. least, most: range of alpha. tries: most runs.
        width: of alpha at which the bisection ends.
    """
    search = _Search(run, attainment, tries)
    low, high = search.enclose(least, most)
    if high is None:
        return Bracket(lower_gpu_hours, None, tuple(search.tried))
    high = search.bisect(low, high, width)
    for _ in range(SECOND_LOOKS):
        gap = search.gap_below(high, least, width)
        if gap is None or not search.left:
            break
        if search.attains(sum(gap) / 2):
            high = search.bisect(gap[0], sum(gap) / 2, width)
    best = min(search.passed(), key=lambda t: (t.gpu_hours, t.alpha))
    return Bracket(lower_gpu_hours, best, tuple(search.tried))


class _Search:
    """Trials, each margin at most once."""

    def __init__(
        self, run: Callable[[float], tuple[float, float]], attainment: float, tries: int
    ) -> None:
        self.tried: list[Tried] = []
        self._run = run
        self._attainment = attainment
        self._tries = tries

    @property
    def left(self) -> int:
        return self._tries - len(self.tried)

    def attains(self, alpha: float) -> bool:
        self.tried.append(Tried(alpha, *self._run(alpha)))
        return self.tried[-1].attainment >= self._attainment

    def passed(self) -> list[Tried]:
        return [t for t in self.tried if t.attainment >= self._attainment]

    def enclose(self, least: float, most: float) -> tuple[float, float | None]:
        """From no margin on outwards in growing steps: one that fails and one that attains."""
        step = STEP
        alpha = min(most, max(least, 0.0))
        if self.attains(alpha):
            while alpha > least and self.left:
                below = max(least, alpha - step)
                if not self.attains(below):
                    return below, alpha
                alpha, step = below, 2 * step
            return alpha, alpha
        while alpha < most and self.left:
            above = min(most, alpha + step)
            if self.attains(above):
                return alpha, above
            alpha, step = above, 2 * step
        return alpha, None

    def bisect(self, low: float, high: float, width: float) -> float:
        """The smallest alpha that attains, if all below `low` fail."""
        while high - low > width and self.left:
            middle = (low + high) / 2
            if self.attains(middle):
                high = middle
            else:
                low = middle
        return high

    def gap_below(self, high: float, least: float, width: float) -> tuple[float, float] | None:
        """The nearest margins up to `high` with nothing tried between, the upper one a near miss.

        Below the lowest that was tried a gap is as wide as a first step.
        """
        tried = {t.alpha: t.attainment for t in self.tried if t.alpha <= high}
        marks = [max(least, min(tried) - STEP), *sorted(tried)]
        wide = [
            (a, b)
            for a, b in pairwise(marks)
            if b - a > 2 * width and tried[b] >= self._attainment - NEAR_MISS
        ]
        return wide[-1] if wide else None
