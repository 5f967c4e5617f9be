"""Bytes of the arena out of a connection, by threads of their own.

Owns the sending itself: `sendfile` in a few threads that the event loop does not wait for, so that
one source gives as fast as its cores can and answers everything else meanwhile. While the worker
serves these threads take only the processor time that nobody else wants (SCHED_IDLE, R9.1), and hand
the kernel little at a time: inside it they are not preempted. How much may go, and when, is
`transfer`'s.
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
# A reader that takes nothing for so long gives its place to others.
STALL_LIMIT_S = 15.0
# Most that one call sends while others come first. On loopback 1 MiB kept a core for 0.25 to 0.7 ms,
# which a KV transfer of 4 ms shows.
YIELDING_BYTES_MAX = 128 * 1024


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
            ConnectionError: the reader is gone. TimeoutError: it took too long, or nothing for
                STALL_LIMIT_S.
        """
        await writer.drain()  # nothing of an earlier answer is left in the transport
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        door, file = _own(writer, source)
        left = threading.Event()
        # The loop keeps its hands off, so that the thread may block: one call then sends a whole
        # piece, where a socket that does not block would wake it for every segment.
        transport.pause_reading()
        try:
            job = self.threads.submit(
                self._give, door, head, file, at, size, limit_s, left, yielding
            )
        except RuntimeError as error:  # closed meanwhile
            door.close()
            os.close(file)
            raise ConnectionAbortedError("this door is closed") from error
        work = asyncio.wrap_future(job)
        # Theirs until the thread is done with them, however this coroutine ends: a number that was
        # closed too early may be somebody else's file by then.
        work.add_done_callback(lambda _: _give_back(door, file))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            left.set()
            with contextlib.suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)  # wakes the thread
            if not job.cancel():  # a piece that waits for a thread needs none any more
                with contextlib.suppress(OSError):
                    await asyncio.shield(work)
            raise
        finally:
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
        taken_s = self._clock.monotonic_s()
        until_s = taken_s + limit_s
        end = at + size
        once = YIELDING_BYTES_MAX if yielding else size
        door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, TURN_US))
        door.setblocking(True)
        try:
            while head or at < end:
                if left.is_set():
                    raise ConnectionAbortedError("nobody waits for it any more")
                try:
                    if head:
                        head = head[door.send(head, socket.MSG_MORE) :]
                        continue
                    sent = os.sendfile(door.fileno(), file, at, min(once, end - at))
                except BlockingIOError:  # nothing was taken for the whole turn
                    now_s = self._clock.monotonic_s()
                    if now_s > min(until_s, taken_s + STALL_LIMIT_S):
                        late = f"{end - at} B not taken in {now_s - until_s + limit_s:.0f} s"
                        raise TimeoutError(late) from None
                    continue
                if sent == 0:
                    raise ConnectionResetError("the arena ended early")
                at, taken_s = at + sent, self._clock.monotonic_s()
                if taken_s > until_s and at < end:
                    raise TimeoutError(f"{end - at} B not taken in {limit_s:g} s")
        finally:
            door.setblocking(False)

    def close(self) -> None:
        """No more pieces; those that go on end with their connections."""
        self.threads.shutdown(wait=False, cancel_futures=True)


def _own(writer: asyncio.StreamWriter, source: int) -> tuple[socket.socket, int]:
    """Connection and file under descriptors of our own: the transport may be closed meanwhile.

    Raises:
        ConnectionError: the connection or the file is closed, or this process has no descriptors.
    """
    try:
        door = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
    except OSError as error:
        raise ConnectionResetError(f"the reader is gone ({error})") from error
    try:
        return door, os.dup(source)
    except OSError as error:
        door.close()
        raise ConnectionAbortedError(f"the arena cannot be read ({error})") from error


def _give_back(door: socket.socket, file: int) -> None:
    door.close()
    os.close(file)


_told = threading.local()


def _yield_to_others(yielding: bool) -> None:
    """The scheduling of this thread; without the right to it (a sandbox) it stays as it is."""
    if getattr(_told, "yielding", False) == yielding:
        return
    _told.yielding = yielding
    policy = os.SCHED_IDLE if yielding else os.SCHED_OTHER
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(0))
