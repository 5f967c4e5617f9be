"""What many starts have in common: the critical path per class, tier and mode (R6.2). Pure.

Owns the grouping of finished starts, quantiles of T_ready, the typical exclusive seconds of each
segment, and the comparison of two sets. Seconds; a group's typical segments are means, so that they
sum with what is unexplained to the mean T_ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from readyplane.core.errors import InvalidField
from readyplane.core.startup import Segment, WeightTier
from readyplane.core.weight_bound import WeightBound, weight_bound

COLD, WARM = "cold", "warm"
# Weights from far away make a start cold; from this node or a peer they make it warm.
TEMPERATURE: Mapping[str, str] = {
    WeightTier.L0_PEER_GPU: WARM,
    WeightTier.L1_HOST: WARM,
    WeightTier.L2_NVME: WARM,
    WeightTier.L3_RACK: COLD,
    WeightTier.L4_OBJECT: COLD,
}
UNEXPLAINED = "unexplained"
STANDBY = "standby"
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Start:
    """One finished start.

    Attributes:
        worker_class, tier, mode, pool: what was started how; empty where nobody told.
        from_standby: a process that had imported everything took the order.
        wall_s: order to routable. segments: with times since the order.
        exclusive_s: share of each segment in the critical path. unexplained_s: the rest.
        upgraded_s: from routable until it had all its graphs, of a start in stages that got them.
    """

    worker_id: str
    wall_s: float
    exclusive_s: Mapping[str, float]
    unexplained_s: float
    segments: tuple[Segment, ...] = ()
    worker_class: str = ""
    tier: str = ""
    mode: str = ""
    pool: str = ""
    from_standby: bool = False
    upgraded_s: float | None = None

    @property
    def saved_s(self) -> float:
        """What it would have taken besides, and did not: its process had done it while it stood by."""
        return sum(segment.saved_s for segment in self.segments)

    @property
    def temperature(self) -> str:
        """`cold`, `warm`, or empty where the weights' tier is not known."""
        return TEMPERATURE.get(self.tier, "")

    @property
    def labels(self) -> frozenset[str]:
        """Every word by which this start can be chosen for a comparison."""
        standby = STANDBY if self.from_standby else ""
        words = (self.temperature, self.worker_class, self.tier, self.mode, self.pool, standby)
        return frozenset(word for word in words if word)


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Starts of one class, tier and mode.

    Attributes:
        p50_s, p90_s, p99_s: of T_ready; with few starts the tail is the slowest of them.
        mean_s: of T_ready. exclusive_s: mean share of each segment, largest first.
        modelled: segments that were only slept in some of them.
        weights: means of the bound of R7.1 and of what was measured, of the starts that told both;
            None where none did.
        typical: the start whose T_ready is nearest to the median.
    """

    name: str
    count: int
    p50_s: float
    p90_s: float
    p99_s: float
    mean_s: float
    exclusive_s: Mapping[str, float]
    unexplained_s: float
    modelled: frozenset[str]
    weights: WeightBound | None
    typical: Start

    @property
    def dominant(self) -> str:
        """The segment with the largest share, `unexplained` where none explains as much."""
        shares = {**self.exclusive_s, UNEXPLAINED: self.unexplained_s}
        return max(shares, key=lambda name: (shares[name], name))


@dataclass(frozen=True, slots=True)
class Difference:
    """One segment in two groups; mean exclusive seconds."""

    segment: str
    first_s: float
    second_s: float

    @property
    def saved_s(self) -> float:
        """What the second spends less."""
        return self.first_s - self.second_s


def grouped(starts: Iterable[Start]) -> list[StartGroup]:
    """A group for each class, tier and mode, in that order; starts of a standby's process apart."""
    found: dict[tuple[str, str, str, bool], list[Start]] = {}
    for start in starts:
        key = (start.worker_class, start.tier, start.mode, start.from_standby)
        found.setdefault(key, []).append(start)
    names = {
        key: ", ".join([*(word or "?" for word in key[:3]), *([STANDBY] if key[3] else [])])
        for key in found
    }
    return [summed(names[key], found[key]) for key in sorted(found)]


def summed(name: str, starts: Sequence[Start]) -> StartGroup:
    """One group of at least one start.

    Raises:
        InvalidField: there is none.
    """
    if not starts:
        raise InvalidField("starts", name, "choose something that was started")
    walls = sorted(s.wall_s for s in starts)
    p50_s, p90_s, p99_s = (quantile(walls, share) for share in QUANTILES)
    names = {segment for s in starts for segment in s.exclusive_s}
    count = len(starts)
    means = {n: sum(s.exclusive_s.get(n, 0.0) for s in starts) / count for n in names}
    ranked = dict(sorted(means.items(), key=lambda item: (-item[1], item[0])))
    return StartGroup(
        name=name,
        count=count,
        p50_s=p50_s,
        p90_s=p90_s,
        p99_s=p99_s,
        mean_s=sum(walls) / count,
        exclusive_s=ranked,
        unexplained_s=sum(s.unexplained_s for s in starts) / count,
        modelled=frozenset(str(g.name) for s in starts for g in s.segments if g.modelled),
        weights=_mean_bound([b for s in starts if (b := weight_bound(s.segments)) is not None]),
        typical=min(starts, key=lambda s: (abs(s.wall_s - p50_s), s.worker_id)),
    )


def _mean_bound(found: Sequence[WeightBound]) -> WeightBound | None:
    if not found:
        return None
    return WeightBound(
        sum(b.size_bytes for b in found) / len(found),
        sum(b.bound_s for b in found) / len(found),
        sum(b.measured_s for b in found) / len(found),
    )


def chosen(starts: Sequence[Start], word: str) -> list[Start]:
    """The starts that a word names: cold, warm, a class, a tier, a mode or a pool.

    Raises:
        InvalidField: no start is called so; the words that are there are named.
    """
    found = [start for start in starts if word in start.labels]
    if not found:
        known = ", ".join(sorted({label for start in starts for label in start.labels}))
        raise InvalidField("--compare", word, f"use two of: {known or 'nothing was started'}")
    return found


def compared(first: StartGroup, second: StartGroup) -> list[Difference]:
    """Segment by segment, the largest difference first; what is unexplained is one of them."""
    one = {**first.exclusive_s, UNEXPLAINED: first.unexplained_s}
    two = {**second.exclusive_s, UNEXPLAINED: second.unexplained_s}
    out = [Difference(n, one.get(n, 0.0), two.get(n, 0.0)) for n in {**one, **two}]
    return sorted(out, key=lambda d: (-abs(d.saved_s), d.segment))


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of sorted values that at least `share` of them do not exceed."""
    rank = -(-len(values) * share // 1)
    return values[max(0, min(len(values), int(rank)) - 1)]
