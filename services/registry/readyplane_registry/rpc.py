"""The registry over gRPC: translates messages with `readyplane.wire`, and nothing else."""

from __future__ import annotations

from typing import Any

import grpc.aio

from readyplane.v1 import registry_pb2 as pb
from readyplane.v1 import registry_pb2_grpc
from readyplane.wire.registry import (
    fetch_plan_to_proto,
    manifest_summary_to_proto,
    manifest_to_json,
    ranges_from_proto,
    resolution_to_proto,
    source_from_proto,
    start_node_from_proto,
    start_placement_to_proto,
    tag_to_proto,
    trail_to_proto,
    transfer_to_proto,
)
from readyplane.wire.scalars import duration, seconds_of, timestamp
from readyplane_registry.catalog import object_document
from readyplane_registry.service import LIST_MAX, RegistryService

FULL_NAME = "readyplane.v1.Registry"
Context = grpc.aio.ServicerContext[Any, Any]


def register(server: grpc.aio.Server, service: RegistryService) -> None:
    """Serve `service` on a gRPC server."""
    registry_pb2_grpc.add_RegistryServicer_to_server(RegistryServicer(service), server)


class RegistryServicer(registry_pb2_grpc.RegistryServicer):
    """One method for each rpc of registry.proto; errors are the core's and become a status outside."""

    def __init__(self, service: RegistryService) -> None:
        self._service = service

    async def PublishManifest(
        self, request: pb.PublishManifestRequest, context: Context
    ) -> pb.PublishManifestResponse:
        digest, created = await self._service.publish_manifest(
            object_document(request.manifest_json), bytes_elsewhere=request.bytes_elsewhere
        )
        return pb.PublishManifestResponse(digest=digest, created=created)

    async def GetManifest(
        self, request: pb.GetManifestRequest, context: Context
    ) -> pb.GetManifestResponse:
        manifest, created_s = await self._service.dated_manifest(request.digest)
        return pb.GetManifestResponse(
            digest=request.digest,
            manifest_json=manifest_to_json(manifest),
            create_time=timestamp(created_s),
        )

    async def ListManifests(
        self, request: pb.ListManifestsRequest, context: Context
    ) -> pb.ListManifestsResponse:
        found, rest = await self._service.list_page(
            model=request.model,
            kind=request.kind,
            limit=request.page_size or LIST_MAX,
            before=request.page_token,
        )
        return pb.ListManifestsResponse(
            manifests=[manifest_summary_to_proto(summary) for summary in found],
            next_page_token=rest,
        )

    async def SignManifest(
        self, request: pb.SignManifestRequest, context: Context
    ) -> pb.SignManifestResponse:
        created = await self._service.sign_manifest(
            request.digest, public_key=request.public_key, envelope=request.envelope_json
        )
        return pb.SignManifestResponse(created=created)

    async def RecordOrigin(
        self, request: pb.RecordOriginRequest, context: Context
    ) -> pb.RecordOriginResponse:
        await self._service.record_origin(request.digest, dict(request.origin))
        return pb.RecordOriginResponse()

    async def GetTrail(self, request: pb.GetTrailRequest, context: Context) -> pb.GetTrailResponse:
        return trail_to_proto(await self._service.trail(request.digest))

    async def HoldUpload(
        self, request: pb.HoldUploadRequest, context: Context
    ) -> pb.HoldUploadResponse:
        ttl_s = await self._service.hold_upload(
            request.upload_id, list(request.sha256), release=request.release
        )
        return pb.HoldUploadResponse(ttl=duration(ttl_s, "ttl"))

    async def SetTag(self, request: pb.SetTagRequest, context: Context) -> pb.SetTagResponse:
        tag = await self._service.set_tag(
            request.name,
            request.digest,
            expected_digest=request.expected_digest,
            force=request.force,
        )
        return pb.SetTagResponse(tag=tag_to_proto(tag))

    async def RemoveTag(
        self, request: pb.RemoveTagRequest, context: Context
    ) -> pb.RemoveTagResponse:
        tag = await self._service.remove_tag(
            request.name, expected_digest=request.expected_digest, force=request.force
        )
        return pb.RemoveTagResponse(tag=tag_to_proto(tag))

    async def ListTags(self, request: pb.ListTagsRequest, context: Context) -> pb.ListTagsResponse:
        tags = await self._service.list_tags(request.name)
        return pb.ListTagsResponse(tags=[tag_to_proto(tag) for tag in tags])

    async def Resolve(self, request: pb.ResolveRequest, context: Context) -> pb.ResolveResponse:
        if request.candidates_max:
            found = await self._service.resolve_need(
                request.reference,
                kind=request.kind or "weights",
                need=dict(request.need),
                candidates_max=request.candidates_max,
            )
            return resolution_to_proto(found)
        manifest = await self._service.resolve(
            request.reference, kind=request.kind or "weights", need=dict(request.need)
        )
        return pb.ResolveResponse(digest=manifest.digest, manifest_json=manifest_to_json(manifest))

    async def AnnounceSource(
        self, request: pb.AnnounceSourceRequest, context: Context
    ) -> pb.AnnounceSourceResponse:
        ttl_s = await self._service.announce_source(source_from_proto(request.source))
        return pb.AnnounceSourceResponse(ttl=duration(ttl_s, "ttl"))

    async def WithdrawSource(
        self, request: pb.WithdrawSourceRequest, context: Context
    ) -> pb.WithdrawSourceResponse:
        await self._service.withdraw_source(request.source_id, reason=request.reason)
        return pb.WithdrawSourceResponse()

    async def PlanFetch(
        self, request: pb.PlanFetchRequest, context: Context
    ) -> pb.PlanFetchResponse:
        plan = await self._service.plan_fetch(
            request.digest,
            worker_id=request.worker_id,
            incarnation=request.incarnation,
            node=request.node,
            missing=ranges_from_proto(request.missing, "missing"),
            rack=request.rack,
            layout_digest=request.layout_digest,
        )
        return fetch_plan_to_proto(plan)

    async def PlaceStart(
        self, request: pb.PlaceStartRequest, context: Context
    ) -> pb.PlaceStartResponse:
        found = await self._service.place_start(
            request.digest,
            nodes=[start_node_from_proto(node) for node in request.nodes],
            starts=request.starts or 1,
            layout_digest=request.layout_digest,
        )
        return start_placement_to_proto(found)

    async def AcquireTransfer(
        self, request: pb.AcquireTransferRequest, context: Context
    ) -> pb.AcquireTransferResponse:
        transfer = await self._service.acquire_transfer(
            request.source_id,
            request.digest,
            worker_id=request.worker_id,
            incarnation=request.incarnation,
            request_id=request.request_id,
            source_incarnation=request.source_incarnation,
            layout_digest=request.layout_digest,
            readers_seen=request.readers_seen if request.HasField("readers_seen") else None,
        )
        return transfer_to_proto(transfer)

    async def ReleaseTransfer(
        self, request: pb.ReleaseTransferRequest, context: Context
    ) -> pb.ReleaseTransferResponse:
        quarantined = await self._service.release_transfer(
            request.transfer_id,
            transferred_bytes=request.transferred_bytes,
            elapsed_s=seconds_of(request.elapsed_duration),
            failure=request.failure,
        )
        return pb.ReleaseTransferResponse(quarantined=quarantined)
