"""The leanest clients: prepared bytes over plain sockets, for HTTP/1.1 and for gRPC.

What measures a server must not be what is measured. A general HTTP or gRPC client in Python costs
more than either server here, so both sides get the same: an epoll loop, one connection a lane, bodies
made beforehand, and no more of an answer read than says that it is complete and no error.

A lane is a generator: it yields what is to be sent and is resumed with the answer.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Generator, Sequence
from typing import Protocol

WAIT_S_MAX = 20.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW = 65_535
OWN_WINDOW = 1 << 30
STATIC_METHOD_POST, STATIC_SCHEME_HTTP = b"\x83", b"\x86"
DYNAMIC_FIRST = 62


class Talk(Protocol):
    """One connection: what is sent becomes bytes, bytes become an answer."""

    def send(self, *parts: bytes) -> None:
        """Begin a call."""

    unsent: memoryview

    def flush(self) -> None:
        """Send on what did not fit."""

    def ready(self) -> bytes | None:
        """Read what is there; the answer once it is complete."""

    def fileno(self) -> int:
        """Of its socket."""

    def close(self) -> None:
        """End the connection."""


class _Wire:
    """A socket that takes what fits and keeps the rest."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.unsent = memoryview(b"")
        self.begun = b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def write(self, data: bytes) -> None:
        """Send what fits; the rest when there is room."""
        self.unsent = memoryview(bytes(self.unsent) + data) if self.unsent else memoryview(data)
        self.flush()

    def flush(self) -> None:
        """Send on."""
        try:
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            pass

    def read(self) -> bytes:
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return b""
        if not data:
            raise ConnectionError("the server closed the connection")
        return data


class Http(_Wire):
    """HTTP/1.1, one call after the other."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._host = address.encode()

    def head(self, method: bytes, path: bytes, length: int) -> bytes:
        """The head of a request with a JSON body."""
        body = (
            b"content-type: application/json\r\ncontent-length: %d\r\n" % length if length else b""
        )
        return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (method, path, self._host, body)

    def send(self, *parts: bytes) -> None:
        self.write(b"".join(parts))

    def ready(self) -> bytes | None:
        self.begun += self.read()
        at = self.begun.find(b"\r\n\r\n")
        if at < 0:
            return None
        head = self.begun[:at].lower()
        place = head.find(b"content-length:")
        length = int(head[place + 15 :].split(b"\r", 1)[0]) if place >= 0 else 0
        if len(self.begun) < at + 4 + length:
            return None
        answer, self.begun = self.begun[at + 4 : at + 4 + length], self.begun[at + 4 + length :]
        if not head.startswith(b"http/1.1 2"):
            raise RuntimeError(f"{head[:40]!r}: {answer[:300]!r}")
        return answer


class Grpc(_Wire):
    """HTTP/2 with one stream at a time; calls of one method each, message for message."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._stream = -1
        self._window = INITIAL_WINDOW
        self._stream_window = self._initial = INITIAL_WINDOW
        self._frame = 16_384
        self._pending = memoryview(b"")
        self._known: list[tuple[bytes, bytes]] = []
        self._answer = b""
        self._address = address.encode()
        settings = struct.pack("!HI", 4, (1 << 31) - 1) + struct.pack("!HI", 2, 0)
        self.write(
            PREFACE
            + _frame(SETTINGS, 0, 0, settings)
            + _frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", OWN_WINDOW))
        )

    def send(self, *parts: bytes) -> None:
        """`parts`: the path of the method, then the message."""
        path, *message = parts
        self._stream += 2
        self._stream_window, self._answer = self._initial, b""
        size = sum(map(len, message))
        self._pending = memoryview(b"".join((b"\0", struct.pack("!I", size), *message)))
        head = _frame(HEADERS, END_HEADERS, self._stream, self._headers(path))
        self._flow(head)

    def _headers(self, path: bytes) -> bytes:
        """Written out once a connection, then one byte each."""
        out = [STATIC_METHOD_POST, STATIC_SCHEME_HTTP]
        for name, value, index in (
            (b":path", path, 4),
            (b":authority", self._address, 1),
            (b"content-type", b"application/grpc", 31),
            (b"te", b"trailers", 0),
        ):
            if (name, value) in self._known:
                place = len(self._known) - 1 - self._known.index((name, value))
                out.append(bytes((0x80 | (DYNAMIC_FIRST + place),)))
                continue
            self._known.append((name, value))
            text = b"" if index else bytes((len(name),)) + name
            out.append(bytes((0x40 | index,)) + text + bytes((len(value),)) + value)
        return b"".join(out)

    def _flow(self, out: bytes = b"") -> None:
        """Send as much of the message as both windows let through."""
        parts: list[bytes | memoryview] = [out]
        while self._pending:
            size = min(len(self._pending), self._frame, self._window, self._stream_window)
            if size <= 0:
                break
            piece, self._pending = self._pending[:size], self._pending[size:]
            self._window -= size
            self._stream_window -= size
            parts.append(_head(DATA, 0 if self._pending else END_STREAM, self._stream, size))
            parts.append(piece)
        data = b"".join(parts)
        if data:
            self.write(data)

    def ready(self) -> bytes | None:
        self.begun += self.read()
        data, at, done = self.begun, 0, False
        while len(data) - at >= 9:
            size = int.from_bytes(data[at : at + 3], "big")
            if len(data) - at < 9 + size:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            done = self._frame_of(kind, flags, stream, data[at + 9 : at + 9 + size]) or done
            at += 9 + size
        self.begun = data[at:]
        if self._pending:
            self._flow()
        if not done:
            return None
        if len(self._answer) < 5:
            raise RuntimeError("a call ended without a message: it failed")
        return self._answer[5:]

    def _frame_of(self, kind: int, flags: int, stream: int, body: bytes) -> bool:
        """Whether the call under way has ended."""
        if kind == DATA:
            self._answer += body
            return bool(flags & END_STREAM)
        if kind == HEADERS:
            return bool(flags & END_STREAM)
        if kind == WINDOW_UPDATE:
            more = int.from_bytes(body, "big")
            if stream == 0:
                self._window += more
            elif stream == self._stream:
                self._stream_window += more
        elif kind == SETTINGS and not flags & ACK:
            for place in range(0, len(body), 6):
                key, value = struct.unpack("!HI", body[place : place + 6])
                if key == 4:
                    self._stream_window += value - self._initial
                    self._initial = value
                elif key == 5:
                    self._frame = value
            self.write(_frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self.write(_frame(PING, ACK, 0, body))
        elif kind == GOAWAY:
            raise ConnectionError(f"the server said good-bye: {body[8:]!r}")
        return False


Lane = Generator[tuple[bytes, ...], bytes, None]


def drive(lanes: Sequence[tuple[Talk, Lane]]) -> float:
    """Run lanes to their end over their connections; seconds from the first byte to the last."""
    poll = select.epoll()
    going: dict[int, tuple[Talk, Lane]] = {}
    sending: set[int] = set()
    try:
        for talk, lane in lanes:
            poll.register(talk.fileno(), select.EPOLLIN)
            going[talk.fileno()] = (talk, lane)
        began_s = time.perf_counter()
        for number, (talk, lane) in list(going.items()):
            _step(talk, lane, None, going)
            if talk.unsent:
                poll.modify(number, select.EPOLLIN | select.EPOLLOUT)
                sending.add(number)
        while going:
            found = poll.poll(WAIT_S_MAX)
            if not found:
                raise TimeoutError(f"no answer within {WAIT_S_MAX} s")
            for number, what in found:
                if number not in going:
                    continue
                talk, lane = going[number]
                if what & select.EPOLLOUT:
                    talk.flush()
                answer = talk.ready() if what & ~select.EPOLLOUT else None
                if answer is not None:
                    _step(talk, lane, answer, going)
                if bool(talk.unsent) != (number in sending):
                    more = select.EPOLLOUT if talk.unsent else 0
                    poll.modify(number, select.EPOLLIN | more)
                    sending ^= {number}
        return time.perf_counter() - began_s
    finally:
        poll.close()


def _step(
    talk: Talk, lane: Lane, answer: bytes | None, going: dict[int, tuple[Talk, Lane]]
) -> None:
    try:
        parts = next(lane) if answer is None else lane.send(answer)
    except StopIteration:
        del going[talk.fileno()]
        return
    talk.send(*parts)


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return _head(kind, flags, stream, len(body)) + body


def _head(kind: int, flags: int, stream: int, size: int) -> bytes:
    return size.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
