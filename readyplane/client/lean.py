"""Unary gRPC calls in the loop's own thread: the client's half of a lean port (`readyplane.kit.lean_rpc`).

`grpc.aio` takes each call through threads and queues that cost more than many a call; where something
is called with every request, that is most of all. Here a call is frames out and frames in, over one
HTTP/2 connection that stays. It speaks plain gRPC, so that any server would answer it.

Owns connections, flow control, and what becomes of calls whose connection is lost: each ends with
`Unavailable`, none waits for ever. A connection that gives no sign while calls wait is left.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import unquote

from readyplane.core.errors import ReadyplaneError, Unauthenticated, Unavailable
from readyplane.kit.hpack import STATIC, TABLE_BYTES, Decoder, HpackError, literal
from readyplane.kit.lean_frames import (
    ACK,
    CANCEL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    GOAWAY,
    HEAD,
    HEAD_BYTES,
    HEADERS,
    NUMBER,
    PADDED,
    PING,
    PREFACE,
    PREFIX,
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
    unpadded,
)
from readyplane.wire.errors import DETAILS_KEY, error_from_status

CONNECT_S_MAX = 2.0
SILENT_S_MAX = 3.0  # while calls wait: then a ping, and as long again for its answer
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
HEADERS_BYTES_MAX = 64 * 1024
CONNECTIONS_MAX = 8
# What is sent in full once a connection; all of it fits into the other side's table.
REMEMBERED_MAX = 12
REMEMBERED_BYTES_MAX = 200
SETTING_TABLE, SETTING_PUSH = 1, 2

Metadata = Sequence[tuple[str, str]]
# What gRPC's codes mean where a server sends no details of ours.
_UNAVAILABLE = {b"1", b"4", b"8", b"14"}
_UNAUTHENTICATED = b"16"


@dataclass(slots=True, eq=False)
class _Call:
    done: asyncio.Future[bytes]
    window: int
    unsent: bytes = b""
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    received: int = 0


class LeanChannel:
    """Calls to one service at one address, or at several: one is used until it goes away."""

    def __init__(self, address: str, *, service: str) -> None:
        """`address`: `host:port`, several separated by commas. `service`: named in errors."""
        self.address = address
        self._service = service
        self._addresses = [part.strip() for part in address.split(",") if part.strip()]
        self._connections: list[_Connection] = []
        self._opening = asyncio.Lock()

    async def call(
        self, path: str, message: bytes, *, metadata: Metadata, timeout_s: float
    ) -> bytes:
        """The answer's bytes.

        Args:
            path: `/package.Service/Method`. timeout_s: of all of it, connecting too.

        Raises:
            ReadyplaneError: what the service raised; `Unavailable` when there was no answer.
        """
        try:
            async with asyncio.timeout(timeout_s):
                connection = self._usable() or await self._open()
                number, call = connection.begin(path, message, metadata)
                try:
                    return await call.done
                finally:
                    connection.end(number)
        except TimeoutError:
            what = f"the {self._service} at {self.address} did not answer in time ({timeout_s} s)"
            raise Unavailable(what, "ask again, or later") from None

    async def aclose(self) -> None:
        """Close; calls under way end with `Unavailable`."""
        for connection in tuple(self._connections):
            connection.close("the client was closed")
        self._connections.clear()

    def _usable(self) -> _Connection | None:
        for connection in self._connections:
            if connection.has_room:
                return connection
        return None

    async def _open(self) -> _Connection:
        async with self._opening:
            found = self._usable()  # somebody else has just opened one
            if found is not None:
                return found
            self._connections = [c for c in self._connections if not c.closed]
            if len(self._connections) >= CONNECTIONS_MAX:
                what = f"too many calls of the {self._service} are under way"
                raise Unavailable(what, "ask again, or later")
            why = "no address is known"
            for _ in self._addresses:
                address = self._addresses[0]
                try:
                    async with asyncio.timeout(CONNECT_S_MAX):
                        made = await self._connect(address)
                except (OSError, ValueError, TimeoutError) as error:
                    why = str(error) or f"no connection within {CONNECT_S_MAX:.0f} s"
                    self._addresses.append(self._addresses.pop(0))
                    continue
                self._connections.append(made)
                return made
        what = f"the {self._service} at {self.address} cannot be reached ({why})"
        raise Unavailable(what, "check that it runs and listens on that address")

    async def _connect(self, address: str) -> _Connection:
        host, _, port = address.rpartition(":")
        where = f"the {self._service} at {address}"
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(
            lambda: _Connection(where, address), host.strip("[]") or "127.0.0.1", int(port)
        )
        return made


class _Connection(asyncio.Protocol):
    """One connection and the calls on it."""

    def __init__(self, where: str, authority: str) -> None:
        self.closed = False
        self._where, self._authority = where, authority.encode()
        self._transport: asyncio.Transport
        self._decoder = Decoder()
        self._calls: dict[int, _Call] = {}
        self._waiting: list[int] = []  # calls with something unsent
        self._next = 1
        self._rest = b""
        self._block: tuple[int, int, bytes] | None = None
        self._window = self._initial = WINDOW_FIRST
        self._frame_bytes, self._streams_max = FRAME_BYTES_MAX, 100
        self._received = 0
        self._leaving = False
        self._known: list[tuple[bytes, bytes]] = []
        self._heads: dict[tuple[str, Metadata], bytes] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._heard = self._pinged = False

    # ------------------------------------------------------------------ calls

    @property
    def has_room(self) -> bool:
        """Whether another call may begin here."""
        full = len(self._calls) >= self._streams_max or self._next >= WINDOW_MOST - 2
        return not (self.closed or self._leaving or full)

    def begin(self, path: str, message: bytes, metadata: Metadata) -> tuple[int, _Call]:
        """Send a call; its number and its answer to come."""
        number, self._next = self._next, self._next + 2
        loop = asyncio.get_running_loop()
        call = self._calls[number] = _Call(loop.create_future(), self._initial)
        head = frame(HEADERS, END_HEADERS, number, self._headers(path, metadata))
        body = PREFIX.pack(0, len(message)) + message
        size = len(body)
        if size <= min(self._window, call.window, self._frame_bytes) and not self._waiting:
            self._window -= size
            call.window -= size
            self._transport.write(head + frame(DATA, END_STREAM, number, body))
        else:
            self._transport.write(head)
            call.unsent = body
            self._waiting.append(number)
            self._send_waiting()
        if self._timer is None:
            self._timer = loop.call_later(SILENT_S_MAX, self._look)
        return number, call

    def end(self, number: int) -> None:
        """Nobody waits for it any more; one that is still under way is taken back."""
        if self._calls.pop(number, None) is not None and not self.closed:
            self._transport.write(frame(RST_STREAM, 0, number, NUMBER.pack(CANCEL)))

    def close(self, why: str) -> None:
        """Give up; whoever waits is told."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._transport.close()
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            self._fail(call, why)

    def _headers(self, path: str, metadata: Metadata) -> bytes:
        """Names and values in full once a connection; what differs from call to call, each time."""
        fixed = tuple((k, v) for k, v in metadata if k == "authorization")
        block = self._heads.get((path, fixed))
        if block is None:
            block = self._indexed(path, fixed)
        for name, value in metadata:
            if name != "authorization":
                block += literal(name.encode(), value.encode())
        return block

    def _indexed(self, path: str, fixed: Metadata) -> bytes:
        wanted = [
            (b":path", path.encode()),
            (b":authority", self._authority),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            *((name.encode(), value.encode()) for name, value in fixed),
        ]
        before, known = len(self._known), self._known
        out = [b"\x83\x86"]  # POST, http
        for name, value in wanted:
            if (name, value) in known:
                # By its place, the newest first, behind the static ones.
                place = len(STATIC) + len(known) - known.index((name, value))
                out.append(bytes((0x80 | place,)))
            elif len(value) > REMEMBERED_BYTES_MAX or len(known) >= REMEMBERED_MAX:
                out.append(literal(name, value))
            else:
                known.append((name, value))
                out.append(b"\x40" + literal(name, value)[1:])
        if len(known) > before:  # places of all others have moved
            self._heads.clear()
        elif len(self._heads) < REMEMBERED_MAX:
            self._heads[path, fixed] = b"".join(out)
        return b"".join(out)

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for number in waiting:
            call = self._calls.get(number)
            if call is None:
                continue
            while call.unsent:
                size = min(len(call.unsent), self._window, call.window, self._frame_bytes)
                if size <= 0:
                    self._waiting.append(number)
                    break
                piece, call.unsent = call.unsent[:size], call.unsent[size:]
                self._window -= size
                call.window -= size
                last = 0 if call.unsent else END_STREAM
                self._transport.write(frame(DATA, last, number, piece))

    def _fail(self, call: _Call, why: str) -> None:
        if not call.done.done():
            remedy = "ask again"
            call.done.set_exception(Unavailable(f"{self._where} did not answer ({why})", remedy))

    def _look(self) -> None:
        """Whether the other side gives a sign while calls wait."""
        self._timer = None
        if not self._calls:
            return
        if not self._heard and self._pinged:
            self.close(f"no sign for {2 * SILENT_S_MAX:.0f} s")
            return
        self._pinged = not self._heard
        if self._pinged:
            self._transport.write(frame(PING, 0, 0, b"\0" * 8))
        self._heard = False
        self._timer = asyncio.get_running_loop().call_later(SILENT_S_MAX, self._look)

    # ------------------------------------------------------------------ of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        settings = b"".join(
            SETTING.pack(key, value)
            for key, value in ((SETTING_PUSH, 0), (SETTING_WINDOW, WINDOW_MOST))
        )
        more = NUMBER.pack(2 * WINDOW_BYTES - WINDOW_FIRST)
        transport = self._transport
        transport.write(
            PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, more)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(str(exc) if exc else "the connection was closed")

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        try:
            while end - at >= HEAD_BYTES:
                high, low, kind, flags, number = HEAD.unpack_from(data, at)
                size = high << 16 | low
                if size > FRAME_BYTES_MAX:
                    raise Broken(0, f"a frame of {size} bytes")
                stop = at + HEAD_BYTES + size
                if stop > end:
                    break
                self._take(kind, flags, number & WINDOW_MOST, data[at + HEAD_BYTES : stop])
                at = stop
        except (Broken, HpackError, struct.error) as error:
            self.close(f"what it sent is not HTTP/2: {error}")
            return
        self._rest = data[at:] if at < end else b""
        if self._received >= WINDOW_BYTES and not self.closed:
            more, self._received = self._received, 0
            self._transport.write(frame(WINDOW_UPDATE, 0, 0, NUMBER.pack(more)))

    # ------------------------------------------------------------------ frames

    def _take(self, kind: int, flags: int, number: int, body: bytes) -> None:
        if kind == DATA:
            self._data(flags, number, body)
        elif kind == HEADERS:
            if flags & PADDED:
                body = unpadded(body)
            if flags & WITH_PRIORITY:
                body = body[5:]
            self._head(number, flags, body)
        elif kind == CONTINUATION and self._block is not None and self._block[0] == number:
            _, first, begun = self._block
            self._head(number, first | flags, begun + body)
        else:
            self._control(kind, flags, number, body)

    def _control(self, kind: int, flags: int, number: int, body: bytes) -> None:
        """What is not of an answer; what is unknown needs none."""
        if kind == WINDOW_UPDATE:
            self._more_window(number, NUMBER.unpack(body)[0] & WINDOW_MOST)
        elif kind == SETTINGS and not flags & ACK:
            self._settings(body)
        elif kind == PING and not flags & ACK:
            self._transport.write(frame(PING, ACK, 0, body))
        elif kind == RST_STREAM:
            call = self._calls.pop(number, None)
            if call is not None:
                self._fail(call, "it ended the call")
        elif kind == GOAWAY:
            self._leaving = True  # what has begun may end
            newest = NUMBER.unpack(body[:4])[0] & WINDOW_MOST
            for later in [n for n in self._calls if n > newest]:
                self._fail(self._calls.pop(later), "it is stopping")

    def _data(self, flags: int, number: int, body: bytes) -> None:
        self._received += len(body)
        call = self._calls.get(number)
        if call is None:
            return
        if flags & PADDED:
            body = unpadded(body)
        call.size += len(body)
        if call.size > MESSAGE_BYTES_MAX:
            raise Broken(0, f"an answer of over {MESSAGE_BYTES_MAX} bytes")
        call.parts.append(body)
        if flags & END_STREAM:
            self._fail(self._calls.pop(number), "its answer has no status")

    def _head(self, number: int, flags: int, block: bytes) -> None:
        if len(block) > HEADERS_BYTES_MAX:
            raise Broken(0, f"headers of over {HEADERS_BYTES_MAX} bytes")
        if not flags & END_HEADERS:
            self._block = (number, flags, block)
            return
        self._block = None
        headers = self._decoder.decode(block)  # also of calls that were given up: it has a memory
        if flags & END_STREAM:
            call = self._calls.pop(number, None)
            if call is not None and not call.done.done():
                self._answer(call, dict(headers))

    def _answer(self, call: _Call, headers: dict[bytes, bytes]) -> None:
        status = headers.get(b"grpc-status")
        if status == b"0":
            data = call.parts[0] if len(call.parts) == 1 else b"".join(call.parts)
            if len(data) < PREFIX.size or PREFIX.unpack_from(data) != (0, len(data) - PREFIX.size):
                self._fail(call, "its answer is not one message")
                return
            call.done.set_result(data[PREFIX.size :])
            return
        call.done.set_exception(self._error(status, headers))

    def _error(self, status: bytes | None, headers: dict[bytes, bytes]) -> ReadyplaneError:
        details = headers.get(DETAILS_KEY.encode())
        if details is not None:
            try:
                return error_from_status(base64.b64decode(details + b"=" * (-len(details) % 4)))
            except binascii.Error:
                pass  # then its code and text must do
        if status == _UNAUTHENTICATED:
            return Unauthenticated()
        text = unquote(headers.get(b"grpc-message", b"").decode("ascii", "replace"))
        code = "no gRPC" if status is None else f"code {status.decode('ascii', 'replace')}"
        what = f"{self._where} answered {code}: {text or 'no text'}"
        if status is None or status in _UNAVAILABLE:
            return Unavailable(what, "ask again, or later")
        return ReadyplaneError(what)

    def _settings(self, body: bytes) -> None:
        for key, value in SETTING.iter_unpack(body):
            if key == SETTING_WINDOW:
                for call in self._calls.values():
                    call.window += value - self._initial
                self._initial = value
            elif key == SETTING_FRAME:
                self._frame_bytes = max(FRAME_BYTES_MAX, value)
            elif key == SETTING_STREAMS:
                self._streams_max = value
            elif key == SETTING_TABLE and value < TABLE_BYTES:
                raise Broken(0, f"it remembers headers of {value} bytes only")
        self._transport.write(frame(SETTINGS, ACK, 0, b""))
        self._send_waiting()

    def _more_window(self, number: int, more: int) -> None:
        if number == 0:
            self._window += more
        else:
            call = self._calls.get(number)
            if call is not None:
                call.window += more
        self._send_waiting()
