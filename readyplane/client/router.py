"""The router over gRPC: implements `readyplane.ports.Router`.

A worker's renewals go over one Session stream; everything else is one call each.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from readyplane import wire
from readyplane.client.channel import (
    CALL_TIMEOUT_S,
    RECONNECT_FIRST_S,
    RPC_ENDED,
    ServiceClient,
    built,
    new_id,
    status_of,
)
from readyplane.core.errors import LostLease, ReadyplaneError, StaleEpoch, Unavailable
from readyplane.core.ration import Ration
from readyplane.core.work import EventKind, RequestEvent, RequestShape, reservation_id_of
from readyplane.core.worker import CheckResult, Fleet, Lease, Role, Serving, Worker, WorkerOffer
from readyplane.kit.clock import Clock
from readyplane.ports import (
    GateVerdict,
    GroupStatus,
    Pair,
    RankReport,
    Renewal,
    RenewalAnswer,
    RouterSignals,
)
from readyplane.v1 import router_pb2 as pb
from readyplane.v1 import router_pb2_grpc

ROUTE_TIMEOUT_S = 60.0
RETRY_MAX_S = 1.0
GIVE_BACK_S_MAX = 1.0
UNANSWERED_MAX = 256
"""Messages of a session of which it is kept when they were sent."""


class _Session:
    """One worker's stream: messages are written in turn; answers are read whenever they come.

    A read that starts with a message finds nothing yet, whatever lies there: so one reader waits all
    the time, and what it has is what there is. Of several answers the newest counts. What the router
    says unasked goes to `told`, or lies there like an answer where nobody listens.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.turn = asyncio.Lock()
        self.stream: Any = None
        self.number = 0
        self.answer: RenewalAnswer | None = None
        self.told: Callable[[RenewalAnswer], None] | None = None
        self._now_s = now_s
        self._asked_s: dict[int, float] = {}
        self._newest: pb.SessionResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._came = asyncio.Event()

    def open(self, stream: Any) -> None:
        self.stream = stream
        self._came = asyncio.Event()
        self._reader = asyncio.ensure_future(self._read(stream, self._came))
        self._reader.add_done_callback(lambda task: task.cancelled() or task.exception())

    def drop(self) -> None:
        stream, self.stream = self.stream, None
        self._reader, self.answer, self._newest = None, None, None
        self._asked_s.clear()
        if stream is not None:
            stream.cancel()

    async def _read(self, stream: Any, came: asyncio.Event) -> None:
        try:
            while (message := await stream.read()) is not grpc.aio.EOF:
                if stream is not self.stream:
                    continue
                if message.unasked and self.told is not None:
                    self.told(wire.renewal_answer_from_proto(message))
                else:
                    self._newest = message
                    came.set()
        finally:
            came.set()

    def ask(self) -> int:
        """The number of the next message."""
        self.number += 1
        self._asked_s[self.number] = self._now_s()
        if len(self._asked_s) > UNANSWERED_MAX:
            del self._asked_s[next(iter(self._asked_s))]
        return self.number

    async def ended(self) -> bool:
        """Whether nothing more is to come. Raises what ended the stream, if that is known."""
        if self._reader is None or not self._reader.done():
            return False
        await self._reader
        return True

    async def answered(self, number: int) -> bool:
        """Wait for the answer to `number`, passing late ones by; False where the stream ended."""
        while self._newest is None or self._newest.number not in (0, number):
            if await self.ended():
                return False
            self._came.clear()
            await self._came.wait()
        return True

    def taken(self) -> RenewalAnswer | None:
        """The newest answer that has come, with its age; None where none has."""
        message, self._newest = self._newest, None
        if message is None:
            return None
        answer = wire.renewal_answer_from_proto(message)
        self.answer = answer
        if message.number in (0, self.number):
            self._asked_s.clear()
            return answer
        asked_s = self._asked_s.get(message.number)
        for number in [n for n in self._asked_s if n <= message.number]:
            del self._asked_s[number]
        if asked_s is None:  # so old that it says nothing of whether the router is there
            return replace(answer, heard=False)
        return replace(answer, age_s=self._now_s() - asked_s)


class RouterClient(ServiceClient):
    """`readyplane.ports.Router` over gRPC.

    Args:
        route_timeout_s: bound of `route`, longer than the policy's bound on waiting for a pair.
    """

    service = "router"

    def __init__(
        self,
        address: str,
        token: str = "",
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        route_timeout_s: float = ROUTE_TIMEOUT_S,
        clock: Clock | None = None,
        make_id: Callable[[], str] = new_id,
    ) -> None:
        super().__init__(address, token, timeout_s=timeout_s, clock=clock, make_id=make_id)
        self.route_timeout_s = route_timeout_s
        self._sessions: dict[tuple[str, str], _Session] = {}
        self._giving_back: set[asyncio.Task[None]] = set()

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        return router_pb2_grpc.RouterStub(channel)

    async def aclose(self) -> None:
        """Close every session and the channel."""
        for session in self._sessions.values():
            session.drop()
        self._sessions.clear()
        if self._giving_back:
            await asyncio.wait(tuple(self._giving_back), timeout=GIVE_BACK_S_MAX)
        await super().aclose()

    # ------------------------------------------------------------------ workers

    async def register(self, offer: WorkerOffer) -> Lease:
        """Grant a lease; sessions of older incarnations of this worker end."""
        response: pb.RegisterResponse = await self.call(
            "Register",
            lambda: pb.RegisterRequest(
                request_id=self._make_id(), offer=wire.worker_offer_to_proto(offer)
            ),
        )
        for key in [k for k in self._sessions if k[0] == offer.worker_id]:
            if key[1] != offer.incarnation:
                self._sessions.pop(key).drop()
        return wire.lease_from_proto(response.lease)

    async def renew(self, renewal: Renewal) -> RenewalAnswer:
        """Renew over the worker's stream, opening it anew while the call's bound lasts.

        A quiet one is sent without waiting for its answer; a directive comes with the next one,
        as old as the message that it answers (`RenewalAnswer.age_s`).

        Raises:
            LostLease, StaleEpoch: the lease is over; so is the stream.
            Unavailable: no answer within `timeout_s`.
        """
        built("Session", lambda: wire.renewal_to_proto(renewal))
        key = (renewal.worker_id, renewal.incarnation)
        session = self._sessions.setdefault(key, _Session(self._clock.monotonic_s))
        fault: ReadyplaneError | None = None
        pause_s = RECONNECT_FIRST_S
        try:
            async with asyncio.timeout(self.timeout_s), session.turn:
                while True:
                    try:
                        return await self._exchange(session, renewal)
                    except Unavailable as error:
                        fault = error
                    await self._clock.sleep(pause_s)
                    pause_s = min(RETRY_MAX_S, pause_s * 2)
        except TimeoutError:
            self.turn_away()  # a second bound on one that hangs would outlast the lease
            raise fault or Unavailable(
                f"the router at {self.address} did not answer a renewal within {self.timeout_s} s",
                "check that it runs; the next renewal repairs a lost one",
            ) from None
        except (LostLease, StaleEpoch):
            self._sessions.pop(key, None)
            raise

    def hear(self, worker_id: str, incarnation: str, told: Callable[[RenewalAnswer], None]) -> None:
        """Give `told` what the router says unasked, for as long as this incarnation has its lease."""
        key = (worker_id, incarnation)
        self._sessions.setdefault(key, _Session(self._clock.monotonic_s)).told = told

    async def _exchange(self, session: _Session, renewal: Renewal) -> RenewalAnswer:
        try:
            if session.stream is None:
                session.open(self.stub.Session(metadata=self.metadata()))
            stream, last = session.stream, session.answer
            number = session.ask()
            # The first of a stream is answered: until then nothing is known that could be told.
            quiet = renewal.quiet and last is not None
            try:
                message = wire.renewal_to_proto(replace(renewal, quiet=quiet), number=number)
                await stream.write(message)
                over = await session.ended() if quiet else not await session.answered(number)
            except RPC_ENDED as error:
                found = error if isinstance(error, grpc.RpcError) else await status_of(stream)
                raise self.error(found) from error
            if over:
                found = await status_of(stream)
                if found.code() is not grpc.StatusCode.OK:
                    raise self.error(found)
                what = f"the router at {self.address} ended the session"
                raise Unavailable(what, "the next renewal opens another")
            answer = session.taken()
            if answer is not None:
                return answer
            assert last is not None
            return replace(last, directives=(), heard=False)
        except BaseException:
            # Whatever went wrong, a late answer must never be taken for that of another message.
            session.drop()
            raise

    async def report_rank(self, report: RankReport) -> GroupStatus:
        """One rank's step towards the group barrier."""
        response: pb.ReportRankResponse = await self.call(
            "ReportRank", lambda: wire.rank_report_to_proto(report, request_id=self._make_id())
        )
        return wire.group_status_from_proto(response)

    async def admit(
        self,
        worker_id: str,
        incarnation: str,
        epoch: int,
        *,
        serving: Serving,
        checks: Sequence[CheckResult],
    ) -> GateVerdict:
        """Hand the gate evidence in."""
        response: pb.AdmitResponse = await self.call(
            "Admit",
            lambda: pb.AdmitRequest(
                request_id=self._make_id(),
                worker_id=worker_id,
                incarnation=incarnation,
                epoch=epoch,
                serving=wire.serving_to_proto(serving),
                checks=[wire.check_result_to_proto(c) for c in checks],
            ),
        )
        return wire.gate_verdict_from_proto(response)

    async def leave(self, worker_id: str, incarnation: str, epoch: int, *, reason: str) -> None:
        """Give the lease up and end the session."""
        await self.call(
            "Leave",
            lambda: pb.LeaveRequest(
                request_id=self._make_id(),
                worker_id=worker_id,
                incarnation=incarnation,
                epoch=epoch,
                reason=reason,
            ),
        )
        session = self._sessions.pop((worker_id, incarnation), None)
        if session is not None:
            session.drop()

    async def drain(
        self,
        worker_id: str,
        *,
        epoch: int = 0,
        reason: str = "",
        deadline_s: float = 300.0,
        scale_decision_id: str = "",
        leader_epoch: int = 0,
    ) -> Worker:
        """No new assignment from now on."""
        response: pb.DrainResponse = await self.call(
            "Drain",
            lambda: pb.DrainRequest(
                request_id=self._make_id(),
                worker_id=worker_id,
                epoch=epoch,
                reason=reason,
                deadline_duration=wire.duration(deadline_s, "deadline_s"),
                scale_decision_id=scale_decision_id,
                leader_epoch=leader_epoch,
            ),
        )
        return wire.worker_from_proto(response.worker, now_s=self._clock.monotonic_s())

    async def activate(
        self,
        worker_id: str,
        *,
        epoch: int = 0,
        reason: str = "",
        deadline_s: float = 0.0,
        scale_decision_id: str = "",
        leader_epoch: int = 0,
    ) -> Worker:
        """A standby is to serve."""
        response: pb.ActivateResponse = await self.call(
            "Activate",
            lambda: pb.ActivateRequest(
                request_id=self._make_id(),
                worker_id=worker_id,
                epoch=epoch,
                reason=reason,
                deadline_duration=wire.duration(deadline_s, "deadline_s"),
                scale_decision_id=scale_decision_id,
                leader_epoch=leader_epoch,
            ),
        )
        return wire.worker_from_proto(response.worker, now_s=self._clock.monotonic_s())

    async def flip(
        self,
        worker_id: str,
        *,
        role: Role,
        epoch: int = 0,
        reason: str = "",
        deadline_s: float = 0.0,
        scale_decision_id: str = "",
        leader_epoch: int = 0,
    ) -> Worker:
        """A ready worker is to serve the other stage."""
        response: pb.FlipResponse = await self.call(
            "Flip",
            lambda: pb.FlipRequest(
                request_id=self._make_id(),
                worker_id=worker_id,
                role=wire.role_to_proto(role),
                epoch=epoch,
                reason=reason,
                deadline_duration=wire.duration(deadline_s, "deadline_s"),
                scale_decision_id=scale_decision_id,
                leader_epoch=leader_epoch,
            ),
        )
        return wire.worker_from_proto(response.worker, now_s=self._clock.monotonic_s())

    async def ration(self, model: str, order: Ration, *, leader_epoch: int = 0) -> Ration | None:
        """Refuse requests of low priority for a bounded time."""
        response: pb.RationResponse = await self.call(
            "Ration",
            lambda: pb.RationRequest(
                request_id=self._make_id(),
                model=model,
                order=wire.ration_to_proto(order),
                leader_epoch=leader_epoch,
            ),
        )
        return wire.ration_from_proto(response.order) if response.HasField("order") else None

    async def list_workers(self, model: str = "") -> Fleet:
        """The fleet now."""
        response: pb.ListWorkersResponse = await self.call(
            "ListWorkers", lambda: pb.ListWorkersRequest(model=model)
        )
        return wire.fleet_from_proto(response.fleet, now_s=self._clock.monotonic_s())

    async def watch(self, model: str = "") -> AsyncIterator[Fleet]:
        """The fleet now and after every change; while the router is away, the last one, degraded."""
        last = Fleet()

        def read(message: pb.WatchResponse) -> Fleet:
            nonlocal last
            last = wire.fleet_from_proto(message.fleet, now_s=self._clock.monotonic_s())
            return last

        def degraded(why: str) -> Fleet:
            return replace(last, degraded=why)

        request = built("Watch", lambda: pb.WatchRequest(model=model))
        async for fleet in self.follow("Watch", request, read, degraded):
            yield fleet

    # ------------------------------------------------------------------ requests

    async def route(
        self,
        shape: RequestShape,
        *,
        replaces: str = "",
        avoid: Sequence[str] = (),
        explain: bool = False,
        dry_run: bool = False,
    ) -> Pair:
        """Pick and reserve a pair.

        When the caller is cancelled, what was or is being reserved for it is given back: the router
        cannot know whether an answer that it has sent was received.
        """
        try:
            response: pb.RouteResponse = await self.call(
                "Route",
                lambda: wire.request_shape_to_proto(
                    shape, replaces=replaces, avoid=avoid, explain=explain, dry_run=dry_run
                ),
                self.route_timeout_s,
            )
        except asyncio.CancelledError:
            if not dry_run:
                self._gives_back([reservation_id_of(shape.request_id, replaces)])
            raise
        return wire.pair_from_proto(response)

    async def route_batch(self, shapes: Sequence[RequestShape]) -> list[Pair | ReadyplaneError]:
        """Pick and reserve a pair for each, in one call; a pair or its own error each, in order.

        One that has to wait holds the answer back. When the caller is cancelled, all are given back.
        """
        try:
            response: pb.RouteBatchResponse = await self.call(
                "RouteBatch",
                lambda: pb.RouteBatchRequest(
                    request_id=self._make_id(),
                    requests=[wire.request_shape_to_proto(shape) for shape in shapes],
                ),
                self.route_timeout_s,
            )
        except asyncio.CancelledError:
            self._gives_back([reservation_id_of(shape.request_id) for shape in shapes])
            raise
        return [wire.route_result_from_proto(result) for result in response.results]

    async def move(
        self, shape: RequestShape, *, reservation_id: str, worker_id: str, emitted: int
    ) -> Pair:
        """Reserve another decode worker for a request that decodes, and give the old one back."""
        response: pb.MoveResponse = await self.call(
            "Move",
            lambda: pb.MoveRequest(
                request=wire.request_shape_to_proto(shape),
                reservation_id=reservation_id,
                worker_id=worker_id,
                emitted_tokens=emitted,
            ),
        )
        return wire.pair_from_proto(response.pair)

    def _gives_back(self, reservation_ids: Sequence[str]) -> None:
        task = asyncio.ensure_future(self._give_back(reservation_ids))
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)

    async def _give_back(self, reservation_ids: Sequence[str]) -> None:
        events = [
            RequestEvent(reservation_id, EventKind.ABORTED, detail="its route was cancelled")
            for reservation_id in reservation_ids
        ]
        with contextlib.suppress(ReadyplaneError):  # then it runs out by its own time
            await self.complete(events)

    async def complete(self, events: Sequence[RequestEvent]) -> int:
        """Tell facts; returns how many reservations were not known."""
        response: pb.CompleteResponse = await self.call(
            "Complete",
            lambda: pb.CompleteRequest(
                request_id=self._make_id(),
                events=[wire.request_event_to_proto(e) for e in events],
            ),
        )
        return response.unknown

    async def signals(self, model: str = "", *, leader_epoch: int = 0) -> RouterSignals:
        """Demand, latency, queues and fleet."""
        response: pb.GetSignalsResponse = await self.call(
            "GetSignals", lambda: pb.GetSignalsRequest(model=model, leader_epoch=leader_epoch)
        )
        return wire.router_signals_from_proto(response, now_s=self._clock.monotonic_s())
