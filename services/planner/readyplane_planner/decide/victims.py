"""Whom to give up: who holds the fewest sequences, the least KV value and no backlog (R22.1).

Judged by what the router assigned, never by an engine's own report, which may be older than a
dispatch (B64). The order is total, so that the same fleet gives the same victims.
"""

from __future__ import annotations

from collections.abc import Iterable

from readyplane_planner.decide.pools import Coming
from readyplane_planner.signals import WorkerView


def score(worker: WorkerView, *, digest: str) -> tuple[float, ...]:
    """What losing a worker costs, in the order that counts; smaller goes first.

    (newer artifact, sequences, promised prompt tokens, KV in use, seniority). The senior worker
    is the likeliest source of weights for the next start, so among equals the newest goes.
    """
    current = 1.0 if worker.manifest_digest == digest or not digest else 0.0
    return (
        current,
        float(worker.active),
        float(worker.promised_prefill_tokens),
        worker.kv_usage if worker.kv_usage is not None else 1.0,
        worker.ready_age_s or 0.0,
    )


def shown(worker: WorkerView) -> str:
    """Its score in words, for the record of the decision (B66)."""
    kv = "an unknown share" if worker.kv_usage is None else f"{worker.kv_usage:.0%}"
    return (
        f"holds {worker.active} sequences, {worker.promised_prefill_tokens} promised tokens and "
        f"{kv} of its KV; ready for {worker.ready_age_s or 0.0:.0f} s"
    )


def from_ready(
    workers: Iterable[WorkerView], count: int, *, digest: str, min_ready_s: float
) -> list[WorkerView]:
    """At most `count` victims. Attached engines belong to somebody else and are never chosen.

    The worker that holds the most is spared while another exists: it is the one with the
    backlog (B23). Fresh workers are spared for `min_ready_s`.
    """
    if count <= 0:
        return []
    own = [w for w in workers if not w.attached]
    old_enough = [w for w in own if w.ready_age_s is not None and w.ready_age_s >= min_ready_s]
    ranked = sorted(old_enough, key=lambda w: (*score(w, digest=digest), w.worker_id))
    busiest = max(own, key=lambda w: (w.active, w.promised_prefill_tokens), default=None)
    if busiest is not None and len(own) > 1 and busiest.active > 0:
        ranked = [w for w in ranked if w.worker_id != busiest.worker_id]
    return ranked[:count]


def from_coming(coming: Iterable[Coming], count: int) -> list[Coming]:
    """Starts to cancel: the youngest, which has been paid for least; nobody is routed to them."""
    ranked = sorted((c for c in coming if not c.attached), key=lambda c: (c.age_s, c.worker_id))
    return ranked[:count]
