"""Bytes out of a connection by threads: whole, in order, bounded, and never into another's socket."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from readyplane.kit.clock import SystemClock
from readyplane_agent.sending import YIELDING_BYTES_MAX, Sending

SIZE = 24 * 2**20
DATA = os.urandom(2**20) * (SIZE // 2**20)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """The work in a loop of its own."""
    asyncio.run(work())


@asynccontextmanager
async def connected(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
) -> AsyncIterator[socket.socket]:
    """A plain client of a server with that handler; the client reads when the test says so."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = socket.create_connection(server.sockets[0].getsockname())
    try:
        yield client
    finally:
        client.close()
        server.close()
        await server.wait_closed()


async def beside() -> tuple[socket.socket, asyncio.StreamWriter]:
    """A reader that a test reads from by itself, and what is written to for it."""
    reader, other = socket.socketpair()
    other.setblocking(False)
    _, writer = await asyncio.open_connection(sock=other)
    return reader, writer


def taken(client: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer at the end of the connection."""
    found = bytearray()
    while len(found) < size and (part := client.recv(size - len(found))):
        found += part
    return bytes(found)


def test_head_and_bytes_arrive_whole_and_the_connection_serves_on() -> None:
    async def work() -> None:
        sending = Sending(SystemClock(), threads_max=2)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with tempfile.TemporaryFile() as file:
                file.write(DATA)
                file.flush()
                while ask := await reader.readline():
                    at = int(ask)
                    await sending.send(
                        writer, file.fileno(), at, SIZE - at, head=b"head", limit_s=20.0,
                        yielding=at > 0,
                    )  # fmt: skip
            writer.close()

        async with connected(serve) as client:
            for at in (0, 5_000_001, SIZE - 1):
                client.sendall(f"{at}\n".encode())
                found = await asyncio.to_thread(taken, client, 4 + SIZE - at)
                assert found[:4] == b"head"
                assert found[4:] == DATA[at:]
        sending.close()

    run(work)


@pytest.mark.parametrize("end", ["too slow", "gone", "cancelled"])
def test_a_reader_that_does_not_take_its_bytes_holds_nothing_for_ever(end: str) -> None:
    async def work() -> None:
        sending = Sending(SystemClock(), threads_max=1)
        outcome: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        began = asyncio.Event()
        tasks: list[asyncio.Task[None]] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with tempfile.TemporaryFile() as file:
                file.truncate(SIZE)
                limit_s = 0.6 if end == "too slow" else 60.0
                send = sending.send(
                    writer, file.fileno(), 0, SIZE, head=b"", limit_s=limit_s, yielding=False
                )
                tasks.append(asyncio.ensure_future(send))
                began.set()
                try:
                    await tasks[0]
                except BaseException as error:
                    outcome.set_result(error)
            writer.close()

        async with connected(serve) as client:
            await began.wait()
            await asyncio.sleep(0.2)
            if end == "gone":
                client.close()
            if end == "cancelled":
                tasks[0].cancel()
            async with asyncio.timeout(10.0):
                error = await outcome
            wanted = {
                "too slow": TimeoutError,
                "gone": ConnectionError,
                "cancelled": asyncio.CancelledError,
            }
            assert isinstance(error, wanted[end])
            # The only thread is free again: somebody else is served by it.
            reader, writer = await beside()
            with tempfile.TemporaryFile() as file:
                file.write(b"abc")
                file.flush()
                async with asyncio.timeout(10.0):
                    await sending.send(
                        writer, file.fileno(), 0, 3, head=b"", limit_s=5.0, yielding=False
                    )
            assert reader.recv(3) == b"abc"
            writer.close()
            reader.close()
        sending.close()

    run(work)


def test_an_arena_that_ends_early_is_an_error_and_no_endless_turn() -> None:
    async def work() -> None:
        sending = Sending(SystemClock(), threads_max=1)
        reader, writer = await beside()
        with tempfile.TemporaryFile() as file:
            file.write(b"abc")
            file.flush()
            with pytest.raises(ConnectionResetError, match="ended early"):
                await sending.send(
                    writer, file.fileno(), 0, 10, head=b"", limit_s=5.0, yielding=False
                )
        writer.close()
        reader.close()
        sending.close()

    run(work)


def test_while_the_worker_serves_its_threads_take_what_nobody_else_wants() -> None:
    async def work() -> None:
        sending = Sending(SystemClock(), threads_max=1)
        reader, writer = await beside()
        seen: list[int] = []

        def policy() -> None:
            seen.append(os.sched_getscheduler(0))

        with tempfile.TemporaryFile() as file:
            file.write(b"abc")
            file.flush()
            for yielding in (True, False):
                await sending.send(
                    writer, file.fileno(), 0, 3, head=b"", limit_s=5.0, yielding=yielding
                )
                await asyncio.get_running_loop().run_in_executor(sending.threads, policy)
        assert seen == [os.SCHED_IDLE, os.SCHED_OTHER]
        writer.close()
        reader.close()
        sending.close()

    run(work)


def test_while_the_worker_serves_the_kernel_is_handed_little_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    real = os.sendfile

    def sendfile(out_fd: int, in_fd: int, offset: int, count: int) -> int:
        asked.append(count)
        return real(out_fd, in_fd, offset, count)

    async def work() -> None:
        sending = Sending(SystemClock(), threads_max=1)
        with tempfile.TemporaryFile() as file:
            file.write(DATA)
            file.flush()
            for yielding in (True, False):
                asked.clear()
                reader, writer = await beside()
                taking = asyncio.create_task(asyncio.to_thread(taken, reader, SIZE))
                await sending.send(
                    writer, file.fileno(), 0, SIZE, head=b"", limit_s=30.0, yielding=yielding
                )
                assert await taking == DATA
                assert (max(asked) <= YIELDING_BYTES_MAX) == yielding
                writer.close()
                reader.close()
        sending.close()

    monkeypatch.setattr("readyplane_agent.sending.os.sendfile", sendfile)
    run(work)
