"""The router over gRPC: translates messages with `readyplane.wire`, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc.aio

from readyplane import wire
from readyplane.kit.clock import Clock
from readyplane.kit.lean_rpc import Message, Method
from readyplane.ports import Pair
from readyplane.v1 import router_pb2 as pb
from readyplane.v1 import router_pb2_grpc
from readyplane_router.batches import Batches
from readyplane_router.service import RouterService
from readyplane_router.sessions import Sessions

FULL_NAME = "readyplane.v1.Router"
Context = grpc.aio.ServicerContext[Any, Any]


def register(server: grpc.aio.Server, service: RouterService, clock: Clock) -> None:
    """Serve `service` on a gRPC server; `clock` turns its clock readings into ages."""
    router_pb2_grpc.add_RouterServicer_to_server(RouterServicer(service, clock), server)


def lean_methods(service: RouterService, clock: Clock) -> dict[str, Method]:
    """What is called for each request and each worker, for a server that does not do more."""
    servicer = RouterServicer(service, clock)

    def unary(
        call: Callable[[Any, Any], Awaitable[Message]],
    ) -> Callable[[Any], Awaitable[Message]]:
        return lambda request: call(request, None)

    return {
        f"/{FULL_NAME}/Session": Method(pb.SessionRequest.FromString, talk=servicer.sessions.begin),
        f"/{FULL_NAME}/Register": Method(pb.RegisterRequest.FromString, unary(servicer.Register)),
        f"/{FULL_NAME}/ReportRank": Method(
            pb.ReportRankRequest.FromString, unary(servicer.ReportRank)
        ),
        f"/{FULL_NAME}/Admit": Method(pb.AdmitRequest.FromString, unary(servicer.Admit)),
        f"/{FULL_NAME}/Leave": Method(pb.LeaveRequest.FromString, unary(servicer.Leave)),
        f"/{FULL_NAME}/Drain": Method(pb.DrainRequest.FromString, unary(servicer.Drain)),
        f"/{FULL_NAME}/ListWorkers": Method(
            pb.ListWorkersRequest.FromString, unary(servicer.ListWorkers)
        ),
        f"/{FULL_NAME}/Route": Method(pb.RouteRequest.FromString, servicer.routed),
        f"/{FULL_NAME}/RouteBatch": Method(pb.RouteBatchRequest.FromString, servicer.batched),
        f"/{FULL_NAME}/Complete": Method(pb.CompleteRequest.FromString, servicer.completed),
    }


class RouterServicer(router_pb2_grpc.RouterServicer):
    """One method for each rpc of router.proto; errors are the core's and become a status outside."""

    def __init__(self, service: RouterService, clock: Clock) -> None:
        self._service = service
        self._clock = clock
        self._batches = Batches(self._pair, service.complete)
        self.sessions = Sessions(service)

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        lease = await self._service.register(wire.worker_offer_from_proto(request.offer))
        return pb.RegisterResponse(lease=wire.lease_to_proto(lease))

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        async with aclosing(self.sessions.stream(request_iterator)) as answers:
            async for answer in answers:
                yield answer

    async def ReportRank(
        self, request: pb.ReportRankRequest, context: Context
    ) -> pb.ReportRankResponse:
        status = await self._service.report_rank(wire.rank_report_from_proto(request))
        return wire.group_status_to_proto(status)

    async def Admit(self, request: pb.AdmitRequest, context: Context) -> pb.AdmitResponse:
        verdict = await self._service.admit(
            request.worker_id,
            request.incarnation,
            request.epoch,
            serving=wire.serving_from_proto(request.serving),
            checks=[wire.check_result_from_proto(check) for check in request.checks],
        )
        return wire.gate_verdict_to_proto(verdict)

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        await self._service.leave(
            request.worker_id, request.incarnation, request.epoch, reason=request.reason
        )
        return pb.LeaveResponse()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        given = request.HasField("deadline_duration")
        worker = await self._service.drain(
            request.worker_id,
            epoch=request.epoch,
            reason=request.reason,
            deadline_s=wire.seconds_of(request.deadline_duration) if given else 0.0,
            scale_decision_id=request.scale_decision_id,
            leader_epoch=request.leader_epoch,
        )
        now_s = self._clock.monotonic_s()
        return pb.DrainResponse(worker=wire.worker_to_proto(worker, now_s=now_s))

    async def Activate(self, request: pb.ActivateRequest, context: Context) -> pb.ActivateResponse:
        given = request.HasField("deadline_duration")
        worker = await self._service.activate(
            request.worker_id,
            epoch=request.epoch,
            reason=request.reason,
            deadline_s=wire.seconds_of(request.deadline_duration) if given else 0.0,
            scale_decision_id=request.scale_decision_id,
            leader_epoch=request.leader_epoch,
        )
        now_s = self._clock.monotonic_s()
        return pb.ActivateResponse(worker=wire.worker_to_proto(worker, now_s=now_s))

    async def Flip(self, request: pb.FlipRequest, context: Context) -> pb.FlipResponse:
        given = request.HasField("deadline_duration")
        worker = await self._service.flip(
            request.worker_id,
            role=wire.role_from_proto(request.role),
            epoch=request.epoch,
            reason=request.reason,
            deadline_s=wire.seconds_of(request.deadline_duration) if given else 0.0,
            scale_decision_id=request.scale_decision_id,
            leader_epoch=request.leader_epoch,
        )
        now_s = self._clock.monotonic_s()
        return pb.FlipResponse(worker=wire.worker_to_proto(worker, now_s=now_s))

    async def Ration(self, request: pb.RationRequest, context: Context) -> pb.RationResponse:
        found = await self._service.ration(
            request.model,
            wire.ration_from_proto(request.order),
            leader_epoch=request.leader_epoch,
        )
        return pb.RationResponse(order=None if found is None else wire.ration_to_proto(found))

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Context
    ) -> pb.ListWorkersResponse:
        fleet = await self._service.list_workers(request.model)
        now_s = self._clock.monotonic_s()
        return pb.ListWorkersResponse(fleet=wire.fleet_to_proto(fleet, now_s=now_s))

    async def Watch(
        self, request: pb.WatchRequest, context: Context
    ) -> AsyncIterator[pb.WatchResponse]:
        async with aclosing(self._service.watch(request.model)) as fleets:
            async for fleet in fleets:
                now_s = self._clock.monotonic_s()
                yield pb.WatchResponse(fleet=wire.fleet_to_proto(fleet, now_s=now_s))

    async def Route(self, request: pb.RouteRequest, context: Context) -> pb.RouteResponse:
        return await self.routed(request)

    async def routed(self, request: pb.RouteRequest) -> pb.RouteResponse:
        """Pick a pair."""
        return wire.pair_to_proto(await self._pair(request))

    async def _pair(self, request: pb.RouteRequest) -> Pair:
        return await self._service.route(
            wire.request_shape_from_proto(request),
            replaces=request.replaces_reservation_id,
            avoid=tuple(request.avoid_worker_ids),
            explain=request.explain,
            dry_run=request.dry_run,
        )

    async def RouteBatch(
        self, request: pb.RouteBatchRequest, context: Context
    ) -> pb.RouteBatchResponse:
        return await self.batched(request)

    async def batched(self, request: pb.RouteBatchRequest) -> pb.RouteBatchResponse:
        """Pick a pair for each."""
        return await self._batches.batch(request)

    async def RouteStream(
        self, request_iterator: AsyncIterator[pb.RouteStreamRequest], context: Context
    ) -> AsyncIterator[pb.RouteStreamResponse]:
        async with aclosing(self._batches.stream(request_iterator)) as answers:
            async for answer in answers:
                yield answer

    async def Move(self, request: pb.MoveRequest, context: Context) -> pb.MoveResponse:
        pair = await self._service.move(
            wire.request_shape_from_proto(request.request),
            reservation_id=request.reservation_id,
            worker_id=request.worker_id,
            emitted=request.emitted_tokens,
        )
        return pb.MoveResponse(pair=wire.pair_to_proto(pair))

    async def Complete(self, request: pb.CompleteRequest, context: Context) -> pb.CompleteResponse:
        return await self.completed(request)

    async def completed(self, request: pb.CompleteRequest) -> pb.CompleteResponse:
        """Apply facts."""
        events = [wire.request_event_from_proto(event) for event in request.events]
        return pb.CompleteResponse(unknown=await self._service.complete(events))

    async def GetSignals(
        self, request: pb.GetSignalsRequest, context: Context
    ) -> pb.GetSignalsResponse:
        signals = await self._service.signals(request.model, leader_epoch=request.leader_epoch)
        return wire.router_signals_to_proto(signals, now_s=self._clock.monotonic_s())
