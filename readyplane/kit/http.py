"""The REST side of a service: health, readiness, metrics, one error body, the token.

Owned by `readyplane.kit.server`. Middleware is plain ASGI, so that streams pass untouched.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import Match, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from readyplane.core.errors import InvalidField, ReadyplaneError, Unauthenticated, UnknownField
from readyplane.core.text import check_text
from readyplane.kit import telemetry
from readyplane.kit.auth import OPEN_HTTP_PATHS, TokenCheck
from readyplane.wire.errors import error_to_document, http_status

CLIENT_GONE = 499
# How a lone surrogate begins in JSON: escaped, or in bytes that Python's reader lets pass.
SURROGATES = (b"\\ud", b"\\uD", b"\xed")

log = logging.getLogger(__name__)
T = TypeVar("T")


def make_app(
    name: str,
    check: TokenCheck,
    open_paths: set[str],
    readiness: Callable[[], tuple[bool, str]],
) -> FastAPI:
    """An application with what every service answers; routers are added to it."""
    whole = [Depends(_check_text)]
    app = FastAPI(title=f"Readyplane {name}", version="1", dependencies=whole)

    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        return {"status": "alive", "service": name}

    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> JSONResponse:
        ok, why = readiness()
        body = {"status": "ready" if ok else "not ready", "service": name, "why": why}
        return JSONResponse(body, status_code=200 if ok else 503)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(telemetry.metrics), media_type=CONTENT_TYPE_LATEST)

    app.add_exception_handler(ReadyplaneError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_unexpected)
    app.add_middleware(_TokenGate, check=check, open_paths=open_paths, app_of=lambda: app)
    return app


async def while_asked(
    request: Request, work: Coroutine[Any, Any, T], give_back: Callable[[T], Awaitable[object]]
) -> T:
    """What `work` finds, which is cancelled when the client goes; the body must have been read.

    Args:
        give_back: called with what was found in the very moment in which the client went.

    Raises:
        HTTPException: the client has gone; nobody reads it.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            return working.result()
        working.cancel()
        await asyncio.wait({working})
        if not working.cancelled() and working.exception() is None:
            await give_back(working.result())
        raise HTTPException(CLIENT_GONE, "the client has gone")
    finally:
        working.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Json(JSONResponse):
    """JSON that can always be sent: half a character that a client wrote comes back as `?`."""

    def render(self, content: Any) -> bytes:
        return json.dumps(
            content, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        ).encode("utf-8", "replace")


def error_response(error: ReadyplaneError) -> JSONResponse:
    """The REST answer to an error, with `Retry-After` where it says when."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return _Json(error_to_document(error), status_code=http_status(error), headers=headers)


async def _check_text(request: Request) -> None:
    """Refuse text that could not be passed on; a route that reads its body itself bounds it first."""
    if getattr(request.scope.get("route"), "body_field", None) is None:
        return
    body = await request.body()
    if not any(mark in body for mark in SURROGATES):
        return
    try:
        document = await request.json()
    except (ValueError, RecursionError):
        return  # the route says what is wrong
    check_text(document)


async def _on_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ReadyplaneError)
    return error_response(error)


async def _on_invalid(_request: Request, error: Exception) -> Response:
    """A body or query that does not fit its schema, in the same words as any other wrong field."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    field = where[0] if first["type"] == "json_invalid" else ".".join(where[1:]) or where[0]
    cls = UnknownField if first["type"] == "extra_forbidden" else InvalidField
    said = str(first["msg"]).removeprefix("Value error, ")
    remedy = "remove it" if cls is UnknownField else said[:1].lower() + said[1:]
    return error_response(cls(field, first.get("input"), remedy))


async def _on_http(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"reason": "NotFound" if error.status_code == 404 else "HttpError"}
    body |= {"message": str(error.detail), "remedy": "/openapi.json lists what is served here"}
    return JSONResponse({"error": body}, status_code=error.status_code, headers=error.headers)


async def _on_unexpected(_request: Request, error: Exception) -> Response:
    number = secrets.token_hex(6)
    log.error("unexpected error in a request", exc_info=error, extra={"error_id": number})
    body = {
        "reason": "ReadyplaneError",
        "message": f"unexpected {type(error).__name__}, logged under error_id {number}",
    }
    return JSONResponse({"error": body}, status_code=500)


class _TokenGate:
    """Lets a request in when it carries the token, or asks for what is open to all."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        check: TokenCheck,
        open_paths: set[str],
        app_of: Callable[[], FastAPI],
    ) -> None:
        self._app = app
        self._check = check
        self._open_paths = open_paths
        self._app_of = app_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._check.required or self._passes(scope):
            await self._app(scope, receive, send)
            return
        await error_response(Unauthenticated())(scope, receive, send)

    def _passes(self, scope: MutableMapping[str, Any]) -> bool:
        given = next((value for key, value in scope["headers"] if key == b"authorization"), None)
        if self._check.allows(given):
            return True
        if scope["method"] not in {"GET", "HEAD"}:
            return False
        path = scope["path"]
        return path in OPEN_HTTP_PATHS or path in self._open_paths or self._is_static(scope)

    def _is_static(self, scope: MutableMapping[str, Any]) -> bool:
        for route in self._app_of().routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return isinstance(route, Mount) and isinstance(route.app, StaticFiles)
        return False
