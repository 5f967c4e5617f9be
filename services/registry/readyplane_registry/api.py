"""The registry over REST: what a person, a script or a gateway asks for.

Owns the shapes of the JSON answers; the use-cases and their errors are the service's, so REST and
gRPC agree. `blob_http` serves the bytes beside it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse

from readyplane.core.errors import InvalidField, UnknownField
from readyplane.core.identity import Manifest
from readyplane.core.resolution import Resolution
from readyplane.core.trust import Trail
from readyplane.ports import ManifestSummary, StartNode, Tag
from readyplane_registry.catalog import MANIFEST_BYTES_MAX, object_document
from readyplane_registry.service import RegistryService

PUBLISH_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["manifest"],
                    "additionalProperties": False,
                    "properties": {
                        "manifest": {"type": "object"},
                        "bytes_elsewhere": {"type": "boolean", "default": False},
                    },
                }
            }
        },
    }
}


class TagBody(BaseModel):
    """Where a tag is to point; `expected_digest` is where the caller believes it points now."""

    model_config = ConfigDict(extra="forbid", strict=True)

    digest: str
    expected_digest: str = ""
    force: bool = False


class NodeBody(BaseModel):
    """A node where a worker could start; see `readyplane.ports.StartNode`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    node: str
    rack: str = ""
    queue_s: float = 0.0
    runtime_init_s: float | None = None
    ingress_bytes_per_s: float = 0.0
    places: int = 1


class PlaceBody(BaseModel):
    """How many workers are to start, and on which nodes they could."""

    model_config = ConfigDict(extra="forbid", strict=True)

    nodes: list[NodeBody]
    starts: int = 1
    layout_digest: str = ""


def routes(service: RegistryService) -> APIRouter:
    """The routes of artifacts, tags and resolving."""
    router = APIRouter(prefix="/v1", tags=["registry"])
    _add_artifacts(router, service)
    _add_sources(router, service)
    _add_tags(router, service)
    return router


def _add_artifacts(router: APIRouter, service: RegistryService) -> None:
    @router.get("/artifacts")
    async def list_artifacts(
        model: str = "",
        kind: str = "",
        page_size: int = 100,
        page_token: str = "",
    ) -> dict[str, Any]:
        """Manifests, newest first."""
        found, rest = await service.list_page(
            model=model, kind=kind, limit=page_size, before=page_token
        )
        return {"artifacts": [_line(summary) for summary in found], "next_page_token": rest}

    @router.post("/artifacts", status_code=201, openapi_extra=PUBLISH_BODY)
    async def publish(request: Request) -> JSONResponse:
        """Publish a manifest whose bytes are stored: 201 when it is new, 200 when it was known."""
        body = object_document(await _body(request))
        for name in sorted(set(body) - {"manifest", "bytes_elsewhere"}):
            raise UnknownField(name, body[name], "send manifest and bytes_elsewhere only")
        document, elsewhere = body.get("manifest"), body.get("bytes_elsewhere", False)
        if not isinstance(document, dict):
            raise InvalidField("manifest", document, "send the manifest as an object")
        if not isinstance(elsewhere, bool):
            raise InvalidField("bytes_elsewhere", elsewhere, "send true or false")
        digest, created = await service.publish_manifest(document, bytes_elsewhere=elsewhere)
        return JSONResponse({"digest": digest, "created": created}, 201 if created else 200)

    @router.get("/artifacts/{digest}")
    async def get_artifact(digest: str) -> dict[str, Any]:
        """One manifest."""
        manifest, created_s = await service.dated_manifest(digest)
        trail = _trail(await service.trail(digest))
        return {**_artifact(manifest), "created_s": created_s, **trail}

    @router.post("/artifacts/{digest}/retire")
    async def retire(digest: str, reason: str = "") -> dict[str, Any]:
        """Hide an artifact: nobody resolves to it any more; its identity stays its own."""
        return {"digest": digest, "retired": await service.retire(digest, reason=reason)}

    @router.post("/collect")
    async def collect(dry_run: bool = False) -> dict[str, Any]:
        """Retire what nobody needs and take away bytes that nothing keeps."""
        return asdict(await service.collect(dry_run=dry_run))

    @router.post("/artifacts/{digest}/verify")
    async def verify(digest: str) -> dict[str, Any]:
        """Read every stored byte again and compare it with the manifest."""
        found = await service.verify(digest)
        return {"digest": digest, "ok": found.ok, "files": [asdict(file) for file in found.files]}

    @router.get("/artifacts/{digest}/plan")
    async def plan(
        digest: str, worker_id: str = "", incarnation: str = "", node: str = ""
    ) -> dict[str, Any]:
        """Who could give the bytes to this worker, best first, and why."""
        found = await service.plan_fetch(
            digest, worker_id=worker_id, incarnation=incarnation, node=node
        )
        sources = [
            {**asdict(r.source), "predicted_s": r.predicted_s, "why": r.why} for r in found.sources
        ]
        return {"digest": digest, "sources": sources, "excluded": list(found.excluded)}


def _add_sources(router: APIRouter, service: RegistryService) -> None:
    @router.get("/artifacts/{digest}/sources")
    async def list_sources(digest: str) -> dict[str, Any]:
        """Who holds the bytes now, who reads from whom, and who is not offered, with the reason."""
        found = await service.sources_of(digest)
        return {"digest": digest, "sources": [asdict(held) for held in found]}

    @router.get("/sources/bars")
    async def list_bars() -> dict[str, Any]:
        """Which sources were not offered for a while, on whose word and why, newest first."""
        return {"bars": [asdict(record) for record in await service.bars()]}

    @router.post("/artifacts/{digest}/place")
    async def place(digest: str, body: PlaceBody) -> dict[str, Any]:
        """Where to start next, over nodes and sources; a read."""
        nodes = [StartNode(**node.model_dump()) for node in body.nodes]
        found = await service.place_start(
            digest, nodes=nodes, starts=body.starts, layout_digest=body.layout_digest
        )
        return {"digest": digest, **asdict(found)}


def _add_tags(router: APIRouter, service: RegistryService) -> None:
    @router.get("/tags")
    async def list_tags() -> dict[str, Any]:
        """Every tag as it points now, the latest change first."""
        return {"tags": [_tag(tag) for tag in await service.list_tags()]}

    @router.get("/tags/{name:path}")
    async def get_tag(name: str) -> dict[str, Any]:
        """One tag as it points now, and where it has pointed, newest first."""
        history = [_tag(tag) for tag in await service.list_tags(name)]
        return {**history[0], "history": history}

    @router.put("/tags/{name:path}")
    async def set_tag(name: str, body: TagBody) -> dict[str, Any]:
        """Point a tag by compare-and-set: of two writers one gets 409."""
        return _tag(
            await service.set_tag(
                name, body.digest, expected_digest=body.expected_digest, force=body.force
            )
        )

    @router.delete("/tags/{name:path}")
    async def remove_tag(
        name: str, expected_digest: str = "", force: bool = False
    ) -> dict[str, Any]:
        """Take a tag away by compare-and-set; its history stays, its digest is empty."""
        return _tag(await service.remove_tag(name, expected_digest=expected_digest, force=force))

    @router.get("/resolve")
    async def resolve(
        reference: str,
        kind: str = "weights",
        need: Annotated[list[str] | None, Query()] = None,
        candidates: int = 0,
    ) -> dict[str, Any]:
        """A digest, tag or model name as one manifest; `need=layout=safetensors/1` narrows it.

        With `candidates=5` a need that nothing meets is answered with the five nearest.
        """
        needs = _needs(need or [])
        if not candidates:
            return _artifact(await service.resolve(reference, kind=kind, need=needs))
        found = await service.resolve_need(
            reference, kind=kind, need=needs, candidates_max=candidates
        )
        return _resolution(found)


def _needs(given: list[str]) -> dict[str, str]:
    needs: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals or name in needs:
            raise InvalidField("need", text, "write FIELD=VALUE, each field once")
        needs[name] = value
    return needs


async def _body(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > MANIFEST_BYTES_MAX:
            raise InvalidField("body", f"over {MANIFEST_BYTES_MAX} bytes", "send a smaller one")
        parts.append(piece)
    return b"".join(parts)


def _artifact(manifest: Manifest) -> dict[str, Any]:
    return {
        "digest": manifest.digest,
        "size_bytes": manifest.size_bytes,
        "manifest": manifest.document(),
    }


def _trail(trail: Trail) -> dict[str, Any]:
    return {
        "retired": trail.retired,
        "origin": dict(trail.origin),
        "signatures": [
            {"key_id": s.key_id, "envelope": s.envelope, "created_s": s.created_s}
            for s in trail.signatures
        ],
        "events": [asdict(event) for event in trail.events],
    }


def _resolution(found: Resolution) -> dict[str, Any]:
    return {
        "artifact": None if found.manifest is None else _artifact(found.manifest),
        "candidates": [
            {
                "digest": candidate.digest,
                "differing": [
                    {"field": f.field, "needed": f.left, "found": f.right}
                    for f in candidate.differing
                ],
            }
            for candidate in found.candidates
        ],
        "left_off": found.left_off,
    }


def _line(summary: ManifestSummary) -> dict[str, Any]:
    return {**asdict(summary), "tags": list(summary.tags)}


def _tag(tag: Tag) -> dict[str, Any]:
    return asdict(tag)
