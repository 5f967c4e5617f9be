"""HTTP/1.1 for the gateway's clients: what uvicorn does for an ASGI application, and less of it.

Owns one connection: parsing (httptools), keep-alive, pipelining, flow control both ways, and one
write where a general server makes several. An application begins when the body is there (or is
long, or late), may take it whole, and may ask to be told at once when its client has gone, without a
task that waits for it. What is not HTTP is refused in the words of the API. uvicorn goes on owning
the sockets; it is given this as its protocol.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, MutableMapping
from http import HTTPStatus
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.server import ServerState

from readyplane_gateway.openai import Failure

READ_AHEAD_BYTES_MAX = 1024 * 1024
WHOLE_BODY_BYTES_MAX = 256 * 1024
WHOLE_BODY_S_MAX = 1.0
HEAD_S_MAX = 30.0
HEAD_BYTES_MAX = 256 * 1024
PIPELINED_MAX = 64
GONE = "readyplane.gone"
WHOLE = "readyplane.whole"

_STATUS = {
    s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode("ascii", "replace") for s in HTTPStatus
}
Message = MutableMapping[str, Any]


class _Turn:
    """One request and its answer, as an ASGI application sees them."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_head",
        "_parts",
        "_told",
        "_waiter",
        "begun",
        "complete",
        "done",
        "gone",
        "headers",
        "held",
        "keep_alive",
        "method",
        "on_gone",
        "target",
    )

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self._parts: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._told = False
        self._head: list[bytes] = []
        self._chunked = False
        self.method = ""
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.held = 0
        self.keep_alive = True
        self.begun = self.complete = self.done = self.gone = False
        self.on_gone: Callable[[], None] | None = None

    def scope(self, server: Any, client: Any) -> dict[str, Any]:
        """What ASGI wants to be told first; with it, how to take a body that is there already, and
        how to hear that the client has gone.
        """
        path, _, query = self.target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": _unquoted(path),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": self.headers,
            "server": server,
            "client": client,
            "extensions": {},
            GONE: self._hear,
            WHOLE: self._whole,
        }

    def _whole(self) -> bytes | None:
        """The body, once, when all of it is there; None: ask `receive` for it."""
        if self._told or not self.complete:
            return None
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self.held = 0
        self._connection.read_on()
        self._told = True
        return data

    def _hear(self, told: Callable[[], None] | None) -> bool:
        """Call `told` when the client goes; False when it has gone already. None: no more."""
        self.on_gone = told
        return not self.gone

    # the connection tells

    def body(self, data: bytes) -> None:
        self._parts.append(data)
        self.held += len(data)
        self._wake()

    def ended(self) -> None:
        self.complete = True
        self._wake()

    def lost(self) -> None:
        if self.done or self.gone:
            return
        self.gone = True
        self._wake()
        told, self.on_gone = self.on_gone, None
        if told is not None:
            told()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # the application asks

    async def receive(self) -> Message:
        """The next of the body, or that the client has gone."""
        while True:
            if self._parts or (self.complete and not self._told):
                data = b"".join(self._parts)
                self._parts.clear()
                self.held = 0
                self._connection.read_on()
                self._told = self.complete
                return {"type": "http.request", "body": data, "more_body": not self.complete}
            if self.gone or self.done:
                return {"type": "http.disconnect"}
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def send(self, message: Message) -> None:
        """Some of the answer; waits while the client does not read."""
        if self.gone or self.done:
            return
        if message["type"] == "http.response.start":
            self._head = self._head_of(message)
            return
        data, more = message.get("body", b""), message.get("more_body", False)
        if self.method == "HEAD":
            data = b""
        out, self._head = self._head, []
        if out and not self._chunked and out[-1] == b"":
            out.pop()  # no length was named
            if more and self.method != "HEAD":
                self._chunked = True
                out.append(b"transfer-encoding: chunked\r\n\r\n")
            else:
                out.append(b"content-length: %d\r\n\r\n" % len(data))
        if self._chunked:
            if data:
                out += (b"%x\r\n" % len(data), data, b"\r\n")
            if not more:
                out.append(b"0\r\n\r\n")
        elif data:
            out.append(data)
        self._connection.write(out, now=not more)
        if not more:
            self.done = True
            self._connection.answered(self)
        elif self._connection.paused is not None:
            await self._connection.paused

    def _head_of(self, message: Message) -> list[bytes]:
        """The head; its end is left open (an empty last piece) when no length is named."""
        status = message["status"]
        out = [_STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status]
        sized = status in (204, 304)
        for name, value in message.get("headers", ()):
            if b"\n" in value or b"\r" in value or b"\n" in name or b"\r" in name:
                raise ValueError(f"a line break in the header {name!r}")
            lower = name.lower()
            if lower == b"content-length":
                sized = True
            elif lower == b"transfer-encoding":
                continue
            elif lower == b"connection" and value.lower() == b"close":
                self.keep_alive = False
                continue
            out += (name, b": ", value, b"\r\n")
        if not self.keep_alive:
            out.append(b"connection: close\r\n")
        out.append(b"\r\n" if sized else b"")
        return out


class HttpConnection(asyncio.Protocol):
    """One client's connection. Made by uvicorn, as `http` of its configuration."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        del app_state
        if not config.loaded:
            config.load()
        self._app = config.loaded_app
        self._state = server_state
        self._loop = _loop or asyncio.get_event_loop()
        self._keep_s = config.timeout_keep_alive
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._server: Any = None
        self._client: Any = None
        self._turns: deque[_Turn] = deque()
        self._reading: _Turn | None = None
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        self._stopped_reading = self._ends = False
        self._idle: asyncio.TimerHandle | None = None
        self._served = False
        self._late: asyncio.TimerHandle | None = None
        self.paused: asyncio.Future[None] | None = None

    # ------------------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server = transport.get_extra_info("sockname")
        self._client = transport.get_extra_info("peername")
        self._state.connections.add(self)  # type: ignore[arg-type]  # it asks for `shutdown` alone
        self._wait_for_next()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        self._state.connections.discard(self)
        for timer in (self._idle, self._late):
            if timer is not None:
                timer.cancel()
        self.resume_writing()
        turns, self._turns = list(self._turns), deque()
        if self._reading is not None:
            turns.append(self._reading)
        for turn in turns:
            turn.lost()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "invalid_http", "no protocol upgrade is offered: send plain HTTP/1.1")
        except httptools.HttpParserError as error:
            self._refuse(400, "invalid_http", f"not HTTP/1.1 ({error}): send one request at a time")
        reading = self._reading
        if self._late is None and reading is not None:
            if not reading.method:
                self._late = self._loop.call_later(HEAD_S_MAX, self._head_is_late)
            elif not reading.begun:
                self._late = self._loop.call_later(WHOLE_BODY_S_MAX, self._body_is_late)

    def pause_writing(self) -> None:
        if self.paused is None:
            self.paused = self._loop.create_future()

    def resume_writing(self) -> None:
        paused, self.paused = self.paused, None
        if paused is not None and not paused.done():
            paused.set_result(None)

    # ------------------------------------------------------------ httptools

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._reading = _Turn(self)

    def on_url(self, url: bytes) -> None:
        assert self._reading is not None
        self._reading.target += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._reading is not None
        name = name.lower()
        self._reading.headers.append((name, value))
        self._count(len(name) + len(value))
        if name == b"expect" and value.lower() == b"100-continue":
            self.write([b"HTTP/1.1 100 Continue\r\n\r\n"])

    def on_headers_complete(self) -> None:
        turn = self._reading
        assert turn is not None
        turn.method = self._parser.get_method().decode("ascii", "replace")
        if self._late is not None:
            self._late.cancel()
            self._late = None
        turn.keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        turn = self._reading
        if turn is None:
            return
        turn.body(body)
        if turn.begun:
            if turn.held > READ_AHEAD_BYTES_MAX:
                self._stop_reading()
        elif turn.held > WHOLE_BODY_BYTES_MAX:
            self._take(turn)

    def on_message_complete(self) -> None:
        turn, self._reading = self._reading, None
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if turn is not None:
            turn.ended()
            self._take(turn)

    # ------------------------------------------------------------ inside

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES_MAX:
            text = f"headers of over {HEAD_BYTES_MAX} bytes: send fewer"
            self._refuse(431, "headers_too_large", text)

    def _head_is_late(self) -> None:
        self._late = None
        if self._reading is not None and not self._reading.method:
            text = f"the headers did not come within {HEAD_S_MAX:.0f} s"
            self._refuse(408, "headers_timeout", text)

    def _body_is_late(self) -> None:
        self._late = None
        if self._reading is not None:
            self._take(self._reading)

    def _take(self, turn: _Turn) -> None:
        """A request is whole, or its application is to read the rest by itself."""
        if turn.begun:
            return
        turn.begun = True
        self._turns.append(turn)
        if len(self._turns) == 1:
            self._begin(turn)
        elif len(self._turns) > PIPELINED_MAX:
            self._stop_reading()

    def _begin(self, turn: _Turn) -> None:
        self._state.total_requests += 1
        task = self._loop.create_task(self._run(turn))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    async def _run(self, turn: _Turn) -> None:
        """The application; what it leaves open is ended with its connection."""
        try:
            scope = turn.scope(self._server, self._client)
            await self._app(scope, turn.receive, turn.send)
        finally:
            if not turn.done and self._transport is not None:
                self._flush()
                self._transport.abort()

    def write(self, pieces: list[bytes], *, now: bool = False) -> None:
        """Write in one piece what comes in this turn of the loop; `now`: nothing more will come."""
        if now:
            self._pieces += pieces
            self._flush()
            return
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces += pieces

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(pieces))

    def answered(self, turn: _Turn) -> None:
        """An answer is complete: the next request, or the end."""
        if not self._turns or self._turns[0] is not turn:
            return
        self._turns.popleft()
        if not turn.keep_alive or self._ends or not turn.complete:
            self._close()
        elif self._turns:
            self.read_on()
            self._begin(self._turns[0])
        else:
            self._wait_for_next()

    def _wait_for_next(self) -> None:
        """One timer lasts for many requests: who is idle is closed after one to two of its times."""
        self._served = True
        if self._idle is None:
            self._idle = self._loop.call_later(self._keep_s, self._look)

    def _look(self) -> None:
        self._idle = None
        if self._turns or self._reading is not None:
            return  # the end of these asks again
        if self._served:
            self._served = False
            self._idle = self._loop.call_later(self._keep_s, self._look)
        else:
            self._close()

    def _stop_reading(self) -> None:
        if not self._stopped_reading and self._transport is not None:
            self._stopped_reading = True
            self._transport.pause_reading()

    def read_on(self) -> None:
        """There is room for more."""
        if self._stopped_reading and self._transport is not None:
            self._stopped_reading = False
            self._transport.resume_reading()

    def _refuse(self, status: int, code: str, text: str) -> None:
        """Not for any application: said and closed."""
        if self._transport is not None and not self._transport.is_closing():
            body = Failure(status, "invalid_request_error", code, text).document()
            head = _STATUS[status] + b"content-type: application/json\r\n"
            length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.write([head, length, body])
            self._close()

    def _close(self) -> None:
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def shutdown(self) -> None:
        """The server ends: what is under way is answered first."""
        self._ends = True
        if not self._turns:
            self._close()


def _unquoted(path: bytes) -> str:
    if b"%" not in path:
        return path.decode("ascii", "replace")
    from urllib.parse import unquote  # rare: no path of ours has one

    return unquote(path.decode("ascii", "replace"))
