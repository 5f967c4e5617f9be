"""One suite for every way in which pairs are asked for: alone, in a batch, over a stream; both ports."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from readyplane import wire
from readyplane.client import RouterClient
from readyplane.core.errors import InvalidField, NotFound, PromptTooLong, ReadyplaneError
from readyplane.core.work import EventKind, RequestEvent, RequestShape
from readyplane.core.worker import Role
from readyplane.kit.auth import TokenCheck
from readyplane.kit.clock import SystemClock
from readyplane.kit.lean_rpc import LeanServer
from readyplane.kit.rpc import OPTIONS, Guard
from readyplane.ports import Pair
from readyplane.v1 import router_pb2 as pb
from readyplane.v1 import router_pb2_grpc
from readyplane_router import rpc
from readyplane_router.batches import BATCH_REQUESTS_MAX
from readyplane_router.epochs import MemoryEpochs
from readyplane_router.policy import RouterPolicy
from readyplane_router.service import RouterService
from readyplane_router.store import MemoryStore
from tests.router_world import MODEL, PROFILE, FakeWorker, Registry, offer, shape

Found = Pair | ReadyplaneError


@dataclass
class Case:
    """A router with one worker of each stage; `ask` and `tell` go the way under test."""

    service: RouterService
    stub: Any
    client: RouterClient
    ask: Callable[[Sequence[RequestShape]], Awaitable[list[Found]]]
    tell: Callable[[Sequence[RequestEvent]], Awaitable[int]]

    async def used(self) -> int:
        """Sequences that the store counts on all workers."""
        usage = await self.service._store.usage(MODEL)
        return sum(use.sequences for use in usage.values())


async def _alone(client: RouterClient, shapes: Sequence[RequestShape]) -> list[Found]:
    async def one(each: RequestShape) -> Found:
        try:
            return await client.route(each)
        except ReadyplaneError as error:
            return error

    return list(await asyncio.gather(*map(one, shapes)))


async def _streamed(
    stub: Any,
    shapes: Sequence[RequestShape] = (),
    events: Sequence[RequestEvent] = (),
) -> tuple[list[Found], int]:
    message = pb.RouteStreamRequest(
        requests=[wire.request_shape_to_proto(each) for each in shapes],
        events=[wire.request_event_to_proto(each) for each in events],
    )
    found: dict[str, list[Found]] = {}
    unknown = 0
    stream = stub.RouteStream(iter([message]))
    async for answer in stream:
        unknown += answer.unknown
        for result in answer.results:
            found.setdefault(result.request_id, []).append(wire.route_result_from_proto(result))
    return [found[each.request_id].pop(0) for each in shapes], unknown


@asynccontextmanager
async def serving(way: str, *, policy: RouterPolicy | None = None) -> AsyncIterator[Case]:
    clock = SystemClock()
    service = RouterService(
        store=MemoryStore(clock, shared=True),
        epochs=MemoryEpochs(),
        clock=clock,
        registry=Registry(),
        profiles={PROFILE.name: PROFILE},
        incarnation="router-1",
        policy=policy,
    )
    async with AsyncExitStack() as stack:
        await service.start()
        server = grpc.aio.server(interceptors=(Guard(TokenCheck()),), options=OPTIONS)
        rpc.register(server, service, clock)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0)
        if way.startswith("lean"):
            listening = socket.create_server(("127.0.0.1", 0))
            listening.setblocking(False)
            port = listening.getsockname()[1]
            lean = LeanServer(rpc.lean_methods(service, clock), TokenCheck())
            running = asyncio.create_task(lean.run(listening))

            async def end() -> None:
                running.cancel()
                await asyncio.wait([running])

            stack.push_async_callback(end)
        client = RouterClient(f"127.0.0.1:{port}")
        stack.push_async_callback(client.aclose)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        stub: Any = router_pb2_grpc.RouterStub(channel)
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            await FakeWorker(service, offer(name, role)).start()

        async def ask(shapes: Sequence[RequestShape]) -> list[Found]:
            if way.endswith("alone"):
                return await _alone(client, shapes)
            if way.endswith("batch"):
                return await client.route_batch(shapes)
            return (await _streamed(stub, shapes))[0]

        async def tell(events: Sequence[RequestEvent]) -> int:
            if way.endswith("stream"):
                return (await _streamed(stub, events=events))[1]
            return await client.complete(events)

        yield Case(service, stub, client, ask, tell)


WAYS = ("alone", "batch", "stream", "lean alone", "lean batch")
everyway = pytest.mark.parametrize("way", WAYS)


def ended(pair: Found, kind: EventKind = EventKind.FINISHED) -> RequestEvent:
    assert isinstance(pair, Pair)
    return RequestEvent(pair.reservation_id, kind, output_tokens=4)


@everyway
async def test_each_gets_its_own_pair_in_the_order_asked(way: str) -> None:
    async with serving(way) as case:
        found = await case.ask([shape(f"r{n}", isl=16 * (n + 1)) for n in range(8)])
        assert [f.reservation_id for f in found if isinstance(f, Pair)] == [
            f"r{n}.0" for n in range(8)
        ]
        assert await case.used() == 16
        assert await case.tell([ended(pair) for pair in found]) == 0
        assert await case.used() == 0


@everyway
async def test_one_that_fails_does_not_touch_the_others(way: str) -> None:
    async with serving(way) as case:
        asked = [
            shape("good"),
            shape("nobody's", model="other"),
            shape("long", isl=40_000),
            shape("no tokens", isl=0),
            shape("good too"),
        ]
        found = await case.ask(asked)
        assert [type(each) for each in found] == [
            Pair,
            NotFound,
            PromptTooLong,
            InvalidField,
            Pair,
        ]
        assert "model 'other'" in str(found[1])
        assert await case.used() == 4


@everyway
async def test_asking_again_finds_the_same_reservation(way: str) -> None:
    async with serving(way) as case:
        first = await case.ask([shape("a"), shape("b")])
        again = await case.ask([shape("b"), shape("c"), shape("a")])
        assert again[0] == first[1]
        assert again[2] == first[0]
        assert await case.used() == 6


@everyway
async def test_one_asked_twice_at_once_is_reserved_once(way: str) -> None:
    async with serving(way) as case:
        one, other = await case.ask([shape("a"), shape("a")])
        assert isinstance(one, Pair)
        assert one == other
        assert await case.used() == 2


@everyway
async def test_what_ends_twice_is_unknown_the_second_time(way: str) -> None:
    async with serving(way) as case:
        pairs = await case.ask([shape("a"), shape("b")])
        assert await case.tell([ended(pairs[0], EventKind.ABORTED)]) == 0
        assert await case.tell([ended(pairs[0]), ended(pairs[1])]) == 1
        assert await case.used() == 0


@pytest.mark.parametrize("way", ["batch", "lean batch"])
@pytest.mark.parametrize("count", [0, BATCH_REQUESTS_MAX + 1])
async def test_a_batch_is_bounded(way: str, count: int) -> None:
    async with serving(way) as case:
        with pytest.raises(InvalidField, match="1 to 256"):
            await case.ask([shape(f"r{n}", isl=1) for n in range(count)])
        assert await case.used() == 0


async def test_a_batch_that_is_given_up_is_given_back() -> None:
    policy = RouterPolicy()
    async with serving("batch", policy=policy) as case:
        case.service.desk(MODEL).seats[next(iter(case.service.desk(MODEL).seats))].shut = "test"
        call = asyncio.ensure_future(case.ask([shape("a"), shape("b")]))
        while len(case.service.desk(MODEL).waiting) < 2:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while case.service.desk(MODEL).waiting:
            await asyncio.sleep(0.01)
        assert await case.used() == 0


async def test_over_a_stream_nobody_waits_for_another() -> None:
    async with serving("stream") as case:
        desk = case.service.desk(MODEL)

        seat = next(s for s in desk.seats.values() if s.role is Role.PREFILL)

        async def messages() -> AsyncIterator[pb.RouteStreamRequest]:
            for request_id in ("first", "waits", "last"):
                seat.shut = "test" if request_id == "waits" else ""
                request = wire.request_shape_to_proto(shape(request_id))
                yield pb.RouteStreamRequest(requests=[request])
                while f"{request_id}.0" not in {*desk.waiting, *desk.held}:
                    await asyncio.sleep(0.01)

        order = []
        async for answer in case.stub.RouteStream(messages()):
            order += [result.request_id for result in answer.results]
        assert sorted(order) == ["first", "last", "waits"]
        assert order[0] == "first"


async def test_facts_that_make_no_sense_are_told_on_the_stream_and_it_goes_on() -> None:
    async with serving("stream") as case:
        (pair,) = await case.ask([shape("a")])
        assert isinstance(pair, Pair)
        bad = pb.RequestEvent(reservation_id=pair.reservation_id, kind="finished", ttft_s=-1.0)
        good = wire.request_event_to_proto(ended(pair))

        async def messages() -> AsyncIterator[pb.RouteStreamRequest]:
            yield pb.RouteStreamRequest(events=[bad])
            yield pb.RouteStreamRequest(events=[good])

        answers = [answer async for answer in case.stub.RouteStream(messages())]
        errors = [answer.error_status for answer in answers if answer.error_status]
        assert len(errors) == 1
        assert isinstance(wire.errors.error_from_status(errors[0]), InvalidField)
        assert sum(answer.applied for answer in answers) == 1
        assert await case.used() == 0


async def test_too_large_a_message_ends_a_stream_with_a_reason() -> None:
    async with serving("stream") as case:
        many = [shape(f"r{n}", isl=1) for n in range(BATCH_REQUESTS_MAX + 1)]
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await case.ask(many)
        assert isinstance(wire.error_from_rpc(found.value), InvalidField)
