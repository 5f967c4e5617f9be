"""The planner over REST: state, stream, decisions, explain, policy, pause, and the page at `/`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.staticfiles import StaticFiles

from readyplane.core.errors import InvalidField
from readyplane.core.identity import digest_of, parse
from readyplane_planner.document import dumps
from readyplane_planner.service import PlannerService

PAGE = Path(__file__).parent / "page"
LIMIT_MAX = 200
HEARTBEAT_S = 15.0

POLICY_EXAMPLE = {
    "whole": {
        "summary": "change two fields (PATCH)",
        "value": {"prefill": {"max": 6}, "slo": {"ttft_s": 1.5}},
    }
}

WHAT_IF_EXAMPLE = {
    "load and starts": {
        "summary": "twice the prompt length, starts of three minutes",
        "value": {"isl": "2x", "tready": "180"},
    }
}


class PauseBody(BaseModel):
    """Hold all targets, or let go."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"example": {"paused": True, "reason": "maintenance of rack 7"}},
    )

    paused: bool
    reason: str = ""


class RolloutBody(BaseModel):
    """What a person asks of a roll-out; `id` makes it idempotent."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "example": {"id": "r-17", "action": "go", "to": "demo:next", "by": "ann"}
        },
    )

    id: str = Field(min_length=1, max_length=64)
    action: str
    to: str = ""
    surge: int = 0
    by: str = ""


def routes(service: PlannerService, stopping: asyncio.Event | None = None) -> APIRouter:
    """The routes; `stopping` ends the endless ones."""
    router = APIRouter(prefix="/v1", tags=["planner"])
    _add_state(router, service, stopping or asyncio.Event())
    _add_decisions(router, service)
    _add_policy(router, service)
    _add_rollout(router, service)
    return router


def mount_page(app: FastAPI) -> None:
    """Serve the page at `/`; a package without it serves the API alone."""
    if PAGE.is_dir():
        app.mount("/", StaticFiles(directory=PAGE, html=True), name="page")


def _add_state(router: APIRouter, service: PlannerService, stopping: asyncio.Event) -> None:
    @router.get("/state")
    async def state(model: str = "") -> Response:
        """What a person watches, with its history."""
        return _json(await service.state(model))

    @router.get("/stream")
    async def stream(model: str = "") -> StreamingResponse:
        """Server-sent events: one state after every tick, without history."""
        states = service.watch_state(model)
        # The first state is asked for here, so that an unknown model is an answer and no stream.
        first = await anext(states)
        return StreamingResponse(
            _events(first, states, stopping),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )


async def _events(
    first: dict[str, Any], states: AsyncIterator[dict[str, Any]], stopping: asyncio.Event
) -> AsyncIterator[str]:
    yield f"data: {dumps(first)}\n\n"
    ended = asyncio.ensure_future(stopping.wait())
    coming: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(_next(states))
    try:
        while not stopping.is_set():
            both: set[asyncio.Future[Any]] = {ended, coming}
            done, _ = await asyncio.wait(
                both, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if coming in done:
                yield f"data: {dumps(coming.result())}\n\n"
                coming = asyncio.ensure_future(_next(states))
            elif not done:
                yield ": still here\n\n"
    finally:
        for task in (ended, coming):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await coming
        close = getattr(states, "aclose", None)
        if close is not None:
            await close()


async def _next(states: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return await anext(states)


def _add_decisions(router: APIRouter, service: PlannerService) -> None:
    @router.get("/decisions")
    async def decisions(
        model: str = "",
        limit: Annotated[int, Query(ge=1, le=LIMIT_MAX)] = 50,
        changes_only: bool = False,
        before: Annotated[int, Query(ge=0)] = 0,
    ) -> Response:
        """Decisions, newest first; `before` goes on from a `sequence`."""
        found = await service.list_decisions(
            model=model, limit=limit, changes_only=changes_only, before=before
        )
        rest = found[-1]["sequence"] if len(found) == limit else None
        return _json({"decisions": found, "next_before": rest})

    @router.get("/decisions/{decision_id}")
    async def decision(decision_id: str) -> Response:
        """One decision as it was taken."""
        answer = await service.explain(decision_id)
        return _json(answer["decision"])

    @router.get("/explain/{decision_id}")
    async def explain(decision_id: str) -> Response:
        """One decision with what came of it: orders, starts by segment, drains, and a sentence."""
        return _json(await service.explain(decision_id))

    @router.get("/replay/{decision_id}")
    async def replay(decision_id: str) -> Response:
        """One decision taken again from its recorded inputs, compared field by field."""
        return _json(await service.replay(decision_id))

    @router.post("/what-if")
    async def what_if(
        changes: Annotated[dict[str, str], Body(openapi_examples=WHAT_IF_EXAMPLE)],
        model: str = "",
    ) -> Response:
        """What the last tick would have decided under changes; nothing is stored or ordered."""
        return _json(await service.what_if(changes, model=model))


def _add_policy(router: APIRouter, service: PlannerService) -> None:
    @router.get("/policy")
    async def get_policy(model: str = "") -> Response:
        """The policy in force, its version and digest; the version is the ETag."""
        policy, version = await service.get_policy(model)
        return _policy(policy, version)

    @router.put("/policy")
    async def put_policy(
        request: Request,
        policy: Annotated[Any, Body(openapi_examples=None)],
        model: str = "",
        expected_version: Annotated[int, Query(ge=0)] = 0,
        if_match: Annotated[str, Header()] = "",
    ) -> Response:
        """Replace the whole policy; `If-Match` or `expected_version` makes it compare-and-set."""
        await _check_once(request)
        stored, version = await service.set_policy(
            policy, model=model, expected_version=_expected(expected_version, if_match)
        )
        return _policy(stored, version)

    @router.patch("/policy")
    async def patch_policy(
        request: Request,
        policy: Annotated[Any, Body(openapi_examples=POLICY_EXAMPLE)],
        model: str = "",
        expected_version: Annotated[int, Query(ge=0)] = 0,
        if_match: Annotated[str, Header()] = "",
    ) -> Response:
        """Change only the given fields; objects are merged field by field."""
        await _check_once(request)
        stored, version = await service.set_policy(
            policy, model=model, merge=True, expected_version=_expected(expected_version, if_match)
        )
        return _policy(stored, version)

    @router.post("/pause")
    async def pause(body: PauseBody, model: str = "") -> Response:
        """Hold all targets where they are, or let go again."""
        paused = await service.set_paused(body.paused, model=model, reason=body.reason)
        return _json({"paused": paused})


def _add_rollout(router: APIRouter, service: PlannerService) -> None:
    @router.get("/rollout")
    async def rollout(model: str = "") -> Response:
        """Where the roll-out is: phase, generations, workers of each, what they attain."""
        return _json(await service.upgrades.show(model))

    @router.post("/rollout")
    async def ask_rollout(body: RolloutBody, model: str = "") -> Response:
        """Begin a roll-out (`go`), or pause, resume or undo the one under way."""
        shown = await service.upgrades.ask(
            body.action, asked_id=body.id, to=body.to, surge=body.surge, by=body.by, model=model
        )
        return _json(shown)


async def _check_once(request: Request) -> None:
    """A field that stands twice is refused here as it is in a file, and so is a NaN."""
    parse(await request.body(), where="policy")


def _expected(given: int, if_match: str) -> int:
    if not if_match or if_match == "*":
        return given
    text = if_match.strip().removeprefix("W/").strip('"')
    if not text.isdigit():
        raise InvalidField("If-Match", if_match, "send the version from the ETag, in quotes")
    return int(text)


def _policy(policy: dict[str, Any], version: int) -> Response:
    answer = {"policy": policy, "version": version, "digest": digest_of(policy)}
    return _json(answer, headers={"ETag": f'"{version}"'})


def _json(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(value), media_type="application/json", headers=headers)
