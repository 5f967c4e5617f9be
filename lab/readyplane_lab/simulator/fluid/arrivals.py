"""A workload as columns, one row a request or many: what a fluid is fed with.

Owns the columns, the binning of very large workloads, and how much of each prompt a prefix cache
of a given size would hold. Hands `Arrivals` to the run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from readyplane.core.errors import InvalidField
from readyplane_lab.simulator.outcome import Floats
from readyplane_lab.workload.request import WorkloadRequest, prompt_hashes

Chains = tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Columns of one length, sorted by arrival.

    Attributes:
        at_s: seconds since the first arrival. isl, osl: tokens.
        cached: prompt tokens that the prefix cache holds.
        weight: requests that a row stands for; where any is not 1, the requests of a row are spread
            evenly until the next row.
        chains: for each row the prefixes that other rows share, longest first, each as (name,
            tokens); empty where nothing is shared or rows are many requests.
    """

    at_s: Floats
    isl: Floats
    osl: Floats
    cached: Floats
    weight: Floats
    chains: Chains = ()

    def __post_init__(self) -> None:
        """Check what the run relies on."""
        rows = len(self.at_s)
        if not rows or any(len(c) != rows for c in (self.isl, self.osl, self.cached, self.weight)):
            raise InvalidField("arrivals", rows, "give columns of one length, at least one row")
        if np.any(np.diff(self.at_s) < 0) or self.at_s[0] < 0:
            raise InvalidField("arrivals.at_s", "order", "sort by arrival, from 0 on")
        if min(self.isl.min(), self.osl.min()) < 1 or self.weight.min() <= 0:
            raise InvalidField(
                "arrivals", "values", "use lengths of at least 1 and weights above 0"
            )

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def single(self) -> bool:
        """Whether each row is one request."""
        return bool(np.all(self.weight == 1.0))


def arrivals_of(
    requests: Sequence[WorkloadRequest],
    *,
    block_size: int = 64,
    cache_tokens: float = np.inf,
) -> Arrivals:
    """One row a request.

    Args:
        cache_tokens: size of the one prefix cache, in tokens; the least recently used goes first.
    """
    cached, chains = _cached(requests, block_size, cache_tokens)
    return Arrivals(
        at_s=np.array([r.at_s for r in requests], dtype=np.float64),
        isl=np.array([r.isl for r in requests], dtype=np.float64),
        osl=np.array([r.osl for r in requests], dtype=np.float64),
        cached=cached,
        weight=np.ones(len(requests)),
        chains=chains,
    )


def _cached(
    requests: Sequence[WorkloadRequest], block_size: int, cache_tokens: float
) -> tuple[Floats, Chains]:
    """Leading prompt tokens that the cache holds when each request comes, and shared prefixes."""
    found = np.zeros(len(requests))
    firsts = [r.parts[0][0] for r in requests if r.parts]
    if len(set(firsts)) == len(firsts) or cache_tokens < block_size:
        return found, ()
    blocks_max = cache_tokens / block_size
    held: OrderedDict[int, None] = OrderedDict()
    ends: set[int] = set()
    for row, request in enumerate(requests):
        hashes = prompt_hashes(request, block_size)
        most = (request.isl - 1) // block_size
        hits = 0
        while hits < most and hashes[hits] in held:
            hits += 1
        found[row] = hits * block_size
        if hits:
            ends.add(hashes[hits - 1])
        for value in reversed(hashes):  # the end of a prompt goes before its beginning
            held[value] = None
            held.move_to_end(value)
        while len(held) > blocks_max:
            held.popitem(last=False)
    chains = []
    for request in requests:
        hashes = prompt_hashes(request, block_size)
        passed = [(h, float((i + 1) * block_size)) for i, h in enumerate(hashes) if h in ends]
        chains.append(tuple(reversed(passed)))
    return found, tuple(chains)


def binned(arrivals: Arrivals, *, bin_s: float, rows: int) -> Arrivals:
    """At most `rows` rows a bin: requests of like work are told as one, with their mean lengths.

    Work, requests and tokens of each bin stay; the spread of lengths stays as far as `rows`
    classes can tell it. The rows of a bin are spread evenly over it, in an order that mixes them.
    """
    if bin_s <= 0 or rows < 1:
        raise InvalidField("bin", (bin_s, rows), "use seconds above 0 and at least one row")
    bins = np.floor(arrivals.at_s / bin_s).astype(np.int64)
    uncached = arrivals.isl - arrivals.cached
    order = np.lexsort((uncached + arrivals.osl, bins))
    weight = arrivals.weight[order]
    starts = np.flatnonzero(np.diff(bins[order], prepend=-1))
    sizes = np.diff(np.append(starts, len(order)))
    place = np.arange(len(order)) - np.repeat(starts, sizes)
    each = np.minimum(rows, np.repeat(sizes, sizes))
    group = bins[order] * rows + (place * each) // np.repeat(sizes, sizes)
    heads = np.flatnonzero(np.diff(group, prepend=-1))
    total = np.add.reduceat(weight, heads)

    def mean(column: Floats) -> Floats:
        return np.add.reduceat(column[order] * weight, heads) / total

    in_bin = group[heads] % rows
    count = each[heads]
    turn = (in_bin * _stride(rows)) % rows if rows > 1 else in_bin
    rank = _ranks(bins[order][heads], turn)
    at_s = (bins[order][heads] + rank / count) * bin_s
    last = np.argsort(at_s, kind="stable")
    return Arrivals(
        at_s=at_s[last],
        isl=np.maximum(1.0, mean(arrivals.isl))[last],
        osl=np.maximum(1.0, mean(arrivals.osl))[last],
        cached=mean(arrivals.cached)[last],
        weight=total[last],
    )


def _stride(rows: int) -> int:
    """A step that visits every row once, far from its neighbours."""
    stride = max(1, round(rows * 0.618))
    while np.gcd(stride, rows) != 1:
        stride += 1
    return stride


def _ranks(bins: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Place of each row within its bin, by its turn."""
    order = np.lexsort((turn, bins))
    starts = np.flatnonzero(np.diff(bins[order], prepend=-1))
    sizes = np.diff(np.append(starts, len(order)))
    rank = np.empty(len(order))
    rank[order] = np.arange(len(order)) - np.repeat(starts, sizes)
    return rank
