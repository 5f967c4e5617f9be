"""ZMQ sockets on the event loop, without zmq.asyncio (which would import half of it again).

Owns the care that ZMQ's edge-triggered descriptor needs: after every wake-up and every send the
socket is read until it is empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq


class Mailbox:
    """A bound or connected socket whose messages go to `on_message(frames)`."""

    def __init__(
        self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None] | None = None
    ) -> None:
        self._socket, self._on_message = socket, on_message
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._fd = int(socket.getsockopt(zmq.FD))
        if on_message is not None:
            self._loop.add_reader(self._fd, self._drain)
            self._loop.call_soon(self._drain)

    def send(self, frames: list[bytes]) -> bool:
        """Hand over a message; False when the peer's queue is full or nobody is there."""
        if self._closed:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        finally:
            if self._on_message is not None:
                self._loop.call_soon(self._drain)
        return True

    def _drain(self) -> None:
        while not self._closed and self._on_message is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(frames)

    def close(self) -> None:
        """Let go of the socket at once."""
        if not self._closed:
            self._closed = True
            if self._on_message is not None:
                self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)


def bind(socket: zmq.Socket[bytes], host: str, port: int) -> int:
    """Bind to a port (0: a free one) and return it. Raises OSError."""
    where = "*" if host == "0.0.0.0" else host
    try:
        socket.bind(f"tcp://{where}:{port or '*'}")
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"cannot bind tcp://{where}:{port}: {error}") from error
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.rstrip(b"\0").rpartition(b":")[2])
