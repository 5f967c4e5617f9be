"""Allocations on virtual time: who holds GPUs, since when, and who may not have any more.

Owns `readyplane.ports.Actuator` for the simulator: its processes are `SimWorker`s, its limits are a
quota of GPUs per worker class. It knows nothing of load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from readyplane.core.errors import NotFound, ReadyplaneError, Refused
from readyplane.core.fencing import Fences
from readyplane.core.worker import Role
from readyplane.kit.clock import Clock
from readyplane.ports import Instance, Order
from readyplane_lab.simulator.invariants import Epochs
from readyplane_lab.simulator.nodes import Nodes
from readyplane_lab.simulator.site import Begin
from readyplane_lab.simulator.worker import SimWorker

ENDED_SHOWN = 256


@dataclass(slots=True)
class _Denial:
    """Orders of a role (of any, when None) that are still taken, until a moment."""

    until_s: float
    granted: int
    role: Role | None


class SimActuator:
    """Args:
    spawn: allocates one worker. quota: GPUs of each worker class that may be held at once.
    """

    def __init__(
        self,
        spawn: Callable[[Order, Begin], SimWorker],
        *,
        clock: Clock,
        quota: Mapping[str, int] | None = None,
        nodes: Nodes,
    ) -> None:
        self._nodes = nodes
        self.living: dict[str, SimWorker] = {}
        self.everyone: dict[str, SimWorker] = {}
        self.refused = 0
        self._spawn = spawn
        self._clock = clock
        self._quota = dict(quota or {})
        self._fences = Fences()
        self._epochs = Epochs("epoch of the leader")
        self._denials: list[_Denial] = []

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        """Start one worker. Idempotent by worker id.

        Raises:
            Refused: the quota of its class, or no capacity. NotFound: a class without a profile.
            StaleEpoch: of a leader that leads no more.
        """
        self._lead(order.model, leader_epoch)
        if order.worker_id not in self.everyone:
            try:
                self._check_quota(order)
                self._check_denials(order)
                self.begin(order, Begin.STANDBY if order.standby else Begin.COLD)
            except ReadyplaneError:
                self.refused += 1
                raise
        return self._instance(order.worker_id)

    def begin(self, order: Order, how: Begin = Begin.COLD) -> SimWorker:
        """Allocate one worker. Raises Refused where no machine has room."""
        self._nodes.take(order)
        worker = self._spawn(order, how)
        self.everyone[order.worker_id] = self.living[order.worker_id] = worker
        return worker

    def ended(self, worker: SimWorker) -> None:
        """A worker has given its GPUs back."""
        self.living.pop(worker.order.worker_id, None)
        self._nodes.give(worker.order.worker_id)

    def deny(self, *, until_s: float, granted: int, role: Role | None) -> None:
        """Take only so many more orders of a role (of any, when None) until then."""
        self._denials.append(_Denial(until_s, granted, role))

    async def release(
        self, worker_id: str, *, grace_s: float = 10.0, reason: str = "", leader_epoch: int = 0
    ) -> Instance:
        """End it."""
        del grace_s, reason
        if worker_id not in self.everyone:
            raise NotFound("worker", worker_id)
        self._lead(self.everyone[worker_id].order.model, leader_epoch)
        if worker_id in self.living:
            await self.living[worker_id].release()
        return self._instance(worker_id)

    async def list_instances(self, *, model: str = "", leader_epoch: int = 0) -> list[Instance]:
        """Everything allocated, and the last that ended."""
        self._lead(model, leader_epoch)
        ended = [w for w in self.everyone if w not in self.living]
        shown = [*ended[-ENDED_SHOWN:], *self.living]
        return [self._instance(worker_id) for worker_id in shown]

    def _lead(self, model: str, leader_epoch: int) -> None:
        self._fences.take(model, leader_epoch)
        if leader_epoch > 0:
            self._epochs.take("actuator", leader_epoch)

    def _check_denials(self, order: Order) -> None:
        now_s = self._clock.monotonic_s()
        self._denials = [d for d in self._denials if now_s < d.until_s]
        for denial in self._denials:
            if denial.role not in (None, order.role):
                continue
            if denial.granted < 1:
                raise Refused(f"order of {order.worker_id}", ["no capacity"], "ask again later")
            denial.granted -= 1

    def _check_quota(self, order: Order) -> None:
        quota = self._quota.get(order.worker_class)
        if quota is None:
            return
        held = sum(
            w.profile.gpus
            for w in self.living.values()
            if w.order.worker_class == order.worker_class
        )
        if held >= quota:
            why = f"{held} of {quota} GPUs of class {order.worker_class} are held"
            raise Refused(f"order of {order.worker_id}", [why], "wait until some are given back")

    def _instance(self, worker_id: str) -> Instance:
        worker = self.everyone[worker_id]
        now_s = self._clock.monotonic_s()
        ended = worker.released_s
        state = "running" if ended is None else ("failed" if worker.failure else "exited")
        return Instance(
            order=worker.order,
            state=state,
            node=self._nodes.of(worker_id),
            node_note=self._nodes.note_of(worker_id),
            allocated_ago_s=now_s - worker.born_s,
            running_ago_s=now_s - worker.born_s,
            exited_ago_s=None if ended is None else now_s - ended,
            exit_code=None if ended is None else int(bool(worker.failure)),
            reason=worker.failure,
        )
