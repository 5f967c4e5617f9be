"""Workers' sessions as they come over gRPC: renewals up, answers down, and words that nobody asked for.

Owns what one stream says when: each renewal's answer, unless it was asked to be quiet and there is
nothing to do, and what the router wants of the worker as soon as it wants it. Whatever is lost comes
with the next answer, so that of answers which are not read the newest are kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from readyplane import wire
from readyplane.ports import RenewalAnswer
from readyplane.v1 import router_pb2 as pb
from readyplane_router.service import RouterService

UNREAD_MAX = 64
"""Answers of one stream that wait to be sent."""

Say = Callable[[pb.SessionResponse], None]
Renewed = Callable[[pb.SessionRequest], Awaitable[pb.SessionResponse | None]]


class Sessions:
    """The sessions of one router."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    def begin(self, say: Say) -> Renewed:
        """One stream: what answers each of its messages, None where there is nothing to say.

        Args:
            say: sends something down the stream unasked, if it is still open. Never raises.
        """

        def told(answer: RenewalAnswer) -> None:
            say(wire.renewal_answer_to_proto(answer, unasked=True))

        async def renewed(message: pb.SessionRequest) -> pb.SessionResponse | None:
            renewal = wire.renewal_from_proto(message)
            answer = await self._service.renew(renewal)
            self._service.hear(renewal.worker_id, renewal.incarnation, told)
            if renewal.quiet and not answer.directives:
                return None
            return wire.renewal_answer_to_proto(answer, number=message.number)

        return renewed

    async def stream(
        self, messages: AsyncIterator[pb.SessionRequest]
    ) -> AsyncGenerator[pb.SessionResponse]:
        """One stream of a server that sends what is yielded; raises what ends the session."""
        said: deque[pb.SessionResponse] = deque(maxlen=UNREAD_MAX)
        came = asyncio.Event()

        def say(message: pb.SessionResponse) -> None:
            said.append(message)
            came.set()

        renewed = self.begin(say)

        async def read() -> None:
            async for message in messages:
                answer = await renewed(message)
                if answer is not None:
                    say(answer)

        reading = asyncio.ensure_future(read())
        reading.add_done_callback(lambda _: came.set())
        try:
            while True:
                over = reading.done()  # whatever it has said lies there by now
                while said:
                    yield said.popleft()
                if over:
                    break
                await came.wait()
                came.clear()
            await reading
        finally:
            reading.cancel()
            await asyncio.wait([reading])
