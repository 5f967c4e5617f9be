"""Which of several addresses a client calls: each begins somewhere, and goes on when one is away."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from readyplane.client.channel import options, target


class Name(grpc.GenericRpcHandler):
    """Answers every call with its name."""

    def __init__(self, name: bytes) -> None:
        self._name = name

    def service(self, handler_call_details: Any) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            return self._name

        return grpc.unary_unary_rpc_method_handler(answer)


@asynccontextmanager
async def servers(count: int) -> AsyncIterator[list[int]]:
    running, ports = [], []
    for number in range(count):
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Name(b"%d" % number),))
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        running.append(server)
    try:
        yield ports
    finally:
        for server in running:
            await server.stop(None)


async def answered(numbers: str, address: str) -> bytes:
    """Who answers a new client of `address`, a name that has these numbers."""
    async with grpc.aio.insecure_channel(numbers, options=options(address)) as channel:
        method: Any = channel.unary_unary("/any/Thing")
        told: bytes = await method(b"", timeout=5.0)
        return told


async def test_clients_of_one_name_with_several_numbers_begin_at_each_of_them() -> None:
    async with servers(2) as ports:
        numbers = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        found = Counter([await answered(numbers, "routers:7001") for _ in range(40)])
        assert found.keys() == {b"0", b"1"}  # all at one: once in 10^12
        listed = Counter([await answered(numbers, "a:7001,b:7001") for _ in range(10)])
        assert listed.keys() == {b"0"}, "whoever is given a list has its own beginning"


async def test_numbers_of_a_name_that_are_away_are_passed_over(free_port: int) -> None:
    async with servers(1) as (port,):
        numbers = f"ipv4:127.0.0.1:{free_port},127.0.0.1:{port}"
        assert {await answered(numbers, "routers:7001") for _ in range(10)} == {b"0"}


async def test_a_service_that_is_slow_to_greet_is_not_called_unreachable() -> None:
    """A busy process accepts at once, by its kernel, and says its first word later."""
    slow_s = 0.5

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(sink):
            while data := await source.read(65536):
                sink.write(data)

    async with servers(1) as (port,):

        async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(slow_s)
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(copy(reader, back), copy(there, writer))

        async with await asyncio.start_server(late, "127.0.0.1", 0) as front:
            address = f"127.0.0.1:{front.sockets[0].getsockname()[1]}"
            assert await answered(address, address) == b"0"


@pytest.mark.parametrize(
    ("first", "dialled"),
    [
        (0, "ipv4:10.0.0.1:1,10.0.0.2:1,10.0.0.9:2"),
        (1, "ipv4:10.0.0.9:2,10.0.0.2:1,10.0.0.1:1"),
        (2, "ipv4:10.0.0.1:1,10.0.0.2:1,10.0.0.9:2"),
    ],
)
def test_of_a_list_all_numbers_of_all_names_are_dialled(
    monkeypatch: pytest.MonkeyPatch, first: int, dialled: str
) -> None:
    known = {"two": ["10.0.0.1", "10.0.0.2"], "one": ["10.0.0.9"]}

    def getaddrinfo(host: str, port: str, **_: Any) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, 1, 6, "", (where, int(port))) for where in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert target("two:1,one:2", first=first) == dialled
    assert target("two:1") == "two:1", "gRPC looks a single name up again when it must"
