"""Allocations on virtual time: who holds GPUs, since when, and who may not have any more.

Owns `readyplane.ports.Actuator` for the simulator: its processes are `SimWorker`s, its limits are a
quota of GPUs per worker class. It knows nothing of load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from readyplane.core.errors import NotFound, Refused, StaleEpoch
from readyplane.kit.clock import Clock
from readyplane.ports import Instance, Order
from readyplane_lab.simulator.worker import SimWorker

ENDED_SHOWN = 256


class SimActuator:
    """Args:
    spawn: allocates one worker. quota: GPUs of each worker class that may be held at once.
    """

    def __init__(
        self,
        spawn: Callable[[Order], SimWorker],
        *,
        clock: Clock,
        quota: Mapping[str, int] | None = None,
    ) -> None:
        self.living: dict[str, SimWorker] = {}
        self.everyone: dict[str, SimWorker] = {}
        self.refused = 0
        self._spawn = spawn
        self._clock = clock
        self._quota = dict(quota or {})
        self._leader_epoch = 0

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        """Start one worker. Idempotent by worker id.

        Raises:
            Refused: the quota of its class. StaleEpoch: of a leader that leads no more.
        """
        self._lead(leader_epoch)
        if order.worker_id not in self.everyone:
            self._check_quota(order)
            self.begin(order)
        return self._instance(order.worker_id)

    def begin(self, order: Order) -> SimWorker:
        """Allocate one worker."""
        worker = self._spawn(order)
        self.everyone[order.worker_id] = self.living[order.worker_id] = worker
        return worker

    def ended(self, worker: SimWorker) -> None:
        """A worker has given its GPUs back."""
        self.living.pop(worker.order.worker_id, None)

    async def release(
        self, worker_id: str, *, grace_s: float = 10.0, reason: str = "", leader_epoch: int = 0
    ) -> Instance:
        """End it."""
        del grace_s, reason
        self._lead(leader_epoch)
        if worker_id not in self.everyone:
            raise NotFound("worker", worker_id)
        if worker_id in self.living:
            await self.living[worker_id].release()
        return self._instance(worker_id)

    async def list_instances(self) -> list[Instance]:
        """Everything allocated, and the last that ended."""
        ended = [w for w in self.everyone if w not in self.living]
        shown = [*ended[-ENDED_SHOWN:], *self.living]
        return [self._instance(worker_id) for worker_id in shown]

    def _lead(self, leader_epoch: int) -> None:
        if leader_epoch < self._leader_epoch:
            remedy = "another planner leads"
            raise StaleEpoch("leader epoch", leader_epoch, self._leader_epoch, remedy)
        self._leader_epoch = leader_epoch

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
            self.refused += 1
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
            node=worker_id,
            allocated_ago_s=now_s - worker.allocated_s,
            running_ago_s=now_s - worker.allocated_s,
            exited_ago_s=None if ended is None else now_s - ended,
            exit_code=None if ended is None else int(bool(worker.failure)),
            reason=worker.failure,
        )
