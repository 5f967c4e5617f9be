"""The agent's door among readers that take nothing: it answers, and nothing is left over (R9.1)."""

import asyncio
import gc
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from readyplane_agent import sending
from readyplane_agent.transfer import REQUESTS_PER_READER, SPARE_CONNECTIONS, TransferServer
from tests.unit.agent_twins import Artifact, artifact
from tests.unit.test_agent_transfer import giving, loaded, raw, target

PATH = "model-0.safetensors"


@cache
def big() -> Artifact:
    """Far more than a connection's buffers hold on both sides."""
    return artifact(floats=4_000_000, shards=1, chunk_bytes=2**20)


@cache
def many() -> Artifact:
    """A long answer about its chunks."""
    return artifact(floats=2_000_000, shards=1, chunk_bytes=4096)


def held() -> tuple[int, int, int]:
    """(descriptors, sending threads, tasks) of this process now."""
    gc.collect()
    threads = [t for t in threading.enumerate() if t.name.startswith("give")]
    return len(list(Path("/proc/self/fd").iterdir())), len(threads), len(asyncio.all_tasks())


async def until(true: Callable[[], bool], *, limit_s: float = 8.0) -> None:
    async with asyncio.timeout(limit_s):
        while not true():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Whatever happens inside, this process holds no more afterwards."""
    await asyncio.sleep(0)
    before = held()
    yield
    await until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


def slow(server: TransferServer, art: Artifact, *, times: int = 1, path: str = "") -> socket.socket:
    """A reader that asks, and takes nothing of the answer."""
    host, _, port = server.url[7:].partition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    ask = f"GET {path or target(art, PATH)} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    client.setblocking(False)
    client.send(ask * times)
    return client


async def full(server: TransferServer, readers_max: int = 2) -> list[socket.socket]:
    """All threads blocked, each by a reader of its own."""
    clients = [slow(server, big()) for _ in range(readers_max * REQUESTS_PER_READER)]
    await until(lambda: server.active == len(clients))
    await asyncio.sleep(0.3)
    return clients


async def answers(server: TransferServer) -> None:
    """Health, metrics and verdicts come at once."""
    async with asyncio.timeout(2.0):
        assert (await raw(server, "/healthz"))[0].startswith("HTTP/1.1 200")
        assert (await raw(server, "/metrics"))[0].startswith("HTTP/1.1 200")
        assert (await raw(server, target(big(), "config.json")))[0].startswith("HTTP/1.1 503")


@pytest.mark.parametrize("end", ["stop", "drain", "gone", "stalled"])
async def test_readers_that_take_nothing_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    if end == "stalled":
        monkeypatch.setattr(sending, "STALL_LIMIT_S", 0.6)
    async with nothing_left():
        async with giving(big()) as server:
            clients = await full(server)
            if end != "stalled":
                await answers(server)
            if end == "drain":
                server.drain(limit_s=0.1)
                await answers(server)
                await asyncio.sleep(0.2)
                assert not server.in_use, "nobody waits for them beyond the bound"
            if end == "gone":
                for client in clients:
                    client.close()
            if end in {"gone", "stalled"}:  # their places are free for others
                await until(lambda: server.active == 0)
                assert (await raw(server, target(big(), "config.json")))[1] == b"{}"
            async with asyncio.timeout(3.0):
                await server.stop()
            assert server.active == 0
        for client in clients:
            client.close()


async def test_readers_cancelled_while_weights_go_out() -> None:
    """Withheld in the middle: connections end, and no thread goes on reading the file."""
    async with nothing_left():
        async with giving(big()) as server:
            clients = await full(server)
            server.withhold()
            await until(lambda: server.active == 0)
            head, body = await raw(server, target(big(), "config.json"))
            assert head.startswith("HTTP/1.1 404") and b"withheld" in body
            await until(server._sending.threads._work_queue.empty)
        for client in clients:
            client.close()


async def test_a_flood_of_connections_that_never_read_an_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each asks a thousand times and reads nothing: what they are not given is bounded, and goes."""
    metrics = "x" * 100_000
    async with nothing_left():
        before, arena = held(), loaded(many())
        async with giving(big(), metrics=lambda: metrics) as server:
            places = 2 * REQUESTS_PER_READER + SPARE_CONNECTIONS
            holdings = f"/v1/holdings/{many().manifest.digest}?incarnation=w1-abc"
            server.offer(arena)
            clients = []
            for _ in range(3):
                clients += [
                    slow(server, many(), times=2000, path=holdings if n % 2 else "/metrics")
                    for n in range(places)
                ]
                await asyncio.sleep(0.6)
                async with asyncio.timeout(3.0):
                    assert (await raw(server, "/healthz"))[0].startswith("HTTP/1.1 200")
            # Ours: the clients' own ends are as many as they are.
            ours = held()[0] - before[0] - len(clients)
            arena.close()
            assert ours <= places + 10, f"{ours} descriptors for {places} places"
        for client in clients:
            client.close()
    assert not [r for r in caplog.records if r.exc_info]


async def test_pipelined_chunks_that_nobody_takes_are_no_crash(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second answer's head finds the connection's buffers full of the first."""
    monkeypatch.setattr(sending, "STALL_LIMIT_S", 1.2)
    async with nothing_left():
        async with giving(artifact(floats=50_000)) as server:
            art = artifact(floats=50_000)
            client = slow(server, art, times=200)
            await until(lambda: server.bytes_served > 0)
            await until(lambda: server.active == 0 and not server._readers)
        client.close()
    assert not [r for r in caplog.records if r.exc_info]


async def test_a_connection_accepted_just_before_the_end_does_not_outlive_it() -> None:
    async with nothing_left():
        async with giving(artifact()) as server:
            clients: list[Any] = [slow(server, big(), path="/healthz") for _ in range(20)]
            await asyncio.sleep(0)
            await server.stop()
            await asyncio.sleep(0.05)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            assert not [t for t in others if "_connection" in repr(t)]
        for client in clients:
            client.close()
