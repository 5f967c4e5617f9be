"""What became of orders and drains, told apart by watching the fleet and the actuator.

Owns following each worker from its order to ready or failure, to its first request and its end, and
each drain to its end; and asking, when the time has come, whether a decision was worth it. Hands
Outcomes to the journal; each is told once. Rests on the fleet and the journal, so a restarted
planner goes on.

| kind | told when |
|---|---|
| ordered, refused, advised | the actuator took the order (it says so, or its list shows it), did not, or there is none to take it |
| unanswered | nobody said whether it was taken: the same order is given again |
| allocated, running | the actuator's list shows the allocation, its process; at_s is when it began |
| provisioned | the router shows a lease |
| ready | the gate let it in; with the whole start, the gate's checks and where weights came from |
| stood_by | the gate let it in as a standby; with the whole start, like `ready`; or its process waits, with what it `holds` |
| upgraded, upgrade_failed | it runs with all its graphs, or went back to those of its start; with the stage and `seconds` since it was ready |
| activating, activate_failed, activated | the router took the word, did not; it serves, after `seconds` |
| flipping, flip_failed, flipped | the same of a change of the stage, its drain included; of one by hand `flipped`, at what started the worker |
| first_request | the router has assigned it work, or its engine has computed something |
| failed | its process ended by itself; with the start as far as it came |
| draining, drain_failed, drained | the router took the drain, did not; the worker has left |
| rationed, ration_failed | the router took the order of admission, did not; of the decision itself |
| released, release_failed | the actuator gave the allocation back, did not |
| left | it had served and is gone from the router |
| judged | of the decision itself: effect, and worth it or not (see judgement.py) |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from readyplane.core.errors import NotFound
from readyplane.core.stage import UpgradeState
from readyplane.core.worker import Holds, Worker, WorkerState
from readyplane.ports import Instance
from readyplane_planner.actuators import Done
from readyplane_planner.decide import POOLS, ROLE_OF, Decision, fast
from readyplane_planner.journal import Journal, Outcome, Record
from readyplane_planner.judgement import due_after_s, judge, to_judge
from readyplane_planner.starts import StartBook, sample_document, sample_of, start_document

TOLD_MAX = 20_000
STARTING_MAX = 2000
WAITING_MAX = 2000
UNJUDGED_MAX = 256
BEFORE_MAX = 120
AFTER_MAX = 600
AGAIN_S = 10.0
"""A decision that cannot be judged yet is looked at again after that."""
UPGRADED = {
    UpgradeState.COMPLETE: "upgraded",
    UpgradeState.ROLLED_BACK: "upgrade_failed",
}
SERVING = frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.STALLED})


@dataclass(frozen=True, slots=True)
class Word:
    """What a worker of a pool was told, by which decision, and when."""

    kind: str
    decision_id: str
    pool: str
    told_s: float


@dataclass(slots=True)
class Follower:
    """Follows workers of one model; `told` bounds what it remembers to have said."""

    book: StartBook
    told: dict[tuple[str, str, str], None] = field(default_factory=dict)
    draining: dict[str, str] = field(default_factory=dict)
    serving: dict[str, str] = field(default_factory=dict)
    starting: dict[str, Worker] = field(default_factory=dict)
    placed: dict[str, None] = field(default_factory=dict)
    sampled: dict[tuple[str, str], None] = field(default_factory=dict)
    changing: dict[str, Word] = field(default_factory=dict)
    _out: list[Outcome] = field(default_factory=list)

    def calls(self, done: Iterable[Done], *, wall_s: float) -> None:
        """Finished calls."""
        for call in done:
            note = {"note": call.note} if call.note else {}
            self._tell(call.decision_id, call.worker_id, call.kind, wall_s, note)
            if call.kind == "draining":
                self.draining[call.worker_id] = call.decision_id
            elif call.kind in {"activate_failed", "flip_failed"}:
                self.changing.pop(call.worker_id, None)

    def expects(self, decision: Decision, *, wall_s: float) -> None:
        """A decision that is carried out now tells these workers to serve, or to change the stage."""
        for kind, words in (("activate", decision.activations), ("flip", decision.flips)):
            for word in words:
                loads = kind == fast.ACTIVATE and word.deadline_s > fast.ACTIVATE_S_MAX
                told = Word(fast.LOAD if loads else kind, decision.decision_id, word.pool, wall_s)
                self.changing.setdefault(word.worker_id, told)
        _bound(self.changing, STARTING_MAX)

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
            worker_id, decision_id = worker.worker_id, worker.offer.scale_decision_id
            alive.add(worker_id)
            self._tell(decision_id, worker_id, "provisioned", wall_s, {})
            if worker.told == fast.FLIP and worker_id not in self.changing:
                # Told by hand: it is no end of the worker, and belongs to what started it.
                pool = next(name for name in POOLS if ROLE_OF[name] is worker.offer.counts_as)
                self.changing[worker_id] = Word(fast.FLIP, decision_id, pool, wall_s)
                _bound(self.changing, STARTING_MAX)
            if worker_id in self.changing:
                self._changed(worker, now_s=now_s, wall_s=wall_s)
            self._upgraded(worker, wall_s=wall_s)
            self._stood_by(worker, instances, now_s=now_s, wall_s=wall_s)
            if worker.state in SERVING:
                self.starting.pop(worker_id, None)
                self._ready(worker, instances, now_s=now_s, wall_s=wall_s)
                if decision_id:
                    self.serving.setdefault(worker_id, decision_id)
                if has_worked(worker):
                    self._tell(decision_id, worker_id, "first_request", wall_s, {})
            else:
                self.starting[worker_id] = worker
                _bound(self.starting, STARTING_MAX)
        for instance in instances:
            if instance.order.worker_id not in self.placed:
                self._place(instance, wall_s=wall_s)
            if instance.state == "failed":
                self._failed(instance, wall_s=wall_s)
        if fleet_known:
            self._gone(alive, wall_s=wall_s)

    def collect(self) -> list[Outcome]:
        """Everything not handed out yet; of what nobody collects the newest WAITING_MAX."""
        out, self._out = self._out, []
        return out

    def keep(self, outcomes: list[Outcome]) -> None:
        """Hand these out with the next ones: they could not be written down yet."""
        self._out = [*outcomes, *self._out][-WAITING_MAX:]

    def _place(self, instance: Instance, *, wall_s: float) -> None:
        """When the actuator allocated it and when its process began, by the actuator's own ages."""
        order = instance.order
        began_s = wall_s - instance.allocated_ago_s
        where = {"node": instance.node, "note": instance.node_note}
        # The call itself may have been cut off, and a quick start be over before it is given again.
        taken = {"note": instance.node_note} if instance.node_note else {}
        self._tell(order.scale_decision_id, order.worker_id, "ordered", began_s, taken)
        self._tell(order.scale_decision_id, order.worker_id, "allocated", began_s, where)
        if instance.running_ago_s is not None:
            began_s = wall_s - instance.running_ago_s
            self._tell(order.scale_decision_id, order.worker_id, "running", began_s, {})
        if instance.running_ago_s is not None or instance.exited_ago_s is not None:
            self.placed[order.worker_id] = None
            _bound(self.placed)

    def _failed(self, instance: Instance, *, wall_s: float) -> None:
        order, code = instance.order, instance.exit_code
        if (order.scale_decision_id, order.worker_id, "failed") in self.told:
            return
        document: dict[str, Any] = {
            "note": f"{instance.reason or 'ended'} (exit code {code})",
            "worker_class": order.worker_class,
            "mode": str(order.mode),
        }
        worker = self.starting.pop(order.worker_id, None)
        if worker is not None:
            document["start"] = start_document(worker)
            document["checks"] = _checks(worker)
        if instance.log_tail:
            document["log_tail"] = instance.log_tail
        self._tell(order.scale_decision_id, order.worker_id, "failed", wall_s, document)

    def _gone(self, alive: set[str], *, wall_s: float) -> None:
        """Who is in the router's fleet no more; only where the fleet is known."""
        for worker_id, decision_id in list(self.draining.items()):
            if worker_id not in alive:
                self._tell(decision_id, worker_id, "drained", wall_s, {})
                del self.draining[worker_id]
        # Who changes the stage is between two leases for a moment; it is not gone.
        for worker_id in [w for w in self.serving if w not in alive and w not in self.changing]:
            self._tell(self.serving.pop(worker_id), worker_id, "left", wall_s, {})

    def _changed(self, worker: Worker, *, now_s: float, wall_s: float) -> None:
        """Whether it serves as it was told by now."""
        word, role = self.changing[worker.worker_id], worker.offer.counts_as
        flips = word.kind == fast.FLIP
        if worker.state is not WorkerState.READY or (role is ROLE_OF[word.pool]) is flips:
            return
        del self.changing[worker.worker_id]
        seconds = max(0.0, wall_s - word.told_s)
        pool = next(name for name in POOLS if ROLE_OF[name] is role)
        self.book.changed(pool, worker.offer.worker_class, word.kind, seconds, now_s=now_s)
        kind = "flipped" if flips else "activated"
        self._tell(word.decision_id, worker.worker_id, kind, wall_s, {"seconds": seconds})

    def _stood_by(
        self, worker: Worker, instances: Iterable[Instance], *, now_s: float, wall_s: float
    ) -> None:
        """Whether it waits: proved, which was a start, or with a process only, which was none."""
        if worker.holds is Holds.PROCESS:
            document = {"holds": str(worker.holds)}
            self._tell(
                worker.offer.scale_decision_id, worker.worker_id, "stood_by", wall_s, document
            )
        elif worker.state is WorkerState.STANDBY and worker.serving is not None:
            self._ready(worker, instances, now_s=now_s, wall_s=wall_s, kind="stood_by")

    def _upgraded(self, worker: Worker, *, wall_s: float) -> None:
        """Whether the upgrade of its graphs is over, well or not."""
        stage = worker.serving.stage if worker.serving is not None else None
        if stage is None or stage.state not in UPGRADED:
            return
        document = {
            "seconds": stage.took_s,
            "state": str(stage.state),
            "shapes": list(stage.shapes),
            "kv_tokens": stage.kv_tokens,
            "digest": stage.digest,
            "why": stage.failure,
        }
        kind = UPGRADED[stage.state]
        self._tell(worker.offer.scale_decision_id, worker.worker_id, kind, wall_s, document)

    def _ready(
        self,
        worker: Worker,
        instances: Iterable[Instance],
        *,
        now_s: float,
        wall_s: float,
        kind: str = "ready",
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
            "worker_class": worker.offer.worker_class,
            "mode": str(worker.offer.mode),
            "holds": str(worker.offer.holds),
            "checks": _checks(worker),
        }
        if worker.ready_s is not None:
            document["ready_ago_s"] = max(0.0, worker.renewed_s - worker.ready_s)
        if sample is not None and worker.offer.holds is not Holds.PROCESS:
            self.book.add(worker.offer.counts_as, sample)
            document["sample"] = sample_document(sample)
        self._tell(worker.offer.scale_decision_id, worker.worker_id, kind, wall_s, document)

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
        del self._out[:-WAITING_MAX]


class Judge:
    """Asks of each decision that moved something whether it was worth it, once its time has come.

    Holds only what is still to be judged; the journal holds the rest, so that a successor goes on
    where this one ended, and what was told once stays (its outcomes are never written again).
    """

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def expect(self, record: Record) -> None:
        """A decision that was just kept."""
        if to_judge(record.document):
            self._due[record.decision_id] = record.create_s + due_after_s(record.document)
            _bound(self._due, UNJUDGED_MAX)

    async def begin(self, journal: Journal, model: str) -> None:
        """Take over what a predecessor left unjudged."""
        told = await journal.outcomes(model, "judged", limit=2 * UNJUDGED_MAX)
        judged = {outcome.decision_id for outcome in told}
        newest = await journal.newest(model, limit=UNJUDGED_MAX, changes_only=True)
        for record in reversed(newest):
            if record.decision_id not in judged:
                self.expect(record)

    async def look(self, journal: Journal, *, wall_s: float) -> Outcome | None:
        """The judgement of one decision that is due, if it can be judged already."""
        decision_id = next((d for d, due_s in self._due.items() if due_s <= wall_s), None)
        if decision_id is None:
            return None
        again_s = wall_s + AGAIN_S
        try:
            record, outcomes = await journal.get(decision_id)
        except NotFound:  # pruned, or its writing failed
            del self._due[decision_id]
            return None
        self._due[decision_id] = again_s
        before = await journal.newest(record.model, limit=BEFORE_MAX, before=record.sequence)
        after = await journal.since(record.model, record.sequence, limit=AFTER_MAX)
        found = judge(record, outcomes, before, after, now_s=wall_s)
        if found is None:
            return None
        del self._due[decision_id]
        return Outcome(decision_id, "", "judged", wall_s, found)


def has_worked(worker: Worker) -> bool:
    """Whether a worker was given a request: by the router's count, or by its engine's counters."""
    load = worker.load
    computed = (load.prefill_tokens_total or 0) + (load.decode_tokens_total or 0)
    return worker.active > 0 or bool(load.running) or (worker.offer.attached and computed > 0)


def _checks(worker: Worker) -> list[dict[str, Any]]:
    return [{"name": c.name, "passed": c.passed, "reason": c.reason} for c in worker.checks]


def _bound(remembered: dict[Any, Any], most: int = TOLD_MAX) -> None:
    while len(remembered) > most:
        remembered.pop(next(iter(remembered)))
