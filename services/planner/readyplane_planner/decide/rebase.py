"""What of the memory is void when the policy changes what it was measured of (B44).

Owns the link between a policy and the windows that rest on it: another class or profile makes an old
speed correction meaningless, another look-back makes the old series one of other numbers.
"""

from __future__ import annotations

from dataclasses import replace

from readyplane_planner.capacity import Correction
from readyplane_planner.decide.values import POOLS, Averages, Memory, Plan
from readyplane_planner.forecast import Series


def bases(plan: Plan) -> dict[str, str]:
    """What the windows of the memory rest on, by name."""
    by_pool = {
        name: f"{plan.pool(name).worker_class}/{plan.pool(name).profile.name}" for name in POOLS
    }
    return {**by_pool, "rates": f"{plan.model}/{plan.knobs.window_s:g}"}


def rebased(memory: Memory, plan: Plan) -> Memory:
    """The memory without the windows whose basis has changed."""
    now, before = bases(plan), memory.bases
    if now == before:
        return memory
    if before.get("rates", now["rates"]) != now["rates"]:
        blank = Memory()
        memory = replace(
            memory,
            work_p=Series(),
            work_d=Series(),
            apart_p=blank.apart_p,
            apart_d=blank.apart_d,
            averages=Averages(),
        )
    if before.get("prefill", now["prefill"]) != now["prefill"]:
        guard = replace(memory.guard_p, wants=(), surplus_since_s=None, deficit_since_s=None)
        memory = replace(memory, correct_p=Correction(), guard_p=guard)
    if before.get("decode", now["decode"]) != now["decode"]:
        guard = replace(memory.guard_d, wants=(), surplus_since_s=None, deficit_since_s=None)
        memory = replace(memory, correct_d=Correction(), guard_d=guard)
    return replace(memory, bases=now)
