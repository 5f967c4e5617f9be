"""The first minutes: what may not yet be concluded from what was seen.

The rate of a first second is mostly chance, and a calm minute is no reason to give up what a person
began with. Until a window has been seen nothing grows, until the forecast is warm nothing shrinks.
"""

from __future__ import annotations

from dataclasses import replace

from readyplane_planner.decide.values import Memory, Plan
from readyplane_planner.optimise import Proposal


def held(proposal: Proposal, plan: Plan, memory: Memory, live: tuple[int, int]) -> Proposal:
    """The proposal without what is too early. A pool that is empty is not held.

    Args:
        live: workers of P and D that serve or come.
    """
    begun_s, (live_p, live_d) = memory.work_p.begun_s, live
    if begun_s is None or min(live) <= 0:
        return proposal
    age_s = memory.work_p.updated_s - begun_s
    if age_s < plan.knobs.window_s:
        proposal = replace(proposal, p=min(proposal.p, live_p), d=min(proposal.d, live_d))
    if age_s < plan.knobs.warmup_s:
        p_keep, d_keep = max(proposal.p_keep, live_p), max(proposal.d_keep, live_d)
        proposal = replace(proposal, p_keep=p_keep, d_keep=d_keep)
    return proposal
