"""The state document: what a person watches, as JSON; null is 'not known' (see the README).

Owns its shape and the history behind it. Built from values of one tick; no effect happens here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from readyplane.core.worker import Role, Worker, WorkerState
from readyplane_planner.decide import POOLS, ROLE_OF, Decision, Plan, PoolDecision
from readyplane_planner.decide.values import Denied
from readyplane_planner.signals import Allocation, Latency, Observation, RouterSample
from readyplane_planner.starts import start_document

HISTORY_MAX = 900
POINT = ("desired", "provisioned", "ready", "load")
STEMS = ("ttft", "tpot")
"""The latency of each pool, in the order of POOLS."""
RUNS = frozenset({"pending", "running"})
"""States of an instance that has not ended."""
UNHEARD_S_MIN = 5.0
"""A process that ends as it was asked to is silent for less."""
HELD = frozenset(
    (
        "dead_end",
        *("manual_hold", "ownership_conflict", "denied", "pending", "backoff", "shape_unknown"),
        *("shedding", "fallback", "drift_forecast", "drift_model", "drift_actuation"),
    )
)
"""Reasons that a person may end or wait for; each says for how long."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one tick knows. `paused`: by the policy; a plan also holds while another planner leads.

    `denied`: classes whose orders are refused. `advisory`: nothing is ordered at all, on purpose.
    `silent`: workers that the router knows no more though the actuator holds them, as last heard of.
    """

    plan: Plan
    observation: Observation
    decision: Decision
    sample: RouterSample | None
    worker_seconds: Mapping[str, float]
    wall_s: float
    paused: bool = False
    degraded: str = ""
    silent: tuple[Worker, ...] = ()
    denied: tuple[Denied, ...] = ()
    advisory: bool = False


class LastHeard:
    """The last word of each worker for as long as the actuator holds it.

    An agent that hangs or is frozen loses its lease, and the router forgets it after a while; its
    process still runs, and it never is a worker that has just been ordered.
    """

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}

    def of(
        self, sample: RouterSample | None, allocations: Iterable[Allocation]
    ) -> tuple[Worker, ...]:
        """Who is held and shown no more."""
        shown = {} if sample is None else {w.worker_id: w for w in sample.workers}
        held = {a.worker_id for a in allocations if a.state in RUNS}
        kept = {**self._workers, **shown}
        self._workers = {k: w for k, w in kept.items() if k in held or k in shown}
        return tuple(w for k, w in self._workers.items() if k not in shown)


class History:
    """The last HISTORY_MAX points, one row a tick; lists by name only when somebody looks."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float | None, ...]] = deque(maxlen=HISTORY_MAX)

    def add(self, seen: Seen) -> None:
        """Take the point of one tick."""
        row: list[float | None] = [seen.wall_s]
        latency = seen.observation.latency
        for name, stem in zip(POOLS, STEMS, strict=True):
            pool = seen.decision.pool(name)
            provisioned, ready = _capacity(name, seen)
            row += (pool.target, provisioned, ready, pool.load.value)
            actual = latency.get(f"{stem}_actual")
            row.append(actual.p90_s if actual is not None and actual.count > 0 else None)
            row.append(pool.load.predicted_s)
        self._rows.append(tuple(row))

    def document(self) -> dict[str, Any]:
        """The lists as JSON."""
        width = 1 + (len(POINT) + 2) * len(POOLS)
        columns = iter([list(c) for c in zip(*self._rows, strict=True)] or [[]] * width)
        out: dict[str, Any] = {"t_s": list(next(columns))}
        latencies: dict[str, Any] = {}
        for name, stem in zip(POOLS, STEMS, strict=True):
            out[name] = {key: list(next(columns)) for key in POINT}
            latencies[f"{stem}_actual_p90_s"] = list(next(columns))
            latencies[f"{stem}_predicted_s"] = list(next(columns))
        return {**out, **latencies}


def state_document(
    seen: Seen,
    pools: Mapping[str, Mapping[str, Any]],
    decisions: Iterable[Mapping[str, Any]],
) -> dict[str, Any]:
    """One state, without history; `pools` as made by `state_pools`."""
    sample, decision, plan = seen.sample, seen.decision, seen.plan
    workers = () if sample is None else sample.workers
    return {
        "now_s": seen.wall_s,
        "model": plan.model,
        "paused": seen.paused,
        "advisory": seen.advisory,
        "policy_version": plan.version,
        "slo": {"ttft_s": plan.ttft_s, "tpot_s": plan.tpot_s},
        "degraded": seen.degraded or decision.degraded,
        "held": [
            {"pool": r.pool, "code": r.code, "text": r.text} for r in decision.why if r.code in HELD
        ],
        "lateness_p99_s": _largest(w.load.lateness_p99_s for w in workers),
        "pools": dict(pools),
        "latency": {
            name: {
                "actual": _latency(seen.observation.latency.get(f"{name}_actual")),
                "predicted": _latency(seen.observation.latency.get(f"{name}_predicted")),
            }
            for name in STEMS
        },
        "counters": _counters(sample, seen.worker_seconds),
        "workers": _workers(workers, seen),
        "decisions": list(decisions),
        "forecast": {name: _forecast(decision.pool(name)) for name in POOLS},
        "rollout": _rollout(decision),
        "degradation": _degradation(seen),
    }


def state_pools(seen: Seen) -> dict[str, dict[str, Any]]:
    """The `pools` part of the document."""
    workers = () if seen.sample is None else seen.sample.workers
    return {name: _pool(name, seen, seen.decision.pool(name), workers) for name in POOLS}


def _pool(name: str, seen: Seen, pool: PoolDecision, workers: Sequence[Worker]) -> dict[str, Any]:
    role, rate, observation = ROLE_OF[name], pool.worker_rate, seen.observation
    mine = [
        w for w in workers if w.offer.counts_as.serves(role) and w.state is not WorkerState.GONE
    ]
    provisioned, ready = _capacity(name, seen)
    usages = [
        w.load.kv_used_blocks / w.load.kv_total_blocks
        for w in mine
        if w.state is WorkerState.READY
        and w.load.kv_used_blocks is not None
        and w.load.kv_total_blocks
    ]
    queue = observation.queue if name == "prefill" else observation.remaining
    target_s = seen.plan.ttft_s if name == "prefill" else seen.plan.tpot_s
    return {
        "desired": pool.target,
        "provisioned": provisioned,
        "ready": ready,
        "draining": sum(w.state is WorkerState.DRAINING for w in mine),
        "standby": sum(w.state is WorkerState.STANDBY for w in mine),
        "desired_rate": pool.target * rate,
        "provisioned_rate": provisioned * rate,
        "ready_rate": ready * rate,
        "gap_rate": max(0, pool.target - ready) * rate,
        "load": pool.load.value,
        "load_low": pool.load.low,
        "load_high": pool.load.high,
        "queue_tokens": queue.value,
        "actual_s": pool.load.actual_s,
        "predicted_s": pool.load.predicted_s,
        "target_s": target_s,
        "next_arrival_s": pool.etas_s[0] if pool.etas_s else None,
        "t_ready_p50_s": pool.t_ready.p50_s,
        "t_ready_p90_s": pool.t_ready.p90_s,
        "t_ready_p99_s": pool.t_ready.p99_s,
        "t_ready_samples": pool.t_ready.count,
        "kv_usage": sum(usages) / len(usages) if usages else None,
        "active": sum(w.active for w in mine),
        "correction": pool.correction,
        "missing_capability": _missing(role, observation),
        "dead_ends": [
            {
                "digest": d.digest,
                "kind": d.kind,
                "starts": d.starts,
                "worker_ids": list(d.worker_ids),
                "why": d.why,
                "standby": d.standby,
            }
            for d in seen.decision.dead_ends
            if d.pool == name
        ],
        "denied": [
            {
                "worker_class": d.worker_class,
                "times": d.count,
                "why": d.why,
                "ago_s": max(0.0, seen.decision.at_s - d.at_s),
                "again_in_s": max(0.0, d.retry_s - seen.decision.at_s),
            }
            for d in seen.denied
            if d.pool == name
        ],
    }


def _missing(role: Role, observation: Observation) -> dict[str, int]:
    """Ready workers of a pool that do not tell something it is judged by, by its name (B19)."""
    told = (name for w in observation.workers if w.role.serves(role) for name in w.missing)
    return dict(Counter(told))


def _capacity(name: str, seen: Seen) -> tuple[int, int]:
    """(provisioned, ready) workers of a pool; of the ready, those who have a partner."""
    serving = (ROLE_OF[name], Role.BOTH)
    views = seen.observation.workers
    alive: set[str] = set()
    ready = provisioned = 0
    for view in views:
        if view.role in serving:
            alive.add(view.worker_id)
            if view.state is WorkerState.READY:
                provisioned += 1
                ready += not view.unpairable
            elif view.state in (WorkerState.PROVISIONED, WorkerState.STALLED):
                provisioned += 1
    # The actuator also tells of capacity that runs but holds no lease yet (R1.1).
    for held in seen.observation.allocations:
        if held.state == "running" and held.role in serving and held.worker_id not in alive:
            provisioned += 1
    return provisioned, ready


def _forecast(pool: PoolDecision) -> dict[str, Any]:
    made = pool.forecast
    return {
        "level": made.level,
        "upper": made.upper,
        "lower": made.lower,
        "now": made.now,
        "horizon_s": made.horizon_s,
        "coverage": made.coverage,
        "judged": made.judged,
        "pinball": made.pinball,
    }


def _rollout(decision: Decision) -> dict[str, Any]:
    """Where the roll-out is; `serves` is the generation of new workers."""
    told, now_s = decision.rollout, decision.at_s

    def ago_s(then_s: float | None) -> float | None:
        return None if then_s is None else max(0.0, now_s - then_s)

    return {
        "phase": str(told.phase),
        "reason": told.reason,
        "by": told.by,
        "serves": {"digest": told.serves.digest, "generation": told.serves.number},
        "to": {"digest": told.to.digest, "generation": told.to.number},
        "from": {"digest": told.before.digest, "generation": told.before.number},
        "new": dict(zip(POOLS, told.new, strict=True)),
        "old": dict(zip(POOLS, told.old, strict=True)),
        "leaving": told.leaving,
        "attained_new": told.attained_new,
        "attained_old": told.attained_old,
        "samples": told.samples,
        "begun_ago_s": ago_s(told.begun_s),
        "phase_ago_s": ago_s(told.since_s),
    }


def _degradation(seen: Seen) -> dict[str, Any]:
    """Who gives way: as ordered in this tick, and as the router said that it does; null for nobody."""
    order, sample = seen.decision.ration, seen.sample
    wanted = None if order is None or order.admit_share >= 1.0 else asdict(order)
    return {"ordered": wanted, "in_force": None if sample is None else sample.ration}


def _latency(window: Latency | None) -> dict[str, Any]:
    if window is None or window.count == 0:
        return {"p50_s": None, "p90_s": None, "p99_s": None, "count": 0}
    return {
        "p50_s": window.p50_s,
        "p90_s": window.p90_s,
        "p99_s": window.p99_s,
        "count": window.count,
    }


def _counters(sample: RouterSample | None, worker_seconds: Mapping[str, float]) -> dict[str, Any]:
    names = ("arrivals", "finished", "attained", "refused", "aborted", "repaired", "handovers")
    counters = {} if sample is None or not sample.model_known else sample.counters
    return {
        **{name: counters.get(f"{name}_total") for name in names},
        "output_tokens": counters.get("output_tokens_total"),
        "worker_seconds": dict(worker_seconds),
    }


def _workers(workers: Sequence[Worker], seen: Seen) -> list[dict[str, Any]]:
    """Every worker the router knows or has known, then what was ordered and is new to it."""
    observation, decision = seen.observation, seen.decision
    held = observation.allocations
    runs = {a.worker_id for a in held if a.state in RUNS}
    unpairable = {w.worker_id: w.unpairable for w in observation.workers}
    rows = []
    for worker in sorted((*workers, *seen.silent), key=lambda w: w.worker_id):
        row = _worker(worker, held)
        if worker.worker_id in runs and _lost(worker, seen.silent):
            unheard_s = decision.at_s - worker.renewed_s
            row["unheard_s"] = unheard_s if unheard_s >= UNHEARD_S_MIN else None
        if why := unpairable.get(worker.worker_id):
            row["unpairable"] = why
        rows.append(row)
    known = {row["worker_id"] for row in rows}
    for allocation in held:
        if allocation.worker_id not in known and allocation.state in RUNS:
            rows.append(_unleased(allocation))
            known.add(allocation.worker_id)
    for order in decision.orders:
        if order.worker_id not in known:
            rows.append(
                _unleased(
                    Allocation(
                        order.worker_id,
                        ROLE_OF[order.pool],
                        "ordered",
                        order.worker_class,
                        generation=order.generation,
                        mode=order.mode,
                        scale_decision_id=decision.decision_id,
                    )
                )
            )
    return rows


def _lost(worker: Worker, silent: Sequence[Worker]) -> bool:
    """Whether the router has lost a worker that nobody has told to go."""
    gone = worker.state is WorkerState.GONE or worker in silent
    return gone and worker.draining_s is None


def _worker(worker: Worker, held: Sequence[Allocation]) -> dict[str, Any]:
    offer, load = worker.offer, worker.load
    age_s = next((a.allocated_ago_s for a in held if a.worker_id == worker.worker_id), None)
    usage = None
    if load.kv_used_blocks is not None and load.kv_total_blocks:
        usage = load.kv_used_blocks / load.kv_total_blocks
    return {
        "worker_id": offer.worker_id,
        "incarnation": offer.incarnation,
        "role": str(offer.counts_as),
        "convertible": offer.convertible,
        "told": worker.told,
        "state": str(worker.state),
        "node": offer.node,
        "worker_class": offer.worker_class,
        "generation": offer.generation,
        "epoch": worker.epoch,
        "scale_decision_id": offer.scale_decision_id,
        "mode": str(offer.mode),
        "tier": str(worker.serving.tier) if worker.serving is not None else "unknown",
        "age_s": age_s,
        "active": worker.active,
        "promised_prefill_tokens": worker.promised_prefill_tokens,
        "promised_kv_blocks": worker.promised_kv_blocks,
        "kv_usage": usage,
        "load": {name: getattr(load, name) for name in load.__slots__},
        "start": start_document(worker),
        "checks": [{"name": c.name, "passed": c.passed, "reason": c.reason} for c in worker.checks],
        "drain_reason": worker.drain_reason,
        "unheard_s": None,
    }


def _unleased(allocation: Allocation) -> dict[str, Any]:
    """An allocation whose agent has not registered: ordered, with nothing known of its load."""
    nothing = {"wall_s": allocation.allocated_ago_s, "segments": [], "exclusive_s": {}}
    blocking = "runtime_import" if allocation.running_ago_s is not None else "schedule"
    return {
        "worker_id": allocation.worker_id,
        "incarnation": "",
        "role": str(allocation.role),
        "convertible": False,
        "told": "",
        "state": str(WorkerState.ORDERED),
        "node": allocation.node,
        "worker_class": allocation.worker_class,
        "generation": allocation.generation,
        "epoch": 0,
        "scale_decision_id": allocation.scale_decision_id,
        "mode": allocation.mode,
        "tier": "unknown",
        "age_s": allocation.allocated_ago_s,
        "active": 0,
        "promised_prefill_tokens": 0,
        "promised_kv_blocks": 0,
        "kv_usage": None,
        "load": {},
        "start": {
            **nothing,
            "unexplained_s": None,
            "blocking_segment": blocking,
            "dominant_segment": None,
            "log_tail": "",
            "failure": allocation.reason,
        },
        "checks": [],
        "drain_reason": "",
        "unheard_s": None,
    }


def _largest(values: Iterable[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)
