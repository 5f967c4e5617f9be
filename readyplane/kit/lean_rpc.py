"""A lean gRPC server: HTTP/2 in the loop's own thread, and nothing else.

`grpc.aio` takes a call through threads, queues and a task of its own before a line of ours runs, some
two hundred microseconds of CPU; where the call itself costs as much, that is half of all. Here bytes
become frames, frames a message and the message a task, all in the thread that answers. Every gRPC
client can call it: what differs is that there are no streams but such where each message up has at
most one down (a `conversation`), no compression, no reflection.

Owns framing, flow control and the bounds of a connection. Methods are given as callables over
messages; core errors become a status as on the other port.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
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
from readyplane.kit.reading import body_of, read
from readyplane.wire.errors import DETAILS_KEY, error_to_status

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, WITH_PRIORITY = 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR = 0, 1, 3, 6
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 8, 9, 11
SETTING_STREAMS, SETTING_WINDOW, SETTING_FRAME = 3, 4, 5

HEAD_BYTES = 9
FRAME_BYTES_MAX = 16_384
WINDOW_FIRST = 65_535
WINDOW_MOST = (1 << 31) - 1
WINDOW_BYTES = 16 * 1024 * 1024
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
BUFFERED_BYTES_MAX = 2 * MESSAGE_BYTES_MAX
HEADERS_BYTES_MAX = 32 * 1024
STREAMS_MAX = 1_024
UNREAD_BYTES_MAX = 1024 * 1024
RESETS_MAX = 1_000
STOP_S_MAX = 2.0

_HEAD = struct.Struct("!BHBBI")
_PREFIX = struct.Struct("!BI")
_SETTING = struct.Struct("!HI")
_NUMBER = struct.Struct("!I")
_OK_HEADERS = b"\x88" + literal(b"content-type", b"application/grpc")
_OK_TRAILERS = literal(b"grpc-status", b"0")

log = logging.getLogger(__name__)


class Message(Protocol):
    """What a protobuf message can do, as far as it is needed here."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Its bytes."""


@dataclass(frozen=True, slots=True)
class Method:
    """A unary method: bytes to a request, and the request to its answer.

    `conversation`: a stream of requests, each answered in its turn, or not where `call` says None.
    """

    parse: Callable[[bytes], Any]
    call: Callable[[Any], Awaitable[Message | None]]
    conversation: bool = False


@dataclass(slots=True)
class _Stream:
    method: Method | None
    refusal: ReadyplaneError | None
    window: int
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    task: asyncio.Task[None] | None = None
    unsent: bytes = b""
    trailers: bytes = b""
    inbox: deque[bytes] = field(default_factory=deque)
    greeted: bool = False
    over: bool = False
    received: int = 0

    @property
    def talks(self) -> bool:
        """Whether it is a conversation."""
        return self.refusal is None and self.method is not None and self.method.conversation


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
        self._streams: dict[int, _Stream] = {}
        self._rest = b""
        self._greeted = False
        self._newest = 0
        self._block: tuple[int, int, bytes] | None = None  # stream, flags, headers so far
        self._window = self._initial = WINDOW_FIRST  # what may be sent
        self._frame_bytes = FRAME_BYTES_MAX
        self._received = self._buffered = 0
        self._waiting: deque[int] = deque()  # streams with something unsent
        self._resets = self._answered = 0
        self._ending = False

    # ------------------------------------------------------------------ of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by class
        self._server.connections.add(self)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(lean_guard.PREFACE_S_MAX, self._transport.close)
        settings = b"".join(
            _SETTING.pack(key, value)
            for key, value in (
                (SETTING_STREAMS, STREAMS_MAX),
                (SETTING_WINDOW, WINDOW_MOST),
                (SETTING_FRAME, FRAME_BYTES_MAX),
            )
        )
        more = _NUMBER.pack(2 * WINDOW_BYTES - WINDOW_FIRST)
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
            self._timer.cancel()  # whoever has greeted may be idle
        try:
            while end - at >= HEAD_BYTES:
                high, low, kind, flags, number = _HEAD.unpack_from(data, at)
                size = high << 16 | low
                if size > FRAME_BYTES_MAX:
                    raise _Broken(FRAME_SIZE_ERROR, f"a frame of {size} bytes")
                stop = at + HEAD_BYTES + size
                if stop > end:
                    break
                self._take(kind, flags, number & WINDOW_MOST, data[at + HEAD_BYTES : stop])
                at = stop
        except _Broken as error:
            self._break(error)
            return
        self._rest = data[at:] if at < end else b""
        if self._received >= WINDOW_BYTES:
            more, self._received = self._received, 0
            self._transport.write(frame(WINDOW_UPDATE, 0, 0, _NUMBER.pack(more)))

    # ------------------------------------------------------------------ frames

    def _take(self, kind: int, flags: int, number: int, body: bytes) -> None:  # noqa: C901 - a table
        if self._block is not None and kind != CONTINUATION:
            raise _Broken(PROTOCOL_ERROR, "headers are interrupted")
        if kind == DATA:
            self._data(flags, number, body)
        elif kind == HEADERS:
            self._headers(flags, number, body)
        elif kind == WINDOW_UPDATE:
            self._more_window(number, body)
        elif kind == SETTINGS:
            self._settings(flags, body)
        elif kind == PING:
            if len(body) != 8:
                raise _Broken(FRAME_SIZE_ERROR, "a ping has 8 bytes")
            if not flags & ACK:
                self._transport.write(frame(PING, ACK, 0, body))
        elif kind == RST_STREAM:
            self._reset(number)
        elif kind == CONTINUATION:
            if self._block is None or self._block[0] != number:
                raise _Broken(PROTOCOL_ERROR, "a continuation of nothing")
            _, first, begun = self._block
            self._head(number, first | flags, begun + body)
        elif kind == PUSH_PROMISE:
            raise _Broken(PROTOCOL_ERROR, "a client does not push")
        # PRIORITY, GOAWAY and whatever is unknown need no answer.

    def _data(self, flags: int, number: int, body: bytes) -> None:
        self._received += len(body)
        if number == 0 or number > self._newest:
            raise _Broken(PROTOCOL_ERROR, "data of no stream")
        stream = self._streams.get(number)
        if stream is None:  # reset or refused meanwhile
            return
        if flags & PADDED:
            body = _unpadded(body)
        if stream.talks:
            self._hear(number, stream, body, over=bool(flags & END_STREAM))
            return
        if stream.task is not None:
            return
        stream.size += len(body)
        self._hold(len(body))
        if stream.size > MESSAGE_BYTES_MAX + _PREFIX.size:
            stream.parts.clear()
            remedy = f"send {MESSAGE_BYTES_MAX} bytes at most"
            stream.refusal = InvalidField("message", stream.size, remedy)
        elif stream.refusal is None:
            stream.parts.append(body)
        if flags & END_STREAM:
            self._begin(number, stream)

    def _headers(self, flags: int, number: int, body: bytes) -> None:
        if flags & PADDED:
            body = _unpadded(body)
        if flags & WITH_PRIORITY:
            body = body[5:]
        self._head(number, flags, body)

    def _head(self, number: int, flags: int, block: bytes) -> None:
        if len(block) > HEADERS_BYTES_MAX:
            raise _Broken(ENHANCE_YOUR_CALM, f"headers have {HEADERS_BYTES_MAX} bytes at most")
        if not flags & END_HEADERS:
            self._block = (number, flags, block)
            return
        self._block = None
        try:
            headers = self._decoder.decode(block)
        except HpackError as error:
            raise _Broken(COMPRESSION_ERROR, str(error)) from error
        stream = self._streams.get(number)
        if number <= self._newest:
            if stream is not None:  # else it has ended meanwhile
                self._trailers(flags, number, stream)
            return
        if not number & 1:
            raise _Broken(PROTOCOL_ERROR, "a client's streams are odd")
        self._newest = number
        if len(self._streams) >= STREAMS_MAX or self._ending:
            self._transport.write(frame(RST_STREAM, 0, number, _NUMBER.pack(REFUSED_STREAM)))
            return
        stream = self._streams[number] = self._opened(dict(headers))
        if stream.talks:
            self._hear(number, stream, b"", over=bool(flags & END_STREAM))
        elif flags & END_STREAM or stream.refusal is not None:  # whoever is refused need not go on
            self._begin(number, stream)

    def _trailers(self, flags: int, number: int, stream: _Stream) -> None:
        """Headers after those that opened a stream may only end it, and only once."""
        if flags & END_STREAM and stream.talks and not stream.over:
            self._hear(number, stream, b"", over=True)
        elif flags & END_STREAM and not stream.talks and stream.task is None:
            self._begin(number, stream)
        else:
            self._reset(number)
            self._transport.write(frame(RST_STREAM, 0, number, _NUMBER.pack(PROTOCOL_ERROR)))

    def _opened(self, headers: Mapping[bytes, bytes]) -> _Stream:
        path = headers.get(b":path", b"")
        method = self._server.methods.get(path)
        refusal: ReadyplaneError | None = None
        if not self._server.check.allows(headers.get(HEADER.encode())):
            refusal = Unauthenticated()
        elif method is None:
            what = f"{path.decode(errors='replace')} on this port"
            refusal = Unsupported(what, "call it on the other gRPC port")
        return _Stream(method, refusal, self._initial)

    def _settings(self, flags: int, body: bytes) -> None:
        if flags & ACK:
            return
        if len(body) % _SETTING.size:
            raise _Broken(FRAME_SIZE_ERROR, "settings have 6 bytes each")
        for key, value in _SETTING.iter_unpack(body):
            if key == SETTING_WINDOW:
                if value > WINDOW_MOST:
                    raise _Broken(FLOW_CONTROL_ERROR, "a window is too large")
                for stream in self._streams.values():
                    stream.window += value - self._initial
                self._initial = value
            elif key == SETTING_FRAME:
                self._frame_bytes = max(FRAME_BYTES_MAX, value)
        self._transport.write(frame(SETTINGS, ACK, 0, b""))
        self._send_waiting()

    def _more_window(self, number: int, body: bytes) -> None:
        if len(body) != _NUMBER.size:
            raise _Broken(FRAME_SIZE_ERROR, "a window update has 4 bytes")
        more = _NUMBER.unpack(body)[0] & WINDOW_MOST
        if number == 0:
            self._window += more
            if not more or self._window > WINDOW_MOST:
                raise _Broken(FLOW_CONTROL_ERROR, "a window is too large, or does not grow")
        else:
            stream = self._streams.get(number)
            if stream is not None:
                stream.window += more
        self._send_waiting()

    def _reset(self, number: int) -> None:
        stream = self._drop(number)
        if stream is None:
            return
        if stream.task is not None:
            stream.task.cancel()
        self._resets += 1
        if self._resets > RESETS_MAX and self._resets > self._answered:
            raise _Broken(ENHANCE_YOUR_CALM, "most calls are given up")

    # ------------------------------------------------------------------ calls

    def _begin(self, number: int, stream: _Stream) -> None:
        if stream.refusal is not None:
            self._fail(number, stream.refusal)
            return
        stream.task = asyncio.get_running_loop().create_task(self._call(number, stream))

    async def _call(self, number: int, stream: _Stream) -> None:
        """One call; when it is cancelled nobody waits for an answer."""
        method = stream.method
        assert method is not None
        parts, stream.parts = stream.parts, []
        try:
            answer = await method.call(read(method.parse, body_of(parts)))
            assert answer is not None
            self._answer(number, stream, answer.SerializeToString())
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

    def _hear(self, number: int, stream: _Stream, body: bytes, *, over: bool) -> None:
        """More of a conversation: whole messages wait for their turn."""
        stream.over = over
        stream.received += len(body)
        if stream.received >= WINDOW_BYTES:
            more, stream.received = stream.received, 0
            self._transport.write(frame(WINDOW_UPDATE, 0, number, _NUMBER.pack(more)))
        stream.size += len(body)
        self._hold(len(body))
        if stream.parts:
            body = stream.parts.pop() + body
        while len(body) >= _PREFIX.size:
            size = _PREFIX.size + _PREFIX.unpack_from(body)[1]
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

    async def _converse(self, number: int, stream: _Stream) -> None:
        """Answer what has come, in its order, and end what was ended."""
        method = stream.method
        assert method is not None
        try:
            while stream.inbox:
                body = stream.inbox.popleft()
                answer = await method.call(read(method.parse, body_of([body])))
                stream.size -= len(body)
                self._hold(-len(body))
                if answer is not None:
                    self._say(number, stream, answer.SerializeToString())
            if stream.over:
                tail = frame(HEADERS, END_HEADERS | END_STREAM, number, _OK_TRAILERS)
                if stream.unsent:
                    stream.trailers = tail
                elif self._drop(number) is not None:
                    head = frame(HEADERS, END_HEADERS, number, _OK_HEADERS)
                    self._transport.write(tail if stream.greeted else head + tail)
        except Exception as error:  # noqa: BLE001 - it becomes a status, and is logged
            self._fail_by(number, error)
        finally:
            stream.task = None

    def _say(self, number: int, stream: _Stream, message: bytes) -> None:
        """One message down a conversation, as soon as the windows let it."""
        if number not in self._streams or self._transport.is_closing():
            return
        self._answered += 1
        if not stream.greeted:
            stream.greeted = True
            self._transport.write(frame(HEADERS, END_HEADERS, number, _OK_HEADERS))
        body = _PREFIX.pack(0, len(message)) + message
        if stream.unsent:
            stream.unsent += body
            if len(stream.unsent) > UNREAD_BYTES_MAX:
                why = f"more than {UNREAD_BYTES_MAX} bytes of answers are not read"
                raise Unavailable(why, "read the answers")
            return
        if len(body) <= min(self._window, stream.window, self._frame_bytes) and not self._waiting:
            self._window -= len(body)
            stream.window -= len(body)
            self._transport.write(frame(DATA, 0, number, body))
            return
        stream.unsent = body
        self._waiting.append(number)
        self._send_waiting()

    # ------------------------------------------------------------------ answers

    def _answer(self, number: int, stream: _Stream, message: bytes) -> None:
        if number not in self._streams or self._transport.is_closing():
            return
        self._answered += 1
        body = _PREFIX.pack(0, len(message)) + message
        size = len(body)
        head = frame(HEADERS, END_HEADERS, number, _OK_HEADERS)
        tail = frame(HEADERS, END_HEADERS | END_STREAM, number, _OK_TRAILERS)
        if size <= min(self._window, stream.window, self._frame_bytes) and not self._waiting:
            self._window -= size
            self._drop(number)
            self._transport.write(head + frame(DATA, 0, number, body) + tail)
            return
        self._transport.write(head)
        stream.unsent, stream.trailers = body, tail
        self._waiting.append(number)
        self._send_waiting()

    def _send_waiting(self) -> None:
        """What both windows let through, one after the other."""
        for _ in range(len(self._waiting)):
            number = self._waiting.popleft()
            stream = self._streams.get(number)
            if stream is None:
                continue
            while stream.unsent:
                size = min(len(stream.unsent), self._window, stream.window, self._frame_bytes)
                if size <= 0:
                    self._waiting.append(number)
                    break
                piece, stream.unsent = stream.unsent[:size], stream.unsent[size:]
                self._window -= size
                stream.window -= size
                self._transport.write(frame(DATA, 0, number, piece))
            else:
                if stream.trailers:
                    self._transport.write(stream.trailers)
                    self._drop(number)

    def _fail(self, number: int, error: ReadyplaneError) -> None:
        status = error_to_status(error)
        self._end(number, status.code, status.message, status.SerializeToString())

    def _end(self, number: int, code: int, text: str, details: bytes) -> None:
        stream = self._drop(number)
        if stream is None or self._transport.is_closing():
            return
        self._answered += 1
        block = b"" if stream.greeted else _OK_HEADERS
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
            raise _Broken(ENHANCE_YOUR_CALM, f"no room for {self._buffered} bytes of requests")

    def _drop(self, number: int) -> _Stream | None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            self._hold(-stream.size)
        return stream

    # ------------------------------------------------------------------ the end

    def tasks(self) -> list[asyncio.Task[None]]:
        """Calls under way."""
        return [s.task for s in self._streams.values() if s.task is not None]

    def say_good_bye(self) -> None:
        """No new calls; those under way may end."""
        self._ending = True
        self._transport.write(frame(GOAWAY, 0, 0, struct.pack("!II", self._newest, NO_ERROR)))

    def close(self) -> None:
        """Whoever still waits is told that the service stops."""
        for number, stream in list(self._streams.items()):
            self._fail(number, Unavailable("the service is stopping", "ask again"))
            if stream.task is not None:
                stream.task.cancel()
        self._transport.close()

    def _break(self, error: _Broken) -> None:
        self._server.crowd.warn(error.why)
        body = struct.pack("!II", self._newest, error.code) + error.why.encode()
        self._transport.write(frame(GOAWAY, 0, 0, body))
        self._transport.close()


class _Broken(Exception):
    """The connection cannot go on."""

    def __init__(self, code: int, why: str) -> None:
        self.code, self.why = code, why
        super().__init__(why)


def frame(kind: int, flags: int, number: int, body: bytes) -> bytes:
    """One frame."""
    size = len(body)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, number) + body


def _unpadded(body: bytes) -> bytes:
    if not body or body[0] >= len(body):
        raise _Broken(PROTOCOL_ERROR, "more padding than there is")
    return body[1 : len(body) - body[0]]
