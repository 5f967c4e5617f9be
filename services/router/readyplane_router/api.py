"""The router over REST: what a person or a gateway without gRPC asks for.

Translates JSON only; the same use-cases and errors as over gRPC. Times of a worker are ages.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from readyplane.core.errors import InvalidField
from readyplane.core.ration import Ration
from readyplane.core.work import EventKind, RequestEvent, RequestShape, Slo, pack_tokens
from readyplane.core.worker import Fleet, Role, Worker
from readyplane.kit.clock import Clock
from readyplane.kit.http import while_asked
from readyplane.ports import Pair
from readyplane_router.service import RouterService

EVENTS_MAX = 10_000
TOKENS_MAX = 2_000_000


Model = Annotated[str, Query(description="empty for all")]


# JSON's own numbers: neither true nor "5" is one.
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SloBody(_Body):
    """Targets of one request."""

    ttft_s: Number = Field(gt=0, description="seconds to the first token")
    tpot_s: Number = Field(gt=0, description="seconds per later token")


class RouteBody(_Body):
    """A request to be paired: token ids, or the hashes of its full blocks with its length."""

    request_id: str = Field(min_length=1, max_length=200)
    model: str = Field(min_length=1)
    token_ids: list[Whole] = Field(default_factory=list, max_length=TOKENS_MAX)
    block_hashes: list[Annotated[Whole, Field(ge=0, lt=2**64)]] = Field(
        default_factory=list, max_length=TOKENS_MAX
    )
    isl: Whole | None = Field(None, description="prompt tokens; not needed with token_ids")
    max_tokens: Whole | None = None
    priority: Whole = 0
    tenant: str = ""
    slo: SloBody | None = None
    lora: str = ""
    cache_salt: str = ""
    replaces: str = Field("", description="reservation whose leg failed")
    avoid: list[str] = Field(default_factory=list, description="worker ids not to be used")
    explain: bool = False
    dry_run: bool = False

    def shape(self) -> RequestShape:
        """The request in core words.

        Raises:
            InvalidField: neither token ids nor a length.
        """
        isl = self.isl if self.isl is not None else len(self.token_ids)
        if not isl:
            raise InvalidField("isl", self.isl, "give token_ids, or isl with block_hashes")
        return RequestShape(
            request_id=self.request_id,
            model=self.model,
            isl=isl,
            token_ids=pack_tokens(self.token_ids) if self.token_ids else b"",
            block_hashes=tuple(self.block_hashes),
            max_tokens=self.max_tokens,
            priority=self.priority,
            tenant=self.tenant,
            slo=Slo(self.slo.ttft_s, self.slo.tpot_s) if self.slo else None,
            lora=self.lora,
            cache_salt=self.cache_salt,
        )


class EventBody(_Body):
    """A fact about a reserved request."""

    reservation_id: str
    kind: EventKind
    ttft_s: Number | None = None
    tpot_s: Number | None = None
    output_tokens: Whole = Field(0, ge=0)
    cached_tokens: Whole | None = None
    failed_worker_id: str = ""
    attained: bool | None = None
    detail: str = ""


class CompleteBody(_Body):
    """Facts, in order."""

    events: list[EventBody] = Field(max_length=EVENTS_MAX)


class DrainBody(_Body):
    """Why and how long a worker may take to drain."""

    epoch: Whole = Field(0, ge=0, description="0: whatever incarnation lives now")
    reason: str = ""
    deadline_s: Number = Field(300.0, gt=0, le=86_400)
    scale_decision_id: str = ""


class ActivateBody(_Body):
    """Why, and for how long the word is given."""

    epoch: Whole = Field(0, ge=0, description="0: whatever incarnation lives now")
    reason: str = ""
    deadline_s: Number = Field(60.0, gt=0, le=86_400)
    scale_decision_id: str = ""


class FlipBody(DrainBody):
    """The stage to serve from then on, and how long the worker may take to drain."""

    role: Role


class RationBody(_Body):
    """Who is refused, and for how long; a share of 1 ends it."""

    model: str = Field(min_length=1)
    priority: Whole = Field(description="less important requests are refused")
    admit_share: Number = Field(0.0, ge=0, le=1, description="of that priority's prompt tokens")
    ttl_s: Number = Field(60.0, gt=0, le=1_000)
    reason: str = Field("by hand", max_length=500)
    retry_after_s: Number = Field(0.0, ge=0, le=86_400, description="0: when the order ends")


def routes(service: RouterService, clock: Clock) -> APIRouter:
    """The routes of the router."""
    router = APIRouter(prefix="/v1", tags=["router"])

    @router.post("/route", summary="Pick and reserve a pair")
    async def route(body: RouteBody, request: Request) -> dict[str, Any]:
        routing = service.route(
            body.shape(),
            replaces=body.replaces,
            avoid=body.avoid,
            explain=body.explain,
            dry_run=body.dry_run,
        )

        async def give_back(pair: Pair) -> None:
            if not body.dry_run:
                await service.complete([RequestEvent(pair.reservation_id, EventKind.ABORTED)])

        return _pair(await while_asked(request, routing, give_back))

    @router.post("/complete", summary="Tell what became of reserved requests")
    async def complete(body: CompleteBody) -> dict[str, int]:
        events = [RequestEvent(**event.model_dump()) for event in body.events]
        return {"unknown": await service.complete(events)}

    @router.get("/workers", summary="The workers now")
    async def workers(model: Model = "") -> dict[str, Any]:
        fleet = await service.list_workers(model)
        if model and not fleet.workers:  # unknown is not empty
            await service.check_model(model)
        return _fleet(fleet, clock.monotonic_s())

    @router.post("/workers/{worker_id}/drain", summary="No new work for a worker")
    async def drain(worker_id: str, body: DrainBody | None = None) -> dict[str, Any]:
        wanted = body or DrainBody.model_validate({})
        worker = await service.drain(worker_id, **wanted.model_dump())
        return _worker(worker, clock.monotonic_s())

    @router.post("/workers/{worker_id}/activate", summary="A standby is to serve")
    async def activate(worker_id: str, body: ActivateBody | None = None) -> dict[str, Any]:
        wanted = body or ActivateBody.model_validate({})
        worker = await service.activate(worker_id, **wanted.model_dump())
        return _worker(worker, clock.monotonic_s())

    @router.post("/workers/{worker_id}/flip", summary="A worker is to serve the other stage")
    async def flip(worker_id: str, body: FlipBody) -> dict[str, Any]:
        worker = await service.flip(worker_id, **body.model_dump())
        return _worker(worker, clock.monotonic_s())

    @router.post("/ration", summary="Refuse requests of low priority for a while")
    async def ration(body: RationBody) -> dict[str, Any]:
        wanted = body.model_dump(exclude={"model"})
        found = await service.ration(body.model, Ration(**wanted))
        return {"order": None if found is None else dataclasses.asdict(found)}

    @router.get("/signals", summary="Demand, latency and queues")
    async def signals(model: Model = "") -> dict[str, Any]:
        found = await service.signals(model)
        return {
            "incarnation": found.incarnation,
            "uptime_s": found.uptime_s,
            "models": {name: dataclasses.asdict(value) for name, value in found.models.items()},
            "fleet": _fleet(found.fleet, clock.monotonic_s()),
            "routers_missing": found.routers_missing,
        }

    return router


def _pair(pair: Pair) -> dict[str, Any]:
    document = dataclasses.asdict(pair)
    if pair.explanation is None:
        del document["explanation"]
    if pair.bootstrap_room is not None:
        document["bootstrap_room"] = pair.bootstrap_room
    return document


def _fleet(fleet: Fleet, now_s: float) -> dict[str, Any]:
    return {
        "version": fleet.version,
        "degraded": fleet.degraded,
        "workers": [_worker(worker, now_s) for worker in fleet.workers.values()],
    }


def _worker(worker: Worker, now_s: float) -> dict[str, Any]:
    document = dataclasses.asdict(worker)
    for name in ("provisioned", "ready", "draining", "renewed"):
        then_s = document.pop(f"{name}_s")
        document[f"{name}_ago_s"] = None if then_s is None else max(0.0, now_s - then_s)
    return document
