"""On which node a worker starts soonest, and which artifacts should lie where before it does.

T_start = T_queue + T_artifact_to_GPU + T_runtime_init over all nodes (R8.2): a node that is free a
little later and holds the model may win over one that is free now and does not. What would have to
come from far to the node that is next in line is named for placing there beforehand (R8.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

PREFERRED_MAX = 3
LOCAL_TIERS = frozenset({"L0", "L1", "L2"})


@dataclass(frozen=True, slots=True)
class NodeOffer:
    """One node as it is now.

    Attributes:
        places: workers that fit on it beside those it has. free_s: until the next place is free
            when there is none, inf for never. fetch_s: artifact to GPU from the best source, None
            where nobody could say. tier, source_node: of that source.
    """

    node: str
    places: int
    free_s: float = 0.0
    fetch_s: float | None = None
    tier: str = "unknown"
    source_node: str = ""

    @property
    def holds(self) -> bool:
        """Whether it has the artifact itself."""
        return self.tier in LOCAL_TIERS and self.source_node == self.node


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """Nodes for one start, the best first, and why."""

    nodes: tuple[str, ...]
    why: str


def prefer(offers: Sequence[NodeOffer], count: int, *, init_s: float) -> list[NodeChoice]:
    """Nodes for so many starts, one after another; each takes the place it prefers.

    Args:
        init_s: what a start takes besides its place and its artifact, the same everywhere.
    """
    left = {o.node: o for o in offers}
    chosen: list[NodeChoice] = []
    for _ in range(count):
        ranked = sorted(left.values(), key=lambda o: (start_s(o, init_s), o.node))
        ranked = [o for o in ranked if math.isfinite(start_s(o, init_s))][:PREFERRED_MAX]
        if not ranked:
            break
        best = ranked[0]
        chosen.append(NodeChoice(tuple(o.node for o in ranked), _why(ranked, init_s)))
        if best.places > 0:
            more = best.places - 1
            left[best.node] = replace(best, places=more, free_s=best.free_s if more else math.inf)
        else:
            del left[best.node]
    return chosen


def start_s(offer: NodeOffer, init_s: float) -> float:
    """Seconds until a worker ordered now would serve there; inf where it never will."""
    queue_s = 0.0 if offer.places > 0 else offer.free_s
    # Who cannot say how long the artifact takes is no better than the others: after those who can.
    return queue_s + (_UNKNOWN_S if offer.fetch_s is None else offer.fetch_s) + init_s


_UNKNOWN_S = 3600.0


def to_place(offers: Sequence[NodeOffer], count: int, *, init_s: float) -> list[NodeOffer]:
    """Nodes among those of the next `count` starts that would have to fetch the artifact."""
    by_name = {o.node: o for o in offers}
    choices = prefer(offers, count, init_s=init_s)
    first = dict.fromkeys(c.nodes[0] for c in choices)
    return [o for name in first if not (o := by_name[name]).holds and o.places > 0]


def _why(ranked: Sequence[NodeOffer], init_s: float) -> str:
    return "; ".join(_said(o, init_s) for o in ranked)


def _said(offer: NodeOffer, init_s: float) -> str:
    place = "free now" if offer.places > 0 else f"free in {offer.free_s:.1f} s"
    if offer.fetch_s is None:
        return f"{offer.node} ({place}, artifact unknown)"
    where = "its own" if offer.holds else offer.source_node or "elsewhere"
    artifact = f"artifact {offer.fetch_s:.1f} s from {where} {offer.tier}"
    return f"{offer.node} in {start_s(offer, init_s):.1f} s ({place}, {artifact})"
