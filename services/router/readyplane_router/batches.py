"""Many routes in one message, and routes over a stream: the shapes in which others call `route`.

Owns what belongs to the message and not to the request: that each element has an answer of its own,
in what order answers go, and how much may be under way. Every element is one call of the service, as
if it had come alone; bookings that are made together share their round trip in the store.

A pair whose caller was gone before the answer is not given back here, as a call that was asked again
may just have been answered with it: whoever gives up tells so, or the reservation runs out.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

from readyplane import wire
from readyplane.core.errors import InvalidField, ReadyplaneError
from readyplane.core.work import RequestEvent
from readyplane.ports import Pair
from readyplane.v1 import router_pb2 as pb

BATCH_REQUESTS_MAX = 256
STREAM_REQUESTS_MAX = 4_096

log = logging.getLogger(__name__)

Route = Callable[[pb.RouteRequest], Awaitable[Pair]]
Complete = Callable[[Sequence[RequestEvent]], Awaitable[int]]


class Batches:
    """`RouteBatch` and `RouteStream` over `route` and `complete` of one router."""

    def __init__(self, route: Route, complete: Complete) -> None:
        """`route`: one request to its answer. `complete`: facts to how many nobody knows."""
        self._route = route
        self._complete = complete

    async def batch(self, request: pb.RouteBatchRequest) -> pb.RouteBatchResponse:
        """All of them, answered together and in their order.

        Raises:
            InvalidField: none or too many.
        """
        count = len(request.requests)
        if not 1 <= count <= BATCH_REQUESTS_MAX:
            raise InvalidField("requests", count, f"give 1 to {BATCH_REQUESTS_MAX} in a batch")
        return pb.RouteBatchResponse(
            results=await asyncio.gather(*map(self._result, request.requests))
        )

    async def stream(
        self, messages: AsyncIterator[pb.RouteStreamRequest]
    ) -> AsyncGenerator[pb.RouteStreamResponse]:
        """Answers as they are found; what is found together goes together."""
        line = _Line(self._result, self._complete)
        reading = asyncio.ensure_future(line.read(messages))
        try:
            while True:
                answer = await line.next()
                if answer is None:
                    break
                yield answer
            await reading  # whatever ended it
        finally:
            reading.cancel()
            line.stop()

    async def _result(self, request: pb.RouteRequest) -> pb.RouteResult:
        """The answer to one request, an error too."""
        found: Pair | ReadyplaneError
        try:
            found = await self._route(request)
        except ReadyplaneError as error:
            found = error
        except Exception as error:
            number = secrets.token_hex(6)
            log.exception("unexpected error in a route of a batch", extra={"error_id": number})
            text = f"unexpected {type(error).__name__}, logged under error_id {number}"
            found = ReadyplaneError(text)
        return wire.route_result_to_proto(found, request_id=request.request_id)


Result = Callable[[pb.RouteRequest], Awaitable[pb.RouteResult]]


class _Line:
    """What is under way on one stream."""

    def __init__(self, result: Result, complete: Complete) -> None:
        self._result = result
        self._complete = complete
        self._results: list[pb.RouteResult] = []
        self._applied = self._unknown = 0
        self._error = b""
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._read_all = False

    async def read(self, messages: AsyncIterator[pb.RouteStreamRequest]) -> None:
        """Begin what is asked for; not read on while too much is under way."""
        try:
            async for message in messages:
                if message.events:
                    self._begin(self._apply(message.events))
                requests = message.requests
                if len(requests) > BATCH_REQUESTS_MAX:
                    remedy = f"give at most {BATCH_REQUESTS_MAX} in one message"
                    raise InvalidField("requests", len(requests), remedy)
                for request in requests:
                    self._begin(self._one(request))
                while len(self._tasks) >= STREAM_REQUESTS_MAX:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._read_all = True
            self._news.set()

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("unexpected error on a stream of routes", exc_info=task.exception())
        self._room.set()
        self._news.set()

    async def _one(self, request: pb.RouteRequest) -> None:
        found = await self._result(request)
        self._results.append(found)  # looked up now: an answer may have taken the others meanwhile

    async def _apply(self, events: Sequence[pb.RequestEvent]) -> None:
        try:
            told = [wire.request_event_from_proto(event) for event in events]
            unknown = await self._complete(told)
            self._unknown += unknown
            self._applied += len(told)
        except ReadyplaneError as error:
            self._error = wire.error_to_status(error).SerializeToString()

    async def next(self) -> pb.RouteStreamResponse | None:
        """What is known since the last answer; None at the end."""
        while not (self._results or self._applied or self._error):
            if self._read_all and not self._tasks:
                return None
            self._news.clear()
            await self._news.wait()
        answer = pb.RouteStreamResponse(
            results=self._results,
            applied=self._applied,
            unknown=self._unknown,
            error_status=self._error,
        )
        self._results = []
        self._applied = self._unknown = 0
        self._error = b""
        return answer

    def stop(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()
