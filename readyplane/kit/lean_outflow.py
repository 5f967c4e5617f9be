"""What goes to one client of the lean gRPC server: both windows, and what they do not let through yet.

Owns flow control towards the client and the streams' unsent bytes; `readyplane.kit.lean_rpc` hands it
answers and the client's settings.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from readyplane.core.errors import ReadyplaneError, Unavailable
from readyplane.kit.lean_frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME_BYTES_MAX,
    FRAME_SIZE_ERROR,
    HEADERS,
    NUMBER,
    OK_HEADERS,
    OK_TRAILERS,
    PREFIX,
    SETTING,
    SETTING_FRAME,
    SETTING_WINDOW,
    SETTINGS,
    WINDOW_FIRST,
    WINDOW_MOST,
    Broken,
    frame,
)

UNREAD_BYTES_MAX = 1024 * 1024


class Message(Protocol):
    """What a protobuf message can do, as far as it is needed here."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Its bytes."""


Call = Callable[[Any], Awaitable[Message | None]]
Say = Callable[[Message], None]


@dataclass(frozen=True, slots=True)
class Method:
    """A unary method (`call`: a request to its answer), or a conversation (`talk`).

    `talk`: made for each stream of requests, from what sends a message down it unasked; each request
    is answered in its turn, or not where what was made says None.
    """

    parse: Callable[[bytes], Any]
    call: Call | None = None
    talk: Callable[[Say], Call] | None = None


@dataclass(slots=True)
class Stream:
    """One call of a client, from its headers to the last byte of its answer."""

    method: Method | None
    refusal: ReadyplaneError | None
    window: int
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    task: asyncio.Task[None] | None = None
    unsent: bytes = b""
    trailers: bytes = b""
    inbox: deque[bytes] = field(default_factory=deque)
    call: Call | None = None
    greeted: bool = False
    over: bool = False
    received: int = 0

    @property
    def talks(self) -> bool:
        """Whether it is a conversation."""
        return self.refusal is None and self.method is not None and self.method.talk is not None


class Outflow:
    """What is sent to one client.

    Attributes:
        answered: how many messages were sent, or calls ended.
        initial: bytes that a new stream may send.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        streams: dict[int, Stream],
        drop: Callable[[int], Stream | None],
    ) -> None:
        """`streams`: of the connection, shared with it; `drop` forgets one that has ended."""
        self._transport = transport
        self._streams = streams
        self._drop = drop
        self._window = self.initial = WINDOW_FIRST
        self._frame_bytes = FRAME_BYTES_MAX
        self._waiting: deque[int] = deque()  # streams with something unsent
        self.answered = 0

    def settings(self, flags: int, body: bytes) -> None:
        """What the client asks for.

        Raises:
            Broken: it is no setting, or too large.
        """
        if flags & ACK:
            return
        if len(body) % SETTING.size:
            raise Broken(FRAME_SIZE_ERROR, "settings have 6 bytes each")
        for key, value in SETTING.iter_unpack(body):
            if key == SETTING_WINDOW:
                if value > WINDOW_MOST:
                    raise Broken(FLOW_CONTROL_ERROR, "a window is too large")
                for stream in self._streams.values():
                    stream.window += value - self.initial
                self.initial = value
            elif key == SETTING_FRAME:
                self._frame_bytes = max(FRAME_BYTES_MAX, value)
        self._transport.write(frame(SETTINGS, ACK, 0, b""))
        self._send_waiting()

    def more_window(self, number: int, body: bytes) -> None:
        """The client has read so much, of one stream or of all.

        Raises:
            Broken: it is no number, or too large.
        """
        if len(body) != NUMBER.size:
            raise Broken(FRAME_SIZE_ERROR, "a window update has 4 bytes")
        more = NUMBER.unpack(body)[0] & WINDOW_MOST
        if number == 0:
            self._window += more
            if not more or self._window > WINDOW_MOST:
                raise Broken(FLOW_CONTROL_ERROR, "a window is too large, or does not grow")
        else:
            stream = self._streams.get(number)
            if stream is not None:
                stream.window += more
        self._send_waiting()

    def say(self, number: int, stream: Stream, message: bytes) -> None:
        """One message down a conversation, as soon as the windows let it.

        Raises:
            Unavailable: too much of what was said before is not read.
        """
        if number not in self._streams or self._transport.is_closing():
            return
        self.answered += 1
        if not stream.greeted:
            stream.greeted = True
            self._transport.write(frame(HEADERS, END_HEADERS, number, OK_HEADERS))
        body = PREFIX.pack(0, len(message)) + message
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

    def answer(self, number: int, stream: Stream, message: bytes) -> None:
        """The one answer of a call, and its end."""
        if number not in self._streams or self._transport.is_closing():
            return
        self.answered += 1
        body = PREFIX.pack(0, len(message)) + message
        size = len(body)
        head = frame(HEADERS, END_HEADERS, number, OK_HEADERS)
        tail = frame(HEADERS, END_HEADERS | END_STREAM, number, OK_TRAILERS)
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
