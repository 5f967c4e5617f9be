"""Manifests, tags, sources and transfers <-> registry.proto."""

from __future__ import annotations

from collections.abc import Iterable

from readyplane.core.chunks import ChunkRanges, check_ranges
from readyplane.core.identity import FieldDifference, Manifest, canonical, parse
from readyplane.core.resolution import Candidate, Resolution
from readyplane.core.startup import WeightTier
from readyplane.core.trust import ManifestEvent, Signature, Trail
from readyplane.ports import (
    FetchPlan,
    ManifestSummary,
    RankedSource,
    Source,
    StartChoice,
    StartNode,
    StartPlacement,
    Tag,
    Transfer,
)
from readyplane.v1 import registry_pb2 as pb
from readyplane.wire.scalars import duration, enum_of, seconds_of, timestamp


def manifest_to_json(manifest: Manifest) -> str:
    """The manifest's canonical document: its digest is the sha256 of these bytes."""
    return canonical(manifest.document()).decode()


def manifest_from_json(text: str) -> Manifest:
    """Parse and validate. Raises InvalidField naming the field."""
    return Manifest.from_document(parse(text, where="manifest"))


def resolution_to_proto(resolution: Resolution) -> pb.ResolveResponse:
    """Resolution as response."""
    manifest = resolution.manifest
    return pb.ResolveResponse(
        digest="" if manifest is None else manifest.digest,
        manifest_json="" if manifest is None else manifest_to_json(manifest),
        candidates=[
            pb.Candidate(
                digest=candidate.digest,
                differing=[
                    pb.FieldDifference(field=f.field, needed=f.left, found=f.right)
                    for f in candidate.differing
                ],
            )
            for candidate in resolution.candidates
        ],
        left_off=resolution.left_off,
    )


def resolution_from_proto(message: pb.ResolveResponse, manifest: Manifest | None) -> Resolution:
    """Response as resolution, with the manifest that was read from it and checked."""
    candidates = tuple(
        Candidate(c.digest, tuple(FieldDifference(f.field, f.needed, f.found) for f in c.differing))
        for c in message.candidates
    )
    return Resolution(manifest, candidates, message.left_off)


def manifest_summary_to_proto(summary: ManifestSummary) -> pb.ManifestSummary:
    """Summary as message."""
    return pb.ManifestSummary(
        digest=summary.digest,
        kind=summary.kind,
        model=summary.model,
        size_bytes=summary.size_bytes,
        file_count=summary.file_count,
        tensor_count=summary.tensor_count,
        create_time=timestamp(summary.created_s),
        tags=summary.tags,
    )


def manifest_summary_from_proto(message: pb.ManifestSummary) -> ManifestSummary:
    """Message as summary."""
    return ManifestSummary(
        digest=message.digest,
        kind=message.kind,
        model=message.model,
        size_bytes=message.size_bytes,
        file_count=message.file_count,
        tensor_count=message.tensor_count,
        created_s=seconds_of(message.create_time),
        tags=tuple(message.tags),
    )


def trail_to_proto(trail: Trail) -> pb.GetTrailResponse:
    """Trail as response."""
    return pb.GetTrailResponse(
        signatures=[
            pb.ManifestSignature(
                key_id=signature.key_id,
                public_key=signature.public_key,
                envelope_json=signature.envelope,
                create_time=timestamp(signature.created_s),
            )
            for signature in trail.signatures
        ],
        events=[
            pb.ManifestEvent(
                event=event.event,
                detail=dict(event.detail),
                create_time=timestamp(event.created_s),
            )
            for event in trail.events
        ],
    )


def trail_from_proto(message: pb.GetTrailResponse) -> Trail:
    """Response as trail; nothing of it is verified here."""
    return Trail(
        tuple(
            Signature(s.key_id, s.public_key, s.envelope_json, seconds_of(s.create_time))
            for s in message.signatures
        ),
        tuple(
            ManifestEvent(e.event, dict(e.detail), seconds_of(e.create_time))
            for e in message.events
        ),
    )


def tag_to_proto(tag: Tag) -> pb.Tag:
    """Tag as message."""
    return pb.Tag(
        name=tag.name,
        digest=tag.digest,
        version=tag.version,
        create_time=timestamp(tag.created_s),
    )


def tag_from_proto(message: pb.Tag) -> Tag:
    """Message as tag."""
    return Tag(message.name, message.digest, message.version, seconds_of(message.create_time))


def ranges_to_proto(ranges: ChunkRanges) -> list[pb.ChunkRange]:
    """Chunk ranges as messages."""
    return [pb.ChunkRange(begin=begin, end=end) for begin, end in ranges]


def ranges_from_proto(messages: Iterable[pb.ChunkRange], where: str) -> ChunkRanges:
    """Messages as chunk ranges. Raises InvalidField for an empty or a negative one."""
    return check_ranges([(m.begin, m.end) for m in messages], where=where)


def source_to_proto(source: Source) -> pb.Source:
    """Source as message."""
    return pb.Source(
        source_id=source.source_id,
        digest=source.digest,
        tier=source.tier,
        url=source.url,
        worker_id=source.worker_id,
        incarnation=source.incarnation,
        node=source.node,
        bandwidth_bytes_per_s=source.bandwidth_bytes_per_s,
        readers=source.readers,
        readers_max=source.readers_max,
        partial=source.partial,
        held=ranges_to_proto(source.held),
        layout_digest=source.layout_digest,
        slo_share=source.slo_share,
        draining=source.draining,
        rack=source.rack,
    )


def source_from_proto(message: pb.Source) -> Source:
    """Message as source. Raises InvalidField for an unknown tier."""
    return Source(
        source_id=message.source_id,
        digest=message.digest,
        tier=enum_of(WeightTier, message.tier, "source.tier", WeightTier.UNKNOWN),
        url=message.url,
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        node=message.node,
        bandwidth_bytes_per_s=message.bandwidth_bytes_per_s,
        readers=message.readers,
        readers_max=message.readers_max,
        partial=message.partial,
        held=ranges_from_proto(message.held, "source.held"),
        layout_digest=message.layout_digest,
        slo_share=message.slo_share if message.HasField("slo_share") else None,
        draining=message.draining,
        rack=message.rack,
    )


def ranked_source_to_proto(ranked: RankedSource) -> pb.RankedSource:
    """Ranked source as message."""
    soon = ranked.complete_in_s
    return pb.RankedSource(
        source=source_to_proto(ranked.source),
        predicted_duration=duration(ranked.predicted_s, "predicted_duration"),
        why=ranked.why,
        gives=ranges_to_proto(ranked.gives),
        complete_duration=None if soon is None else duration(soon, "complete_duration"),
    )


def ranked_source_from_proto(message: pb.RankedSource) -> RankedSource:
    """Message as ranked source."""
    known = message.HasField("complete_duration")
    return RankedSource(
        source_from_proto(message.source),
        seconds_of(message.predicted_duration),
        message.why,
        ranges_from_proto(message.gives, "gives"),
        seconds_of(message.complete_duration) if known else None,
    )


def fetch_plan_to_proto(plan: FetchPlan) -> pb.PlanFetchResponse:
    """Plan as response."""
    sources = [ranked_source_to_proto(s) for s in plan.sources]
    later = plan.retry_after_s
    return pb.PlanFetchResponse(
        sources=sources,
        excluded=plan.excluded,
        retry_after_duration=None if later is None else duration(later, "retry_after_duration"),
    )


def fetch_plan_from_proto(message: pb.PlanFetchResponse) -> FetchPlan:
    """Response as plan."""
    sources = tuple(ranked_source_from_proto(s) for s in message.sources)
    later = message.HasField("retry_after_duration")
    retry_after_s = seconds_of(message.retry_after_duration) if later else None
    return FetchPlan(sources, tuple(message.excluded), retry_after_s)


def transfer_to_proto(transfer: Transfer) -> pb.AcquireTransferResponse:
    """Transfer as response."""
    return pb.AcquireTransferResponse(
        transfer_id=transfer.transfer_id,
        ttl=duration(transfer.ttl_s, "ttl"),
        source_incarnation=transfer.source_incarnation,
        layout_digest=transfer.layout_digest,
        bytes_per_s=transfer.bytes_per_s,
        readers=transfer.readers,
    )


def transfer_from_proto(message: pb.AcquireTransferResponse) -> Transfer:
    """Response as transfer."""
    return Transfer(
        message.transfer_id,
        seconds_of(message.ttl),
        message.source_incarnation,
        message.layout_digest,
        message.bytes_per_s,
        message.readers,
    )


def start_node_to_proto(node: StartNode) -> pb.StartNode:
    """Node as message."""
    init_s = node.runtime_init_s
    return pb.StartNode(
        node=node.node,
        rack=node.rack,
        queue_duration=duration(node.queue_s, "node.queue_duration"),
        runtime_init_duration=(
            None if init_s is None else duration(init_s, "node.runtime_init_duration")
        ),
        ingress_bytes_per_s=node.ingress_bytes_per_s,
        places=node.places,
    )


def start_node_from_proto(message: pb.StartNode) -> StartNode:
    """Message as node; `places` left out means one."""
    known = message.HasField("runtime_init_duration")
    return StartNode(
        message.node,
        message.rack,
        seconds_of(message.queue_duration),
        seconds_of(message.runtime_init_duration) if known else None,
        message.ingress_bytes_per_s,
        message.places or 1,
    )


def start_choice_to_proto(choice: StartChoice) -> pb.StartChoice:
    """Choice as message."""
    return pb.StartChoice(
        node=choice.node,
        source=source_to_proto(choice.source),
        queue_duration=duration(choice.queue_s, "queue_duration"),
        artifact_duration=duration(choice.artifact_s, "artifact_duration"),
        runtime_init_duration=duration(choice.runtime_init_s, "runtime_init_duration"),
        total_duration=duration(choice.total_s, "total_duration"),
        why=choice.why,
    )


def start_choice_from_proto(message: pb.StartChoice) -> StartChoice:
    """Message as choice."""
    return StartChoice(
        message.node,
        source_from_proto(message.source),
        seconds_of(message.queue_duration),
        seconds_of(message.artifact_duration),
        seconds_of(message.runtime_init_duration),
        seconds_of(message.total_duration),
        message.why,
    )


def start_placement_to_proto(placement: StartPlacement) -> pb.PlaceStartResponse:
    """Placement as response."""
    return pb.PlaceStartResponse(
        choices=[start_choice_to_proto(c) for c in placement.choices],
        alternatives=[start_choice_to_proto(c) for c in placement.alternatives],
        excluded=placement.excluded,
    )


def start_placement_from_proto(message: pb.PlaceStartResponse) -> StartPlacement:
    """Response as placement."""
    return StartPlacement(
        tuple(start_choice_from_proto(c) for c in message.choices),
        tuple(start_choice_from_proto(c) for c in message.alternatives),
        tuple(message.excluded),
    )
