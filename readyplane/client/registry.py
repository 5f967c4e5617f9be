"""The registry over gRPC: implements `readyplane.ports.Registry`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc.aio

from readyplane import wire
from readyplane.client.channel import ServiceClient
from readyplane.core.chunks import ChunkRanges
from readyplane.core.errors import IdentityMismatch
from readyplane.core.identity import Manifest, canonical
from readyplane.core.resolution import CANDIDATES_SHOWN_MAX, Resolution
from readyplane.core.trust import Trail
from readyplane.ports import (
    FetchPlan,
    ManifestSummary,
    Source,
    StartNode,
    StartPlacement,
    Tag,
    Transfer,
)
from readyplane.v1 import registry_pb2 as pb
from readyplane.v1 import registry_pb2_grpc
from readyplane.wire.registry import ranges_to_proto, resolution_from_proto

PUBLISH_TIMEOUT_S = 120.0
PAGE_SIZE = 500
PAGES_MAX = 1_000


class RegistryClient(ServiceClient):
    """`readyplane.ports.Registry` over gRPC."""

    service = "registry"

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        return registry_pb2_grpc.RegistryStub(channel)

    async def publish_manifest(
        self, document: Mapping[str, Any], *, bytes_elsewhere: bool = False
    ) -> tuple[str, bool]:
        """Store a manifest; the registry checks its bytes, which may take a while."""
        response: pb.PublishManifestResponse = await self.call(
            "PublishManifest",
            lambda: pb.PublishManifestRequest(
                request_id=self._make_id(),
                manifest_json=canonical(document, where="manifest").decode(),
                bytes_elsewhere=bytes_elsewhere,
            ),
            PUBLISH_TIMEOUT_S,
        )
        return response.digest, response.created

    async def get_manifest(self, digest: str) -> Manifest:
        """One manifest, checked against the digest that was asked for."""
        response: pb.GetManifestResponse = await self.call(
            "GetManifest", lambda: pb.GetManifestRequest(digest=digest)
        )
        return _checked(response.manifest_json, digest)

    async def list_manifests(self, *, model: str = "", kind: str = "") -> list[ManifestSummary]:
        """Newest first, all pages."""
        found: list[ManifestSummary] = []
        token = ""
        for _ in range(PAGES_MAX):
            response: pb.ListManifestsResponse = await self.call(
                "ListManifests",
                lambda token=token: pb.ListManifestsRequest(  # type: ignore[misc]
                    model=model, kind=kind, page_size=PAGE_SIZE, page_token=token
                ),
            )
            found += [wire.manifest_summary_from_proto(m) for m in response.manifests]
            token = response.next_page_token
            if not token:
                break
        return found

    async def set_tag(
        self, name: str, digest: str, *, expected_digest: str = "", force: bool = False
    ) -> Tag:
        """Compare-and-set."""
        response: pb.SetTagResponse = await self.call(
            "SetTag",
            lambda: pb.SetTagRequest(
                request_id=self._make_id(),
                name=name,
                digest=digest,
                expected_digest=expected_digest,
                force=force,
            ),
        )
        return wire.tag_from_proto(response.tag)

    async def remove_tag(self, name: str, *, expected_digest: str = "", force: bool = False) -> Tag:
        """Take a tag away by compare-and-set."""
        response: pb.RemoveTagResponse = await self.call(
            "RemoveTag",
            lambda: pb.RemoveTagRequest(
                request_id=self._make_id(),
                name=name,
                expected_digest=expected_digest,
                force=force,
            ),
        )
        return wire.tag_from_proto(response.tag)

    async def sign_manifest(self, digest: str, *, public_key: bytes, envelope: str) -> bool:
        """Store a signature; False when this key had signed it before."""
        response: pb.SignManifestResponse = await self.call(
            "SignManifest",
            lambda: pb.SignManifestRequest(
                request_id=self._make_id(),
                digest=digest,
                public_key=public_key,
                envelope_json=envelope,
            ),
        )
        return response.created

    async def record_origin(self, digest: str, origin: Mapping[str, str]) -> None:
        """Note beside it where an artifact's bytes came from."""
        await self.call(
            "RecordOrigin",
            lambda: pb.RecordOriginRequest(
                request_id=self._make_id(), digest=digest, origin=dict(origin)
            ),
        )

    async def trail(self, digest: str) -> Trail:
        """Signatures, origins and retirement of a manifest; nothing is verified here."""
        response: pb.GetTrailResponse = await self.call(
            "GetTrail", lambda: pb.GetTrailRequest(digest=digest)
        )
        return wire.trail_from_proto(response)

    async def hold_upload(
        self, upload_id: str, sha256: Sequence[str], *, release: bool = False
    ) -> float:
        """Keep bytes from being collected while they are published; returns the ttl in seconds."""
        response: pb.HoldUploadResponse = await self.call(
            "HoldUpload",
            lambda: pb.HoldUploadRequest(upload_id=upload_id, sha256=sha256, release=release),
        )
        return wire.seconds_of(response.ttl)

    async def list_tags(self, name: str = "") -> list[Tag]:
        """Current tags, or the history of one, newest first."""
        response: pb.ListTagsResponse = await self.call(
            "ListTags", lambda: pb.ListTagsRequest(name=name)
        )
        return [wire.tag_from_proto(t) for t in response.tags]

    async def resolve(
        self, reference: str, *, kind: str = "weights", need: Mapping[str, str] | None = None
    ) -> Manifest:
        """By digest, tag or model name."""
        response: pb.ResolveResponse = await self.call(
            "Resolve",
            lambda: pb.ResolveRequest(reference=reference, kind=kind, need=dict(need or {})),
        )
        return _checked(response.manifest_json, response.digest)

    async def resolve_need(
        self,
        reference: str,
        *,
        kind: str,
        need: Mapping[str, str],
        candidates_max: int = CANDIDATES_SHOWN_MAX,
    ) -> Resolution:
        """The artifact that meets the need, or the nearest candidates."""
        response: pb.ResolveResponse = await self.call(
            "Resolve",
            lambda: pb.ResolveRequest(
                reference=reference, kind=kind, need=dict(need), candidates_max=candidates_max
            ),
        )
        found = _checked(response.manifest_json, response.digest) if response.digest else None
        return resolution_from_proto(response, found)

    async def announce_source(self, source: Source) -> float:
        """Announce or refresh; returns the ttl in seconds."""
        response: pb.AnnounceSourceResponse = await self.call(
            "AnnounceSource",
            lambda: pb.AnnounceSourceRequest(
                request_id=self._make_id(), source=wire.source_to_proto(source)
            ),
        )
        return wire.seconds_of(response.ttl)

    async def withdraw_source(self, source_id: str, *, reason: str = "") -> None:
        """Take a source back at once."""
        await self.call(
            "WithdrawSource",
            lambda: pb.WithdrawSourceRequest(
                request_id=self._make_id(), source_id=source_id, reason=reason
            ),
        )

    async def plan_fetch(
        self,
        digest: str,
        *,
        worker_id: str,
        incarnation: str,
        node: str,
        missing: ChunkRanges = (),
        rack: str = "",
        layout_digest: str = "",
    ) -> FetchPlan:
        """Sources for one target, best first."""
        response: pb.PlanFetchResponse = await self.call(
            "PlanFetch",
            lambda: pb.PlanFetchRequest(
                digest=digest,
                worker_id=worker_id,
                incarnation=incarnation,
                node=node,
                missing=ranges_to_proto(missing),
                rack=rack,
                layout_digest=layout_digest,
            ),
        )
        return wire.fetch_plan_from_proto(response)

    async def place_start(
        self, digest: str, *, nodes: Sequence[StartNode], starts: int = 1, layout_digest: str = ""
    ) -> StartPlacement:
        """Where to start next, over (node, source)."""
        response: pb.PlaceStartResponse = await self.call(
            "PlaceStart",
            lambda: pb.PlaceStartRequest(
                digest=digest,
                nodes=[wire.start_node_to_proto(node) for node in nodes],
                starts=starts,
                layout_digest=layout_digest,
            ),
        )
        return wire.start_placement_from_proto(response)

    async def acquire_transfer(
        self,
        source_id: str,
        digest: str,
        *,
        worker_id: str,
        incarnation: str,
        request_id: str,
        source_incarnation: str = "",
        layout_digest: str = "",
        readers_seen: int | None = None,
    ) -> Transfer:
        """Reserve a reader's place, or renew it with the same `request_id`."""
        response: pb.AcquireTransferResponse = await self.call(
            "AcquireTransfer",
            lambda: pb.AcquireTransferRequest(
                request_id=request_id,
                source_id=source_id,
                digest=digest,
                worker_id=worker_id,
                incarnation=incarnation,
                source_incarnation=source_incarnation,
                layout_digest=layout_digest,
                readers_seen=readers_seen,
            ),
        )
        return wire.transfer_from_proto(response)

    async def release_transfer(
        self, transfer_id: str, *, transferred_bytes: int, elapsed_s: float, failure: str = ""
    ) -> bool:
        """Give the place back; True when the source was quarantined for lying."""
        response: pb.ReleaseTransferResponse = await self.call(
            "ReleaseTransfer",
            lambda: pb.ReleaseTransferRequest(
                request_id=self._make_id(),
                transfer_id=transfer_id,
                transferred_bytes=transferred_bytes,
                elapsed_duration=wire.duration(elapsed_s, "elapsed_s"),
                failure=failure,
            ),
        )
        return response.quarantined


def _checked(text: str, digest: str) -> Manifest:
    """Identity is content: what came back must have the digest it was named by."""
    manifest = wire.manifest_from_json(text)
    if manifest.digest != digest:
        raise IdentityMismatch(
            "manifest",
            [f"digest: asked for {digest}, got content of {manifest.digest}"],
            "publish it again; the registry's copy is damaged",
        )
    return manifest
