"""The living workers as a decision sees them, and what two reports of one life measured.

Joins by (worker id, incarnation) and by nothing else. Ages are differences on the router's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from readyplane.core.identity import FieldDifference, compatible
from readyplane.core.worker import Holds, LoadReport, Role, Worker, WorkerState
from readyplane_planner.signals.outside import EngineLoad, EngineSample
from readyplane_planner.signals.values import EndedStart, RouterSample, WorkerView

_FOR_PREFILL = ("waiting_prefill_tokens", "prefill_tokens_total")
_FOR_DECODE = ("running", "iterations_total", "kv_usage")
NEEDED = {
    Role.PREFILL: _FOR_PREFILL,
    Role.DECODE: _FOR_DECODE,
    Role.BOTH: (*_FOR_PREFILL, *_FOR_DECODE),
}
"""What each stage is judged by beside the router's own promises."""


def workers(
    previous: RouterSample | None, current: RouterSample | None
) -> tuple[tuple[WorkerView, ...], int]:
    """The living, joined with their own earlier sample by (id, incarnation) and by nothing else."""
    if current is None:
        return (), 0
    before = {w.key: w for w in previous.workers} if previous is not None else {}
    told = {e.key: e for e in current.engines}
    told_before = {e.key: e for e in previous.engines} if previous is not None else {}
    living = [w for w in current.workers if w.state is not WorkerState.GONE]
    router_now_s = max((w.renewed_s for w in living), default=0.0)
    for worker in living:
        for since_s in (worker.ready_s, worker.draining_s):
            if since_s is not None and since_s > router_now_s:
                router_now_s = since_s
    unpairable = stranded(living)
    # What is left of `before` when everyone alive is taken out has ended.
    views = []
    for worker in living:
        key = worker.key
        engine = told.pop(key, None)
        beside = None if engine is None else (engine, told_before.get(key))
        why = unpairable.get(worker.offer.worker_id, "")
        views.append(_view(worker, before.pop(key, None), router_now_s, why, beside))
    return tuple(views), len(before) + len(told)


def ended(workers: Sequence[Worker]) -> tuple[EndedStart, ...]:
    """Starts that ended for good; most of them are gone by the time that anybody looks."""
    return tuple(
        EndedStart(w.worker_id, w.progress.dead_end, w.progress.failure)
        for w in workers
        if w.progress is not None and w.progress.dead_end
    )


def stranded(workers: Sequence[Worker]) -> dict[str, str]:
    """Ready workers that no ready worker of the other stage can exchange KV with, and why.

    Nobody is stranded while the other stage has nobody ready. Where not one pair of the two stages
    fits, only attached engines are: the planner's own workers are what new ones will fit.
    """
    serving = [
        (w, w.serving.kv) for w in workers if w.state is WorkerState.READY and w.serving is not None
    ]
    if all(kv == serving[0][1] for _w, kv in serving):
        return {}
    ready = {
        stage: [(w, kv) for w, kv in serving if w.offer.role.serves(stage)]
        for stage in (Role.PREFILL, Role.DECODE)
    }
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
    worker: Worker,
    before: Worker | None,
    router_now_s: float,
    unpairable: str,
    beside: tuple[EngineSample, EngineSample | None] | None,
) -> WorkerView:
    load, told, pace = worker.load, _NOTHING, _measured(worker, before)
    if beside is not None:
        told = beside[0].load
        load, pace = _with_engine(load, told), _either(pace, _measured_beside(*beside))
    total, used = load.kv_total_blocks, load.kv_used_blocks
    usage = used / total if used is not None and total else told.kv_usage
    block = worker.serving.block_size if worker.serving is not None else 16
    kv_tokens = float(used * block) if used is not None else told.kv_tokens
    prefill_rate, dry_rate, iteration_s, decode_rate = pace
    offer, ready_s, draining_s = worker.offer, worker.ready_s, worker.draining_s
    stage = worker.serving.stage if worker.serving is not None else None
    return WorkerView(
        worker_id=offer.worker_id,
        incarnation=offer.incarnation,
        role=offer.counts_as,
        state=worker.state,
        worker_class=offer.worker_class,
        epoch=worker.epoch,
        generation=offer.generation,
        manifest_digest=offer.manifest_digest,
        mode=str(offer.mode if worker.serving is None else worker.serving.runs),
        node=offer.node,
        attached=offer.attached,
        scale_decision_id=offer.scale_decision_id,
        ready_age_s=None if ready_s is None else max(0.0, router_now_s - ready_s),
        drain_age_s=None if draining_s is None else max(0.0, router_now_s - draining_s),
        active=worker.active,
        promised_prefill_tokens=worker.promised_prefill_tokens,
        promised_kv_blocks=worker.promised_kv_blocks,
        running=load.running,
        waiting=load.waiting,
        waiting_prefill_tokens=load.waiting_prefill_tokens,
        kv_usage=usage,
        prefill_rate=prefill_rate,
        dry_rate=dry_rate,
        iteration_s=iteration_s,
        decode_rate=decode_rate,
        kv_tokens=kv_tokens,
        kv_capacity=float(total * block) if total else told.kv_capacity_tokens,
        failure=worker.progress.failure if worker.progress is not None else "",
        unpairable=unpairable,
        convertible=offer.convertible,
        standby=offer.standby,
        standby_age_s=_standby_age_s(worker, router_now_s),
        bare=offer.standby and offer.holds is Holds.PROCESS and worker.serving is None,
        kv_published=None if stage is None else stage.kv_tokens,
        told=worker.told,
        flips=worker.serving is not None and worker.serving.flips,
        missing=_missing(worker, load, told, usage),
    )


def _with_engine(load: LoadReport, told: EngineLoad) -> LoadReport:
    """A worker's own report, and what only its engine tells. An agent may not know the engine."""
    known = {
        name: getattr(told, name)
        for name in ("running", "waiting", "waiting_prefill_tokens")
        if getattr(load, name) is None
    }
    return replace(load, **known)


def _missing(
    worker: Worker, load: LoadReport, told: EngineLoad, usage: float | None
) -> tuple[str, ...]:
    if worker.state is not WorkerState.READY:
        return ()
    return tuple(
        [
            name
            for name in NEEDED[worker.offer.role]
            if (usage if name == "kv_usage" else getattr(load, name)) is None
            and getattr(told, name, None) is None
        ]
    )


_NOTHING = EngineLoad()


def _standby_age_s(worker: Worker, router_now_s: float) -> float | None:
    if worker.state is not WorkerState.STANDBY or worker.provisioned_s is None:
        return None
    return max(0.0, router_now_s - worker.provisioned_s)


Pace = tuple[float | None, float | None, float | None, float | None]
"""prefill_rate, dry_rate, iteration_s and decode_rate of a WorkerView."""


def _measured(worker: Worker, before: Worker | None) -> Pace:
    """Between two reports of one life. Iterations only where the worker ran at both ends: else
    they tell of its load, not of its speed; and not where a lent decoder computed prompts in them.
    """
    if before is None or worker.ready_s is None:
        return None, None, None, None
    now, old = worker.load, before.load
    dt_s = (worker.renewed_s - now.age_s) - (before.renewed_s - old.age_s)
    if dt_s <= 0:
        return None, None, None, None
    rate = dry = iteration = decoded = None
    lent = False
    if now.prefill_tokens_total is not None and old.prefill_tokens_total is not None:
        grown = now.prefill_tokens_total - old.prefill_tokens_total
        lent = worker.offer.convertible and grown > 0
        if grown > 0 and old.waiting_prefill_tokens is not None:
            rate, dry = grown / dt_s, old.waiting_prefill_tokens / dt_s
    if now.iterations_total is not None and old.iterations_total is not None:
        steps = now.iterations_total - old.iterations_total
        if steps > 0 and (now.running or 0) and (old.running or 0) and not lent:
            iteration = dt_s / steps
    if now.decode_tokens_total is not None and old.decode_tokens_total is not None:
        made = _grown(now.decode_tokens_total, old.decode_tokens_total)
        decoded = None if made is None else made / dt_s
    return rate, dry, iteration, decoded


def _measured_beside(now: EngineSample, old: EngineSample | None) -> Pace:
    """The same from two readings of one engine; another life of it shares no counters."""
    if old is None or now.life != old.life or now.read_s <= old.read_s:
        return None, None, None, None
    dt_s, load, before = now.read_s - old.read_s, now.load, old.load
    rate = dry = iteration = None
    computed = _grown(load.prefill_tokens_total, before.prefill_tokens_total)
    if computed and before.waiting_prefill_tokens is not None:
        rate, dry = computed / dt_s, before.waiting_prefill_tokens / dt_s
    steps = _grown(load.iterations_total, before.iterations_total)
    if steps and load.running and before.running:
        iteration = dt_s / steps
    made = _grown(load.decode_tokens_total, before.decode_tokens_total)
    return rate, dry, iteration, None if made is None else made / dt_s


def _grown(now: float | None, old: float | None) -> float | None:
    """None where either is not known, or where it went back, which says nothing (B15)."""
    return None if now is None or old is None or now < old else now - old


def _either(first: Pace, second: Pace) -> Pace:
    prefill, dry, iteration, decoded = (
        a if a is not None else b for a, b in zip(first, second, strict=True)
    )
    return prefill, dry, iteration, decoded


def generated(views: Sequence[WorkerView]) -> float | None:
    """Output tokens/s of the D pool; None when no worker told.

    Reports come less often than ticks: who has not told in this one counts as the others' mean.
    """
    serving = {WorkerState.READY, WorkerState.DRAINING}
    told = [w.decode_rate for w in views if w.role.serves(Role.DECODE) and w.state in serving]
    known = [rate for rate in told if rate is not None]
    return sum(known) / len(known) * len(told) if known else None
