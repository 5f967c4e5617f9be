"""The server side of every gRPC port: token, errors as status, traces, and an orderly end of streams.

Owned by `readyplane.kit.server`; servicers raise core errors and know nothing of status codes.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio

from readyplane.core.errors import InvalidField, ReadyplaneError, Unavailable
from readyplane.kit import telemetry
from readyplane.kit.auth import OPEN_RPC_PREFIXES, TokenCheck
from readyplane.kit.reading import read
from readyplane.wire.errors import DETAILS_KEY, error_to_status, grpc_code

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
METADATA_BYTES_MAX = 32 * 1024
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES_MAX),
    # Two servers must never share a port silently.
    ("grpc.so_reuseport", 0),
    # Clients ping idle channels; do not take that for an attack.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
)

log = logging.getLogger(__name__)
Handler = Any  # grpc.RpcMethodHandler: a tuple of callables that the stubs leave untyped


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """One interceptor for all calls; a method is wrapped once and then costs a dictionary lookup."""

    def __init__(self, check: TokenCheck) -> None:
        self._check = check
        self._wrapped: dict[str, Handler] = {}
        self._streams: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self._tracer = telemetry.tracer("readyplane.kit.rpc")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Check the token, then hand out the wrapped handler."""
        method: str = handler_call_details.method  # type: ignore[attr-defined, unused-ignore]
        if method.startswith(OPEN_RPC_PREFIXES):
            return await continuation(handler_call_details)
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            wrapped = self._wrapped[method] = self._wrap(handler)
        if self._check.required:
            metadata = handler_call_details.invocation_metadata  # type: ignore[attr-defined, unused-ignore]
            try:
                self._check.check_metadata(metadata)
            except ReadyplaneError as error:
                return self._wrap(_refusing(wrapped, error))
        return wrapped

    def end_streams(self) -> None:
        """End every open stream with `Unavailable`, so that clients turn elsewhere at once."""
        self._stopping = True
        for task in self._streams:
            task.cancel()

    def _wrap(self, handler: Handler) -> Handler:
        kind, make = _kind(handler)
        behaviour = getattr(handler, kind)
        given = _each_readable if handler.request_streaming else _readable
        if not handler.response_streaming:
            inner = self._unary(behaviour, given)
        elif inspect.isasyncgenfunction(behaviour):
            inner = self._stream(behaviour, given)
        else:  # an awaitable that calls context.write
            inner = self._tracked(self._unary(behaviour, given))
        parse = handler.request_deserializer
        if parse is not None:
            parse = _reading(parse)
        return make(
            inner,
            request_deserializer=parse,
            response_serializer=handler.response_serializer,
        )

    def _unary(
        self, behaviour: Callable[..., Any], given: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            try:
                if not telemetry.tracing_on():
                    return await behaviour(given(request), context)
                with self._span(behaviour, context):
                    return await behaviour(given(request), context)
            except (grpc.aio.AbortError, asyncio.CancelledError):
                raise
            except Exception as error:  # noqa: BLE001 - every failure becomes a status
                await _abort(context, error)

        return call

    def _stream(
        self, behaviour: Callable[..., AsyncIterator[Any]], given: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            task = asyncio.current_task()
            assert task is not None
            self._streams.add(task)
            try:
                answers = behaviour(given(request), context)
                async with aclosing(answers):  # type: ignore[type-var]
                    async for answer in answers:
                        yield answer
            except grpc.aio.AbortError:
                raise
            except asyncio.CancelledError:
                if not self._stopping:
                    raise
                task.uncancel()
                await _abort(context, Unavailable("the service is stopping", "ask again"))
            except Exception as error:  # noqa: BLE001 - every failure becomes a status
                await _abort(context, error)
            finally:
                self._streams.discard(task)

        return call

    def _tracked(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._streams.add(task)
            try:
                await behaviour(request, context)
            finally:
                self._streams.discard(task)

        return call

    def _span(self, behaviour: Callable[..., Any], context: Any) -> Any:
        name = getattr(behaviour, "__qualname__", "rpc")
        parent = telemetry.extract(context.invocation_metadata())
        return self._tracer.start_as_current_span(name, context=parent)


def _kind(handler: Handler) -> tuple[str, Callable[..., Handler]]:
    streams = (bool(handler.request_streaming), bool(handler.response_streaming))
    return {
        (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
        (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
        (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
        (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
    }[streams]


def _reading(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """What cannot be read is handed on as its error: raised here, gRPC would answer in its own words."""

    def readable(body: bytes) -> Any:
        try:
            return read(parse, body)
        except InvalidField as error:
            return error

    return readable


def _readable(request: Any) -> Any:
    """The request, or what is wrong with it raised where its answer is in our words."""
    if isinstance(request, InvalidField):
        raise request
    return request


async def _each_readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """A stream of requests; the first that cannot be read ends the call."""
    async for request in requests:
        yield _readable(request)


def _refusing(handler: Handler, error: ReadyplaneError) -> Handler:
    async def answer(request: Any, context: Any) -> NoReturn:  # noqa: ARG001 - the shape of a method
        raise error

    async def answers(request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ARG001
        raise error
        yield  # type: ignore[unreachable]  # what makes it a generator

    _, make = _kind(handler)
    return make(
        answers if handler.response_streaming else answer,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


async def _abort(context: Any, error: Exception) -> NoReturn:
    """End the call with the error's status; `context.abort` raises."""
    if isinstance(error, ReadyplaneError):
        status = error_to_status(error)
        trailers = ((DETAILS_KEY, status.SerializeToString()),)
        await context.abort(grpc_code(error), status.message, trailers)
    number = secrets.token_hex(6)
    log.error("unexpected error in a call", exc_info=error, extra={"error_id": number})
    text = f"unexpected {type(error).__name__}, logged under error_id {number}"
    await context.abort(grpc.StatusCode.INTERNAL, text)
    raise AssertionError
