"""A distribution of non-negative numbers in little room, that fades.

Owns a histogram whose bins grow by a tenth each, so that any quantile is right to within that at any
scale; only so many bins are kept, the smallest of them together.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

GROWTH = 1.1
BINS_MAX = 64
_LOG = math.log(GROWTH)


@dataclass(frozen=True, slots=True)
class Sketch:
    """Weights by bin, ascending; `zero` is the weight of what is nothing."""

    keys: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    zero: float = 0.0
    at_s: float = 0.0

    @property
    def weight(self) -> float:
        """Of all samples, as faded at the last one."""
        return self.zero + sum(self.weights)

    def above(self, value: float) -> float:
        """Weight of the samples above a value, its own bin in proportion."""
        if value <= 0:
            return sum(self.weights)
        place = math.log(value) / _LOG
        key = math.floor(place)
        i = bisect_left(self.keys, key)
        over = sum(self.weights[i:])
        if i < len(self.keys) and self.keys[i] == key:
            over -= self.weights[i] * (place - key)
        return over

    def quantile(self, share: float) -> float:
        """The value below which that share lies, the upper end of its bin; 0 without samples."""
        left = share * self.weight - self.zero
        if left <= 0:
            return 0.0
        for key, weight in zip(self.keys, self.weights, strict=True):
            left -= weight
            if left <= 1e-12:
                return GROWTH ** (key + 1)
        return self.largest

    @property
    def largest(self) -> float:
        """The upper end of the last bin."""
        return GROWTH ** (self.keys[-1] + 1) if self.keys else 0.0


def add(sketch: Sketch, value: float, *, now_s: float, tau_s: float, weight: float = 1.0) -> Sketch:
    """With one more sample; what was there fades by e within `tau_s`."""
    fade = math.exp(-max(0.0, now_s - sketch.at_s) / tau_s) if sketch.weight else 1.0
    zero = sketch.zero * fade
    weights = [w * fade for w in sketch.weights]
    keys = sketch.keys
    if value <= 1e-9:
        return Sketch(keys, tuple(weights), zero + weight, now_s)
    key = math.floor(math.log(value) / _LOG)
    i = bisect_left(keys, key)
    if i < len(keys) and keys[i] == key:
        weights[i] += weight
    else:
        keys = (*keys[:i], key, *keys[i:])
        weights.insert(i, weight)
    # Below a four-hundredth of the largest nothing needs a bin of its own.
    while len(keys) > BINS_MAX:
        zero += weights.pop(0)
        keys = keys[1:]
    # A bin that has faded away would keep the largest value for ever.
    if weights[-1] < 1e-3:
        weights.pop()
        keys = keys[:-1]
    return Sketch(keys, tuple(weights), zero, now_s)


def scaled(sketch: Sketch, factor: float) -> Sketch:
    """Of so many times each sample, to the nearest bin; of none at all, nothing but zeros."""
    if factor <= 0:
        return Sketch((), (), sketch.weight, sketch.at_s)
    shift = round(math.log(factor) / _LOG)
    return replace(sketch, keys=tuple(key + shift for key in sketch.keys))
