"""The share of requests that a pool of a given size has to let be late.

Owns one formula: a queue that is served within a patience and whose excess steps back (as the
router has it) is a reflected Brownian motion between empty and full, and what is lost at its upper
wall is the excess. With capacity to spare theta = capacity - demand and a wall at b tokens,

    lost tokens/s = theta / (exp(2 theta b / variance) - 1),

which is variance / 2b where capacity equals demand, and demand - capacity where it is far short.
Tokens, tokens/s and seconds; shares are 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import NormalDist

_NORMAL = NormalDist()
_ROOT_HALF = math.sqrt(0.5)
CHOICE = 0.5
"""How far the longest can be chosen: only few wait at a time, and who is begun goes on."""
_EVEN = 1e-9
"""Below that exponent capacity and demand are the same."""


def lost_share(demand: float, *, capacity: float, wall: float, variance: float) -> float:
    """Share of the demand that does not fit, all in tokens: a rate, a rate, tokens, tokens²/s."""
    if demand <= 0:
        return 0.0
    if capacity <= 0:
        return 1.0
    spare = capacity - demand
    if variance <= 0 or wall <= 0:
        return 1.0 if wall <= 0 < demand else max(0.0, -spare) / demand
    power = 2.0 * spare * wall / variance
    if abs(power) < _EVEN:
        lost = variance / (2.0 * wall)
    elif power > 700.0:
        return 0.0
    else:
        lost = spare / math.expm1(power)
    return min(1.0, lost / demand)


def stepped_back(share: float, *, cv2: float) -> float:
    """Share of *requests* that hold that share of the work when the longest step back first.

    For lognormal lengths with a squared coefficient of variation of `cv2`: a request in a hundred
    can hold a tenth of the work.
    """
    if share <= 0.0 or share >= 1.0 or cv2 <= 0.0:
        return min(1.0, max(0.0, share))
    deviations = _NORMAL.inv_cdf(share) - math.sqrt(math.log1p(cv2))
    longest = 0.5 * math.erfc(-deviations * _ROOT_HALF)
    return (1.0 - CHOICE) * share + CHOICE * longest


def expected(spread: Iterable[tuple[float, float]], lost: Callable[[float], float]) -> float:
    """Mean share over demands and their probabilities, each weighing what it brings."""
    total = late = 0.0
    for demand, probability in spread:
        total += probability * demand
        late += probability * demand * lost(demand)
    return late / total if total > 0 else 0.0
