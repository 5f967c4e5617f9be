"""A lean gRPC server: HTTP/2 in the loop's own thread, and nothing else.

`grpc.aio` takes a call through threads, queues and a task of its own before a line of ours runs, some
two hundred microseconds of CPU; where the call itself costs as much, that is half of all. Here bytes
become frames, frames a message and the message a task, all in the thread that answers. Every gRPC
client can call it: what differs is that there are no streams but such where a message up has an
answer or none (`Method.talk`), beside what is said unasked, no compression, no reflection.

Owns connections, their calls and their bounds. Methods are given as callables over messages; core
errors become a status as on the other port. What goes to a client waits in `lean_outflow`, frames are
`lean_frames`, and what all clients may hold together is `lean_guard`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import secrets
import socket
from collections.abc import Mapping
from functools import partial
from typing import cast
from urllib.parse import quote

import grpc

from readyplane.core.errors import (
    InvalidField,
    ReadyplaneError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from readyplane.kit import lean_guard
from readyplane.kit.auth import HEADER, TokenCheck
from readyplane.kit.hpack import Decoder, HpackError, literal
from readyplane.kit.lean_frames import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FRAME_BYTES_MAX,
    FRAME_SIZE_ERROR,
    HEAD,
    HEAD_BYTES,
    HEADERS,
    NO_ERROR,
    NUMBER,
    OK_HEADERS,
    OK_TRAILERS,
    PADDED,
    PING,
    PREFACE,
    PREFIX,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTING,
    SETTING_FRAME,
    SETTING_STREAMS,
    SETTING_WINDOW,
    SETTINGS,
    WINDOW_BYTES,
    WINDOW_FIRST,
    WINDOW_MOST,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    Broken,
    frame,
    goaway,
    unpadded,
)
from readyplane.kit.lean_outflow import Message, Method, Outflow, Stream
from readyplane.kit.reading import body_of, read
from readyplane.wire.errors import DETAILS_KEY, error_to_status

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
BUFFERED_BYTES_MAX = 2 * MESSAGE_BYTES_MAX
HEADERS_BYTES_MAX = 32 * 1024
STREAMS_MAX = 1_024
RESETS_MAX = 1_000
STOP_S_MAX = 2.0

__all__ = ["PREFACE", "LeanServer", "Message", "Method", "frame"]

log = logging.getLogger(__name__)


class LeanServer:
    """Unary methods by path (`/package.Service/Method`) on one port.

    Attributes:
        connections: that are open now.
    """

    def __init__(self, methods: Mapping[str, Method], check: TokenCheck) -> None:
        """`check`: of the token, as on the other ports."""
        self.methods = {path.encode(): method for path, method in methods.items()}
        self.check = check
        self.connections: set[_Connection] = set()
        self.crowd = lean_guard.Crowd()

    async def run(self, listening: socket.socket) -> None:
        """Serve until cancelled; then calls under way have `STOP_S_MAX` to end."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(self), sock=listening)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            for connection in list(self.connections):
                connection.say_good_bye()
            under_way = [task for c in self.connections for task in c.tasks()]
            if under_way:
                await asyncio.wait(under_way, timeout=STOP_S_MAX)
            for connection in list(self.connections):
                connection.close()


class _Connection(asyncio.Protocol):
    """One client: its frames, its streams, both windows."""

    def __init__(self, server: LeanServer) -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._decoder = Decoder()
        self._streams: dict[int, Stream] = {}
        self._rest = b""
        self._greeted = False
        self._newest = 0
        self._block: tuple[int, int, bytes] | None = None  # stream, flags, headers so far
        self._out: Outflow
        self._received = self._buffered = 0
        self._resets = 0
        self._looked = (0, 0)  # newest stream, and headers under way, when last looked after
        self._ending = False

    # ------------------------------------------------------------------ of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by class
        self._out = Outflow(self._transport, self._streams, self._drop)
        self._server.connections.add(self)
        self._look_after(lean_guard.PREFACE_S_MAX)
        settings = b"".join(
            SETTING.pack(key, value)
            for key, value in (
                (SETTING_STREAMS, STREAMS_MAX),
                (SETTING_WINDOW, WINDOW_MOST),
                (SETTING_FRAME, FRAME_BYTES_MAX),
            )
        )
        more = NUMBER.pack(2 * WINDOW_BYTES - WINDOW_FIRST)
        self._transport.write(frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, more))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - what asyncio calls
        self._timer.cancel()
        self._server.connections.discard(self)
        for stream in self._streams.values():
            if stream.task is not None:
                stream.task.cancel()
        self._streams.clear()
        self._hold(-self._buffered)

    def pause_writing(self) -> None:
        self._transport.pause_reading()  # a client that does not read is not read from

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        if not self._greeted:
            if end < len(PREFACE) and PREFACE.startswith(data):
                self._rest = data
                return
            if not data.startswith(PREFACE):
                self._transport.close()
                return
            self._greeted, at = True, len(PREFACE)
            self._timer.cancel()
            self._look_after(lean_guard.REQUEST_S_MAX)
        try:
            while end - at >= HEAD_BYTES:
                high, low, kind, flags, number = HEAD.unpack_from(data, at)
                size = high << 16 | low
                if size > FRAME_BYTES_MAX:
                    raise Broken(FRAME_SIZE_ERROR, f"a frame of {size} bytes")
                stop = at + HEAD_BYTES + size
                if stop > end:
                    break
                self._take(kind, flags, number & WINDOW_MOST, data[at + HEAD_BYTES : stop])
                at = stop
        except Broken as error:
            self._break(error)
            return
        self._rest = data[at:] if at < end else b""
        if self._received >= WINDOW_BYTES:
            more, self._received = self._received, 0
            self._transport.write(frame(WINDOW_UPDATE, 0, 0, NUMBER.pack(more)))

    # ------------------------------------------------------------------ frames

    def _take(self, kind: int, flags: int, number: int, body: bytes) -> None:  # noqa: C901 - a table
        if self._block is not None and kind != CONTINUATION:
            raise Broken(PROTOCOL_ERROR, "headers are interrupted")
        if kind == DATA:
            self._data(flags, number, body)
        elif kind == HEADERS:
            self._headers(flags, number, body)
        elif kind == WINDOW_UPDATE:
            self._out.more_window(number, body)
        elif kind == SETTINGS:
            self._out.settings(flags, body)
        elif kind == PING:
            if len(body) != 8:
                raise Broken(FRAME_SIZE_ERROR, "a ping has 8 bytes")
            if not flags & ACK:
                self._transport.write(frame(PING, ACK, 0, body))
        elif kind == RST_STREAM:
            self._reset(number)
        elif kind == CONTINUATION:
            if self._block is None or self._block[0] != number:
                raise Broken(PROTOCOL_ERROR, "a continuation of nothing")
            _, first, begun = self._block
            self._head(number, first | flags, begun + body)
        elif kind == PUSH_PROMISE:
            raise Broken(PROTOCOL_ERROR, "a client does not push")
        # PRIORITY, GOAWAY and whatever is unknown need no answer.

    def _data(self, flags: int, number: int, body: bytes) -> None:
        self._received += len(body)
        if number == 0 or number > self._newest:
            raise Broken(PROTOCOL_ERROR, "data of no stream")
        stream = self._streams.get(number)
        if stream is None:  # reset or refused meanwhile
            return
        if flags & PADDED:
            body = unpadded(body)
        if stream.talks:
            self._hear(number, stream, body, over=bool(flags & END_STREAM))
            return
        if stream.task is not None:
            return
        stream.size += len(body)
        self._hold(len(body))
        if stream.size > MESSAGE_BYTES_MAX + PREFIX.size:
            stream.parts.clear()
            remedy = f"send {MESSAGE_BYTES_MAX} bytes at most"
            stream.refusal = InvalidField("message", stream.size, remedy)
        elif stream.refusal is None:
            stream.parts.append(body)
        if flags & END_STREAM:
            self._begin(number, stream)

    def _headers(self, flags: int, number: int, body: bytes) -> None:
        if flags & PADDED:
            body = unpadded(body)
        if flags & WITH_PRIORITY:
            body = body[5:]
        self._head(number, flags, body)

    def _head(self, number: int, flags: int, block: bytes) -> None:
        if len(block) > HEADERS_BYTES_MAX:
            raise Broken(ENHANCE_YOUR_CALM, f"headers have {HEADERS_BYTES_MAX} bytes at most")
        if not flags & END_HEADERS:
            self._block = (number, flags, block)
            return
        self._block = None
        try:
            headers = self._decoder.decode(block)
        except HpackError as error:
            raise Broken(COMPRESSION_ERROR, str(error)) from error
        stream = self._streams.get(number)
        if number <= self._newest:
            if stream is not None:  # else it has ended meanwhile
                self._trailers(flags, number, stream)
            return
        if not number & 1:
            raise Broken(PROTOCOL_ERROR, "a client's streams are odd")
        self._newest = number
        if len(self._streams) >= STREAMS_MAX or self._ending:
            self._transport.write(frame(RST_STREAM, 0, number, NUMBER.pack(REFUSED_STREAM)))
            return
        stream = self._streams[number] = self._opened(dict(headers))
        if stream.talks:
            self._hear(number, stream, b"", over=bool(flags & END_STREAM))
        elif flags & END_STREAM or stream.refusal is not None:  # whoever is refused need not go on
            self._begin(number, stream)

    def _trailers(self, flags: int, number: int, stream: Stream) -> None:
        """Headers after those that opened a stream may only end it, and only once."""
        if flags & END_STREAM and stream.talks and not stream.over:
            self._hear(number, stream, b"", over=True)
        elif flags & END_STREAM and not stream.talks and stream.task is None:
            self._begin(number, stream)
        else:
            self._reset(number)
            self._transport.write(frame(RST_STREAM, 0, number, NUMBER.pack(PROTOCOL_ERROR)))

    def _opened(self, headers: Mapping[bytes, bytes]) -> Stream:
        path = headers.get(b":path", b"")
        method = self._server.methods.get(path)
        refusal: ReadyplaneError | None = None
        if not self._server.check.allows(headers.get(HEADER.encode())):
            refusal = Unauthenticated()
        elif method is None:
            what = f"{path.decode(errors='replace')} on this port"
            refusal = Unsupported(what, "call it on the other gRPC port")
        return Stream(method, refusal, self._out.initial)

    def _reset(self, number: int) -> None:
        stream = self._drop(number)
        if stream is None:
            return
        if stream.task is not None:
            stream.task.cancel()
        self._resets += 1
        if self._resets > RESETS_MAX and self._resets > self._out.answered:
            raise Broken(ENHANCE_YOUR_CALM, "most calls are given up")

    # ------------------------------------------------------------------ calls

    def _begin(self, number: int, stream: Stream) -> None:
        if stream.refusal is not None:
            self._fail(number, stream.refusal)
            return
        stream.task = asyncio.get_running_loop().create_task(self._call(number, stream))

    async def _call(self, number: int, stream: Stream) -> None:
        """One call; when it is cancelled nobody waits for an answer."""
        method = stream.method
        assert method is not None
        assert method.call is not None
        parts, stream.parts = stream.parts, []
        try:
            answer = await method.call(read(method.parse, body_of(parts)))
            assert answer is not None
            self._out.answer(number, stream, answer.SerializeToString())
        except Exception as error:  # noqa: BLE001 - it becomes a status, and is logged
            self._fail_by(number, error)

    def _fail_by(self, number: int, error: Exception) -> None:
        if isinstance(error, ReadyplaneError):
            self._fail(number, error)
            return
        name = secrets.token_hex(6)
        log.error("unexpected error in a call", extra={"error_id": name}, exc_info=error)
        text = f"unexpected {type(error).__name__}, logged under error_id {name}"
        self._end(number, grpc.StatusCode.INTERNAL.value[0], text, b"")

    # ------------------------------------------------------------------ conversations

    def _hear(self, number: int, stream: Stream, body: bytes, *, over: bool) -> None:
        """More of a conversation: whole messages wait for their turn."""
        stream.over = over
        stream.received += len(body)
        if stream.received >= WINDOW_BYTES:
            more, stream.received = stream.received, 0
            self._transport.write(frame(WINDOW_UPDATE, 0, number, NUMBER.pack(more)))
        stream.size += len(body)
        self._hold(len(body))
        if stream.parts:
            body = stream.parts.pop() + body
        while len(body) >= PREFIX.size:
            size = PREFIX.size + PREFIX.unpack_from(body)[1]
            if size > MESSAGE_BYTES_MAX:
                remedy = f"send {MESSAGE_BYTES_MAX} bytes at most"
                self._fail(number, InvalidField("message", size, remedy))
                return
            if len(body) < size:
                break
            stream.inbox.append(body[:size])
            body = body[size:]
        if body:
            stream.parts.append(body)
        if stream.task is None and (stream.inbox or over):
            stream.task = asyncio.get_running_loop().create_task(self._converse(number, stream))

    async def _converse(self, number: int, stream: Stream) -> None:
        """Answer what has come, in its order, and end what was ended."""
        method = stream.method
        assert method is not None
        assert method.talk is not None
        if stream.call is None:
            stream.call = method.talk(partial(self._say, number, stream))
        try:
            while stream.inbox:
                body = stream.inbox.popleft()
                answer = await stream.call(read(method.parse, body_of([body])))
                stream.size -= len(body)
                self._hold(-len(body))
                if answer is not None:
                    self._out.say(number, stream, answer.SerializeToString())
            if stream.over:
                tail = frame(HEADERS, END_HEADERS | END_STREAM, number, OK_TRAILERS)
                if stream.unsent:
                    stream.trailers = tail
                elif self._drop(number) is not None:
                    head = frame(HEADERS, END_HEADERS, number, OK_HEADERS)
                    self._transport.write(tail if stream.greeted else head + tail)
        except Exception as error:  # noqa: BLE001 - it becomes a status, and is logged
            self._fail_by(number, error)
        finally:
            stream.task = None

    def _say(self, number: int, stream: Stream, message: Message) -> None:
        """Something that was not asked for: lost where the client has gone, or does not read."""
        with contextlib.suppress(Unavailable):
            self._out.say(number, stream, message.SerializeToString())

    # ------------------------------------------------------------------ answers

    def _fail(self, number: int, error: ReadyplaneError) -> None:
        status = error_to_status(error)
        self._end(number, status.code, status.message, status.SerializeToString())

    def _end(self, number: int, code: int, text: str, details: bytes) -> None:
        stream = self._drop(number)
        if stream is None or self._transport.is_closing():
            return
        self._out.answered += 1
        block = b"" if stream.greeted else OK_HEADERS
        block += literal(b"grpc-status", b"%d" % code)
        block += literal(b"grpc-message", quote(text, safe=" !#$&'()*+,/:;=?@[]").encode())
        if details:
            coded = base64.b64encode(details).rstrip(b"=")
            block += literal(DETAILS_KEY.encode(), coded)
        self._transport.write(frame(HEADERS, END_HEADERS | END_STREAM, number, block))

    def _hold(self, more: int) -> None:
        crowd, connections = self._server.crowd, len(self._server.connections)
        self._buffered += more
        crowd.unfinished_bytes += more
        full = self._buffered > BUFFERED_BYTES_MAX or crowd.too_much(self._buffered, connections)
        if more > 0 and full:
            raise Broken(ENHANCE_YOUR_CALM, f"no room for {self._buffered} bytes of requests")

    def _drop(self, number: int) -> Stream | None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            self._hold(-stream.size)
        return stream

    # ------------------------------------------------------------------ bounds in time

    def _look_after(self, after_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_s, self._look)

    def _look(self) -> None:
        """Who has not begun, or not gone on, within the time for it need not be waited for.

        Who has called may be idle, and pings alone are no calls.
        """
        newest, begun = self._looked
        if not self._newest:
            if self._greeted:
                self._transport.write(goaway(0, NO_ERROR, "no call"))
            self._transport.close()
            return
        if self._block is not None and self._block[0] == begun:
            self._break(Broken(ENHANCE_YOUR_CALM, "headers that do not end"))
            return
        for number, stream in list(self._streams.items()):
            if number <= newest and stream.task is None and not stream.talks:
                remedy = f"send all of it within {lean_guard.REQUEST_S_MAX:.0f} s"
                unfinished = InvalidField("message", f"{stream.size} bytes so far", remedy)
                self._fail(number, stream.refusal or unfinished)
        self._looked = (self._newest, 0 if self._block is None else self._block[0])
        self._look_after(lean_guard.REQUEST_S_MAX)

    # ------------------------------------------------------------------ the end

    def tasks(self) -> list[asyncio.Task[None]]:
        """Calls under way."""
        return [s.task for s in self._streams.values() if s.task is not None]

    def say_good_bye(self) -> None:
        """No new calls; those under way may end."""
        self._ending = True
        self._transport.write(goaway(self._newest, NO_ERROR))

    def close(self) -> None:
        """Whoever still waits is told that the service stops."""
        for number, stream in list(self._streams.items()):
            self._fail(number, Unavailable("the service is stopping", "ask again"))
            if stream.task is not None:
                stream.task.cancel()
        self._transport.close()

    def _break(self, error: Broken) -> None:
        self._server.crowd.warn(error.why)
        self._transport.write(goaway(self._newest, error.code, error.why))
        self._transport.close()
