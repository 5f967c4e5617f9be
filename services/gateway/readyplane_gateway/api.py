"""The HTTP side: an OpenAI-compatible API as a plain ASGI application.

Owns paths, headers, body limits, the API key, error answers and what a client that leaves sets in
motion. It stands in front of the service's FastAPI application (which keeps `/metrics`, `/healthz`,
`/readyz`), because a routed and wrapped chunk costs more than the gateway's own work on it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import msgspec

from readyplane.core.errors import InvalidField, ReadyplaneError, Unauthenticated
from readyplane.kit.telemetry import tracer, tracing_on
from readyplane_gateway.http_server import GONE, WHOLE
from readyplane_gateway.legs import LegFailed
from readyplane_gateway.openai import (
    Ask,
    Failure,
    Kind,
    failure_of,
    parse_ask,
    slo_of,
    tenant_of,
)
from readyplane_gateway.pump import Call, Header
from readyplane_gateway.service import Gateway
from readyplane_gateway.tokens import ClientFault

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Hear = Callable[[Callable[[], None] | None], bool]
Whole = Callable[[], bytes | None]

KINDS = {kind.path: kind for kind in Kind}
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
JSON = (b"content-type", b"application/json")
UNGUARDED_BYTES_MAX = 64 * 1024  # of an answer in one piece for which nobody waits
CLIENT_CLOSED = "499"  # what proxies write for a client that left before the answer

log = logging.getLogger(__name__)
_tracer = tracer("readyplane_gateway")


class _Refused(Exception):
    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


class _Answer:
    """Where the answer of one request goes; notices a client that does not read."""

    def __init__(self, send: Send, request_id: str, gateway: Gateway) -> None:
        self._send = send
        self._gateway = gateway
        self._fixed: list[Header] = [(b"x-request-id", request_id.encode("latin-1"))]
        self.status = 0
        self.blocked_since_s: float | None = None
        self.guarded: Callable[[], None] = lambda: None
        self._ended = False

    async def start(self, status: int, headers: Sequence[Header]) -> None:
        self.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *self._fixed],
            }
        )

    async def send(self, data: bytes) -> None:
        self.blocked_since_s = self._gateway.clock.monotonic_s()
        self.guarded()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self.blocked_since_s = None

    async def end(self) -> None:
        if not self._ended:
            self._ended = True
            await self._send({"type": "http.response.body", "body": b""})

    async def whole(self, status: int, body: bytes, headers: Sequence[Header] = ()) -> None:
        length = (b"content-length", b"%d" % len(body))
        await self.start(status, [JSON, length, *headers])
        if len(body) > UNGUARDED_BYTES_MAX:
            await self.send(body)
            body = b""
        self._ended = True
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, failure: Failure) -> None:
        await self.whole(failure.status, failure.document(), failure.headers())


class Api:
    """The ASGI application. What it does not know goes to `inner`."""

    def __init__(
        self, gateway: Gateway, *, inner: App, new_id: Callable[[], str], api_key: str = ""
    ) -> None:
        """`new_id`: a fresh unique text at each call. `api_key`: wanted of clients, empty for none."""
        self._gateway = gateway
        self._inner = inner
        self._new_id = new_id
        self._key = api_key.encode()
        self._body_bytes = 0
        self._known: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path.startswith("/v1/") or path in {"/health", "/v1"}):
            await self._inner(scope, receive, send)
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        own_id = self._new_id()
        given = headers.get("x-request-id", "")
        answer = _Answer(send, given if REQUEST_ID.fullmatch(given) else own_id, self._gateway)
        try:
            self._admit(scope, headers)
            kind = KINDS.get(path)
            if kind is None:
                await self._small(scope, path, answer)
                return
            if scope["method"] != "POST":
                raise _Refused(_wrong_method("POST"))
        except _Refused as refused:
            self._count(str(refused.failure.status)[0] + "xx", "")
            await answer.fail(refused.failure)
            return
        await self._generate(kind, headers, own_id, receive, scope, answer)

    # ------------------------------------------------------------------ who may, and the small paths

    def _admit(self, scope: Scope, headers: dict[str, str]) -> None:
        size = sum(len(k) + len(v) for k, v in scope["headers"])
        limit = self._gateway.bounds.header_bytes_max
        if size > limit:
            text = f"headers of {size} bytes: send at most {limit}"
            raise _Refused(Failure(431, "invalid_request_error", "headers_too_large", text))
        if self._key and scope["path"] != "/health":
            scheme, _, key = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(key.strip().encode("latin-1"), self._key)
            if scheme.lower() != "bearer" or not right:
                remedy = "send the API key as `authorization: Bearer KEY`"
                raise _Refused(failure_of(Unauthenticated(remedy)))

    async def _small(self, scope: Scope, path: str, answer: _Answer) -> None:
        if path not in {"/health", "/v1/models"} and not path.startswith("/v1/models/"):
            text = (
                f"no such path: {path[:200]}; see /v1/models, /v1/completions, /v1/chat/completions"
            )
            raise _Refused(Failure(404, "invalid_request_error", "unknown_path", text))
        if scope["method"] not in {"GET", "HEAD"}:
            raise _Refused(_wrong_method("GET"))
        if path == "/health":
            why = await self._gateway.unhealthy()
            document: object = {"status": "unhealthy" if why else "ok", "why": why}
            await answer.whole(503 if why else 200, msgspec.json.encode(document))
            return
        models = {facts.name: facts for facts in self._gateway.fleet.ready_models()}
        if path == "/v1/models":
            cards = [self._card(name, facts.max_model_len) for name, facts in models.items()]
            document = {"object": "list", "data": cards}
        else:
            name = path.removeprefix("/v1/models/")
            try:
                facts = self._gateway.fleet.find(name)
            except ReadyplaneError as error:
                raise _Refused(failure_of(error)) from error
            if not facts.ready:
                text = f"model {name} has no ready pair of workers yet"
                raise _Refused(
                    Failure(503, "server_error", "no_ready_pair", text, retry_after_s=2.0)
                )
            document = self._card(name, facts.max_model_len)
        await answer.whole(200, msgspec.json.encode(document))

    def _card(self, name: str, max_model_len: int | None) -> dict[str, Any]:
        created = self._known.setdefault(name, int(self._gateway.clock.wall_s()))
        card = {"id": name, "object": "model", "created": created, "owned_by": "readyplane"}
        return card | ({"max_model_len": max_model_len} if max_model_len is not None else {})

    # ------------------------------------------------------------------ requests

    async def _generate(
        self,
        kind: Kind,
        headers: dict[str, str],
        own_id: str,
        receive: Receive,
        scope: Scope,
        answer: _Answer,
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._gateway.stopping or not self._gateway.enter(task):
            await answer.fail(self._too_many())
            self._count("4xx", "")
            return
        guard = _Guard(task, receive, scope.get(GONE), answer, self._gateway)
        call = Call(own_id, self._gateway.clock.monotonic_s())
        model, code = "", "5xx"
        raw_size = 0
        try:
            raw = await self._body(receive, headers, scope.get(WHOLE))
            raw_size = len(raw)
            guard.begin()
            ask = parse_ask(kind, raw)
            del raw
            model = ask.model
            call.slo = slo_of(headers, self._gateway.bounds.slo)
            call.tenant = tenant_of(headers)
            code = await self._serve(ask, call, answer)
            guard.end()
            await answer.end()
        except asyncio.CancelledError:
            code = CLIENT_CLOSED
            self._gateway.meters.aborted.labels(call.stage).inc()
            if not guard.gone:
                raise  # the service stops
            task.uncancel()
        except _ClientLeft:
            code = CLIENT_CLOSED
            self._gateway.meters.aborted.labels(call.stage).inc()
        except (_Refused, ReadyplaneError, ClientFault, LegFailed) as error:
            failure = _failure(error)
            code = f"{failure.status // 100}xx"
            guard.end()
            await answer.fail(failure)
        except Exception:
            log.exception("a request failed", extra={"request_id": own_id})
            guard.end()
            if not answer.status:
                text = f"unexpected error, logged under request id {own_id}"
                await answer.fail(Failure(500, "server_error", "internal_error", text))
        finally:
            guard.end()
            self._body_bytes -= raw_size
            self._gateway.leave(task)
            self._count(code, model)

    async def _serve(self, ask: Ask, call: Call, answer: _Answer) -> str:
        if not tracing_on():
            failure = await self._gateway.proxy.serve(ask, call, answer)
            return "2xx" if failure is None else "stream_error"
        attributes = {"readyplane.model": ask.model, "readyplane.request_id": call.request_id}
        with _tracer.start_as_current_span("gateway.request", attributes=attributes) as span:
            failure = await self._gateway.proxy.serve(ask, call, answer)
            if call.bookings:
                pair = call.bookings[-1].pair
                span.set_attribute("readyplane.prefill_worker", pair.prefill.worker_id)
                span.set_attribute("readyplane.decode_worker", pair.decode.worker_id)
        return "2xx" if failure is None else "stream_error"

    async def _body(self, receive: Receive, headers: dict[str, str], whole: Whole | None) -> bytes:
        bounds = self._gateway.bounds
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > bounds.body_bytes_max:
            raise _Refused(_too_large(int(declared), bounds.body_bytes_max))
        raw = whole() if whole is not None else None
        if raw is None:
            raw = await self._read(receive)
        size = len(raw)
        if size > bounds.body_bytes_max:
            raise _Refused(_too_large(size, bounds.body_bytes_max))
        if self._body_bytes + size > bounds.bodies_bytes_max:
            raise _Refused(self._too_many())
        self._body_bytes += size
        return raw

    async def _read(self, receive: Receive) -> bytes:
        """A body that comes in pieces."""
        bounds = self._gateway.bounds
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(bounds.body_s_max):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientLeft
                    part = message.get("body", b"")
                    size += len(part)
                    if size > bounds.body_bytes_max:
                        raise _Refused(_too_large(size, bounds.body_bytes_max))
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as error:
            text = f"the body did not come within {bounds.body_s_max:.0f} s"
            raise _Refused(Failure(408, "invalid_request_error", "body_timeout", text)) from error

    def _too_many(self) -> Failure:
        if self._gateway.stopping:
            text = "the gateway is stopping; send the request again"
            return Failure(503, "server_error", "stopping", text, retry_after_s=1.0)
        text = (
            f"too many requests in flight ({self._gateway.bounds.requests_max} at most): "
            "send it again later"
        )
        return Failure(429, "rate_limit_error", "too_many_requests", text, retry_after_s=1.0)

    def _count(self, code_class: str, model: str) -> None:
        self._gateway.meters.requests.labels(code_class, self._gateway.label(model)).inc()


class _ClientLeft(Exception):
    pass


class _Guard:
    """Cancels a request whose client has left, or does not read what it asked for."""

    def __init__(
        self,
        task: asyncio.Task[object],
        receive: Receive,
        hear: Hear | None,
        answer: _Answer,
        gateway: Gateway,
    ) -> None:
        """`hear`: calls back when the client has gone; without it a task waits for that."""
        self._task = task
        self._receive, self._hear = receive, hear
        self._answer = answer
        self._gateway = gateway
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.gone = False

    def begin(self) -> None:
        """From now on, the request ends with its client."""
        if self._hear is None:
            self._watch = asyncio.ensure_future(self._until_gone())
        elif not self._hear(self._cut):
            self._cut()
        self._answer.guarded = self._guard

    def _guard(self) -> None:
        """Something is sent that may have to wait for the client."""
        if self._timer is None:
            self._arm(self._gateway.bounds.client_stall_s_max)

    def end(self) -> None:
        """The request has come to its own end. Idempotent."""
        if self._hear is not None:
            self._hear(None)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._cut()

    def _cut(self) -> None:
        self.gone = True
        self._task.cancel()

    def _arm(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        bound_s = self._gateway.bounds.client_stall_s_max
        since_s = self._answer.blocked_since_s
        waited_s = 0.0 if since_s is None else self._gateway.clock.monotonic_s() - since_s
        if waited_s < bound_s:
            self._arm(max(0.01, bound_s - waited_s))
            return
        log.info("a client does not read", extra={"waited_s": round(waited_s, 1)})
        self._cut()


def _failure(error: Exception) -> Failure:
    if isinstance(error, _Refused | ClientFault):
        return error.failure
    if isinstance(error, LegFailed):
        return error.failure()
    assert isinstance(error, ReadyplaneError)
    if isinstance(error, InvalidField) and error.field == "body":
        return Failure(400, "invalid_request_error", "invalid_json", str(error), "body")
    return failure_of(error)


def _wrong_method(right: str) -> Failure:
    text = f"this path takes {right}"
    return Failure(405, "invalid_request_error", "method_not_allowed", text)


def _too_large(size_bytes: int, limit_bytes: int) -> Failure:
    text = (
        f"the body has {size_bytes} bytes or more: send at most {limit_bytes} "
        "(the gateway's --body-mib-max)"
    )
    return Failure(413, "invalid_request_error", "request_too_large", text)
