"""Every error arrives as what it was, over gRPC and over HTTP; foreign ones keep their text."""

import copy
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from readyplane import wire
from readyplane.core import errors as tree
from readyplane.core.errors import ReadyplaneError
from readyplane.wire.errors import DETAILS_KEY, _classes

C = grpc.StatusCode
EXAMPLES: list[tuple[ReadyplaneError, grpc.StatusCode, int]] = [
    (tree.InvalidField("policy.prefill.min", -1, "use 0 or more"), C.INVALID_ARGUMENT, 422),
    (tree.InvalidField("a", {"b": [1, None]}, "x", "own words"), C.INVALID_ARGUMENT, 422),
    (tree.PromptTooLong("prompt", 200_000, "shorten it"), C.INVALID_ARGUMENT, 400),
    (tree.UnknownField("policy.mim", 3, "remove it"), C.INVALID_ARGUMENT, 422),
    (tree.NotFound("model", "llama"), C.NOT_FOUND, 404),
    (tree.Conflict("tag prod", "sha256:a", None, "read it again"), C.ABORTED, 409),
    (tree.StaleEpoch("lease of w", 3, 5, "register again"), C.ABORTED, 409),
    (tree.LostLease("w-1", "inc", "expired 3 s ago"), C.ABORTED, 409),
    (tree.Refused("worker w", ["canary: é", "verify: no"], "look"), C.FAILED_PRECONDITION, 422),
    (tree.IdentityMismatch("pair", ["dtype: a != b"]), C.FAILED_PRECONDITION, 422),
    (tree.BytesMissing("manifest", ["w: no bytes"], "upload"), C.FAILED_PRECONDITION, 422),
    (tree.NoPair("no ready decode worker", 2.25), C.UNAVAILABLE, 503),
    (tree.NoCompatiblePair("tp: 1 != 2", 30.0), C.UNAVAILABLE, 503),
    (tree.Overloaded("queue is full", 0.5), C.RESOURCE_EXHAUSTED, 429),
    (tree.Unavailable("Redis is away", "start it", 4.0), C.UNAVAILABLE, 503),
    (tree.Unsupported("logprobs", "leave it out"), C.UNIMPLEMENTED, 400),
    (tree.Unauthenticated(), C.UNAUTHENTICATED, 401),
    (ReadyplaneError("something else"), C.INTERNAL, 500),
]
IDS = [f"{type(e).__name__}-{i}" for i, (e, _, _) in enumerate(EXAMPLES)]


def rpc_error(
    code: grpc.StatusCode, text: str = "", status: status_pb2.Status | None = None
) -> grpc.aio.AioRpcError:
    trailers = () if status is None else ((DETAILS_KEY, status.SerializeToString()),)
    metadata = grpc.aio.Metadata(*trailers)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, text)


def over_grpc(error: ReadyplaneError) -> ReadyplaneError:
    status = wire.error_to_status(error)
    return wire.error_from_rpc(rpc_error(wire.grpc_code(error), status.message, status))


def same(found: ReadyplaneError, sent: ReadyplaneError) -> None:
    assert type(found) is type(sent)
    assert vars(found) == vars(sent)
    assert str(found) == str(sent)
    assert found.retry_after_s == sent.retry_after_s


@pytest.mark.parametrize("error, code, http", EXAMPLES, ids=IDS)
def test_to_another_process(error: ReadyplaneError, code: grpc.StatusCode, http: int) -> None:
    del code, http
    same(copy.copy(error), error)  # by `__reduce__`, as the way to another process is


def test_every_class_of_the_tree_has_an_example() -> None:
    known = [cls for cls in _classes(ReadyplaneError).values() if cls.__module__ == tree.__name__]
    assert {type(error) for error, _, _ in EXAMPLES} == set(known)


@pytest.mark.parametrize("error, code, http", EXAMPLES, ids=IDS)
def test_over_grpc(error: ReadyplaneError, code: grpc.StatusCode, http: int) -> None:
    assert wire.grpc_code(error) is code
    assert wire.error_to_status(error).code == code.value[0]
    same(over_grpc(error), error)


@pytest.mark.parametrize("error, code, http", EXAMPLES, ids=IDS)
def test_over_http(error: ReadyplaneError, code: grpc.StatusCode, http: int) -> None:
    assert wire.http_status(error) == http
    document = wire.error_to_document(error)
    assert document["error"]["reason"] == type(error).__name__
    assert document["error"]["retry_after_s"] == error.retry_after_s
    same(wire.error_from_document(document, status=http), error)


def test_the_fields_of_a_rest_error() -> None:
    body = wire.error_to_document(tree.InvalidField("isl", -1, "use 0 or more"))["error"]
    assert (body["field"], body["value"], body["remedy"]) == ("isl", -1, "use 0 or more")
    body = wire.error_to_document(tree.NotFound("model", "x"))["error"]
    assert (body["field"], body["value"], body["remedy"]) == ("model", "x", "check the name")


def test_retry_info_is_readable_by_any_client() -> None:
    status = wire.error_to_status(tree.Overloaded("full", 1.5))
    retry = error_details_pb2.RetryInfo()
    assert status.details[1].Unpack(retry)
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (1, 500_000_000)


@pytest.mark.parametrize(
    "error",
    [
        tree.InvalidField("prompt", "漢" * 50_000, "shorten " * 500),
        tree.Refused("worker", [f"check {i}: " + "é" * 90 for i in range(2_000)], "r" * 9_000),
        tree.Conflict("w" * 9_000, ["a"] * 9_000, {"k": "v" * 9_000}, "r" * 9_000),
        tree.NoPair("\n" * 20_000, 1.0),
        tree.InvalidField("bytes", b"\xff" * 9_000, "no"),
        tree.InvalidField("number", float("nan"), "use a finite number"),
    ],
)
def test_a_long_error_still_fits_into_trailers(error: ReadyplaneError) -> None:
    """8 KiB is what a foreign client accepts, with base64 and percent-encoding counted."""
    status = wire.error_to_status(error)
    message = len(status.message.encode()) * 3
    assert message + status.ByteSize() * 4 / 3 < 8 * 1024
    found = over_grpc(error)
    assert type(found) is type(error)
    assert str(found)[:100] == str(error)[:100]
    if isinstance(error, tree.Refused):
        assert isinstance(found, tree.Refused)
        assert found.reasons[0] == error.reasons[0]
        assert "more" in found.reasons[-1]


FOREIGN: list[tuple[grpc.aio.AioRpcError, type[ReadyplaneError], str]] = [
    (rpc_error(C.UNAVAILABLE, "connection refused"), tree.Unavailable, "connection refused"),
    (rpc_error(C.DEADLINE_EXCEEDED, "late"), tree.Unavailable, "in time"),
    (rpc_error(C.INTERNAL, "Internal error from Core"), tree.Unavailable, "closed the connection"),
    (rpc_error(C.INTERNAL, "Exception serializing"), tree.ReadyplaneError, "answered INTERNAL"),
    (rpc_error(C.CANCELLED, "gone"), tree.Unavailable, "gone"),
    (rpc_error(C.UNAUTHENTICATED, "no"), tree.Unauthenticated, "Bearer"),
    (rpc_error(C.INTERNAL, "error_id ab12"), ReadyplaneError, "error_id ab12"),
    (rpc_error(C.UNIMPLEMENTED, "Method not found!"), ReadyplaneError, "Method not found!"),
]


@pytest.mark.parametrize("error, kind, words", FOREIGN, ids=[e.code().name for e, _, _ in FOREIGN])
def test_a_status_without_our_details(
    error: grpc.aio.AioRpcError, kind: type[ReadyplaneError], words: str
) -> None:
    found = wire.error_from_rpc(error, service="the router", address="127.0.0.1:9")
    assert type(found) is kind
    assert words in str(found)
    if kind is not tree.Unauthenticated:
        assert "the router at 127.0.0.1:9" in str(found)


def test_a_reason_that_this_version_does_not_know() -> None:
    info = error_details_pb2.ErrorInfo(reason="TooShiny", domain="readyplane")
    status = status_pb2.Status(code=9, message="it shines")
    status.details.add().Pack(info)
    status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay={"seconds": 3}))
    found = wire.error_from_rpc(rpc_error(C.FAILED_PRECONDITION, "it shines", status))
    assert type(found) is ReadyplaneError
    assert "it shines" in str(found) and "TooShiny" in str(found)
    assert found.retry_after_s == 3.0


@pytest.mark.parametrize(
    "arguments", [{}, {"why": "{"}, {"nonsense": "1"}, {"retry_after_s": '"x"'}]
)
def test_damaged_arguments_keep_the_text(arguments: dict[str, str]) -> None:
    info = error_details_pb2.ErrorInfo(reason="NoPair", domain="readyplane", metadata=arguments)
    status = status_pb2.Status(code=14, message="no pair: none")
    status.details.add().Pack(info)
    found = wire.error_from_rpc(rpc_error(C.UNAVAILABLE, "", status))
    assert str(found) == "no pair: none"


def test_details_that_are_no_status() -> None:
    metadata = grpc.aio.Metadata((DETAILS_KEY, b"\xff\xff"))
    error = grpc.aio.AioRpcError(C.ABORTED, grpc.aio.Metadata(), metadata, "why")
    assert "why" in str(wire.error_from_rpc(error))


@pytest.mark.parametrize("body", [None, [], "oops", {"error": "x"}, {"error": {"reason": 3}}])
def test_an_http_body_that_is_not_ours(body: Any) -> None:
    found = wire.error_from_document(body, status=502)
    assert type(found) is ReadyplaneError
    assert "502" in str(found)
