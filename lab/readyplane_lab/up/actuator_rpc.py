"""The actuator over gRPC: translates and nothing else."""

from __future__ import annotations

from typing import Any

import grpc

from readyplane.ports import Actuator
from readyplane.v1 import actuator_pb2 as pb
from readyplane.v1 import actuator_pb2_grpc as pb_grpc
from readyplane.wire.actuator import instance_to_proto, order_from_proto


class ActuatorServicer(pb_grpc.ActuatorServicer):
    """Serves one `readyplane.ports.Actuator`."""

    def __init__(self, actuator: Actuator) -> None:
        self._actuator = actuator

    async def Provision(
        self, request: pb.ProvisionRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ProvisionResponse:
        """One order."""
        instance = await self._actuator.provision(
            order_from_proto(request.order), leader_epoch=request.leader_epoch
        )
        return pb.ProvisionResponse(instance=instance_to_proto(instance))

    async def Release(
        self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ReleaseResponse:
        """Take resources back."""
        instance = await self._actuator.release(
            request.worker_id,
            grace_s=request.grace_duration.ToTimedelta().total_seconds(),
            reason=request.reason,
            leader_epoch=request.leader_epoch,
        )
        return pb.ReleaseResponse(instance=instance_to_proto(instance))

    async def ListInstances(
        self, request: pb.ListInstancesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListInstancesResponse:
        """Everything allocated, and what ended lately."""
        instances = await self._actuator.list_instances()
        return pb.ListInstancesResponse(instances=[instance_to_proto(i) for i in instances])


def register(server: grpc.aio.Server, actuator: Actuator) -> None:
    """Add the service to a server."""
    pb_grpc.add_ActuatorServicer_to_server(ActuatorServicer(actuator), server)
