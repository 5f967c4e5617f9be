"""The error tree <-> gRPC status and HTTP status, so that both speak alike.

A status carries `google.rpc.ErrorInfo` (reason = class name, metadata = constructor arguments as
JSON) and `RetryInfo`; from these the same error, with the same attributes, is raised at the
client. Trailers of a call are small (8 KiB by default), so long values are shortened on the way.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]

from readyplane.core import errors as tree
from readyplane.core.errors import ReadyplaneError, Unauthenticated, Unavailable

DOMAIN = "readyplane"
DETAILS_KEY = "grpc-status-details-bin"
MESSAGE_BYTES_MAX = 1_000
ARGUMENT_BYTES_MAX = 600
ARGUMENTS_BYTES_MAX = 2_400
VALUE_BYTES_MAX = 16_384

_STATUS: Mapping[type[ReadyplaneError], tuple[grpc.StatusCode, int]] = {
    tree.InvalidField: (grpc.StatusCode.INVALID_ARGUMENT, 422),
    tree.PromptTooLong: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    tree.NotFound: (grpc.StatusCode.NOT_FOUND, 404),
    tree.Conflict: (grpc.StatusCode.ABORTED, 409),
    tree.LostLease: (grpc.StatusCode.ABORTED, 409),
    tree.Refused: (grpc.StatusCode.FAILED_PRECONDITION, 422),
    tree.NoPair: (grpc.StatusCode.UNAVAILABLE, 503),
    tree.Overloaded: (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    tree.Unavailable: (grpc.StatusCode.UNAVAILABLE, 503),
    tree.Unsupported: (grpc.StatusCode.UNIMPLEMENTED, 400),
    tree.Unauthenticated: (grpc.StatusCode.UNAUTHENTICATED, 401),
    ReadyplaneError: (grpc.StatusCode.INTERNAL, 500),
}


def _classes(root: type[ReadyplaneError]) -> dict[str, type[ReadyplaneError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_classes(child))
    return found


_BY_REASON = {
    name: cls for name, cls in _classes(ReadyplaneError).items() if cls.__module__ == tree.__name__
}


def _codes(cls: type[BaseException]) -> tuple[grpc.StatusCode, int]:
    return next(_STATUS[base] for base in cls.__mro__ if base in _STATUS)


def grpc_code(error: ReadyplaneError) -> grpc.StatusCode:
    """Canonical code of an error."""
    return _codes(type(error))[0]


def http_status(error: ReadyplaneError) -> int:
    """HTTP status of an error."""
    return _codes(type(error))[1]


# --------------------------------------------------------------------------- gRPC


def error_to_status(error: ReadyplaneError) -> status_pb2.Status:
    """The error as `google.rpc.Status` with `ErrorInfo` and, if it says when, `RetryInfo`."""
    status = status_pb2.Status(
        code=code_pb2.Code.Value(grpc_code(error).name),
        message=_shortened(str(error), MESSAGE_BYTES_MAX),
    )
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    room = ARGUMENTS_BYTES_MAX
    for name, value in _arguments(error).items():
        text = _to_json(value, min(ARGUMENT_BYTES_MAX, room))
        room = max(32, room - len(text))
        info.metadata[name] = text
    status.details.add().Pack(info)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo(retry_delay=_duration(error.retry_after_s))
        status.details.add().Pack(retry)
    return status


# What gRPC itself says, as INTERNAL, when the connection goes away just as a call begins or runs.
CONNECTION_LOST = ("Internal error from Core", "RST_STREAM")


def error_from_rpc(
    error: grpc.RpcError, *, service: str = "", address: str = ""
) -> ReadyplaneError:
    """The error that the server raised; for a call that never got there, `Unavailable`.

    Args:
        error: what grpc or grpc.aio raised. service, address: named when it cannot be reached.
    """
    code, text = _code_and_text(error)
    ours = _ours(_details(error))
    if ours is not None:
        return ours
    where = f"{service or 'the service'}{f' at {address}' if address else ''}"
    if code is grpc.StatusCode.UNAVAILABLE:
        remedy = "check that it runs and listens on that address"
        return Unavailable(f"{where} cannot be reached ({text})", remedy)
    if code is grpc.StatusCode.CANCELLED:
        return Unavailable(f"{where} ended the call ({text})", "ask again")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unavailable(f"{where} did not answer in time ({text})", "ask again, or later")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return Unauthenticated()
    if code is grpc.StatusCode.INTERNAL and any(mark in text for mark in CONNECTION_LOST):
        return Unavailable(f"{where} closed the connection under the call ({text})", "ask again")
    return ReadyplaneError(f"{where} answered {code.name}: {text}")


def error_from_status(serialised: bytes) -> ReadyplaneError:
    """The error of a serialised `google.rpc.Status`, as answers of a batch carry it."""
    try:
        status = status_pb2.Status.FromString(serialised)
    except DecodeError:
        return ReadyplaneError(f"an error that cannot be read: {serialised[:60]!r}")
    return _ours(status) or ReadyplaneError(status.message)


def _ours(status: status_pb2.Status | None) -> ReadyplaneError | None:
    """The error in a status of ours; None when it is not."""
    info = _unpacked(status, error_details_pb2.ErrorInfo)
    if status is None or info is None or info.domain != DOMAIN:
        return None
    retry = _unpacked(status, error_details_pb2.RetryInfo)
    retry_after_s = None if retry is None else _seconds(retry.retry_delay)
    return _rebuilt(info.reason, dict(info.metadata), status.message, retry_after_s)


def _code_and_text(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return grpc.StatusCode.UNKNOWN, str(error)
    return error.code(), error.details() or ""


def _details(error: grpc.RpcError) -> status_pb2.Status | None:
    trailers: Any = None
    if isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        trailers = error.trailing_metadata()
    for key, value in trailers or ():
        if key == DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _unpacked(status: status_pb2.Status | None, kind: Any) -> Any:
    for detail in status.details if status else ():
        if detail.Is(kind.DESCRIPTOR):
            message = kind()
            detail.Unpack(message)
            return message
    return None


# --------------------------------------------------------------------------- HTTP


def error_to_document(error: ReadyplaneError) -> dict[str, Any]:
    """The body of a REST error: `{"error": {reason, message, field, value, remedy, …}}`."""
    arguments = _arguments(error)
    return {
        "error": {
            "reason": error.reason,
            "message": str(error),
            "field": arguments.get("field", arguments.get("what")),
            "value": _plain(arguments.get("value", arguments.get("name"))),
            "remedy": arguments.get("remedy"),
            "retry_after_s": error.retry_after_s,
            "arguments": {name: _plain(value) for name, value in arguments.items()},
        }
    }


def error_from_document(document: object, *, status: int = 500) -> ReadyplaneError:
    """The error of a REST error body; `ReadyplaneError` with its text when it is not one of ours."""
    body = document.get("error") if isinstance(document, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(body.get("reason"), str):
        return ReadyplaneError(f"HTTP status {status}: {str(document)[:MESSAGE_BYTES_MAX]}")
    arguments = body.get("arguments")
    given = {k: json.dumps(v) for k, v in (arguments or {}).items()}
    retry = body.get("retry_after_s")
    return _rebuilt(body["reason"], given, str(body.get("message", "")), retry)


# --------------------------------------------------------------------------- arguments


def _parameters(cls: type[ReadyplaneError]) -> tuple[str, ...]:
    if cls.__init__ is Exception.__init__:  # no arguments of its own
        return ()
    found = inspect.signature(cls).parameters.values()
    return tuple(p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD)


# Looked up once: a flood of refusals must not cost what it saves.
_PARAMETERS = {cls: _parameters(cls) for cls in _BY_REASON.values()}


def _arguments(error: ReadyplaneError) -> dict[str, Any]:
    """What the constructor was given, as far as the error kept it (the message travels apart)."""
    names = _PARAMETERS.get(type(error)) or _parameters(type(error))
    return {name: getattr(error, name) for name in names if hasattr(error, name)}


def _rebuilt(
    reason: str, arguments: Mapping[str, str], message: str, retry_after_s: float | None
) -> ReadyplaneError:
    cls = _BY_REASON.get(reason)
    if cls is None:
        # A newer peer's error: what to do about it is in the text, when to retry in RetryInfo.
        found = ReadyplaneError(f"{reason}: {message}")
        found.retry_after_s = retry_after_s
        return found
    try:
        given = {n: json.loads(arguments[n]) for n in _parameters(cls) if n in arguments}
        error = cls(**given)
    except (TypeError, ValueError):
        error = ReadyplaneError(message)
    error.args = (message,)
    if retry_after_s is not None and error.retry_after_s is None:
        error.retry_after_s = retry_after_s
    return error


def _plain(value: object) -> object:
    """The value if JSON holds it and it is not huge, else the beginning of its text."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return repr(value)[:ARGUMENT_BYTES_MAX]
    return value if len(text) <= VALUE_BYTES_MAX else _shortened(text, ARGUMENT_BYTES_MAX)


def _to_json(value: object, bytes_max: int) -> str:
    """JSON of at most about `bytes_max` bytes: lists lose their end, texts their tail."""
    if isinstance(value, tuple | list):
        items = list(value)
        text = json.dumps([_plain(item) for item in items])
        while len(text) > bytes_max and items:
            items = items[: len(items) // 2]
            left = len(value) - len(items)
            text = json.dumps([*(_plain(item) for item in items), f"… and {left} more"])
        return text
    text = json.dumps(_plain(value))
    if len(text) <= bytes_max:
        return text
    return json.dumps(_shortened(value if isinstance(value, str) else text, bytes_max // 2))


def _shortened(text: str, bytes_max: int) -> str:
    raw = text.encode("utf-8", "replace")
    if len(raw) <= bytes_max:
        return raw.decode()
    return raw[: bytes_max - 3].decode("utf-8", "ignore") + "…"


def _duration(seconds: float) -> Duration:
    found = Duration()
    found.FromNanoseconds(round(max(0.0, min(seconds, 1e9)) * 1e9))
    return found


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9
