"""The lean gRPC server as gRPC's own client sees it, and as a client that breaks the rules does."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
import uvloop

from readyplane import wire
from readyplane.client.channel import OPTIONS
from readyplane.core.errors import InvalidField, Overloaded, Unauthenticated, Unsupported
from readyplane.kit import lean_guard, lean_rpc
from readyplane.kit.auth import TokenCheck, token_metadata
from readyplane.kit.lean_rpc import PREFACE, LeanServer, Method, frame
from readyplane.v1 import router_pb2 as pb

ECHO, SLOW = "/t.Test/Echo", "/t.Test/Slow"


class World:
    """A server whose methods a test bends, and a client."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.go_on = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.port = 0
        self.server: LeanServer

    async def echo(self, request: pb.RouteRequest) -> pb.RouteResponse:
        if request.model == "full":
            raise Overloaded("no room", 2.5)
        if request.model == "bug":
            raise KeyError("secret")
        text = "x" * request.isl
        return pb.RouteResponse(reservation_id=request.request_id, explanation_json=text)

    async def slow(self, request: pb.RouteRequest) -> pb.RouteResponse:
        self.began.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return pb.RouteResponse(reservation_id=request.request_id)

    async def call(
        self, channel: grpc.aio.Channel, path: str, request: pb.RouteRequest, **more: Any
    ) -> pb.RouteResponse:
        method = channel.unary_unary(
            path,
            request_serializer=pb.RouteRequest.SerializeToString,
            response_deserializer=pb.RouteResponse.FromString,
        )
        answer: pb.RouteResponse = await method(request, **more)
        return answer


@asynccontextmanager
async def serving(token: str = "") -> AsyncIterator[tuple[World, grpc.aio.Channel]]:
    world = World()
    parse = pb.RouteRequest.FromString
    methods = {ECHO: Method(parse, world.echo), SLOW: Method(parse, world.slow)}
    world.server = LeanServer(methods, TokenCheck(token))
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    world.port = listening.getsockname()[1]
    running = asyncio.create_task(world.server.run(listening))
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{world.port}", options=OPTIONS)
    try:
        yield world, channel
    finally:
        await channel.close()
        running.cancel()
        await asyncio.wait([running])


async def test_calls_side_by_side_get_their_own_answers() -> None:
    async with serving() as (world, channel):
        numbers = range(200)
        calls = [world.call(channel, ECHO, pb.RouteRequest(request_id=f"r{n}")) for n in numbers]
        answers = await asyncio.gather(*calls)
    assert [answer.reservation_id for answer in answers] == [f"r{n}" for n in numbers]


@pytest.mark.parametrize("size", [0, 1, 16_379, 16_384, 65_535, 3_000_000])
async def test_messages_of_any_size_go_both_ways(size: int) -> None:
    async with serving() as (world, channel):
        request = pb.RouteRequest(request_id="r", token_ids=b"\1" * size, isl=size)
        answers = await asyncio.gather(*(world.call(channel, ECHO, request) for _ in range(3)))
    assert {len(answer.explanation_json) for answer in answers} == {size}


async def test_more_is_sent_than_all_windows_hold_together() -> None:
    async with serving() as (world, channel):
        request = pb.RouteRequest(request_id="r", token_ids=b"\1" * 12_000_000)
        for _ in range(4):
            assert (await world.call(channel, ECHO, request)).reservation_id == "r"


async def test_errors_arrive_as_they_were_raised() -> None:
    async with serving() as (world, channel):
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await world.call(channel, ECHO, pb.RouteRequest(model="full"))
        error = wire.error_from_rpc(found.value)
        assert isinstance(error, Overloaded)
        assert error.retry_after_s == 2.5
        assert "no room" in str(error)
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await world.call(channel, ECHO, pb.RouteRequest(model="bug"))
        assert found.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in str(found.value.details())
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await world.call(channel, "/t.Test/Other", pb.RouteRequest())
        assert isinstance(wire.error_from_rpc(found.value), Unsupported)


async def test_a_stream_that_is_not_served_is_refused_before_it_says_anything() -> None:
    async with serving() as (_, channel):
        call: Any = channel.stream_stream(
            "/t.Test/Stream",
            request_serializer=pb.RouteRequest.SerializeToString,
            response_deserializer=pb.RouteResponse.FromString,
        )()
        with pytest.raises(grpc.aio.AioRpcError) as found:  # nothing written, nothing half-closed
            await asyncio.wait_for(call.read(), 5.0)
    assert found.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "call it on the other gRPC port" in str(found.value.details())


async def test_bytes_that_nobody_can_read_are_the_callers_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as (_, channel):
        call: Any = channel.unary_unary(ECHO)
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await call(b"\xff\xff\xff")
    assert found.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = wire.error_from_rpc(found.value)
    assert isinstance(error, InvalidField)
    assert (error.field, error.value) == ("message", "3 bytes")
    assert not caplog.records


async def test_compressed_messages_are_refused_with_a_reason() -> None:
    async with serving() as (world, channel):
        request = pb.RouteRequest(request_id="r" * 1_000)
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await world.call(channel, ECHO, request, compression=grpc.Compression.Gzip)
        assert isinstance(wire.error_from_rpc(found.value), Unsupported)


async def test_a_message_beyond_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_rpc, "MESSAGE_BYTES_MAX", 100_000)
    async with serving() as (world, channel):
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await world.call(channel, ECHO, pb.RouteRequest(token_ids=b"x" * 200_000))
        assert isinstance(wire.error_from_rpc(found.value), InvalidField)
        assert (await world.call(channel, ECHO, pb.RouteRequest(request_id="r"))).reservation_id


async def test_the_token_is_wanted() -> None:
    async with serving("open sesame") as (world, channel):
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await world.call(channel, ECHO, pb.RouteRequest())
        assert isinstance(wire.error_from_rpc(found.value), Unauthenticated)
        metadata = token_metadata("open sesame")
        await world.call(channel, ECHO, pb.RouteRequest(request_id="r"), metadata=metadata)


async def test_a_call_that_is_given_up_is_cancelled() -> None:
    async with serving() as (world, channel):
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await world.call(channel, SLOW, pb.RouteRequest(), timeout=0.2)
        assert found.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(world.cancelled.wait(), 5.0)
        assert (await world.call(channel, ECHO, pb.RouteRequest(request_id="r"))).reservation_id


async def test_calls_under_way_may_end_when_the_service_stops() -> None:
    async with serving() as (world, channel):
        call = asyncio.ensure_future(world.call(channel, SLOW, pb.RouteRequest(request_id="r")))
        await asyncio.wait_for(world.began.wait(), 5.0)
        for connection in world.server.connections:
            connection.say_good_bye()
        world.go_on.set()
        assert (await asyncio.wait_for(call, 5.0)).reservation_id == "r"


async def test_no_more_than_so_many_calls_of_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_rpc, "STREAMS_MAX", 4)
    async with serving() as (world, channel):
        calls = [
            asyncio.ensure_future(world.call(channel, SLOW, pb.RouteRequest(request_id=f"{n}")))
            for n in range(8)
        ]
        await asyncio.wait_for(world.began.wait(), 5.0)
        world.go_on.set()
        answers = await asyncio.gather(*calls)  # the client waits with the rest by itself
    assert {answer.reservation_id for answer in answers} == {str(n) for n in range(8)}


# ------------------------------------------------------------------ rules broken

GOAWAY, HEADERS, DATA, SETTINGS = 7, 1, 0, 4
Talk = Callable[[bytes], Awaitable[bytes]]


@asynccontextmanager
async def talking(world: World) -> AsyncIterator[Talk]:
    """A connection of raw bytes: says something, and hears all that comes until it is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)

    async def say(data: bytes) -> bytes:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), 5.0)

    try:
        yield say
    finally:
        writer.close()


def goaway(heard: bytes) -> int | None:
    """The error code with which the server said good-bye; None without one."""
    at = 0
    while len(heard) - at >= 9:
        size, kind = int.from_bytes(heard[at : at + 3], "big"), heard[at + 3]
        if kind == GOAWAY:
            return int(struct.unpack_from("!I", heard, at + 13)[0])
        at += 9 + size
    return None


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(HEADERS, 5, 2, b"\x83"), 1),  # an even stream
        (frame(HEADERS, 5, 1, b"\xff\xff\xff\xff\xff\xff"), 9),  # headers that cannot be read
        (frame(HEADERS, 1, 1, b"\x83") + frame(DATA, 0, 1, b""), 1),  # headers interrupted
        (frame(DATA, 0, 7, b"x"), 1),  # data of no stream
        (frame(SETTINGS, 0, 0, b"123"), 6),  # half a setting
        (frame(9, 4, 1, b""), 1),  # a continuation of nothing
        (frame(8, 0, 0, struct.pack("!I", 0x7FFFFFFF)), 3),  # a window beyond all bounds
        (b"\x01\x00\x00" + b"\0" * 6, 6),  # a frame that is too large
        (frame(5, 4, 1, b""), 1),  # a push by a client
        (frame(HEADERS, 5 | 8, 1, b"\x09\x83"), 1),  # more padding than there is
    ],
)
async def test_who_breaks_the_protocol_is_told_and_closed(data: bytes, code: int) -> None:
    async with serving() as (world, channel), talking(world) as say:
        assert goaway(await say(PREFACE + frame(SETTINGS, 0, 0, b"") + data)) == code
        assert (await world.call(channel, ECHO, pb.RouteRequest(request_id="r"))).reservation_id


@pytest.mark.parametrize("flags", [4, 5])
async def test_headers_that_open_a_stream_twice_reset_it(flags: int) -> None:
    head = b"\x83\x86\x04" + bytes((len(SLOW),)) + SLOW.encode()
    message = frame(DATA, flags & 1, 1, b"\0\0\0\0\0")  # with the end: the call is under way
    again = frame(HEADERS, flags, 1, head) + frame(5, 4, 1, b"")  # and then what closes it all
    data = PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, 4, 1, head) + message + again
    async with serving() as (world, _), talking(world) as say:
        heard = await say(data)
        assert frame(3, 0, 1, b"\0\0\0\1") in heard
        assert not any(connection.tasks() for connection in world.server.connections)


async def test_who_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_guard, "PREFACE_S_MAX", 0.05)
    async with serving() as (world, channel), talking(world) as say:
        assert (await world.call(channel, ECHO, pb.RouteRequest(request_id="r"))).reservation_id
        assert goaway(await say(PREFACE[:5])) is None
        assert len(world.server.connections) == 1  # who has called may be idle


async def test_who_greets_and_never_calls_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_guard, "REQUEST_S_MAX", 0.1)
    ping = frame(6, 0, 0, b"12345678")
    begun = frame(HEADERS, 1, 1, b"\x83")  # headers that never end are no call either
    async with serving() as (world, channel):
        assert (await world.call(channel, ECHO, pb.RouteRequest(request_id="r"))).reservation_id
        for more in (b"", ping, begun):
            async with talking(world) as say:
                assert goaway(await say(PREFACE + frame(SETTINGS, 0, 0, b"") + more)) == 0
        assert len(world.server.connections) == 1  # who has called may be idle
        assert (await world.call(channel, ECHO, pb.RouteRequest(request_id="r"))).reservation_id


async def test_a_call_that_does_not_come_whole_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_guard, "REQUEST_S_MAX", 0.1)
    path = b"\x83\x86\x04" + bytes((len(SLOW),)) + SLOW.encode()
    half = frame(HEADERS, 4, 1, path) + frame(DATA, 0, 1, b"\0\0\0\0\x09half")
    async with serving() as (world, channel):
        slow = asyncio.create_task(world.call(channel, SLOW, pb.RouteRequest(request_id="r")))
        await asyncio.wait_for(world.began.wait(), 5.0)
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(PREFACE + frame(SETTINGS, 0, 0, b"") + half)
        heard = b""
        while b"grpc-status" not in heard:
            heard += await asyncio.wait_for(reader.read(4096), 5.0)
        writer.close()
        assert b"send all of it within" in heard and goaway(heard) is None
        assert not slow.done()  # a call under way takes its time
        world.go_on.set()
        assert (await slow).reservation_id == "r"
        async with talking(world) as say:  # and headers that do not end, after a whole call
            whole = frame(HEADERS, 4, 1, path) + frame(DATA, 1, 1, b"\0\0\0\0\0")
            data = PREFACE + frame(SETTINGS, 0, 0, b"") + whole + frame(HEADERS, 1, 3, b"\x83")
            assert goaway(await say(data)) == 11


async def test_who_holds_most_goes_when_all_hold_too_much(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lean_guard, "UNFINISHED_BYTES_MAX", 20_000)
    path = b"\x83\x86\x04" + bytes((len(SLOW),)) + SLOW.encode()
    hoard = frame(HEADERS, 4, 1, path) + frame(DATA, 0, 1, b"x" * 15_000) * 2
    async with serving() as (world, channel):
        small = asyncio.create_task(world.call(channel, SLOW, pb.RouteRequest(request_id="r")))
        await asyncio.wait_for(world.began.wait(), 5.0)
        for _ in range(3):
            async with talking(world) as say:
                assert goaway(await say(PREFACE + frame(SETTINGS, 0, 0, b"") + hoard)) == 11
        world.go_on.set()
        assert (await small).reservation_id == "r"
        assert world.server.crowd.unfinished_bytes == 0
    assert len(caplog.records) == 1  # three broke it; one line says so


async def test_another_protocol_is_closed() -> None:
    async with serving() as (world, _), talking(world) as say:
        assert goaway(await say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")) is None


async def test_who_only_begins_calls_to_reset_them_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lean_rpc, "RESETS_MAX", 10)
    path = b"\x83\x86\x04" + bytes((len(SLOW),)) + SLOW.encode()
    body = frame(DATA, 1, 0, b"\0\0\0\0\0")
    data = b"".join(
        frame(HEADERS, 4, n, path)
        + body[:5]
        + struct.pack("!I", n)
        + body[9:]
        + frame(3, 0, n, b"\0\0\0\x08")
        for n in range(1, 41, 2)
    )
    async with serving() as (world, _), talking(world) as say:
        assert goaway(await say(PREFACE + frame(SETTINGS, 0, 0, b"") + data)) == 11


def test_it_runs_on_uvloop_too() -> None:
    """Its transports are asyncio's by behaviour, not by class."""

    async def greeted() -> bytes:
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setblocking(False)
        running = asyncio.create_task(LeanServer({}, TokenCheck()).run(listening))
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(6, 0, 0, b"12345678"))
        heard = b""
        while b"12345678" not in heard:  # the ping comes back
            heard += await asyncio.wait_for(reader.read(1_000), 5.0)
        writer.close()
        running.cancel()
        await asyncio.wait([running])
        return heard

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(greeted())[3] == SETTINGS
