"""Manifests, tags, sources and transfers <-> registry.proto."""

from __future__ import annotations

from readyplane.core.identity import Manifest, canonical, parse
from readyplane.core.startup import WeightTier
from readyplane.ports import FetchPlan, ManifestSummary, RankedSource, Source, Tag, Transfer
from readyplane.v1 import registry_pb2 as pb
from readyplane.wire.scalars import duration, enum_of, seconds_of, timestamp


def manifest_to_json(manifest: Manifest) -> str:
    """The manifest's canonical document: its digest is the sha256 of these bytes."""
    return canonical(manifest.document()).decode()


def manifest_from_json(text: str) -> Manifest:
    """Parse and validate. Raises InvalidField naming the field."""
    return Manifest.from_document(parse(text, where="manifest"))


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
    )


def ranked_source_to_proto(ranked: RankedSource) -> pb.RankedSource:
    """Ranked source as message."""
    return pb.RankedSource(
        source=source_to_proto(ranked.source),
        predicted_duration=duration(ranked.predicted_s, "predicted_duration"),
        why=ranked.why,
    )


def ranked_source_from_proto(message: pb.RankedSource) -> RankedSource:
    """Message as ranked source."""
    predicted_s = seconds_of(message.predicted_duration)
    return RankedSource(source_from_proto(message.source), predicted_s, message.why)


def fetch_plan_to_proto(plan: FetchPlan) -> pb.PlanFetchResponse:
    """Plan as response."""
    sources = [ranked_source_to_proto(s) for s in plan.sources]
    return pb.PlanFetchResponse(sources=sources, excluded=plan.excluded)


def fetch_plan_from_proto(message: pb.PlanFetchResponse) -> FetchPlan:
    """Response as plan."""
    sources = tuple(ranked_source_from_proto(s) for s in message.sources)
    return FetchPlan(sources, tuple(message.excluded))


def transfer_to_proto(transfer: Transfer) -> pb.AcquireTransferResponse:
    """Transfer as response."""
    return pb.AcquireTransferResponse(
        transfer_id=transfer.transfer_id, ttl=duration(transfer.ttl_s, "ttl")
    )


def transfer_from_proto(message: pb.AcquireTransferResponse) -> Transfer:
    """Response as transfer."""
    return Transfer(message.transfer_id, seconds_of(message.ttl))
