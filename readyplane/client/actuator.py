"""The actuator over gRPC: implements `readyplane.ports.Actuator`."""

from __future__ import annotations

from typing import Any

import grpc.aio

from readyplane import wire
from readyplane.client.channel import ServiceClient
from readyplane.ports import Instance, Order
from readyplane.v1 import actuator_pb2 as pb
from readyplane.v1 import actuator_pb2_grpc


class ActuatorClient(ServiceClient):
    """`readyplane.ports.Actuator` over gRPC."""

    service = "actuator"

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        return actuator_pb2_grpc.ActuatorStub(channel)

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        """Order one worker."""
        response: pb.ProvisionResponse = await self.call(
            "Provision",
            lambda: pb.ProvisionRequest(
                request_id=self._make_id(),
                order=wire.order_to_proto(order),
                leader_epoch=leader_epoch,
            ),
        )
        return wire.instance_from_proto(response.instance)

    async def release(
        self, worker_id: str, *, grace_s: float = 10.0, reason: str = "", leader_epoch: int = 0
    ) -> Instance:
        """Take the resources back; the actuator may wait out the grace before it answers."""
        response: pb.ReleaseResponse = await self.call(
            "Release",
            lambda: pb.ReleaseRequest(
                request_id=self._make_id(),
                worker_id=worker_id,
                grace_duration=wire.duration(grace_s, "grace_s"),
                reason=reason,
                leader_epoch=leader_epoch,
            ),
            self.timeout_s + max(0.0, grace_s),
        )
        return wire.instance_from_proto(response.instance)

    async def list_instances(self, *, model: str = "", leader_epoch: int = 0) -> list[Instance]:
        """Every instance, the recently ended ones too; fences older leaders off."""
        response: pb.ListInstancesResponse = await self.call(
            "ListInstances",
            lambda: pb.ListInstancesRequest(model=model, leader_epoch=leader_epoch),
        )
        return [wire.instance_from_proto(i) for i in response.instances]
