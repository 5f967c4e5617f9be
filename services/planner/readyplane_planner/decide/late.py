"""Waiting that lasts although the model says it cannot: one P worker more, and again if need be.

What waits before the engines may be seen by nobody but the clock of whoever waits (B07). Owns that
rule alone; it grows by one at a time and shrinks nothing. Handed to brain.
"""

from __future__ import annotations

from dataclasses import replace

from readyplane_planner.decide.pools import Pool
from readyplane_planner.decide.values import Memory, Plan, Reason
from readyplane_planner.optimise import Proposal
from readyplane_planner.signals import Observation

WINDOWS = 2.0
"""A wait counts when it has outlived so many of its windows: the first still tells of the past."""


def lifted(
    proposal: Proposal | None,
    observation: Observation,
    plan: Plan,
    memory: Memory,
    pool: Pool,
    said: list[Reason],
    *,
    now_s: float,
) -> tuple[Proposal | None, Memory]:
    """The proposal with one P worker more while the wait alone misses TTFT, and since when it does.

    A worker on its way is waited for; the windows are counted anew after each.
    """
    wait = observation.latency.get("wait_actual")
    if wait is None or not wait.count or wait.p90_s <= plan.ttft_s:
        return proposal, replace(memory, late_since_s=None) if memory.late_since_s else memory
    text = f"P90 of the wait before prefill is {wait.p90_s:.1f} s of {plan.ttft_s:g} s TTFT"
    said.append(Reason("queue_wait", text, pool.name))
    since_s = now_s if memory.late_since_s is None or pool.coming else memory.late_since_s
    memory = replace(memory, late_since_s=since_s)
    if proposal is None or now_s - since_s < WINDOWS * wait.window_s:
        return proposal, memory
    more = max(proposal.p, pool.live + 1)
    urgent = None if proposal.p_now is None else max(proposal.p_now, pool.live + 1)
    keep = max(proposal.p_keep, more)
    return replace(proposal, p=more, p_now=urgent, p_keep=keep), memory
