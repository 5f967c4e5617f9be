"""Faults in the fluid: what goes wrong, as far as pools that are queues can have it go wrong.

Owns the script of a run's faults. A clock step changes nothing here: the brains go by a monotonic
clock alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

from readyplane.core.worker import Role
from readyplane_lab.simulator import faults as kinds
from readyplane_lab.simulator.fluid.control import Control
from readyplane_lab.simulator.fluid.fleet import LEASE_S, FluidWorker
from readyplane_lab.simulator.fluid.floor import Floor
from readyplane_planner.decide import ROLE_OF

LEADS_FOR_S = 10.0
"""A planner's lease: another begins to act when it has run out."""


class Mishaps:
    """Faults that come due while a run goes on.

    Attributes:
        refused: orders that were not taken.
    """

    def __init__(self, faults: Sequence[Any], floor: Floor, control: Control) -> None:
        self._floor = floor
        self._control = control
        self._due: list[tuple[float, int, Any]] = [(f.at_s, i, f) for i, f in enumerate(faults)]
        heapify(self._due)
        self._ties = len(faults)
        self._quotas: list[tuple[float, Role | None, list[int]]] = []
        self._away_until_s = -inf
        floor.starts.sources.on_death = self._source_died
        self._now_s = 0.0
        self.refused = 0

    @property
    def next_s(self) -> float:
        """When the next one is due."""
        return self._due[0][0] if self._due else inf

    def befall(self, now_s: float) -> None:
        """Carry out what is due."""
        self._now_s = now_s
        while self._due and self._due[0][0] <= now_s:
            fault = heappop(self._due)[2]
            if callable(fault):
                fault()
            else:
                self._carry_out(fault, now_s)

    def denied(self, pool: str, now_s: float) -> str:
        """Why an order is not taken; empty when it is."""
        for until_s, role, left in self._quotas:
            if now_s < until_s and (role is None or role is ROLE_OF[pool]):
                if left[0] <= 0:
                    self.refused += 1
                    return "the quota is used up"
                left[0] -= 1
        return ""

    def planner_away(self, now_s: float) -> bool:
        """Whether nobody plans now."""
        return now_s < self._away_until_s

    def _carry_out(self, fault: Any, now_s: float) -> None:
        match fault:
            case kinds.Crash():
                for worker in self._oldest(fault.role, fault.count):
                    self._crash(worker, now_s, "crashed")
            case kinds.Stall():
                for worker in self._oldest(fault.role, 1):
                    self._floor.stall(worker, fault.for_s, now_s)
            case kinds.Partition():
                for worker in self._oldest(fault.role, fault.count):
                    self._partition(worker, now_s, fault.for_s)
            case kinds.SpotReclaim():
                for worker in self._oldest(fault.role, fault.count):
                    self._floor.drain(worker, now_s)
                    self._later(now_s + fault.notice_s, worker, "reclaimed")
            case kinds.QuotaDenied():
                self._quotas.append((now_s + fault.for_s, fault.role, [fault.granted]))
            case _:
                self._to_starts(fault)
                self._to_planner(fault, now_s)

    def _to_starts(self, fault: Any) -> None:
        starts = self._floor.starts
        match fault:
            case kinds.SourceDies():
                starts.sources.next_dies()
            case kinds.SourceLies():
                starts.sources.next_lies()
            case kinds.StartsHang():
                starts.spoil(str(fault.role), fault.count, hangs=True)
            case kinds.StartsFail():
                starts.spoil(str(fault.role), fault.count, hangs=False)

    def _to_planner(self, fault: Any, now_s: float) -> None:
        match fault:
            case kinds.SignalsStale():
                self._control.stuck_until_s = now_s + fault.for_s
            case kinds.SignalsMissing() | kinds.SignalsDistorted():
                # No answer of a router is modelled here: a spoilt one counts as none.
                self._control.blind_until_s = now_s + fault.for_s
            case kinds.SignalOutlier():
                self._control.outlier = fault.factor
            case kinds.PlannerRestart():
                self._away_until_s = now_s + max(LEADS_FOR_S, fault.for_s)
                self._control.forget()

    def _oldest(self, role: Role, count: int) -> list[FluidWorker]:
        """Those of a role that have served longest."""
        serving = [
            w
            for w in self._floor.fleet.values()
            if ROLE_OF[w.pool] is role and w.ready_s is not None and w.drain_s is None
        ]
        return sorted(serving, key=lambda w: (w.ready_s or 0.0, w.worker_id))[:count]

    def _crash(self, worker: FluidWorker, now_s: float, why: str) -> None:
        if worker.released_s is None:
            worker.lost_until_s = now_s + LEASE_S
            self._floor.remove(worker, now_s, why)

    def _partition(self, worker: FluidWorker, now_s: float, for_s: float) -> None:
        """Its lease lapses, and it serves on what it has until it is let in again."""
        if for_s <= LEASE_S:
            return

        def lapse() -> None:
            worker.hidden = True
            self._floor.close(worker)

        def rejoin() -> None:
            worker.hidden = False
            self._floor.reopen(worker, self._now_s)

        self._ties += 2
        heappush(self._due, (now_s + LEASE_S, self._ties - 1, lapse))
        heappush(self._due, (now_s + for_s, self._ties, rejoin))

    def _later(self, at_s: float, worker: FluidWorker, why: str) -> None:
        self._ties += 1
        heappush(self._due, (at_s, self._ties, lambda: self._crash(worker, self._now_s, why)))

    def _source_died(self, worker_id: str) -> None:
        worker = self._floor.fleet.get(worker_id)
        if worker is not None:
            self._crash(worker, self._floor.starts.now_s, "died while it gave weights")
