"""One connection to Redis for many calls at once: the way of the router's script calls.

Owns the order of answers. A client's pool lends a connection for each command and waits for its
answer; here commands are written as they come and answers are handed out in the same order, so that
calls under way together share their round trip. A call that is given up leaves its answer to be
thrown away; a connection that stays silent for `silent_s` is dropped, with every call on it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Any

from hiredis import pack_command
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import RedisError, ResponseError

from readyplane.kit.redis import Bounded


class Channel:
    """Calls over one connection, made like those of `client`'s pool at the first call.

    `life`: the server that may be called, by its run id; another one is refused, so that a server
    that was restarted is never asked to compare with what it has forgotten. Empty: any.
    """

    def __init__(self, client: Redis, *, silent_s: float) -> None:
        """`silent_s`: how long an answer may take."""
        self.life = ""
        self._client = client
        self._silent_s = silent_s
        self._line: _Line | None = None
        self._opening = asyncio.Lock()

    async def call(self, *command: Any) -> Any:
        """Send one command, return its answer.

        Raises:
            redis.exceptions.ResponseError: Redis refused it. RedisError, OSError, TimeoutError:
                there was no answer, and nobody knows whether it was done.
        """
        line = self._line
        try:
            async with Bounded(self._silent_s):
                if line is None or not line.usable:
                    line = await self._open()
                return await line.call(command)
        except TimeoutError:
            if line is not None:
                await self._drop(line)
            raise

    async def aclose(self) -> None:
        """Close the connection; a later call opens another."""
        if self._line is not None:
            await self._drop(self._line)

    async def _open(self) -> _Line:
        async with self._opening:
            if self._line is None or not self._line.usable:
                if self._line is not None:
                    await self._drop(self._line)
                connection: AbstractConnection
                connection = self._client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
                try:
                    await connection.connect()  # type: ignore[no-untyped-call]
                    await self._check_life(connection)
                except BaseException:
                    await connection.disconnect(nowait=True)
                    raise
                connection.socket_timeout = None  # each call has its own
                self._line = _Line(connection)
            return self._line

    async def _check_life(self, connection: AbstractConnection) -> None:
        if not self.life:
            return
        await connection.send_command("INFO", "server")
        told = await connection.read_response()
        if f"run_id:{self.life}".encode() not in bytes(told):
            raise NotConnected("another life of the server answers, which has yet to be told")

    async def _drop(self, line: _Line) -> None:
        if self._line is line:
            self._line = None
        await line.aclose()


class _Line:
    """An open connection and who waits for its answers, in order."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._broken = False
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @property
    def usable(self) -> bool:
        """Whether commands may be written."""
        return not self._broken and self._connection.is_connected

    async def call(self, command: tuple[Any, ...]) -> Any:
        """Write one command and wait for its answer."""
        answer = asyncio.get_running_loop().create_future()
        packed = pack_command(command)
        self._waiting.append(answer)  # nothing is awaited between this and the writing
        try:
            await self._connection.send_packed_command([packed], check_health=False)
        except BaseException:
            self._broken = True  # perhaps half written
            raise
        return await answer

    async def aclose(self) -> None:
        """Close it; whoever still waits is told."""
        self._broken = True
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        why: Exception = NotConnected("the connection was closed")
        try:
            while True:
                try:
                    answer = await self._connection.read_response(
                        timeout=math.inf, disconnect_on_error=False
                    )
                except ResponseError as error:
                    self._hand_out(error)
                else:
                    self._hand_out(answer)
        except (RedisError, OSError) as error:
            why = error
        finally:
            self._broken = True
            while self._waiting:
                self._hand_out(why)
            await self._connection.disconnect(nowait=True)

    def _hand_out(self, answer: Any) -> None:
        future = self._waiting.popleft()
        if future.done():  # its caller has given up
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
