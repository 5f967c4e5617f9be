"""HTTP/1.1 to engines: keep-alive connections by worker, answers as they come, bounds on all.

Owns connections and nothing of what is said over them. A general client wakes a coroutine several
times a chunk; here the parser hands bytes straight to whoever waits (measured: 45 instead of
59 µs of gateway CPU a streamed chunk, see the README). Every wait of an exchange has a bound that
one lazily renewed timer guards. Closing an unfinished exchange aborts its connection, which is how
an engine learns that nobody waits any more.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from typing import Self, cast
from urllib.parse import urlsplit

import httptools

from readyplane.kit.clock import Clock

BUFFERED_BYTES_MAX = 1024 * 1024
IDLE_CONNECTIONS_MAX = 64
HEADER_COUNT_MAX = 200
HEADS_MAX = 4096


class Trouble(StrEnum):
    """What can go wrong on the way to an engine and back."""

    FULL = "full"
    CONNECT = "connect"
    BROKEN = "broken"
    SLOW = "slow"
    TOO_LARGE = "too_large"


class EngineTrouble(Exception):
    """An exchange failed. `trouble` says how, the text says where and why."""

    def __init__(self, trouble: Trouble, why: str) -> None:
        self.trouble, self.why = trouble, why
        super().__init__(why)


class Exchange:
    """One request and its answer. Use as a context manager: leaving it gives the connection back,
    or aborts it when the answer is not complete.
    """

    __slots__ = (
        "_bound_s",
        "_closed",
        "_connection",
        "_deadline_s",
        "_doing",
        "_engines",
        "_error",
        "_held",
        "_pieces",
        "_request",
        "_stale",
        "_timer",
        "_waiter",
        "complete",
        "received",
        "status",
    )

    def __init__(self, engines: EngineHttp, connection: _Connection, request: bytes) -> None:
        self._engines = engines
        self._connection = connection
        self._request = request
        self._pieces: list[bytes] = []
        self._held = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: EngineTrouble | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = self._bound_s = 0.0
        self._doing = ""
        self._closed = self._stale = False
        self.status = 0
        self.complete = False
        self.received = False
        connection.send(self, request)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def within(self, bound_s: float, doing: str) -> None:
        """From now on the engine may be silent for `bound_s`; `doing` is said when it was not."""
        self._bound_s, self._doing = bound_s, doing
        self._deadline_s = self._engines.now_s() + bound_s
        if self._timer is not None:
            self._timer.cancel()
        self._arm(bound_s)

    async def head(self) -> int:
        """Wait for the status. Raises EngineTrouble.

        An engine may close an idle connection just as it is used again: then the request is sent
        once more on a new one. An engine that died instead refuses that.
        """
        while not self.status:
            try:
                await self._wait()
            except EngineTrouble:
                if not self._stale:
                    raise
                self._error, self._stale = None, False
                self._connection = await self._engines.replace(self._connection)
                self._connection.send(self, self._request)
        return self.status

    async def piece(self) -> bytes:
        """The bytes that have come since the last call, at least one; empty at the end.

        Raises:
            EngineTrouble: the connection broke or the engine was silent for too long.
        """
        while not self._pieces:
            if self.complete:
                return b""
            await self._wait()
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._held > BUFFERED_BYTES_MAX:
            self._connection.resume()
        self._held = 0
        return data

    async def whole(self, bytes_max: int) -> bytes:
        """The rest of the body. Raises EngineTrouble, also for one above `bytes_max`."""
        if self.complete and self._held <= bytes_max:  # most are there with their head
            return await self.piece()
        found: list[bytes] = []
        size = 0
        while data := await self.piece():
            size += len(data)
            if size > bytes_max:
                raise EngineTrouble(Trouble.TOO_LARGE, f"an answer of over {bytes_max} bytes")
            found.append(data)
        return b"".join(found)

    def close(self) -> None:
        """Give the connection back, or abort it. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._closed:
            self._closed = True
            self._engines.give_back(self._connection, complete=self.complete)

    def fail(self, error: EngineTrouble) -> None:
        """End it with an error, from outside: the worker is known to be gone."""
        self._stale = False  # what was given up is not sent again
        if not self.complete and self._error is None:
            self._error = error
            self._wake()

    # what the connection tells

    def on_lost(self, why: str) -> None:
        """The connection has ended, or what came over it cannot be read."""
        if not self.complete and self._error is None:
            self._stale = not self.received and self._connection.used > 1
            self._error = EngineTrouble(Trouble.BROKEN, why)
            self._wake()

    def on_head(self, status: int) -> None:
        """The status line has come."""
        self.status = status
        self._wake()

    def on_body(self, data: bytes) -> None:
        """Body bytes have come."""
        self._deadline_s = self._engines.now_s() + self._bound_s
        self._pieces.append(data)
        self._held += len(data)
        if self._held > BUFFERED_BYTES_MAX:
            self._connection.pause()
        self._wake()

    def on_end(self) -> None:
        """The answer is complete."""
        self.complete = True
        self._wake()

    async def _wait(self) -> None:
        self._raise_trouble()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if not self._pieces:
            self._raise_trouble()

    def _raise_trouble(self) -> None:
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _arm(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        left_s = self._deadline_s - self._engines.now_s()
        if self._pieces:  # the engine waits for us, not we for it
            left_s = max(left_s, self._bound_s)
        if left_s > 0.001:
            self._arm(left_s)
            return
        self._timer = None
        self.fail(
            EngineTrouble(Trouble.SLOW, f"{self._doing}: nothing came within {self._bound_s:.1f} s")
        )


class _Connection(asyncio.Protocol):
    """One TCP connection; serves one exchange after the other."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.exchange: Exchange | None = None
        self.used = 0
        self.closed = False
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._sized = False
        self._headers = 0
        self._reusable = False

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of no class of asyncio's
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.exchange is None:  # an answer that nobody asked for
            self.abort()
            return
        self.exchange.received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lost(f"what it sent is not HTTP/1.1 ({error})")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        exchange = self.exchange
        if exchange is not None and exchange.status and not self._sized and exc is None:
            exchange.on_end()  # a body that ends with its connection
            return
        self._lost("the connection was closed" + (f" ({exc})" if exc else ""))

    # httptools

    def on_header(self, name: bytes, _value: bytes) -> None:
        self._headers += 1
        if self._headers > HEADER_COUNT_MAX:
            raise httptools.HttpParserError("too many headers")
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._sized = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self.exchange is not None:
            self.exchange.on_head(status)

    def on_body(self, data: bytes) -> None:
        if self.exchange is not None:
            self.exchange.on_body(data)

    def on_message_complete(self) -> None:
        if self.exchange is None or not self.exchange.status:
            return  # 1xx: the answer proper follows
        self._reusable = self._parser.should_keep_alive()
        self.exchange.on_end()

    # ours

    @property
    def reusable(self) -> bool:
        """Whether the next exchange may use it."""
        return self._reusable and self._sized and not self.closed

    def send(self, exchange: Exchange, data: bytes) -> None:
        self.exchange = exchange
        self.used += 1
        self._sized = self._reusable = False
        self._headers = 0
        assert self._transport is not None
        self._transport.write(data)

    def pause(self) -> None:
        if self._transport is not None and not self.closed:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self.closed:
            self._transport.resume_reading()

    def abort(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def _lost(self, why: str) -> None:
        if self.exchange is not None:
            self.exchange.on_lost(why)


class EngineHttp:
    """Connections to all engines, each worker with its own pool and its own limit."""

    def __init__(self, clock: Clock, *, connections_max: int, connect_s_max: float) -> None:
        """`connections_max`: open requests to one worker."""
        self._clock = clock
        self._connections_max = connections_max
        self._connect_s_max = connect_s_max
        self._idle: dict[str, deque[_Connection]] = {}
        self._busy: dict[str, int] = {}
        self._tls: ssl.SSLContext | None = None

    def now_s(self) -> float:
        """The clock that judges every bound."""
        return self._clock.monotonic_s()

    def busy(self, url: str = "") -> int:
        """Open exchanges with one engine, or with all."""
        return self._busy.get(url, 0) if url else sum(self._busy.values())

    async def open(
        self,
        url: str,
        path: str,
        body: bytes,
        *,
        headers: Iterable[tuple[str, str]] = (),
        within_s: float,
        doing: str,
    ) -> Exchange:
        """Send a POST; the answer may be silent for `within_s` (see `Exchange.within`).

        Raises:
            EngineTrouble: FULL, CONNECT, or BROKEN.
        """
        if self._busy.get(url, 0) >= self._connections_max:
            why = f"{self._connections_max} requests to it are open already"
            raise EngineTrouble(Trouble.FULL, why)
        self._busy[url] = self._busy.get(url, 0) + 1
        try:
            connection = self._take_idle(url) or await self._connect(url)
        except BaseException:
            self._less_busy(url)
            raise
        exchange = Exchange(self, connection, _request(url, path, body, headers))
        exchange.within(within_s, doing)
        return exchange

    async def replace(self, connection: _Connection) -> _Connection:
        """A new connection in the place of one that was closed. Raises EngineTrouble."""
        return await self._connect(connection.key)

    def give_back(self, connection: _Connection, *, complete: bool) -> None:
        """Called by an exchange that ends, once."""
        connection.exchange = None
        self._less_busy(connection.key)
        idle = self._idle.setdefault(connection.key, deque())
        if complete and connection.reusable and len(idle) < IDLE_CONNECTIONS_MAX:
            idle.append(connection)
        else:
            connection.abort()

    def keep_only(self, urls: Iterable[str]) -> None:
        """Close idle connections to engines that are not among these any more."""
        for url in set(self._idle) - set(urls):
            for connection in self._idle.pop(url):
                connection.abort()

    def close(self) -> None:
        """Close what is idle; open exchanges belong to their requests."""
        self.keep_only(())

    def _take_idle(self, url: str) -> _Connection | None:
        idle = self._idle.get(url)
        while idle:
            connection = idle.pop()
            if not connection.closed:
                return connection
        return None

    def _less_busy(self, url: str) -> None:
        left = self._busy.get(url, 0) - 1
        if left > 0:
            self._busy[url] = left
        else:
            self._busy.pop(url, None)

    async def _connect(self, url: str) -> _Connection:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        if secure and self._tls is None:
            self._tls = ssl.create_default_context()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s_max):
                _, connection = await loop.create_connection(
                    lambda: _Connection(url),
                    parts.hostname or "",
                    parts.port or (443 if secure else 80),
                    ssl=self._tls if secure else None,
                )
        except TimeoutError as error:
            why = f"no connection within {self._connect_s_max:.1f} s"
            raise EngineTrouble(Trouble.CONNECT, why) from error
        except (OSError, ValueError) as error:
            raise EngineTrouble(Trouble.CONNECT, f"no connection ({error})") from error
        return connection


@lru_cache(maxsize=HEADS_MAX)
def _head(url: str, path: str) -> str:
    """What all requests to one path of an engine begin with."""
    parts = urlsplit(url)
    return (
        f"POST {parts.path.rstrip('/')}{path} HTTP/1.1\r\nhost: {parts.netloc}\r\n"
        "content-type: application/json\r\ncontent-length: "
    )


def _request(url: str, path: str, body: bytes, headers: Iterable[tuple[str, str]]) -> bytes:
    more = "".join([f"\r\n{name}: {value}" for name, value in headers])
    return f"{_head(url, path)}{len(body)}{more}\r\n\r\n".encode("latin-1") + body
