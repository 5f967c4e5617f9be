"""The actuator's port: what starts and stops workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from readyplane.core.startup import StartMode
from readyplane.core.worker import Holds, Role


@dataclass(frozen=True, slots=True)
class Order:
    """One worker to be started.

    Attributes:
        convertible_tpot_s: above 0, a decode worker that also takes prompts in short chunks, between
            iterations that keep this time per output token.
        standby: it waits until the router activates it; holds: with what.
        graph_stages: ready with few graphs, more are captured while it serves.
        policy_version: that it was decided under; 0 where that is not told.
    """

    worker_id: str
    role: Role
    model: str
    worker_class: str
    manifest_digest: str
    generation: int = 1
    mode: StartMode = StartMode.JIT
    scale_decision_id: str = ""
    node_preference: tuple[str, ...] = ()
    convertible_tpot_s: float = 0.0
    standby: bool = False
    holds: Holds = Holds.WEIGHTS
    graph_stages: bool = False
    policy_version: int = 0

    def same_as(self, other: Order) -> bool:
        """Whether both ask for one worker, whoever decided it and under which policy."""
        return replace(self, scale_decision_id="", policy_version=0) == replace(
            other, scale_decision_id="", policy_version=0
        )


@dataclass(frozen=True, slots=True)
class Instance:
    """One allocation: pending, running, exited or failed. Ages in seconds, None if not yet."""

    order: Order
    state: str
    node: str = "local"
    node_note: str = ""
    pid: int = 0
    allocated_ago_s: float = 0.0
    running_ago_s: float | None = None
    exited_ago_s: float | None = None
    exit_code: int | None = None
    reason: str = ""
    log_tail: str = ""


class Actuator(Protocol):
    """Starts and stops worker processes; knows nothing of load."""

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        """Idempotent by worker_id. Raises Refused with reasons."""
        ...

    async def release(
        self, worker_id: str, *, grace_s: float = 10.0, reason: str = "", leader_epoch: int = 0
    ) -> Instance:
        """Take the resources back. Idempotent. Raises NotFound."""
        ...

    async def list_instances(self, *, model: str = "", leader_epoch: int = 0) -> list[Instance]:
        """Every instance, the recently ended ones too.

        With a leader's number the list is complete for that leader: from this answer on, orders
        and releases of an older one of `model` are refused. Raises StaleEpoch for an older one.
        """
        ...
