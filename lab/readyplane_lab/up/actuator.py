"""The local actuator: starts and stops worker processes on this machine.

This machine's stand-in for Kubernetes behind the same port (`readyplane.ports.Actuator`). An
instance is one allocation: it is billed from the order until the process has ended. The planner
speaks to it over gRPC (`actuator_rpc`); orders carry a leader epoch, and an order of an older
leader is refused.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from readyplane.core.errors import Conflict, InvalidField, NotFound, Refused
from readyplane.core.fencing import Fences
from readyplane.kit.clock import Clock
from readyplane.ports import Instance, Order
from readyplane_agent.folder import remove_left_behind
from readyplane_lab.up.processes import ProcessTable

ENDED_KEPT = 256
LOG_TAIL_LINES = 20
NODE = "local"
REMOVE_TRIES_MAX = 10
REMOVE_EVERY_S = 0.2

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Allocation:
    order: Order
    process: str
    pid: int
    allocated_s: float
    ended_s: float | None = None
    exit_code: int | None = None
    reason: str = ""
    releasing: bool = False


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where and how agents run: addresses, folders and the environment they get.

    Attributes:
        registry, router: gRPC addresses. work_dir, log_dir: folders for agents.
        environment: whole environment of an agent. workers_max: allocations at once (the GPUs that
            this machine pretends to have). engine: engine adapter. agent_args: appended.
    """

    registry: str
    router: str
    work_dir: Path
    log_dir: Path
    environment: Mapping[str, str]
    workers_max: int = 16
    engine: str = "modelled"
    agent_args: tuple[str, ...] = ()


class LocalActuator:
    """`readyplane.ports.Actuator` over a `ProcessTable`."""

    def __init__(
        self,
        table: ProcessTable,
        place: WorkerPlace,
        *,
        clock: Clock,
        profile_of: Callable[[str], str],
        ranks_of: Callable[[str], int] = lambda _: 1,
        learn: Callable[[Order], Awaitable[None]] | None = None,
    ) -> None:
        """`profile_of` gives the profile (name or path) of a worker class, or raises NotFound.

        `ranks_of` gives the ranks of its workers, one for each GPU that the class has. `learn`
        is awaited before an order is taken, so that both know its class by then.
        """
        self._table = table
        self._place = place
        self._clock = clock
        self._profile_of, self._ranks_of = profile_of, ranks_of
        self._learn = learn
        self._live: dict[str, _Allocation] = {}
        self._ended: deque[_Allocation] = deque(maxlen=ENDED_KEPT)
        self._removals: set[asyncio.Task[None]] = set()
        self._fences = Fences()
        self._closed = False

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        """Start one agent. Idempotent by worker_id.

        Raises:
            StaleEpoch: a newer leader has given orders. Conflict: the id is used by another order.
            Refused: no free place, or this actuator is closing. NotFound: a class that the policy
                does not name. Unavailable: one that is not known, and nobody tells the policy.
        """
        if self._learn is not None and not self._closed:
            await self._learn(order)  # before the fence: a newer leader may come meanwhile
        self._fences.take(order.model, leader_epoch)
        found = self._live.get(order.worker_id) or self._find_ended(order.worker_id)
        if found is not None:
            if not found.order.same_as(order):
                raise Conflict(
                    f"worker_id {order.worker_id}", order, found.order, "use a new worker id"
                )
            return self._instance(found)
        self._check(order)
        allocated_s = self._clock.monotonic_s()
        process = f"worker-{order.worker_id}"
        environment = {
            **self._place.environment,
            "READYPLANE_ORDERED_AT_MONOTONIC_S": repr(allocated_s),
        }
        pid = await self._table.spawn(
            process,
            self._argv(order),
            environment,
            self._place.log_dir / f"{process}.log",
        )
        allocation = _Allocation(order, process, pid, allocated_s)
        self._live[order.worker_id] = allocation
        return self._instance(allocation)

    async def release(
        self, worker_id: str, *, grace_s: float = 10.0, reason: str = "", leader_epoch: int = 0
    ) -> Instance:
        """Ask the agent to drain and leave, after the grace kill it with all its children.

        Raises:
            NotFound: never provisioned here, or forgotten. StaleEpoch: see `provision`.
        """
        held = self._live.get(worker_id) or self._find_ended(worker_id)
        if held is not None:
            self._fences.take(held.order.model, leader_epoch)
        return await self._release(worker_id, grace_s=grace_s, reason=reason)

    def take_no_more(self) -> None:
        """Refuse orders from now on; who runs already serves on."""
        self._closed = True

    async def release_all(self, *, grace_s: float, reason: str) -> None:
        """Take no more orders and end every worker; for whoever owns this machine, not a planner."""
        self.take_no_more()
        await asyncio.gather(
            *(self._release(name, grace_s=grace_s, reason=reason) for name in list(self._live))
        )
        await asyncio.gather(*self._removals)

    async def _release(self, worker_id: str, *, grace_s: float, reason: str) -> Instance:
        allocation = self._live.get(worker_id)
        if allocation is None:
            ended = self._find_ended(worker_id)
            if ended is None:
                raise NotFound("worker", worker_id, "list the instances for the known ids")
            return self._instance(ended)
        allocation.releasing = True
        allocation.reason = allocation.reason or reason
        await self._table.stop(allocation.process, grace_s=grace_s)
        self._collect(allocation)
        return self._instance(allocation)

    async def list_instances(self, *, model: str = "", leader_epoch: int = 0) -> list[Instance]:
        """Every live instance and the last 256 ended ones, in the order they were allocated."""
        self._fences.take(model, leader_epoch)
        for allocation in list(self._live.values()):
            if self._table.returncode(allocation.process) is not None:
                self._collect(allocation)
        everyone = [*self._ended, *self._live.values()]
        everyone.sort(key=lambda a: a.allocated_s)
        return [self._instance(a) for a in everyone]

    def exited(self, process: str, returncode: int) -> None:
        """To be called by the process table when a child ends that nobody asked to stop."""
        for allocation in list(self._live.values()):
            if allocation.process == process:
                allocation.exit_code = returncode
                self._collect(allocation)

    def worker_seconds(self) -> dict[str, float]:
        """Seconds from allocation to release by role, the live ones up to now."""
        now_s = self._clock.monotonic_s()
        total: dict[str, float] = {}
        for a in [*self._ended, *self._live.values()]:
            role = str(a.order.role)
            end_s = now_s if a.ended_s is None else a.ended_s
            total[role] = total.get(role, 0.0) + end_s - a.allocated_s
        return total

    def _check(self, order: Order) -> None:
        if self._closed:
            raise Refused("order", ["the run is ending"], "start a new run")
        if len(self._live) >= self._place.workers_max:
            raise Refused(
                "order",
                [f"no free place: {len(self._live)} of {self._place.workers_max} are allocated"],
                "wait for a worker to end or raise --workers-max",
            )
        name = order.worker_id
        plain = name.strip(".") and len(name) <= 64  # "..", a worker's folder, would be another
        if not plain or not all(c.isalnum() or c in "-_." for c in name):
            raise InvalidField("worker_id", name, "use 1 to 64 letters, digits, '-', '_' or '.'")

    def _argv(self, order: Order) -> list[str]:
        place = self._place
        work_dir = place.work_dir / order.worker_id
        return [
            *(sys.executable, "-m", "readyplane_agent"),
            *("--worker-id", order.worker_id),
            *("--role", str(order.role)),
            *("--model", order.model),
            *("--worker-class", order.worker_class),
            *("--manifest", order.manifest_digest),
            *("--generation", str(order.generation)),
            *("--mode", str(order.mode)),
            *("--scale-decision-id", order.scale_decision_id),
            *("--node", NODE),
            *("--registry", place.registry),
            *("--router", place.router),
            *("--work-dir", str(work_dir)),
            *("--engine", place.engine),
            *("--profile", self._profile_of(order.worker_class)),
            *self._ranks(order.worker_class),
            *(
                ("--convertible-tpot-s", repr(order.convertible_tpot_s))
                if order.convertible_tpot_s > 0
                else ()
            ),
            *(("--standby", "true", "--holds", str(order.holds)) if order.standby else ()),
            *(("--graph-stages", "true") if order.graph_stages else ()),
            *place.agent_args,
        ]

    def _ranks(self, worker_class: str) -> tuple[str, ...]:
        """An engine that starts its own ranks is told by its own flags."""
        ranks = self._ranks_of(worker_class) if self._place.engine == "modelled" else 1
        return ("--tp", str(ranks)) if ranks > 1 else ()

    def _find_ended(self, worker_id: str) -> _Allocation | None:
        return next((a for a in self._ended if a.order.worker_id == worker_id), None)

    def _collect(self, allocation: _Allocation) -> None:
        if self._live.pop(allocation.order.worker_id, None) is None:
            return
        allocation.ended_s = self._clock.monotonic_s()
        if allocation.exit_code is None:
            allocation.exit_code = self._table.returncode(allocation.process)
        if not allocation.releasing and allocation.exit_code:
            allocation.reason = f"agent ended by itself with code {allocation.exit_code}"
            log.warning("%s: %s", allocation.order.worker_id, allocation.reason)
        self._ended.append(allocation)
        removal = asyncio.ensure_future(self._remove_folder(allocation.order.worker_id))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _remove_folder(self, worker_id: str) -> None:
        """An agent that was killed has left its files; its engine may just be ending, too."""
        within, why = self._place.work_dir, OSError()
        for _ in range(REMOVE_TRIES_MAX):
            if worker_id in self._live:
                return  # the id is used again
            try:
                path = within / worker_id
                if await asyncio.to_thread(remove_left_behind, path, within=within):
                    log.info("%s left its work folder; removed", worker_id)
                return
            except OSError as error:
                why = error
            await self._clock.sleep(REMOVE_EVERY_S)
        log.warning("the work folder of %s cannot be removed: %s", worker_id, why)

    def _instance(self, allocation: _Allocation) -> Instance:
        now_s = self._clock.monotonic_s()
        ended = allocation.ended_s is not None
        clean = allocation.releasing or allocation.exit_code == 0
        preference = allocation.order.node_preference
        return Instance(
            order=allocation.order,
            state=("exited" if clean else "failed") if ended else "running",
            node=NODE,
            node_note=(
                f"wanted {preference[0]}, but this actuator has one node, {NODE}"
                if preference and preference[0] != NODE
                else ""
            ),
            pid=allocation.pid,
            allocated_ago_s=now_s - allocation.allocated_s,
            running_ago_s=now_s - allocation.allocated_s,
            exited_ago_s=None if allocation.ended_s is None else now_s - allocation.ended_s,
            exit_code=allocation.exit_code,
            reason=allocation.reason,
            log_tail=self._table.log_tail(allocation.process, LOG_TAIL_LINES) if ended else "",
        )
