"""A conversation on the lean gRPC server, as gRPC's own client has it: a router's sessions."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from readyplane import wire
from readyplane.client.channel import OPTIONS
from readyplane.core.errors import LostLease, Unauthenticated
from readyplane.kit.auth import TokenCheck, token_metadata
from readyplane.kit.lean_rpc import LeanServer, Method
from readyplane.v1 import router_pb2 as pb

TALK = "/t.Test/Talk"


class World:
    """Answers each message in its turn, unless it is quiet; a test bends it."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.server: LeanServer
        self.ways_down: list[Callable[[pb.SessionResponse], None]] = []

    def begin(self, say: Callable[[pb.SessionResponse], None]) -> Any:
        self.ways_down.append(say)
        return self.renewed

    async def renewed(self, request: pb.SessionRequest) -> pb.SessionResponse | None:
        self.seen.append(request.number)
        if request.epoch == 13:
            raise LostLease(request.worker_id, request.incarnation, "another has it")
        if request.epoch == 14:
            raise KeyError("secret")
        await asyncio.sleep(0)
        reason = "x" * request.epoch if request.epoch > 100 else ""
        directive = pb.Directive(kind="drain", reason=reason)
        return (
            None
            if request.quiet
            else pb.SessionResponse(number=request.number, directives=[directive])
        )


@asynccontextmanager
async def talking(token: str = "", given: str = "") -> AsyncIterator[tuple[World, Any]]:
    world = World()
    method = Method(pb.SessionRequest.FromString, talk=world.begin)
    world.server = LeanServer({TALK: method}, TokenCheck(token))
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    running = asyncio.create_task(world.server.run(listening))
    address = f"127.0.0.1:{listening.getsockname()[1]}"
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        make = channel.stream_stream(
            TALK,
            request_serializer=pb.SessionRequest.SerializeToString,
            response_deserializer=pb.SessionResponse.FromString,
        )
        yield world, make(metadata=token_metadata(given))
    running.cancel()
    await asyncio.wait([running])


async def test_each_message_is_answered_in_its_turn_or_not() -> None:
    async with talking() as (world, stream):
        for number in range(50):
            quiet = number % 2 == 1
            await stream.write(pb.SessionRequest(number=number, quiet=quiet))
            if not quiet:
                assert (await stream.read()).number == number
        for number in range(50, 100):  # and many at once keep their order
            await stream.write(pb.SessionRequest(number=number))
        assert [(await stream.read()).number for _ in range(50)] == list(range(50, 100))
        assert world.seen == list(range(100))
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


async def test_something_is_said_unasked_and_lost_once_nobody_listens() -> None:
    async with talking() as (world, stream):
        await stream.write(pb.SessionRequest(number=1))
        assert (await stream.read()).number == 1
        (say,) = world.ways_down
        say(pb.SessionResponse(unasked=True))
        assert (await stream.read()).unasked
        await stream.write(pb.SessionRequest(number=2, quiet=True))
        say(pb.SessionResponse(unasked=True, number=9))
        assert (await stream.read()).number == 9
        stream.cancel()
        (connection,) = world.server.connections
        async with asyncio.timeout(5.0):
            while connection._streams:
                await asyncio.sleep(0.01)
        say(pb.SessionResponse(unasked=True))
        assert len(world.ways_down) == 1


async def test_more_is_said_than_the_windows_hold() -> None:
    async with talking() as (world, stream):
        blocks = [pb.KvEvent(kind="stored", block_hashes=b"\1" * 8_000_000)]
        big = [pb.KvEventBatch(sequence=1, events=blocks)]
        for number in range(6):
            await stream.write(pb.SessionRequest(number=number, kv_events=big, epoch=200_000))
            answer = await stream.read()
            assert (answer.number, len(answer.directives[0].reason)) == (number, 200_000)
        assert len(world.seen) == 6
        for number in range(6, 10):  # answers that nobody reads yet wait for their window
            await stream.write(pb.SessionRequest(number=number, epoch=50_000))
        await stream.done_writing()
        assert [(await stream.read()).number for _ in range(4)] == [6, 7, 8, 9]
        assert await stream.read() is grpc.aio.EOF


@pytest.mark.parametrize("first", [False, True])
async def test_an_error_ends_it_with_its_status(first: bool) -> None:
    for epoch, kind in ((13, LostLease), (14, Exception)):
        async with talking() as (_, stream):
            if not first:
                await stream.write(pb.SessionRequest(number=1))
                await stream.read()
            await stream.write(pb.SessionRequest(number=2, epoch=epoch, worker_id="w"))
            with pytest.raises(grpc.aio.AioRpcError) as found:
                await stream.read()
            assert isinstance(wire.error_from_rpc(found.value), kind)
            assert "secret" not in str(found.value.details())


async def test_the_token_is_wanted_here_too() -> None:
    async with talking("right", "wrong") as (world, stream):
        # Refused by its head: who writes beside the refusal may hear of a broken connection instead.
        with pytest.raises(grpc.aio.AioRpcError) as found:
            async with asyncio.timeout(20.0):
                await stream.read()
        assert isinstance(wire.error_from_rpc(found.value), Unauthenticated)
        assert world.seen == []


async def test_a_conversation_that_is_given_up_leaves_nothing() -> None:
    async with talking() as (world, stream):
        await stream.write(pb.SessionRequest(number=1))
        await stream.read()
        (connection,) = world.server.connections
        assert len(connection._streams) == 1
        stream.cancel()
        async with asyncio.timeout(5.0):
            while connection._streams:
                await asyncio.sleep(0.01)
        assert connection._buffered == 0
