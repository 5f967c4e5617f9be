"""A small HTTP/1.1 server on asyncio: what one engine needs and no more.

Owns connections, parsing (httptools), keep-alive, chunked streams and the news that a client has
gone. Handlers are plain functions that answer now or later through the `Exchange`; there is no
task a request, so that one core streams to many. A web framework would cost each engine start a
quarter of a second of imports.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools

BODY_BYTES_MAX = 32 * 2**20
HEAD_BYTES_MAX = 64 * 2**10
PIPELINED_MAX = 16
UNSENT_BYTES_MAX = 8 * 2**20


class Exchange:
    """One request and the way to answer it: `reply`, or `begin`, `write`… and `end`."""

    __slots__ = (
        "_connection",
        "body",
        "done",
        "headers",
        "keep_alive",
        "method",
        "on_gone",
        "path",
        "query",
        "streaming",
    )

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.method, self.path, self.query = "", "", ""
        self.headers: dict[str, str] = {}
        self.body = b""
        self.keep_alive = True
        self.streaming = self.done = False
        self.on_gone: Callable[[], None] | None = None

    def reply(
        self, status: int, body: bytes, content_type: str = "application/json", extra: str = ""
    ) -> None:
        """A whole answer."""
        if self.done:
            return
        self._connection.send(
            f"{_status_line(status)}content-type: {content_type}\r\n"
            f"content-length: {len(body)}\r\n{extra}{self._closing()}\r\n".encode()
            + body
        )
        self._finish()

    def reply_json(self, status: int, document: Any) -> None:
        """A whole answer in JSON."""
        self.reply(status, json.dumps(document, ensure_ascii=False).encode())

    def begin(self, content_type: str = "text/event-stream; charset=utf-8") -> None:
        """Head of a stream."""
        if self.done or self.streaming:
            return
        self.streaming = True
        self._connection.send(
            f"{_status_line(200)}content-type: {content_type}\r\ncache-control: no-cache\r\n"
            f"transfer-encoding: chunked\r\n{self._closing()}\r\n".encode()
        )

    def write(self, data: bytes) -> None:
        """One chunk of a stream; a reader that is too slow is cut off."""
        if not self.done:
            self._connection.send(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        """End of a stream."""
        if not self.done:
            self._connection.send(b"0\r\n\r\n")
            self._finish()

    def gone(self) -> None:
        """The client went away."""
        if not self.done:
            self.done = True
            if self.on_gone is not None:
                self.on_gone()

    def _closing(self) -> str:
        return "" if self.keep_alive else "connection: close\r\n"

    def _finish(self) -> None:
        self.done = True
        self.on_gone = None
        self._connection.finished(self)


def _status_line(status: int) -> str:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"


class _Connection(asyncio.Protocol):
    """One client; requests are answered in their order."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[Exchange] = deque()
        self._reading: Exchange | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._target = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._transport = None
        self._server.connections.discard(self)
        waiting, self._queue = list(self._queue), deque()
        for exchange in waiting:
            exchange.gone()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "no protocol upgrade is offered")
        except httptools.HttpParserError as error:
            self._refuse(400, f"not HTTP: {error}")

    def send(self, data: bytes) -> None:
        if self._transport is None:
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self._server.slow_readers_total += 1
            self._transport.abort()

    def finished(self, exchange: Exchange) -> None:
        if self._queue and self._queue[0] is exchange:
            self._queue.popleft()
        if not exchange.keep_alive:
            self.close()
        elif self._queue:
            # Later, since this answer may come from the midst of the engine's own work.
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        if self._queue and self._transport is not None:
            self._server.handle(self._queue[0])

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        self._reading = Exchange(self)
        self._parts, self._size, self._target = [], 0, b""

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._grow(len(url), HEAD_BYTES_MAX)

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._reading is not None
        self._reading.headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        self._grow(len(name) + len(value), HEAD_BYTES_MAX)

    def on_headers_complete(self) -> None:
        self._size = 0
        if self._reading is not None and "100-continue" in self._reading.headers.get("expect", ""):
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._grow(len(body), BODY_BYTES_MAX)

    def on_message_complete(self) -> None:
        exchange = self._reading
        if exchange is None or self._transport is None or self._transport.is_closing():
            return
        path, _, query = self._target.decode("latin-1").partition("?")
        exchange.path, exchange.query = path, query
        exchange.method = self._parser.get_method().decode()
        exchange.keep_alive = self._parser.should_keep_alive()
        exchange.body = b"".join(self._parts)
        self._reading, self._parts = None, []
        self._queue.append(exchange)
        if len(self._queue) > PIPELINED_MAX:
            self._refuse(429, f"at most {PIPELINED_MAX} requests at once on one connection")
        elif len(self._queue) == 1:
            self._server.handle(exchange)

    def _grow(self, size: int, most: int) -> None:
        self._size += size
        if self._size > most:
            self._refuse(413, f"at most {most} bytes")

    def _refuse(self, status: int, why: str) -> None:
        body = json.dumps({"error": {"message": why, "type": "BadRequestError", "code": status}})
        self.send(
            f"{_status_line(status)}content-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}".encode()
        )
        self.close()


class HttpServer:
    """Serves `routes`: (method, path) -> handler(exchange)."""

    def __init__(self, routes: dict[tuple[str, str], Callable[[Exchange], None]]) -> None:
        self._routes = routes
        self._server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()
        self.slow_readers_total = 0

    async def start(self, host: str, port: int) -> int:
        """Bind; returns the port. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), host, port, backlog=512)
        return int(self._server.sockets[0].getsockname()[1])

    def handle(self, exchange: Exchange) -> None:
        """Answer one request; a handler that fails is our fault and says so."""
        handler = self._routes.get((exchange.method, exchange.path))
        if handler is None:
            known = sorted(m for m, p in self._routes if p == exchange.path)
            status = 405 if known else 404
            text = f"use {' or '.join(known)}" if known else f"no such path {exchange.path}"
            kind = "MethodNotAllowed" if known else "NotFound"
            exchange.reply_json(
                status,
                {"error": {"message": text, "type": kind, "param": None, "code": status}},
            )
            return
        try:
            handler(exchange)
        except Exception:
            exchange.reply_json(
                500,
                {
                    "error": {
                        "message": "internal error, see the engine's log",
                        "type": "InternalServerError",
                        "param": None,
                        "code": 500,
                    }
                },
            )
            raise

    async def stop(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close()
        await asyncio.sleep(0)
