"""Orders and instances <-> actuator.proto."""

from __future__ import annotations

from readyplane.core.startup import StartMode
from readyplane.core.worker import Holds, Role
from readyplane.ports import Instance, Order
from readyplane.v1 import actuator_pb2 as pb
from readyplane.wire.scalars import enum_of


def order_to_proto(order: Order) -> pb.Order:
    """Order as message."""
    return pb.Order(
        worker_id=order.worker_id,
        role=order.role,
        model=order.model,
        worker_class=order.worker_class,
        manifest_digest=order.manifest_digest,
        generation=order.generation,
        mode=order.mode,
        scale_decision_id=order.scale_decision_id,
        node_preference=order.node_preference,
        convertible_tpot_s=order.convertible_tpot_s,
        standby=order.standby,
        holds=order.holds,
        graph_stages=order.graph_stages,
        policy_version=order.policy_version,
    )


def order_from_proto(message: pb.Order) -> Order:
    """Message as order. Raises InvalidField for an unknown role, mode or standby."""
    return Order(
        worker_id=message.worker_id,
        role=enum_of(Role, message.role, "order.role"),
        model=message.model,
        worker_class=message.worker_class,
        manifest_digest=message.manifest_digest,
        generation=message.generation,
        mode=enum_of(StartMode, message.mode, "order.mode", StartMode.JIT),
        scale_decision_id=message.scale_decision_id,
        node_preference=tuple(message.node_preference),
        convertible_tpot_s=message.convertible_tpot_s,
        standby=message.standby,
        holds=enum_of(Holds, message.holds, "order.holds", Holds.WEIGHTS),
        graph_stages=message.graph_stages,
        policy_version=message.policy_version,
    )


def instance_to_proto(instance: Instance) -> pb.Instance:
    """Instance as message; ages are seconds, absent for what has not happened."""
    return pb.Instance(
        order=order_to_proto(instance.order),
        state=instance.state,
        node=instance.node,
        node_note=instance.node_note,
        pid=instance.pid,
        allocated_ago_s=instance.allocated_ago_s,
        running_ago_s=instance.running_ago_s,
        exited_ago_s=instance.exited_ago_s,
        exit_code=instance.exit_code,
        reason=instance.reason,
        log_tail=instance.log_tail,
    )


def instance_from_proto(message: pb.Instance) -> Instance:
    """Message as instance."""
    has = message.HasField
    return Instance(
        order=order_from_proto(message.order),
        state=message.state,
        node=message.node,
        node_note=message.node_note,
        pid=message.pid,
        allocated_ago_s=message.allocated_ago_s,
        running_ago_s=message.running_ago_s if has("running_ago_s") else None,
        exited_ago_s=message.exited_ago_s if has("exited_ago_s") else None,
        exit_code=message.exit_code if has("exit_code") else None,
        reason=message.reason,
        log_tail=message.log_tail,
    )
