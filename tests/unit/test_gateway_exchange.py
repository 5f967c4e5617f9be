"""One exchange with an engine over a connection that was used before: when it is sent again, and when not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from readyplane.kit.clock import SystemClock
from readyplane_gateway.engine_http import EngineHttp, EngineTrouble, Trouble

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
LIMIT_S = 20.0


class Engine:
    """Answers the first request of a connection at once, and of the next ones what it is told."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.closes = False
        self.second = asyncio.Event()
        self.url = ""
        self._connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        number = self._connections
        try:
            for turn in range(2):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                self.asked.append(number)
                if turn == 0:
                    writer.write(ANSWER)
                    continue
                self.second.set()
                if self.closes:
                    return
                await reader.read()  # holds it until the other side goes
        except (asyncio.IncompleteReadError, ConnectionResetError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def engine() -> AsyncIterator[tuple[Engine, EngineHttp]]:
    """A served engine, and a client of it that has one idle connection."""
    made = Engine()
    http = EngineHttp(SystemClock(), connections_max=8, connect_s_max=LIMIT_S)
    async with await asyncio.start_server(made.serve, "127.0.0.1", 0) as server:
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with await http.open(made.url, "/x", b"{}", within_s=LIMIT_S, doing="first") as first:
            assert (await first.head(), await first.whole(10)) == (200, b"ok")
        yield made, http
        http.close()


async def test_what_came_to_a_connection_just_closed_is_sent_once_more() -> None:
    async with engine() as (made, http):
        made.closes = True
        with await http.open(made.url, "/x", b"{}", within_s=LIMIT_S, doing="again") as again:
            assert (await again.head(), await again.whole(10)) == (200, b"ok")
        assert made.asked == [1, 1, 2]


async def test_what_was_given_up_is_not_sent_again() -> None:
    """Else the engine has it twice, and its two answers come as one."""
    async with engine() as (made, http):
        with await http.open(made.url, "/x", b"{}", within_s=LIMIT_S, doing="again") as again:
            await asyncio.wait_for(made.second.wait(), LIMIT_S)
            waiting = asyncio.create_task(again.head())
            await asyncio.sleep(0)
            again.fail(EngineTrouble(Trouble.BROKEN, "the other leg has failed"))
            with pytest.raises(EngineTrouble, match="the other leg"):
                await asyncio.wait_for(waiting, LIMIT_S)
        assert made.asked == [1, 1]
