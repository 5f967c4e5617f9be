"""The actuator over gRPC: the client's port, health, reflection, the token, typed refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from readyplane.client import ActuatorClient
from readyplane.core.errors import InvalidField, NotFound, Refused, Unauthenticated
from readyplane.core.worker import Role
from readyplane.ports import Instance, Order
from readyplane_lab.up import actuator_rpc

ORDER = Order(
    "p-1", Role.PREFILL, "demo", "h200", "sha256:x", node_preference=("n1",), policy_version=3
)


class Double:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.orders: list[tuple[Order, int]] = []

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        if order.worker_id == "full":
            raise Refused("order", ["no free place: 2 of 2 are allocated"], "wait")
        self.orders.append((order, leader_epoch))
        return Instance(order, "running", pid=7, allocated_ago_s=0.5)

    async def release(
        self, worker_id: str, *, grace_s: float = 10.0, reason: str = "", leader_epoch: int = 0
    ) -> Instance:
        raise NotFound("worker", worker_id)

    async def list_instances(self, *, model: str = "", leader_epoch: int = 0) -> list[Instance]:
        return [Instance(o, "running", pid=7, allocated_ago_s=0.5) for o, _ in self.orders]


@dataclass(frozen=True)
class Served:
    double: Double
    address: str


@pytest.fixture
async def served(free_port: int) -> AsyncIterator[Served]:
    double = Double()
    address = f"127.0.0.1:{free_port}"
    server = await actuator_rpc.serve(double, address=address, token="secret")
    yield Served(double, address)
    await server.stop(0.1)


async def test_the_port_over_the_wire(served: Served) -> None:
    client = ActuatorClient(served.address, "secret")
    instance = await client.provision(ORDER, leader_epoch=3)
    assert (instance.order, instance.pid) == (ORDER, 7)
    assert served.double.orders == [(ORDER, 3)]
    (listed,) = await client.list_instances()
    assert listed.order == ORDER
    assert listed.exited_ago_s is None
    with pytest.raises(NotFound, match="p-9"):
        await client.release("p-9")
    with pytest.raises(Refused, match="2 of 2"):
        await client.provision(Order("full", Role.DECODE, "demo", "h200", "sha256:x"))
    await client.aclose()


async def test_without_the_token_nothing_is_started(served: Served) -> None:
    client = ActuatorClient(served.address, "wrong")
    with pytest.raises(Unauthenticated):
        await client.provision(ORDER)
    assert served.double.orders == []
    await client.aclose()


async def test_health_and_reflection_need_no_token(served: Served) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=actuator_rpc.FULL_NAME)
        answer = await stub.Check(request)  # type: ignore[attr-defined]
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_port_in_use_is_named(served: Served) -> None:
    with pytest.raises(InvalidField, match=served.address):
        await actuator_rpc.serve(Double(), address=served.address, token="")
