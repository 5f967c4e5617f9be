"""RouterClient against a router that dies, forgets, fences and answers late."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from readyplane import wire
from readyplane.client import RouterClient
from readyplane.core.errors import (
    InvalidField,
    LostLease,
    NoPair,
    StaleEpoch,
    Unauthenticated,
    Unavailable,
)
from readyplane.core.kv import KvEvent, KvEventBatch
from readyplane.core.work import EventKind, RequestEvent, RequestShape, Slo
from readyplane.core.worker import Fleet, Lease, LoadReport, Role, Worker, WorkerOffer, WorkerState
from readyplane.kit.auth import TokenCheck
from readyplane.kit.rpc import OPTIONS, Guard
from readyplane.ports import Directive, End, Pair, Renewal, RenewalAnswer
from readyplane.v1 import router_pb2 as pb
from readyplane.v1 import router_pb2_grpc

OFFER = WorkerOffer("w-1", "inc-1", Role.PREFILL, "m", "h200")
PAIR = Pair(
    "r-1",
    End("w-1", "inc-1", 1, "http://p"),
    End("w-2", "inc-2", 2, "http://d", 16),
    local=False,
    predicted_ttft_s=0.1,
    predicted_tpot_s=0.02,
    waited_s=0.0,
    ttl_s=30.0,
)


class FakeRouter(router_pb2_grpc.RouterServicer):
    """Answers by the book; tests bend `on_renewal`, `on_route` and `version`."""

    Admit = Drain = Activate = Flip = None  # type: ignore[assignment]
    GetSignals = ListWorkers = ReportRank = None  # type: ignore[assignment]
    Move = Ration = RouteBatch = RouteStream = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.sessions = 0
        self.renewals: list[Renewal] = []
        self.directives: tuple[Directive, ...] = ()
        self.requests: list[Any] = []
        self.on_renewal: Callable[[Renewal], Any] = lambda renewal: None
        self.fleet = Fleet(1, {"w-1": Worker(OFFER, 1, WorkerState.READY, ready_s=0.0)})
        self.changed = asyncio.Event()

    async def Register(self, request: Any, context: Any) -> Any:
        offer = wire.worker_offer_from_proto(request.offer)
        lease = Lease(offer.worker_id, offer.incarnation, 7, 5.0)
        return pb.RegisterResponse(lease=wire.lease_to_proto(lease))

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        self.sessions += 1
        async for message in request_iterator:
            renewal = wire.renewal_from_proto(message)
            self.renewals.append(renewal)
            bent = self.on_renewal(renewal)
            if asyncio.iscoroutine(bent):
                await bent
            lease = Lease(renewal.worker_id, renewal.incarnation, renewal.epoch, 5)
            if self.directives or not renewal.quiet:
                answer = RenewalAnswer(lease, self.directives)
                yield wire.renewal_answer_to_proto(answer, number=message.number)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            self.changed.clear()
            yield pb.WatchResponse(fleet=wire.fleet_to_proto(self.fleet, now_s=10.0))
            await self.changed.wait()

    async def Route(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        shape = wire.request_shape_from_proto(request)
        if shape.model == "none":
            raise NoPair("no ready decode worker", 2.5)
        if shape.model == "slow":
            await asyncio.sleep(30)
        return wire.pair_to_proto(PAIR)

    async def Complete(self, request: Any, context: Any) -> Any:
        self.requests += [wire.request_event_from_proto(e) for e in request.events]
        return pb.CompleteResponse(unknown=1)

    async def Leave(self, request: Any, context: Any) -> Any:
        return pb.LeaveResponse()


@asynccontextmanager
async def serving(
    router: FakeRouter, port: int = 0, token: str = ""
) -> AsyncIterator[tuple[int, grpc.aio.Server]]:
    server = grpc.aio.server(interceptors=(Guard(TokenCheck(token)),), options=OPTIONS)
    router_pb2_grpc.add_RouterServicer_to_server(router, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port, server
    finally:
        await server.stop(0)


@pytest.fixture
async def router() -> FakeRouter:
    return FakeRouter()


def renewal(number: int = 0, worker: str = "w-1") -> Renewal:
    batch = KvEventBatch(number, (KvEvent("stored", (number,)),))
    return Renewal(worker, "inc-1", 7, load=LoadReport(running=number), kv_events=(batch,))


async def test_renewals_share_one_stream_and_keep_their_order(router: FakeRouter) -> None:
    async with serving(router) as (port, _):
        client = RouterClient(f"127.0.0.1:{port}")
        try:
            assert (await client.register(OFFER)).epoch == 7
            answers = await asyncio.gather(*(client.renew(renewal(i)) for i in range(20)))
            assert {a.lease.epoch for a in answers} == {7}
            assert [r.kv_events[0].sequence for r in router.renewals] == list(range(20))
            assert router.sessions == 1
            await client.renew(renewal(worker="w-2"))
            assert router.sessions == 2
        finally:
            await client.aclose()


@pytest.mark.parametrize(
    "error", [LostLease("w-1", "inc-1", "expired"), StaleEpoch("lease", 7, 9, "register again")]
)
async def test_a_lost_lease_ends_the_stream(router: FakeRouter, error: Exception) -> None:
    async with serving(router) as (port, _):
        client = RouterClient(f"127.0.0.1:{port}")
        try:
            await client.renew(renewal())

            def refuse(_: Renewal) -> None:
                raise error

            router.on_renewal = refuse
            with pytest.raises(type(error)) as caught:
                await client.renew(renewal(1))
            assert vars(caught.value) == vars(error)
            router.on_renewal = lambda _: None
            await client.renew(renewal(2))
            assert router.sessions == 2
        finally:
            await client.aclose()


async def test_a_quiet_renewal_waits_for_nothing_and_misses_nothing(router: FakeRouter) -> None:
    async def told(number: int) -> None:
        async with asyncio.timeout(5.0):
            while len(router.renewals) < number:
                await asyncio.sleep(0.01)

    async with serving(router) as (port, _):
        client = RouterClient(f"127.0.0.1:{port}")
        quiet = replace(renewal(1), quiet=True)
        try:
            assert (await client.renew(renewal())).heard
            for _ in range(3):
                assert await client.renew(quiet) == RenewalAnswer(
                    Lease("w-1", "inc-1", 7, 5.0), heard=False
                )
            await told(4)
            router.directives = (Directive("drain", 9.0, "scaled down"),)
            await client.renew(quiet)
            await told(5)
            await asyncio.sleep(0.1)
            router.directives = ()
            late = await client.renew(quiet)  # the answer to the one before has come by now
            assert late.heard and [d.kind for d in late.directives] == ["drain"]
            loud = await client.renew(renewal(9))
            assert loud.heard and loud.directives == () and router.sessions == 1

            def refuse(_: Renewal) -> None:
                raise LostLease("w-1", "inc-1", "expired")

            router.on_renewal = refuse
            await client.renew(quiet)
            await told(7)
            await asyncio.sleep(0.1)
            with pytest.raises(LostLease):  # said with the next one
                await client.renew(quiet)
        finally:
            await client.aclose()


async def test_every_answer_that_has_come_is_read_and_the_newest_counts(router: FakeRouter) -> None:
    """A router that answers every renewal, and an agent that goes on: it never falls behind."""

    def answer(_: Renewal) -> None:
        router.directives = (Directive("drain", float(len(router.renewals))),)

    router.on_renewal = answer
    async with serving(router) as (port, _):
        client = RouterClient(f"127.0.0.1:{port}")
        quiet = replace(renewal(), quiet=True)
        try:
            first = await client.renew(quiet)  # nothing is known yet: it is waited for
            assert first.heard and first.directives[0].deadline_s == 1.0
            for number in range(2, 8):
                late = await client.renew(quiet)
                if number > 2:
                    assert late.heard and late.directives[0].deadline_s == number - 1
                    assert 0.05 <= late.age_s < 5.0
                await asyncio.sleep(0.3)
            for _ in range(8):  # in one go: more than one lies there
                await client.renew(quiet)
            await asyncio.sleep(0.5)
            newest = await client.renew(quiet)
            assert newest.directives[0].deadline_s == 15.0
            assert router.sessions == 1
        finally:
            await client.aclose()


async def test_a_router_that_restarts_is_found_again(router: FakeRouter, free_port: int) -> None:
    client = RouterClient(f"127.0.0.1:{free_port}", timeout_s=8.0)
    try:
        async with serving(router, free_port):
            await client.renew(renewal(0))
        later = asyncio.create_task(client.renew(renewal(1)))
        await asyncio.sleep(0.3)
        assert not later.done()
        async with serving(router, free_port):
            assert (await later).lease.epoch == 7
        assert [r.kv_events[0].sequence for r in router.renewals] == [0, 1]
        assert router.sessions == 2
    finally:
        await client.aclose()


async def test_a_router_that_is_away_is_named_within_the_bound(free_port: int) -> None:
    client = RouterClient(f"127.0.0.1:{free_port}", timeout_s=0.5)
    try:
        for call in (client.renew(renewal()), client.register(OFFER), client.complete([])):
            async with asyncio.timeout(3):
                with pytest.raises(Unavailable, match=f"router at 127.0.0.1:{free_port}.*runs"):
                    await call
    finally:
        await client.aclose()


async def test_a_late_answer_is_never_taken_for_another(router: FakeRouter) -> None:
    async with serving(router) as (port, _):
        client = RouterClient(f"127.0.0.1:{port}", timeout_s=0.4)
        try:
            await client.renew(renewal(0))
            gate = asyncio.Event()
            router.on_renewal = lambda r: gate.wait()
            with pytest.raises(Unavailable, match=r"within 0\.4 s"):
                await client.renew(renewal(1))
            cancelled = asyncio.create_task(client.renew(renewal(2)))
            await asyncio.sleep(0.1)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            gate.set()
            answer = await client.renew(Renewal("w-1", "inc-1", 99))
            assert answer.lease.epoch == 99
        finally:
            await client.aclose()


async def test_route_and_complete_carry_everything(router: FakeRouter) -> None:
    async with serving(router) as (port, _):
        client = RouterClient(f"127.0.0.1:{port}", route_timeout_s=0.5)
        try:
            shape = RequestShape("q", "m", 4, b"\0" * 16, (1, 2**64 - 1), 0, slo=Slo(1.0, 0.1))
            pair = await client.route(shape, replaces="r-0", avoid=["w-9"], explain=True)
            assert pair == PAIR
            sent = router.requests[-1]
            assert wire.request_shape_from_proto(sent) == shape
            assert (sent.replaces_reservation_id, list(sent.avoid_worker_ids)) == ("r-0", ["w-9"])
            assert (sent.explain, sent.dry_run) == (True, False)
            event = RequestEvent("r-1", EventKind.FINISHED, 0.0, None, 5, 0, attained=False)
            assert await client.complete([event]) == 1
            assert router.requests[-1] == event
            with pytest.raises(NoPair) as caught:
                await client.route(RequestShape("q", "none", 4))
            assert (caught.value.why, caught.value.retry_after_s) == ("no ready decode worker", 2.5)
            with pytest.raises(Unavailable, match="did not answer in time"):
                await client.route(RequestShape("q", "slow", 4))
        finally:
            await client.aclose()


@pytest.mark.parametrize(
    "shape",
    [
        RequestShape("q", "m", 10**30),
        RequestShape("q", "m", 1, max_tokens=-(10**30)),
        RequestShape("q", "\ud800", 1),
        RequestShape("q", "m", 1, block_hashes=(-1,)),
        RequestShape("q", "m", 1.5),  # type: ignore[arg-type]
    ],
)
async def test_what_does_not_fit_is_refused_before_it_is_sent(shape: RequestShape) -> None:
    client = RouterClient("127.0.0.1:1")
    with pytest.raises(InvalidField, match="Route request"):
        await client.route(shape)
    await client.aclose()


def test_no_address() -> None:
    with pytest.raises(InvalidField, match="router"):
        RouterClient("")


async def test_watch_goes_on_through_an_outage(router: FakeRouter, free_port: int) -> None:
    client = RouterClient(f"127.0.0.1:{free_port}")
    try:
        async with asyncio.timeout(20), aclosing(client.watch()) as fleets:  # type: ignore[type-var]
            first = await anext(fleets)
            assert not first.workers and f"127.0.0.1:{free_port}" in first.degraded
            async with serving(router, free_port):
                fresh = await anext(fleets)
                assert (fresh.version, fresh.degraded) == (1, "")
                router.fleet = Fleet(2, router.fleet.workers)
                router.changed.set()
                assert (await anext(fleets)).version == 2
            away = await anext(fleets)
            assert away.version == 2 and list(away.workers) == ["w-1"]
            assert "cannot be reached" in away.degraded or "stopping" in away.degraded
            router.fleet = Fleet(3)
            async with serving(router, free_port):
                assert await anext(fleets) == Fleet(3)
    finally:
        await client.aclose()


async def test_watch_does_not_hide_a_wrong_token(router: FakeRouter) -> None:
    async with serving(router, token="right") as (port, _):
        for token, good in (("", False), ("wrong", False), ("right", True)):
            client = RouterClient(f"127.0.0.1:{port}", token)
            try:
                async with aclosing(client.watch()) as fleets:  # type: ignore[type-var]
                    if good:
                        assert (await anext(fleets)).version == 1
                        assert (await client.register(OFFER)).epoch == 7
                        assert (await client.renew(renewal())).lease.epoch == 7
                    else:
                        with pytest.raises(Unauthenticated):
                            await anext(fleets)
                        with pytest.raises(Unauthenticated):
                            await client.register(OFFER)
                        with pytest.raises(Unauthenticated):
                            await client.renew(renewal())
            finally:
                await client.aclose()


async def test_leave_ends_the_session(router: FakeRouter) -> None:
    async with serving(router) as (port, _):
        client = RouterClient(f"127.0.0.1:{port}")
        try:
            await client.renew(renewal())
            await client.leave("w-1", "inc-1", 7, reason="drained")
            assert client._sessions == {}
            await client.renew(renewal())
            await client.register(WorkerOffer("w-1", "inc-2", Role.PREFILL, "m", "h200"))
            assert client._sessions == {}
        finally:
            await client.aclose()
