"""Workers ahead of a rise that the days before had at this time of the day.

Owns the one use of the day's pattern: it raises a target early, by a bounded number of workers, and
never lowers one. It takes days that were seen, trust in the pattern today, and skill shown against
no pattern at all; each decision names them, and says when the day turns out to be another one.
Handed to brain.
"""

from __future__ import annotations

import math
from dataclasses import replace

from readyplane_planner import forecast
from readyplane_planner.decide.seasonal import Ahead, Rules
from readyplane_planner.decide.values import Memory, Plan, Reason
from readyplane_planner.forecast import Season, Series
from readyplane_planner.optimise import Demand, Problem, Proposal
from readyplane_planner.optimise.needs import decode_need, prefill_need
from readyplane_planner.optimise.size import ROUND
from readyplane_planner.signals import Observation

TRUST_MIN = 0.5
STARTS = 2.0
"""A fleet that grows by several workers starts more than one after another."""
COARSE_S = 900.0
"""Half-hours place a rise to a quarter of an hour."""


def raised(
    proposal: Proposal | None,
    observation: Observation,
    plan: Plan,
    memory: Memory,
    problem: Problem,
    said: list[Reason],
    *,
    now_s: float,
) -> tuple[Proposal | None, Memory]:
    """The proposal with workers ahead of a rise, and the memory of them."""
    rules, before = plan.season, memory.ahead.extra
    known = observation.prefill_work.known and observation.arrivals.known
    if proposal is None or not rules.on or not known or plan.paused:
        none = Ahead()
        return proposal, memory if memory.ahead == none else replace(memory, ahead=none)
    extra = [0, 0]
    have = [proposal.p, proposal.d]
    for place, (name, series) in enumerate((("prefill", memory.work_p), ("decode", memory.work_d))):
        seen = _season(series, observation.t_ready[name].p90_s, plan, now_s=now_s)
        if seen is None:
            continue
        failed = _why_not(seen, rules)
        if failed:
            if before[place]:
                text = f"the day is not like those before ({failed}): no workers ahead of it"
                said.append(Reason("season_failed", text, name))
            continue
        bounds = problem.bounds_p if name == "prefill" else problem.bounds_d
        wanted = min(bounds.high, _workers(problem, name, seen.rate) + bounds.spare)
        extra[place] = max(0, min(rules.extra_max, wanted - have[place]))
        if extra[place]:
            text = (
                f"{seen.rate:,.0f} tokens/s by the day in {seen.in_s / 60:.0f} min need {wanted} "
                f"workers: {extra[place]} more than the {have[place]} of the forecast "
                f"({seen.days:.1f} days seen, trust {seen.trust:.1f}, skill {seen.skill:.2f})"
            )
            said.append(Reason("season", text, name))
    p, d = _within(problem, have, extra)
    if (p, d) != (proposal.p, proposal.d):
        proposal = replace(
            proposal, p=p, d=d, p_keep=max(proposal.p_keep, p), d_keep=max(proposal.d_keep, d)
        )
    ahead = Ahead((extra[0], extra[1]))
    return proposal, memory if memory.ahead == ahead else replace(memory, ahead=ahead)


def _season(series: Series, t_ready_s: float, plan: Plan, *, now_s: float) -> Season | None:
    """What is coming between the first moment that a start can serve and as far as is looked."""
    rules = plan.season
    if series.days.closed < rules.days_min * forecast.DAY_BINS:
        return None
    ahead_s = rules.ahead_s
    if ahead_s is None:
        ahead_s = STARTS * t_ready_s + COARSE_S
    from_s = min(t_ready_s, ahead_s)
    return forecast.coming(series, from_s=from_s, to_s=ahead_s, now_s=now_s)


def _why_not(seen: Season, rules: Rules) -> str:
    if seen.trust < TRUST_MIN:
        return f"trust {seen.trust:.1f}"
    if seen.skill < rules.skill_min:
        return f"skill {seen.skill:.2f}"
    return ""


def _workers(problem: Problem, name: str, rate: float) -> int:
    """Workers that serve a steady rate, as the sizing counts them; what waits now is not its part."""
    demand = Demand(rate, rate, rate, spread=((rate, 1.0),))
    if name == "prefill":
        need = prefill_need(replace(problem, demand_p=demand))
    else:
        need = decode_need(replace(problem, demand_d=demand))
    return math.ceil(need.workers - ROUND)


def _within(problem: Problem, have: list[int], extra: list[int]) -> tuple[int, int]:
    """Both targets, the extra cut to what the budget leaves."""
    p, d = have[0] + extra[0], have[1] + extra[1]
    budget = problem.budget_gpus
    while budget is not None and p * problem.bounds_p.gpus + d * problem.bounds_d.gpus > budget:
        if d > have[1] and (d - have[1] >= p - have[0]):
            d -= 1
        elif p > have[0]:
            p -= 1
        else:
            break
    return p, d
