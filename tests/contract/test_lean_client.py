"""The lean gRPC client against the lean server and gRPC's own, and against servers that break off."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from readyplane.client import lean
from readyplane.client.lean import LeanChannel
from readyplane.core.errors import (
    Overloaded,
    ReadyplaneError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from readyplane.v1 import router_pb2 as pb
from tests.contract.test_lean_rpc import ECHO, SLOW, World, serving

Context = grpc.aio.ServicerContext[pb.RouteRequest, pb.RouteResponse]


@asynccontextmanager
async def calling(address: str) -> AsyncIterator[LeanChannel]:
    channel = LeanChannel(address, service="router")
    try:
        yield channel
    finally:
        await channel.aclose()


@asynccontextmanager
async def grpcs_own() -> AsyncIterator[str]:
    world = World()
    server = grpc.aio.server()

    async def echo(request: pb.RouteRequest, context: Context) -> pb.RouteResponse:
        if request.model == "busy":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not a good time")
        return await world.echo(request)

    handler = grpc.unary_unary_rpc_method_handler(
        echo,
        request_deserializer=pb.RouteRequest.FromString,
        response_serializer=pb.RouteResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("t.Test", {"Echo": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def ask(
    channel: LeanChannel,
    path: str = ECHO,
    *,
    timeout_s: float = 5.0,
    token: str = "",
    **fields: object,
) -> pb.RouteResponse:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    request = pb.RouteRequest(**fields)  # type: ignore[arg-type]
    data = await channel.call(
        path, request.SerializeToString(), metadata=metadata, timeout_s=timeout_s
    )
    return pb.RouteResponse.FromString(data)


@pytest.mark.parametrize("other", ["lean", "grpc"])
async def test_small_and_large_messages_many_at_once(other: str) -> None:
    async def play(address: str) -> None:
        async with calling(address) as channel:
            for turn in range(3):
                assert (await ask(channel, request_id=f"r{turn}")).reservation_id == f"r{turn}"
            assert (await ask(channel, "/t.Test/Echo", request_id="x" * 300_000)).reservation_id
            assert len((await ask(channel, isl=3_000_000)).explanation_json) == 3_000_000
            answers = await asyncio.gather(
                *(ask(channel, request_id=f"m{n}", isl=n * 40) for n in range(300))
            )
            assert [a.reservation_id for a in answers] == [f"m{n}" for n in range(300)]
            assert [len(a.explanation_json) for a in answers] == [n * 40 for n in range(300)]

    if other == "grpc":
        async with grpcs_own() as address:
            await play(address)
    else:
        async with serving() as (world, _):
            await play(f"127.0.0.1:{world.port}")


async def test_errors_are_the_servers_own() -> None:
    async with (
        serving("secret") as (world, _),
        calling(f"127.0.0.1:{world.port}") as channel,
    ):
        with pytest.raises(Overloaded) as caught:
            await ask(channel, model="full", token="secret")
        assert caught.value.retry_after_s == 2.5
        with pytest.raises(Unauthenticated):
            await ask(channel, token="wrong")
        with pytest.raises(Unsupported, match="other gRPC port"):
            await ask(channel, "/t.Test/Watch", token="secret")
        with pytest.raises(ReadyplaneError, match="KeyError"):
            await ask(channel, model="bug", token="secret")
        assert (await ask(channel, request_id="on", token="secret")).reservation_id == "on"
    async with grpcs_own() as address, calling(address) as channel:
        with pytest.raises(Unavailable, match="not a good time"):
            await ask(channel, model="busy")


async def test_who_gives_up_ends_the_call_at_the_server() -> None:
    async with serving() as (world, _), calling(f"127.0.0.1:{world.port}") as channel:
        asking = asyncio.ensure_future(ask(channel, SLOW))
        await asyncio.wait_for(world.began.wait(), 2)
        asking.cancel()
        await asyncio.wait_for(world.cancelled.wait(), 2)
        with pytest.raises(Unavailable, match="in time"):
            await ask(channel, SLOW, timeout_s=0.05)
        assert (await ask(channel, request_id="on")).reservation_id == "on"


async def test_a_server_that_ends_ends_its_calls_and_the_next_address_is_used() -> None:
    async with serving() as (other, _):
        async with serving() as (world, _):
            both = f"127.0.0.1:{world.port},127.0.0.1:{other.port}"
            async with calling(both) as channel:
                asking = asyncio.ensure_future(ask(channel, SLOW))
                await asyncio.wait_for(world.began.wait(), 2)
                for connection in list(world.server.connections):
                    connection.close()
                with pytest.raises(Unavailable):
                    await asking
                await asyncio.sleep(0.05)  # until its end is heard of
                assert (await ask(channel, request_id="again")).reservation_id == "again"
        async with calling(both) as channel:
            assert (await ask(channel, request_id="there")).reservation_id == "there"
    async with calling(both) as channel:
        with pytest.raises(Unavailable, match="cannot be reached"):
            await ask(channel)


async def test_a_server_that_gives_no_sign_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean, "SILENT_S_MAX", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with calling(f"127.0.0.1:{silent.getsockname()[1]}") as channel:
            with pytest.raises(Unavailable, match="no sign"):
                await ask(channel)
    async with serving() as (world, _), calling(f"127.0.0.1:{world.port}") as channel:
        asking = asyncio.ensure_future(ask(channel, SLOW, request_id="slow"))
        await asyncio.sleep(0.5)  # it answers the pings
        world.go_on.set()
        assert (await asking).reservation_id == "slow"


async def test_what_is_not_http_2_is_said() -> None:
    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with (
        server,
        calling(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as channel,
    ):
        with pytest.raises(Unavailable, match="not HTTP/2"):
            await ask(channel)
