"""Where the next workers should start, over (node, source): the least T_start, explained. Pure.

    T_start = T_queue + T_artifact_to_GPU + T_runtime_init

T_queue is the wait for a place on the node; T_artifact_to_GPU what the best source for that node is
predicted to take (`sources.rank`: live bandwidth, readers, headroom, chains of starters), not less
than what the node can take in; T_runtime_init what starting takes there besides. So a node that is
free a little later and holds the model may win over one that is free now and does not (R8.2).
Several starts are placed one after another: each counts as a reader of its source, and as a source
for those after it. Handed to `fetching`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from readyplane.core.startup import WeightTier
from readyplane.ports import StartNode
from readyplane_registry.sources import (
    DEFAULT_POLICY,
    Bandwidth,
    Candidate,
    Ranked,
    SourcePolicy,
    Target,
    rank,
)

STARTER = "start"
ALTERNATIVES_MAX = 32


@dataclass(frozen=True, slots=True)
class Start:
    """One start: the node, the source as ranked for it, and the terms of its time in seconds."""

    node: str
    ranked: Ranked
    queue_s: float
    artifact_s: float
    runtime_init_s: float
    why: str

    @property
    def total_s(self) -> float:
        """T_start."""
        return self.queue_s + self.artifact_s + self.runtime_init_s


@dataclass(frozen=True, slots=True)
class Placed:
    """A start for each place found, the best of every other node for the first, who was left out."""

    starts: tuple[Start, ...]
    alternatives: tuple[Start, ...]
    excluded: tuple[str, ...]


def place(
    nodes: Sequence[StartNode],
    candidates: Callable[[StartNode], Sequence[Candidate]],
    *,
    starts: int,
    size_bytes: int,
    chunk_bytes: int,
    layout_digest: str,
    tiers: Mapping[WeightTier, Bandwidth],
    policy: SourcePolicy = DEFAULT_POLICY,
) -> Placed:
    """Place `starts` workers, one after another; the same facts give the same answer.

    Args:
        candidates: the sources as they are for a target on that node.
    """
    known = [node.runtime_init_s for node in nodes if node.runtime_init_s is not None]
    usual_s = statistics.median(known) if known else None
    left = {node.node: node.places for node in nodes}
    offered = {node.node: list(candidates(node)) for node in nodes}
    ahead: list[tuple[StartNode, Start, Candidate]] = []
    alternatives: tuple[Start, ...] = ()
    excluded: tuple[str, ...] = ()
    for number in range(1, starts + 1):
        best: list[Start] = []
        told: list[str] = []
        for node in nodes:
            if left[node.node] <= 0:
                told.append(f"node {node.node}: all of its places are given")
                continue
            found = _on(
                node, _seen(offered[node.node], ahead, node), size_bytes=size_bytes,
                chunk_bytes=chunk_bytes, layout_digest=layout_digest, tiers=tiers,
                policy=policy, usual_s=usual_s,
            )  # fmt: skip
            if isinstance(found, Start):
                best.append(found)
            else:
                told += found
        best.sort(key=lambda start: (start.total_s, start.node))
        if number == 1:
            alternatives, excluded = tuple(best[1 : ALTERNATIVES_MAX + 1]), tuple(told)
        if not best:
            excluded = (*excluded, f"start {number} of {starts}: no node has a place and a source")
            break
        chosen = best[0]
        left[chosen.node] -= 1
        node = next(node for node in nodes if node.node == chosen.node)
        ahead.append((node, chosen, _as_source(number, node, chosen, size_bytes)))
    return Placed(tuple(start for _node, start, _as in ahead), alternatives, excluded)


def _on(
    node: StartNode,
    candidates: Sequence[Candidate],
    *,
    size_bytes: int,
    chunk_bytes: int,
    layout_digest: str,
    tiers: Mapping[WeightTier, Bandwidth],
    policy: SourcePolicy,
    usual_s: float | None,
) -> Start | list[str]:
    """A start on this node from its best source, or why there is none."""
    target = Target("", "", node.node, node.rack, layout_digest, chunk_bytes)
    ranking = rank(candidates, target=target, size_bytes=size_bytes, tiers=tiers, policy=policy)
    if not ranking.sources:
        reasons = "; ".join(ranking.excluded) or "nobody gives the artifact"
        return [f"node {node.node}: {reasons}"]
    ranked = ranking.sources[0]
    artifact_s, source = ranked.predicted_s, ranked.candidate
    bound = ""
    if node.ingress_bytes_per_s > 0 and size_bytes / node.ingress_bytes_per_s > artifact_s:
        artifact_s = size_bytes / node.ingress_bytes_per_s
        bound = f", bounded by the node's {node.ingress_bytes_per_s / 1e6:.0f} MB/s"
    init_s, whence = node.runtime_init_s, ""
    if init_s is None:
        init_s, whence = (0.0, " (not known)") if usual_s is None else (usual_s, " (as elsewhere)")
    start = Start(node.node, ranked, node.queue_s, artifact_s, init_s, "")
    why = (
        f"{start.total_s:.2f} s on {node.node} = queue {node.queue_s:.2f} + artifact "
        f"{artifact_s:.2f} from {source.source_id}{bound} + runtime init {init_s:.2f}{whence}; "
        f"{ranked.why}"
    )
    return replace(start, why=why)


def _seen(
    offered: Sequence[Candidate],
    ahead: Sequence[tuple[StartNode, Start, Candidate]],
    node: StartNode,
) -> list[Candidate]:
    """The sources as the next start on `node` finds them, after those that were placed before it.

    A start that begins later than this one is no source for it, and no reader beside it.
    """
    earlier = [row for row in ahead if row[1].queue_s <= node.queue_s]
    readers: dict[str, int] = {}
    for _node, start, _source in earlier:
        name = start.ranked.candidate.source_id
        readers[name] = readers.get(name, 0) + 1
    everyone = [*offered, *(source for _node, _start, source in earlier)]
    return [replace(c, readers=c.readers + readers.get(c.source_id, 0)) for c in everyone]


def _as_source(number: int, node: StartNode, start: Start, size_bytes: int) -> Candidate:
    """A start that was placed, as one behind whom later ones may read."""
    name = f"{STARTER}:{number}"
    return Candidate(
        source_id=name,
        tier=WeightTier.L1_HOST,
        url=f"{STARTER}://{number}",
        worker_id=name,
        incarnation=name,
        node=node.node,
        rack=node.rack,
        layout_digest=start.ranked.candidate.layout_digest,
        partial=True,
        lacks_bytes=size_bytes,
        reads_from=(start.ranked.candidate.source_id,),
    )
