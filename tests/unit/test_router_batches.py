"""A stream of routes: who is answered later than others is answered, and facts are counted once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from readyplane.core.errors import NoPair
from readyplane.core.work import RequestEvent
from readyplane.ports import Pair
from readyplane.v1 import router_pb2 as pb
from readyplane_router.batches import Batches


class Gates:
    """Routes and completions that end when they are let go."""

    def __init__(self) -> None:
        self.open = {name: asyncio.Event() for name in ("r1", "r2", "now", "later")}

    async def route(self, request: pb.RouteRequest) -> Pair:
        await self.open[request.request_id].wait()
        raise NoPair("nobody is ready", 1.0)

    async def complete(self, events: Sequence[RequestEvent]) -> int:
        await self.open[events[0].reservation_id].wait()
        return len(events)


async def said(*messages: pb.RouteStreamRequest) -> AsyncIterator[pb.RouteStreamRequest]:
    for message in messages:
        yield message


async def test_a_route_that_ends_after_an_answer_was_sent_is_answered_too() -> None:
    gates = Gates()
    asked = [pb.RouteRequest(request_id=name) for name in ("r1", "r2")]
    answers = Batches(gates.route, gates.complete).stream(
        said(pb.RouteStreamRequest(requests=asked))
    )
    gates.open["r2"].set()
    first = await anext(answers)
    gates.open["r1"].set()
    async with asyncio.timeout(30.0):
        rest = [result.request_id async for answer in answers for result in answer.results]
    assert [result.request_id for result in first.results] == ["r2"]
    assert rest == ["r1"]


async def test_facts_that_are_taken_in_after_an_answer_was_sent_are_counted_once() -> None:
    gates = Gates()
    told = [pb.RequestEvent(reservation_id=name, kind="finished") for name in ("now", "later")]
    messages = (pb.RouteStreamRequest(events=[event]) for event in told)
    answers = Batches(gates.route, gates.complete).stream(said(*messages))
    gates.open["now"].set()
    counted = [await anext(answers)]
    gates.open["later"].set()
    async with asyncio.timeout(30.0):
        counted += [answer async for answer in answers]
    assert [(answer.applied, answer.unknown) for answer in counted] == [(1, 1), (1, 1)]
