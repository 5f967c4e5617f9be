"""More or less of a workload, in the shape that it has.

Owns two steps. Growing repeats each request with a few seconds of independent delay, which keeps
the shape of the rate: laying independent draws over each other would smooth its bursts, and
pressing time together would change them against T_ready. Thinning keeps a drawn share of it.

Both keep the prefix hits: a copy shares prefixes with the copies of its own number only, and what
is drawn is drawn for whole prefix families (requests that share more than what everybody shares).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from readyplane.core.errors import InvalidField
from readyplane_lab.workload.request import WorkloadRequest

JITTER_S = 5.0
FACTOR_MAX = 10_000.0
# A first part that a larger share of all requests has is a system prompt, not a family: families
# have to be many, or drawing some of them would change the shape of the rate.
COMMON_SHARE, COMMON_MIN = 0.01, 10
_SALT = 0x1E3779B97F4A7C15
_SEED_BITS = 2**63 - 1
Parts = tuple[tuple[int, int], ...]


def scaled(
    requests: Sequence[WorkloadRequest], factor: float, seed: int, jitter_s: float = JITTER_S
) -> tuple[WorkloadRequest, ...]:
    """The workload with `factor` times its load.

    Args:
        requests: sorted by arrival. factor: wanted load over the given one. A family is repeated
            `floor(factor)` times, and once more with the probability that is left.
        seed: of the draws. jitter_s: every copy after the first is delayed by U(0, jitter_s) of
            its own; the first copy stays where it is.

    Returns:
        Sorted, indexed from 0, the first at 0 s.

    Raises:
        InvalidField: a factor that is not above 0, or leaves no request.
    """
    if not (math.isfinite(factor) and 0.0 < factor <= FACTOR_MAX):
        raise InvalidField("scale", factor, f"use a factor above 0, {FACTOR_MAX:g} at most")
    if factor == 1.0 or not requests:
        return _in_order([r.at_s for r in requests], [(r, r.parts) for r in requests])
    draws = np.random.Generator(np.random.Philox(key=seed & _SEED_BITS))
    family = families(requests)
    once_more = draws.random(int(family.max()) + 1) < factor % 1.0
    arrivals = np.array([r.at_s for r in requests])
    at_s: list[float] = []
    chosen: list[tuple[WorkloadRequest, Parts]] = []
    for number in range(math.ceil(factor)):
        kept: NDArray[np.int64] = np.arange(len(requests))
        if number >= math.floor(factor):
            kept = kept[once_more[family]]
        delay = draws.uniform(0.0, jitter_s, len(kept)) if number else np.zeros(len(kept))
        at_s += (arrivals[kept] + delay).tolist()
        chosen += zip(
            (requests[i] for i in kept.tolist()),
            _salted((requests[i].parts for i in kept.tolist()), number),
            strict=True,
        )
    if not chosen:
        raise InvalidField("scale", factor, f"use a larger one: of {len(requests)} none are left")
    return _in_order(at_s, chosen)


def families(requests: Sequence[WorkloadRequest]) -> NDArray[np.int64]:
    """The prefix family of each request, as numbers from 0 in order of arrival.

    A family is named by the first part of its prompts that not everybody's have: that at most 1 %
    of the requests (or 10 of them) share. A prompt of nothing but common parts stands alone.
    """
    common = max(COMMON_MIN, COMMON_SHARE * len(requests))
    names: list[object] = [None] * len(requests)
    open_ones = list(range(len(requests)))
    depth = 0
    while open_ones:
        starts = Counter(
            requests[i].parts[depth][0] for i in open_ones if depth < len(requests[i].parts)
        )
        still = []
        for i in open_ones:
            parts = requests[i].parts
            if depth >= len(parts):
                names[i] = ("alone", i)
            elif starts[parts[depth][0]] <= common:
                names[i] = (depth, parts[depth][0])
            else:
                still.append(i)
        open_ones, depth = still, depth + 1
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


def _salted(prompts: Iterator[Parts], number: int) -> Iterator[Parts]:
    """The prompts of one copy: alike exactly where the first copy's are, unlike any other copy's."""
    if number == 0:
        yield from prompts
        return
    salt = number * _SALT & _SEED_BITS
    for parts in prompts:
        yield tuple([(seed + salt & _SEED_BITS, tokens) for seed, tokens in parts])


def _in_order(
    at_s: Sequence[float], chosen: Sequence[tuple[WorkloadRequest, Parts]]
) -> tuple[WorkloadRequest, ...]:
    if not chosen:
        return ()
    order = np.argsort(np.asarray(at_s), kind="stable").tolist()
    begin = at_s[order[0]]
    out = []
    for index, i in enumerate(order):
        of, parts = chosen[i]
        out.append(
            WorkloadRequest(index, at_s[i] - begin, of.isl, of.osl, parts, of.tenant, of.priority)
        )
    return tuple(out)
