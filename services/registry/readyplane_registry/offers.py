"""What a source may say of itself, and how it looks to the brains and to who asks for a plan. Pure.

Owns the checks of an announcement and of nodes to place on, and the step from what the live store
knows to `sources.Candidate` and back to `ports.Source`. Handed to `fetching`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from readyplane.core.chunks import ChunkRanges, ChunkTable, check_ranges, common, without
from readyplane.core.errors import InvalidField
from readyplane.core.identity import check_digest
from readyplane.core.startup import WeightTier
from readyplane.ports import RankedSource, Source, StartChoice, StartNode
from readyplane_registry import placement, sources
from readyplane_registry.live import LiveSource
from readyplane_registry.rates import Bandwidth
from readyplane_registry.sources import Candidate

NAME_CHARS_MAX = 200
STARTS_MAX = 64
NODES_MAX = 1000


def check_name(field: str, value: str) -> None:
    if not 0 < len(value) <= NAME_CHARS_MAX or not value.isprintable() or "|" in value:
        raise InvalidField(field, value, "give 1 to 200 printable characters without |")


def check_source(source: Source) -> None:
    check_name("source.source_id", source.source_id)
    if sources.is_storage(source.source_id):
        raise InvalidField("source.source_id", source.source_id, "leave storage: to the registry")
    check_digest(source.digest, where="source.digest")
    if source.tier is WeightTier.UNKNOWN:
        raise InvalidField("source.tier", str(source.tier), "name the tier, L0 to L4")
    for field, text in (
        ("incarnation", source.incarnation),
        ("worker_id", source.worker_id),
        ("node", source.node),
    ):
        if text:
            check_name(f"source.{field}", text)
    parts = urlsplit(source.url)
    secret = parts.username or parts.password or parts.query or parts.fragment
    known = parts.scheme in {"http", "https"} and parts.hostname
    if secret or not (known or (parts.scheme == "file" and parts.path.startswith("/"))):
        raise InvalidField(
            "source.url",
            source.url.partition("?")[0].rpartition("@")[2],
            "give http://HOST:PORT/PATH or file:///FOLDER, without credentials or query",
        )
    if not 1 <= source.readers_max <= 1024:
        raise InvalidField("source.readers_max", source.readers_max, "use 1 to 1024")
    for field, text in (("rack", source.rack), ("layout_digest", source.layout_digest)):
        if text:
            check_name(f"source.{field}", text)
    check_ranges(source.held, where="source.held")
    share = source.slo_share
    if share is not None and not (math.isfinite(share) and share >= 0):
        raise InvalidField("source.slo_share", share, "use a share from 0, or leave it out")
    if source.partial and not (source.worker_id and source.incarnation):
        raise InvalidField("source.partial", True, "name worker_id and incarnation of who loads")
    rate = source.bandwidth_bytes_per_s
    if not (math.isfinite(rate) and rate >= 0):
        raise InvalidField("source.bandwidth_bytes_per_s", rate, "use a finite number from 0")


def check_nodes(nodes: Sequence[StartNode], starts: int) -> None:
    if not 1 <= starts <= STARTS_MAX:
        raise InvalidField("starts", starts, f"use 1 to {STARTS_MAX}")
    if not 1 <= len(nodes) <= NODES_MAX:
        raise InvalidField("nodes", f"{len(nodes)} nodes", f"name 1 to {NODES_MAX}")
    names = [node.node for node in nodes]
    for place, node in enumerate(nodes):
        where = f"nodes[{place}]"
        check_name(f"{where}.node", node.node)
        if names.count(node.node) > 1:
            raise InvalidField(f"{where}.node", node.node, "name each node once")
        for field, value in (
            ("queue_s", node.queue_s),
            ("runtime_init_s", node.runtime_init_s or 0.0),
            ("ingress_bytes_per_s", node.ingress_bytes_per_s),
            ("places", float(node.places)),
        ):
            if not (math.isfinite(value) and value >= 0):
                raise InvalidField(f"{where}.{field}", value, "use a finite number from 0")


@dataclass(frozen=True, slots=True)
class Known:
    """The sources of one artifact as they are now; `storage` None when it cannot give."""

    live: tuple[LiveSource, ...]
    storage: Candidate | None
    tiers: Mapping[WeightTier, Bandwidth]
    excluded: tuple[str, ...]

    def candidates(self, table: ChunkTable, wanted: ChunkRanges) -> list[Candidate]:
        """The sources for a target that needs these chunks."""
        found = [candidate_of(held, table, wanted) for held in self.live]
        return found if self.storage is None else [*found, self.storage]


def candidate_of(held: LiveSource, table: ChunkTable, wanted: ChunkRanges) -> Candidate:
    source = held.source
    here = common(source.held, table.whole) if source.partial else table.whole
    gives = common(here, wanted)
    return Candidate(
        source_id=source.source_id,
        tier=source.tier,
        url=source.url,
        worker_id=source.worker_id,
        incarnation=source.incarnation,
        node=source.node,
        announced_bytes_per_s=source.bandwidth_bytes_per_s,
        measured=held.measured,
        readers=held.readers,
        readers_max=source.readers_max,
        announced_ago_s=held.announced_ago_s,
        expires_in_s=held.expires_in_s,
        barred=held.barred,
        barred_for_s=held.barred_for_s,
        rack=source.rack,
        layout_digest=source.layout_digest,
        slo_share=source.slo_share,
        draining=source.draining,
        partial=source.partial,
        gives=gives,
        # What it lacks of what the target needs is what the target would have to wait for.
        lacks_bytes=table.size_bytes(without(wanted, here)),
        reads_from=held.reads_from,
    )


def ranked_source(ranked: sources.Ranked, digest: str, wanted: ChunkRanges) -> RankedSource:
    candidate = ranked.candidate
    return RankedSource(
        source_of(ranked, digest),
        ranked.predicted_s,
        ranked.why,
        candidate.gives if candidate.partial else wanted,
        ranked.complete_in_s,
    )


def start_choice(start: placement.Start, digest: str) -> StartChoice:
    return StartChoice(
        node=start.node,
        source=source_of(start.ranked, digest),
        queue_s=start.queue_s,
        artifact_s=start.artifact_s,
        runtime_init_s=start.runtime_init_s,
        total_s=start.total_s,
        why=start.why,
    )


def source_of(ranked: sources.Ranked, digest: str) -> Source:
    candidate = ranked.candidate
    return Source(
        source_id=candidate.source_id,
        digest=digest,
        tier=candidate.tier,
        url=candidate.url,
        worker_id=candidate.worker_id,
        incarnation=candidate.incarnation,
        node=candidate.node,
        bandwidth_bytes_per_s=ranked.bandwidth_bytes_per_s,
        readers=candidate.readers,
        readers_max=candidate.readers_max,
        partial=candidate.partial,
        held=candidate.gives if candidate.partial else (),
        layout_digest=candidate.layout_digest,
        slo_share=candidate.slo_share,
        draining=candidate.draining,
        rack=candidate.rack,
    )
