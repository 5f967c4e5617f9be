"""Bytes of the arena out of a connection, by threads of their own.

Owns the sending itself: `sendfile` in a few threads that the event loop does not wait for, so that
one source gives as fast as its cores can and answers everything else meanwhile. While the worker
serves these threads take only the processor time that nobody else wants (SCHED_IDLE, R9.1). How much
may go, and when, is `transfer`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

from readyplane.kit.clock import Clock

TURN_US = 500_000


class Sending:
    """The threads of one agent's door.

    Args:
        clock: for the time limit of a piece. threads_max: pieces that go out side by side; a reader
            that takes nothing holds one of them.

    Attributes:
        threads: where the pieces are sent.
    """

    def __init__(self, clock: Clock, *, threads_max: int) -> None:
        self._clock = clock
        self.threads = ThreadPoolExecutor(max(1, threads_max), thread_name_prefix="give")

    async def send(
        self,
        writer: asyncio.StreamWriter,
        source: int,
        at: int,
        size: int,
        *,
        head: bytes,
        limit_s: float,
        yielding: bool,
    ) -> None:
        """`size` bytes of the file `source` from `at` on.

        Args:
            head: goes before them, in the same segment: a reader wakes once.
            source: a descriptor that can be read until this returns. limit_s: for all of them.
            yielding: others come first on this machine's processors.

        Raises:
            ConnectionError: the reader is gone. TimeoutError: it took too long.
        """
        await writer.drain()  # nothing of an earlier answer is left in the transport
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        # A descriptor of our own: the transport may be closed, and its number given away, meanwhile.
        door = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        file = os.dup(source)
        left = threading.Event()
        # The loop keeps its hands off, so that the thread may block: one call then sends a whole
        # piece, where a socket that does not block would wake it for every segment.
        transport.pause_reading()
        door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, TURN_US))
        work = asyncio.get_running_loop().run_in_executor(
            self.threads, self._give, door, head, file, at, size, limit_s, left, yielding
        )
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            left.set()
            with contextlib.suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)  # wakes the thread
            with contextlib.suppress(OSError):
                await work
            raise
        finally:
            door.close()
            os.close(file)
            if not transport.is_closing():
                transport.resume_reading()

    def _give(
        self,
        door: socket.socket,
        head: bytes,
        file: int,
        at: int,
        size: int,
        limit_s: float,
        left: threading.Event,
        yielding: bool,
    ) -> None:
        _yield_to_others(yielding)
        until_s = self._clock.monotonic_s() + limit_s
        end = at + size
        door.setblocking(True)
        try:
            if head:
                door.sendall(head, socket.MSG_MORE)
            while at < end:
                if left.is_set():
                    raise ConnectionAbortedError("nobody waits for it any more")
                try:
                    sent = os.sendfile(door.fileno(), file, at, end - at)
                except BlockingIOError:  # nothing was taken for the whole turn
                    if self._clock.monotonic_s() > until_s:
                        raise TimeoutError(f"{end - at} B not taken in {limit_s:g} s") from None
                    continue
                if sent == 0:
                    raise ConnectionResetError("the arena ended early")
                at += sent
        finally:
            door.setblocking(False)

    def close(self) -> None:
        """No more pieces; those that go on end with their connections."""
        self.threads.shutdown(wait=False, cancel_futures=True)


_told = threading.local()


def _yield_to_others(yielding: bool) -> None:
    """The scheduling of this thread; without the right to it (a sandbox) it stays as it is."""
    if getattr(_told, "yielding", False) == yielding:
        return
    _told.yielding = yielding
    policy = os.SCHED_IDLE if yielding else os.SCHED_OTHER
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(0))
