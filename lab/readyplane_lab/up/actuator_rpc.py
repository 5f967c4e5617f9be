"""The actuator over gRPC: translates and nothing else."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from readyplane.core.errors import InvalidField
from readyplane.kit.auth import TokenCheck
from readyplane.kit.rpc import OPTIONS, Guard
from readyplane.ports import Actuator
from readyplane.v1 import actuator_pb2 as pb
from readyplane.v1 import actuator_pb2_grpc as pb_grpc
from readyplane.wire.actuator import instance_to_proto, order_from_proto

FULL_NAME = "readyplane.v1.Actuator"


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
        instances = await self._actuator.list_instances(
            model=request.model, leader_epoch=request.leader_epoch
        )
        return pb.ListInstancesResponse(instances=[instance_to_proto(i) for i in instances])


async def serve(actuator: Actuator, *, address: str, token: str) -> grpc.aio.Server:
    """Start a server with the actuator, health and reflection on `host:port`.

    Raises:
        InvalidField: the address is not free.
    """
    server = grpc.aio.server(interceptors=[Guard(TokenCheck(token))], options=OPTIONS)
    pb_grpc.add_ActuatorServicer_to_server(ActuatorServicer(actuator), server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection(
        (FULL_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise InvalidField("actuator", address, f"give a free port ({error})") from error
    if not bound:
        raise InvalidField("actuator", address, "give a free port")
    await server.start()
    for name in ("", FULL_NAME):
        await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server
