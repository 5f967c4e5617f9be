"""A service's two ports in one loop: health, reflection, readiness, token, errors, the end."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from fastapi.responses import StreamingResponse
from fastapi.staticfiles import StaticFiles
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import BaseModel

from readyplane.core import errors as tree
from readyplane.core.errors import InvalidField, NoPair, ReadyplaneError, Unauthenticated
from readyplane.kit.server import ServiceServer
from readyplane.kit.settings import ServiceSettings
from readyplane.v1 import router_pb2 as pb
from readyplane.v1 import router_pb2_grpc
from readyplane.wire import error_from_document, error_from_rpc

NAME = "readyplane.v1.Router"
ERRORS: dict[str, ReadyplaneError] = {
    "invalid": tree.InvalidField("isl", -1, "use 0 or more"),
    "long": tree.PromptTooLong("prompt", 9, "shorten it"),
    "missing": tree.NotFound("model", "x"),
    "stale": tree.StaleEpoch("lease", 1, 2, "register again"),
    "lost": tree.LostLease("w", "i", "expired"),
    "refused": tree.IdentityMismatch("pair", ["dtype: a != b"]),
    "nopair": NoPair("nothing is ready", 2.2),
    "full": tree.Overloaded("queue is full", 0.3),
    "away": tree.Unavailable("Redis is away", "start it"),
    "unsupported": tree.Unsupported("logprobs", "leave it out"),
}
HTTP = {
    "invalid": 422, "long": 400, "missing": 404, "stale": 409, "lost": 409, "refused": 422,
    "nopair": 503, "full": 429, "away": 503, "unsupported": 400,
}  # fmt: skip


class Router(router_pb2_grpc.RouterServicer):
    Register = Admit = Drain = ListWorkers = None  # type: ignore[assignment]
    ReportRank = Leave = Complete = GetSignals = Activate = Flip = None  # type: ignore[assignment]
    Move = Ration = RouteBatch = None  # type: ignore[assignment]

    async def Route(self, request: Any, context: Any) -> Any:
        if request.model in ERRORS:
            raise ERRORS[request.model]
        if request.model == "bug":
            raise ZeroDivisionError("secret detail")
        return pb.RouteResponse(reservation_id=request.model)

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for message in request_iterator:
            yield pb.SessionResponse(number=message.number)

    async def RouteStream(  # type: ignore[override]
        self, request_iterator: Any, context: Any
    ) -> None:
        async for message in request_iterator:  # the other way to write a stream
            await context.write(pb.RouteStreamResponse(applied=len(message.requests)))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if request.model in ERRORS:
            raise ERRORS[request.model]
        while True:
            yield pb.WatchResponse()
            await asyncio.sleep(3600)


class Shape(BaseModel, extra="forbid"):
    isl: int


def make(tmp_path: Path, **settings: Any) -> ServiceServer:
    server = ServiceServer("thing", ServiceSettings(ready_file=tmp_path / "ready", **settings))
    server.add_grpc(lambda s: router_pb2_grpc.add_RouterServicer_to_server(Router(), s), NAME)

    @server.app.get("/v1/error/{name}")
    async def error(name: str) -> str:
        if name == "bug":
            raise ZeroDivisionError("secret detail")
        raise ERRORS[name]

    @server.app.post("/v1/shape")
    async def shape(body: Shape) -> int:
        return body.isl

    @server.app.get("/v1/stream")
    async def stream() -> StreamingResponse:
        async def endless() -> AsyncIterator[str]:
            while True:
                yield "data: 1\n\n"
                await asyncio.sleep(0.05)

        return StreamingResponse(endless(), media_type="text/event-stream")

    page = tmp_path / "page"
    page.mkdir(exist_ok=True)
    (page / "index.html").write_text("<p>hello")
    server.app.mount("/", StaticFiles(directory=page, html=True))
    return server


@asynccontextmanager
async def running(
    server: ServiceServer, **options: Any
) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    task = asyncio.create_task(server.run(**options))
    ready = server.settings.ready_file
    assert ready is not None
    while not ready.exists():
        assert not task.done(), task.exception()
        await asyncio.sleep(0.01)
    told = json.loads(ready.read_text())
    assert (told["name"], told["grpc"]) == ("thing", server.grpc_address)
    channel = grpc.aio.insecure_channel(told["grpc"])
    async with httpx.AsyncClient(base_url=told["http"], timeout=5) as client:
        try:
            yield router_pb2_grpc.RouterStub(channel), client
        finally:
            await channel.close()
            server.stopping.set()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asyncio.shield(task), 10)
            assert task.done()


async def check_health(server: ServiceServer, service: str) -> int:
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)


async def test_health_and_readiness_follow_the_service(tmp_path: Path) -> None:
    server = make(tmp_path)
    async with running(server) as (_, client):
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 200
        for name in ("", NAME):
            assert await check_health(server, name) == health_pb2.HealthCheckResponse.SERVING
        server.set_ready(False, "Redis is away")
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()["why"]) == (503, "Redis is away")
        assert (await client.get("/healthz")).status_code == 200
        for name in ("", NAME):
            assert await check_health(server, name) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_service_that_says_it_is_not_ready_stays_so(tmp_path: Path) -> None:
    server = make(tmp_path)
    server.set_ready(False, "waiting for the first fleet view")
    async with running(server) as (_, client):
        assert (await client.get("/readyz")).json()["why"] == "waiting for the first fleet view"
        assert await check_health(server, "") == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_what_is_stopping_is_never_ready_again(tmp_path: Path) -> None:
    server = make(tmp_path)
    seen: list[int] = []

    async def on_stop() -> None:
        server.set_ready(True)
        async with httpx.AsyncClient(base_url=server.http_url) as client:
            seen.append((await client.get("/readyz")).status_code)

    async with running(server, on_stop=on_stop):
        pass
    assert seen == [503]


async def test_reflection_names_the_services(tmp_path: Path) -> None:
    server = make(tmp_path, token="t")
    async with running(server), grpc.aio.insecure_channel(server.grpc_address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        call.cancel()
    names = {service.name for service in answer.list_services_response.service}
    assert {NAME, "grpc.health.v1.Health"} <= names


async def test_grpc_and_rest_tell_the_same_error(tmp_path: Path) -> None:
    server = make(tmp_path)
    async with running(server) as (stub, client):
        for name, sent in ERRORS.items():
            for call in (
                stub.Route(pb.RouteRequest(model=name)),
                stub.Watch(pb.WatchRequest(model=name)).read(),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                found = error_from_rpc(caught.value)
                assert (type(found), vars(found)) == (type(sent), vars(sent))
            answer = await client.get(f"/v1/error/{name}")
            assert answer.status_code == HTTP[name]
            found = error_from_document(answer.json(), status=answer.status_code)
            assert (type(found), vars(found), str(found)) == (type(sent), vars(sent), str(sent))
            wanted = {"nopair": "3", "full": "1", "away": "1"}.get(name)
            assert answer.headers.get("retry-after") == wanted


async def test_retry_info_is_in_the_details(tmp_path: Path) -> None:
    async with running(make(tmp_path)) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Route(pb.RouteRequest(model="nopair"))
        trailers = dict(caught.value.trailing_metadata())
        status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(info) and status.details[1].Unpack(retry)
        assert info.reason == "NoPair"
        assert retry.retry_delay.ToMilliseconds() == 2200


async def test_a_bug_is_logged_under_an_id_and_keeps_its_text_to_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(make(tmp_path)) as (stub, client):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Route(pb.RouteRequest(model="bug"))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        answer = await client.get("/v1/error/bug")
        assert answer.status_code == 500
        texts = [caught.value.details() or "", answer.json()["error"]["message"]]
    ids = [getattr(record, "error_id", None) for record in caplog.records if record.exc_info]
    for text in texts:
        assert "secret" not in text
        assert text.rpartition(" ")[2] in ids


async def test_bytes_that_nobody_can_read_are_the_callers_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = make(tmp_path)
    async with running(server), grpc.aio.insecure_channel(server.grpc_address) as channel:
        route: Any = channel.unary_unary(f"/{NAME}/Route")
        watch: Any = channel.unary_stream(f"/{NAME}/Watch")
        for call in (route(b"\xff\xff\xff"), watch(b"\xff\xff\xff").read()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            found = error_from_rpc(caught.value)
            assert isinstance(found, InvalidField)
            assert (found.field, found.value) == ("message", "3 bytes")
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    "body", [b'{"isl": "\\ud800"}', b'{"isl": 1, "\\ud800": 2}', b'"\\ud800"', b'{"isl": "\xff"}']
)
async def test_half_a_character_is_a_wrong_field(tmp_path: Path, body: bytes) -> None:
    async with running(make(tmp_path)) as (_, client):
        headers = {"content-type": "application/json"}
        answer = await client.post("/v1/shape", content=body, headers=headers)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["reason"] in {"InvalidField", "UnknownField", "HttpError"}


@pytest.mark.parametrize(
    "body, field",
    [
        ({"isl": "x" * 90_000}, "isl"),
        ({}, "isl"),
        ({"isl": "many"}, "isl"),
        ({"isl": 1, "ils": 2}, "ils"),
        ([], "body"),
    ],
)
async def test_a_wrong_body_names_its_field(tmp_path: Path, body: Any, field: str) -> None:
    async with running(make(tmp_path)) as (_, client):
        answer = await client.post("/v1/shape", json=body)
        assert answer.status_code == 422
        assert answer.json()["error"]["field"] == field
        assert len(answer.content) < 10_000
        assert answer.json()["error"]["reason"] in {"InvalidField", "UnknownField"}


async def test_what_is_not_json_and_what_is_not_there(tmp_path: Path) -> None:
    async with running(make(tmp_path)) as (_, client):
        answer = await client.post(
            "/v1/shape", content=b"{", headers={"content-type": "application/json"}
        )
        assert (answer.status_code, answer.json()["error"]["reason"]) == (422, "InvalidField")
        assert answer.json()["error"]["field"] == "body"
        answer = await client.get("/v1/nothing")
        assert (answer.status_code, answer.json()["error"]["reason"]) == (404, "NotFound")


BEARER = [("", False), ("Bearer wrong", False), ("Basic s3cret", False), ("Bearer s3cret", True),
          ("bearer s3cret", True), ("Bearer s3cret2", False), ("Bearer", False)]  # fmt: skip


async def test_the_token(tmp_path: Path) -> None:
    server = make(tmp_path, token="s3cret")
    async with running(server) as (stub, client):
        for value, good in BEARER:
            await check_rpcs(stub, value, good)
            await check_routes(client, value, good)
        assert await check_health(server, "") == health_pb2.HealthCheckResponse.SERVING


async def check_rpcs(stub: Any, value: str, good: bool) -> None:
    metadata = (("authorization", value),) if value else ()
    calls: list[Callable[[], Any]] = [
        lambda: stub.Route(pb.RouteRequest(model="m"), metadata=metadata),
        lambda: stub.Watch(pb.WatchRequest(), metadata=metadata).read(),
    ]
    for call in calls:
        if good:
            await call()
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert type(error_from_rpc(caught.value)) is Unauthenticated


async def check_routes(client: httpx.AsyncClient, value: str, good: bool) -> None:
    headers = {"authorization": value} if value else {}
    for method, path in [("GET", "/v1/error/nopair"), ("POST", "/v1/shape"), ("GET", "/docs"),
                         ("POST", "/healthz"), ("GET", "//v1/stream/"), ("GET", "/v1/nothing")]:  # fmt: skip
        answer = await client.request(method, path, headers=headers)
        if good:
            assert answer.status_code != 401
        elif answer.status_code != 404:  # the mounted page has no such file
            assert answer.status_code == 401, path
            assert answer.json()["error"]["reason"] == "Unauthenticated"
            assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/healthz", "/readyz", "/metrics", "/", "/index.html"):
        assert (await client.get(path, headers=headers)).status_code == 200, path


async def test_metrics_are_plain_text(tmp_path: Path) -> None:
    async with running(make(tmp_path)) as (_, client):
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        assert "process_cpu_seconds_total" in answer.text


@pytest.mark.parametrize("field", ["grpc_port", "http_port"])
async def test_a_port_in_use_is_one_clear_error(tmp_path: Path, field: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = make(tmp_path, **{field: port})
        with pytest.raises(InvalidField, match="in use") as caught:
            await server.run()
        assert (caught.value.field, caught.value.value) == (field, port)
        assert not (tmp_path / "ready").exists()


async def test_a_ready_file_of_an_earlier_life_does_not_mislead(tmp_path: Path) -> None:
    (tmp_path / "ready").write_text('{"pid": 1}')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InvalidField):
            await make(tmp_path, grpc_port=taken.getsockname()[1]).run()
    assert not (tmp_path / "ready").exists()


async def test_two_servers_never_share_a_port(tmp_path: Path) -> None:
    async with running(make(tmp_path)) as (_, client):
        told = json.loads((tmp_path / "ready").read_text())
        (tmp_path / "ready").unlink()
        for field, address in (("grpc_port", told["grpc"]), ("http_port", told["http"])):
            port = int(address.rpartition(":")[2])
            with pytest.raises(InvalidField, match=field):
                await make(tmp_path, **{field: port}).run()
        assert (await client.get("/readyz")).status_code == 200


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
async def test_an_address_of_another_machine(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidField, match="host") as caught:
        await make(tmp_path, host=host).run()
    assert caught.value.value == host


async def test_a_ready_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = ServiceServer("thing", ServiceSettings(ready_file=tmp_path / "file" / "ready"))
    with pytest.raises(InvalidField, match="ready_file"):
        async with asyncio.timeout(10):
            await server.run()


async def test_a_crashed_background_task_stops_the_service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go = asyncio.Event()
    ended: list[str] = []

    async def crash() -> None:
        await go.wait()
        raise RuntimeError("the loop broke")

    async def endless() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("endless")

    async def on_stop() -> None:
        ended.append("on_stop")

    server = make(tmp_path)
    task = asyncio.create_task(server.run([crash, endless], on_stop))
    while not (tmp_path / "ready").exists():
        await asyncio.sleep(0.01)
    go.set()
    with pytest.raises(RuntimeError, match="the loop broke"):
        await asyncio.wait_for(task, 10)
    assert ended == ["on_stop", "endless"]
    assert any("crash" in r.message and r.levelname == "CRITICAL" for r in caplog.records)


async def test_the_end_cuts_open_streams_soon_and_says_why(tmp_path: Path) -> None:
    server = make(tmp_path)
    async with running(server) as (stub, client):
        watch = stub.Watch(pb.WatchRequest())
        await watch.read()

        async def listen() -> None:
            async with client.stream("GET", "/v1/stream") as answer:
                async for _ in answer.aiter_lines():
                    pass

        listening = asyncio.create_task(listen())
        await asyncio.sleep(0.2)
        server.stopping.set()
        async with asyncio.timeout(5):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await watch.read()
            with contextlib.suppress(httpx.HTTPError):
                await listening
    assert "stopping" in str(error_from_rpc(caught.value))


async def test_an_on_stop_that_hangs_or_fails_does_not_hold_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("readyplane.kit.server.ON_STOP_S_MAX", 0.2)

    async def hang() -> None:
        await asyncio.sleep(3600)

    async def fail() -> None:
        raise RuntimeError("no")

    for on_stop in (hang, fail):
        (tmp_path / "ready").unlink(missing_ok=True)
        async with asyncio.timeout(8):
            async with running(make(tmp_path), on_stop=on_stop):
                pass


@pytest.mark.parametrize("method", ["Session", "RouteStream"])
async def test_bytes_of_a_stream_that_nobody_can_read(tmp_path: Path, method: str) -> None:
    """They end the call in the words of a wrong field, after the answers to what came before."""
    server = make(tmp_path)
    async with running(server), grpc.aio.insecure_channel(server.grpc_address) as channel:
        call: Any = channel.stream_stream(f"/{NAME}/{method}")()
        await call.write(b"")
        assert await call.read() is not grpc.aio.EOF
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(5):
                await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = error_from_rpc(caught.value)
    assert isinstance(error, InvalidField) and error.field == "message"
