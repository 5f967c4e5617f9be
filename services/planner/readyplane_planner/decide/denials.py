"""Orders that were refused, by class: a class that is denied is left alone until its time comes.

A refusal costs nothing but says that asking again at once is useless: quota and capacity come back in
minutes. It is no failed start, and another class may be had meanwhile (B35). Owns the memory of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from readyplane_planner.decide.pools import Pool
from readyplane_planner.decide.values import Denied, Memory, Plan, Reason
from readyplane_planner.guard import Limits
from readyplane_planner.signals import Observation

PAUSE_S_MAX = 60.0
"""The longest pause: an order that is refused costs a call, one that is late costs promises."""
DENIED_MAX = 64
FORGOTTEN_S = 600.0


def noted(
    memory: Memory, observation: Observation, plan: Plan, limits: Limits, *, now_s: float
) -> Memory:
    """The memory with the refusals of this tick, and without those that an accepted order ended."""
    refused: dict[tuple[str, str], str] = {}
    open_orders = {o.worker_id: o for o in memory.orders}
    for refusal in observation.refused:
        order = open_orders.get(refusal.worker_id)
        if order is not None:
            name = order.worker_class or plan.pool(order.pool).worker_class
            refused[order.pool, name] = refusal.reason
    if not refused and not memory.denied:
        return memory
    held = {a.worker_id for a in observation.allocations}
    taken = {
        (o.pool, o.worker_class or plan.pool(o.pool).worker_class): o.ordered_s
        for o in memory.orders
        if o.worker_id in held
    }
    kept = {}
    for denied in memory.denied:
        key = denied.pool, denied.worker_class
        if taken.get(key, -1.0) < denied.at_s and now_s - denied.retry_s < FORGOTTEN_S:
            kept[key] = denied
    for key, why in refused.items():
        count = kept[key].count + 1 if key in kept else 1
        pause_s = min(PAUSE_S_MAX, limits.backoff_s * 2.0 ** min(count - 1, 10))
        kept[key] = Denied(*key, count=count, at_s=now_s, retry_s=now_s + pause_s, why=why)
    denied_now = tuple(kept[key] for key in sorted(kept))[-DENIED_MAX:]
    return memory if denied_now == memory.denied else replace(memory, denied=denied_now)


def denied(memory: Memory, pool: str, worker_class: str, *, now_s: float) -> Denied | None:
    """The refusal for which a class is left alone now."""
    for entry in memory.denied:
        if (entry.pool, entry.worker_class) == (pool, worker_class) and now_s < entry.retry_s:
            return entry
    return None


def shut(memory: Memory, pool: str, classes: Iterable[str], *, now_s: float) -> Denied | None:
    """When every class of a pool is left alone: the one that may be asked for first."""
    found = [denied(memory, pool, name, now_s=now_s) for name in classes]
    waiting = [d for d in found if d is not None]
    if not waiting or len(waiting) < len(found):
        return None
    return min(waiting, key=lambda d: (d.retry_s, d.worker_class))


def said(memory: Memory, pools: Iterable[Pool], *, now_s: float) -> list[Reason]:
    """Which classes are left alone and for how long."""
    names = {p.name for p in pools}
    return [
        Reason(
            "denied",
            f"{d.worker_class} was refused {d.count} times ({d.why}): asked for again in "
            f"{d.retry_s - now_s:.1f} s",
            d.pool,
        )
        for d in memory.denied
        if d.pool in names and now_s < d.retry_s
    ]
