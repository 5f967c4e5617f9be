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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from readyplane.core.startup import WeightTier
from readyplane_registry.rates import DEFAULT_POLICY, Bandwidth, SourcePolicy
from readyplane_registry.sources import Candidate, Ranked, Ranking, Target, rank

STARTER = "start"


class Room(Protocol):
    """A node where a worker could start; see `readyplane.ports.StartNode`."""

    @property
    def node(self) -> str: ...
    @property
    def rack(self) -> str: ...
    @property
    def queue_s(self) -> float: ...
    @property
    def runtime_init_s(self) -> float | None: ...
    @property
    def ingress_bytes_per_s(self) -> float: ...
    @property
    def places(self) -> int: ...


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
    nodes: Sequence[Room],
    candidates: Sequence[Candidate],
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
        candidates: the sources as they are for a target that needs everything.
    """
    known = [node.runtime_init_s for node in nodes if node.runtime_init_s is not None]
    usual_s = statistics.median(known) if known else None
    left = {node.node: node.places for node in nodes}
    ahead: list[tuple[Room, Start, Candidate]] = []
    alternatives: tuple[Start, ...] = ()
    excluded: tuple[str, ...] = ()
    for number in range(1, starts + 1):
        best: list[Start] = []
        told: list[str] = []
        rankings = _Rankings(
            candidates, ahead, size_bytes=size_bytes, chunk_bytes=chunk_bytes,
            layout_digest=layout_digest, tiers=tiers, policy=policy,
        )  # fmt: skip
        for node in nodes:
            if left[node.node] <= 0:
                told.append(f"node {node.node}: all of its places are given")
                continue
            ranking = rankings.of(node)
            if ranking.sources:
                best.append(_start(node, ranking.sources[0], size_bytes, usual_s))
            else:
                reasons = "; ".join(ranking.excluded) or "nobody gives the artifact"
                told.append(f"node {node.node}: {reasons}")
        best.sort(key=lambda start: (start.total_s, start.node))
        if number == 1:
            alternatives, excluded = tuple(best[1:]), tuple(told)
        if not best:
            excluded = (*excluded, f"start {number} of {starts}: no node has a place and a source")
            break
        chosen = best[0]
        left[chosen.node] -= 1
        node = next(node for node in nodes if node.node == chosen.node)
        ahead.append((node, chosen, _as_source(number, node, chosen, size_bytes)))
    return Placed(tuple(start for _node, start, _as in ahead), alternatives, excluded)


class _Rankings:
    """The sources ranked for each node; nodes near no source share one ranking."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        ahead: Sequence[tuple[Room, Start, Candidate]],
        *,
        size_bytes: int,
        chunk_bytes: int,
        layout_digest: str,
        tiers: Mapping[WeightTier, Bandwidth],
        policy: SourcePolicy,
    ) -> None:
        self._candidates, self._ahead = candidates, ahead
        self._size_bytes, self._chunk_bytes = size_bytes, chunk_bytes
        self._layout_digest, self._tiers, self._policy = layout_digest, tiers, policy
        everyone = [*candidates, *(source for _node, _start, source in ahead)]
        self._nodes = {c.node for c in everyone}
        self._racks = {c.rack for c in everyone}
        self._known: dict[tuple[str, str, int], Ranking] = {}

    def of(self, node: Room) -> Ranking:
        """The ranking for a target on that node."""
        place = node.node if node.node in self._nodes else ""
        rack = node.rack if node.rack in self._racks else ""
        earlier = sum(start.queue_s <= node.queue_s for _node, start, _source in self._ahead)
        key = place, rack, earlier
        if key not in self._known:
            self._known[key] = rank(
                _seen(self._candidates, self._ahead, node),
                target=Target("", "", place, rack, self._layout_digest, self._chunk_bytes),
                size_bytes=self._size_bytes,
                tiers=self._tiers,
                policy=self._policy,
            )
        return self._known[key]


def _start(node: Room, ranked: Ranked, size_bytes: int, usual_s: float | None) -> Start:
    """A start on this node from its best source, with the terms of its time."""
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
    ahead: Sequence[tuple[Room, Start, Candidate]],
    node: Room,
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


def _as_source(number: int, node: Room, start: Start, size_bytes: int) -> Candidate:
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
