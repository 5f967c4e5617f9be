"""The first minutes: what may not yet be concluded from what was seen.

The rate of a first second is mostly chance, answers in flight only rise, and a calm minute is no
reason to give up what a person began with. At first nothing grows, unless a pool is measured to be
late already; until the forecast is warm nothing shrinks.
"""

from __future__ import annotations

from dataclasses import replace

from readyplane_planner.decide.demand import Needs
from readyplane_planner.decide.outlook import Forecasts
from readyplane_planner.decide.values import Memory, Plan
from readyplane_planner.optimise import Proposal
from readyplane_planner.signals import Observation

HELD_S = 20.0
"""Nothing grows before, unless it is late. What answers take is known by then."""


def held(
    proposal: Proposal,
    plan: Plan,
    memory: Memory,
    live: tuple[int, int],
    pressed: tuple[bool, bool],
) -> Proposal:
    """The proposal without what is too early. A pool that is empty is not held.

    Args:
        live: workers of P and D that serve or come. pressed: of each, whether it is late already.
    """
    begun_s, (live_p, live_d) = memory.work_p.begun_s, live
    if begun_s is None or min(live) <= 0:
        return proposal
    age_s = memory.work_p.updated_s - begun_s
    window_s = plan.knobs.window_s
    if age_s < window_s or (age_s < HELD_S and not pressed[0]):
        proposal = replace(proposal, p=min(proposal.p, live_p))
    if age_s < window_s or (age_s < HELD_S and not pressed[1]):
        proposal = replace(proposal, d=min(proposal.d, live_d))
    if age_s < plan.knobs.warmup_s:
        p_keep, d_keep = max(proposal.p_keep, live_p), max(proposal.d_keep, live_d)
        proposal = replace(proposal, p_keep=p_keep, d_keep=d_keep)
    return proposal


def pressed(
    observation: Observation, plan: Plan, model: Needs, ready_p: float, seen: Forecasts
) -> tuple[bool, bool]:
    """Whether P and D are late already, by what is measured. What is not known holds nobody back.

    The router's queue waits for either pool, so that a long one speaks for both.

    Args:
        ready_p: P workers that serve, in workers of the pool's own class.
    """
    if not observation.queue.known:
        return True, True
    queued_s = observation.queue.get() / max(1e-9, ready_p * model.model_p.rate)
    waits = queued_s > plan.ttft_s
    late_p = seen.load_p.actual_s is not None and seen.load_p.actual_s > plan.ttft_s
    late_d = seen.load_d.actual_s is not None and seen.load_d.actual_s > plan.tpot_s
    return waits or late_p, waits or late_d
