"""The living workers as a decision sees them, and what two reports of one life measured.

Joins by (worker id, incarnation) and by nothing else. Ages are differences on the router's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from readyplane.core.identity import FieldDifference, KvFormat, compatible
from readyplane.core.worker import Role, Worker, WorkerState
from readyplane_planner.signals.values import RouterSample, WorkerView


def workers(
    previous: RouterSample | None, current: RouterSample | None
) -> tuple[tuple[WorkerView, ...], int]:
    """The living, joined with their own earlier sample by (id, incarnation) and by nothing else."""
    if current is None:
        return (), 0
    before = {w.key: w for w in previous.workers} if previous is not None else {}
    living = [w for w in current.workers if w.state is not WorkerState.GONE]
    router_now_s = max(
        (t for w in living for t in (w.renewed_s, w.ready_s, w.draining_s) if t is not None),
        default=0.0,
    )
    unpairable = stranded(living)
    views = tuple(
        _view(w, before.get(w.key), router_now_s, unpairable.get(w.offer.worker_id, ""))
        for w in living
    )
    return views, len(before.keys() - {w.key for w in living})


def stranded(workers: Sequence[Worker]) -> dict[str, str]:
    """Ready workers that no ready worker of the other stage can exchange KV with, and why.

    Nobody is stranded while the other stage has nobody ready. Where not one pair of the two stages
    fits, only attached engines are: the planner's own workers are what new ones will fit.
    """
    ready: dict[Role, list[tuple[Worker, KvFormat]]] = {Role.PREFILL: [], Role.DECODE: []}
    for worker in workers:
        if worker.state is WorkerState.READY and worker.serving is not None:
            for stage, members in ready.items():
                if worker.offer.role.serves(stage):
                    members.append((worker, worker.serving.kv))
    formats = {stage: {kv for _w, kv in members} for stage, members in ready.items()}
    some_fit = bool(formats[Role.PREFILL] & formats[Role.DECODE])
    found: dict[str, str] = {}
    for stage, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        if not formats[other]:
            continue
        for worker, kv in ready[stage]:
            if kv not in formats[other] and (some_fit or worker.offer.attached):
                nearest = min(
                    (compatible(kv, partner) for partner in formats[other]),
                    key=lambda differing: (len(differing), str(differing)),
                )
                found[worker.offer.worker_id] = _differing(nearest, other)
    return found


def _differing(differing: Sequence[FieldDifference], other: Role) -> str:
    fields = ", ".join(f"{d.field} {d.left} against {d.right}" for d in differing)
    return f"its KV fits no ready {other} worker: {fields}"


def _view(
    worker: Worker, before: Worker | None, router_now_s: float, unpairable: str
) -> WorkerView:
    load = worker.load
    total, used = load.kv_total_blocks, load.kv_used_blocks
    usage = used / total if used is not None and total else None
    block = worker.serving.block_size if worker.serving is not None else 16
    kv_tokens = float(used * block) if used is not None else None
    pace = _measured(worker, before)

    def age(since: float | None) -> float | None:
        return None if since is None else max(0.0, router_now_s - since)

    offer = worker.offer
    return WorkerView(
        worker_id=offer.worker_id,
        incarnation=offer.incarnation,
        role=offer.role,
        state=worker.state,
        worker_class=offer.worker_class,
        epoch=worker.epoch,
        generation=offer.generation,
        manifest_digest=offer.manifest_digest,
        mode=str(offer.mode),
        node=offer.node,
        attached=offer.attached,
        scale_decision_id=offer.scale_decision_id,
        ready_age_s=age(worker.ready_s),
        drain_age_s=age(worker.draining_s),
        active=worker.active,
        promised_prefill_tokens=worker.promised_prefill_tokens,
        promised_kv_blocks=worker.promised_kv_blocks,
        running=load.running,
        waiting=load.waiting,
        waiting_prefill_tokens=load.waiting_prefill_tokens,
        kv_usage=usage,
        prefill_rate=pace.prefill_rate,
        dry_rate=pace.dry_rate,
        iteration_s=pace.iteration_s,
        decode_rate=pace.decode_rate,
        kv_tokens=kv_tokens,
        failure=worker.progress.failure if worker.progress is not None else "",
        unpairable=unpairable,
    )


@dataclass(frozen=True, slots=True)
class _Pace:
    """What two reports of one life tell; see WorkerView."""

    prefill_rate: float | None = None
    dry_rate: float | None = None
    iteration_s: float | None = None
    decode_rate: float | None = None


def _measured(worker: Worker, before: Worker | None) -> _Pace:
    """Between two reports of one life. Iterations only where the worker ran at both ends: else
    they tell of its load, not of its speed.
    """
    if before is None or worker.ready_s is None:
        return _Pace()
    now, old = worker.load, before.load
    dt_s = (worker.renewed_s - now.age_s) - (before.renewed_s - old.age_s)
    if dt_s <= 0:
        return _Pace()
    rate = dry = iteration = decoded = None
    if now.prefill_tokens_total is not None and old.prefill_tokens_total is not None:
        grown = now.prefill_tokens_total - old.prefill_tokens_total
        if grown > 0 and old.waiting_prefill_tokens is not None:
            rate, dry = grown / dt_s, old.waiting_prefill_tokens / dt_s
    if now.iterations_total is not None and old.iterations_total is not None:
        steps = now.iterations_total - old.iterations_total
        if steps > 0 and (now.running or 0) and (old.running or 0):
            iteration = dt_s / steps
    if now.decode_tokens_total is not None and old.decode_tokens_total is not None:
        decoded = max(0.0, (now.decode_tokens_total - old.decode_tokens_total) / dt_s)
    return _Pace(rate, dry, iteration, decoded)


def generated(views: Sequence[WorkerView]) -> float | None:
    """Output tokens/s of the D pool; None when no worker told.

    Reports come less often than ticks: who has not told in this one counts as the others' mean.
    """
    serving = {WorkerState.READY, WorkerState.DRAINING}
    told = [w.decode_rate for w in views if w.role.serves(Role.DECODE) and w.state in serving]
    known = [rate for rate in told if rate is not None]
    return sum(known) / len(known) * len(told) if known else None
