"""What became of orders and drains, told apart by watching the fleet and the actuator.

Owns following each worker from its order to ready or failure and each drain to its end. Hands
Outcomes to the journal; each is told once. Rests on the fleet, so a restarted planner goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from readyplane.core.worker import Worker, WorkerState
from readyplane.ports import Instance
from readyplane_planner.actuators import Done
from readyplane_planner.journal import Outcome
from readyplane_planner.starts import StartBook, sample_document, sample_of, start_document

TOLD_MAX = 20_000
SERVING = frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.STALLED})


@dataclass(slots=True)
class Follower:
    """Follows workers of one model; `told` bounds what it remembers to have said."""

    book: StartBook
    told: dict[tuple[str, str, str], None] = field(default_factory=dict)
    draining: dict[str, str] = field(default_factory=dict)
    sampled: dict[tuple[str, str], None] = field(default_factory=dict)
    _out: list[Outcome] = field(default_factory=list)

    def calls(self, done: Iterable[Done], *, wall_s: float) -> None:
        """Finished calls."""
        for call in done:
            note = {"note": call.note} if call.note else {}
            self._tell(call.decision_id, call.worker_id, call.kind, wall_s, note)
            if call.kind == "draining":
                self.draining[call.worker_id] = call.decision_id

    def look(
        self,
        workers: Iterable[Worker],
        instances: Iterable[Instance],
        *,
        fleet_known: bool,
        now_s: float,
        wall_s: float,
    ) -> None:
        """What the fleet and the actuator's list say now."""
        alive: set[str] = set()
        for worker in workers:
            alive.add(worker.worker_id)
            decision_id = worker.offer.scale_decision_id
            self._tell(decision_id, worker.worker_id, "provisioned", wall_s, {})
            if worker.state in SERVING:
                self._ready(worker, instances, now_s=now_s, wall_s=wall_s)
        for instance in instances:
            if instance.state == "failed":
                order, code = instance.order, instance.exit_code
                note = {"note": f"{instance.reason or 'ended'} (exit code {code})"}
                self._tell(order.scale_decision_id, order.worker_id, "failed", wall_s, note)
        if fleet_known:
            for worker_id, decision_id in list(self.draining.items()):
                if worker_id not in alive:
                    self._tell(decision_id, worker_id, "drained", wall_s, {})
                    del self.draining[worker_id]

    def collect(self) -> list[Outcome]:
        """Everything not handed out yet."""
        out, self._out = self._out, []
        return out

    def _ready(
        self, worker: Worker, instances: Iterable[Instance], *, now_s: float, wall_s: float
    ) -> None:
        if worker.key in self.sampled:
            return
        self.sampled[worker.key] = None
        _bound(self.sampled)
        mine = (i for i in instances if i.order.worker_id == worker.worker_id)
        ago_s = next((i.allocated_ago_s for i in mine), None)
        sample = sample_of(worker, ordered_ago_s=ago_s, now_s=now_s)
        document: dict[str, Any] = {
            "start": start_document(worker),
            "tier": str(worker.serving.tier) if worker.serving is not None else "unknown",
            "role": str(worker.offer.counts_as),
        }
        if sample is not None:
            self.book.add(worker.offer.counts_as, sample)
            document["sample"] = sample_document(sample)
        self._tell(worker.offer.scale_decision_id, worker.worker_id, "ready", wall_s, document)

    def _tell(
        self,
        decision_id: str,
        subject: str,
        kind: str,
        wall_s: float,
        document: Mapping[str, Any],
    ) -> None:
        key = (decision_id, subject, kind)
        if not decision_id or key in self.told:
            return
        self.told[key] = None
        _bound(self.told)
        self._out.append(Outcome(decision_id, subject, kind, wall_s, document))


def _bound(remembered: dict[Any, None]) -> None:
    while len(remembered) > TOLD_MAX:
        remembered.pop(next(iter(remembered)))
