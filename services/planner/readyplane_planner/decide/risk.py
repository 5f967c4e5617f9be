"""How sure the planner has to be: from what was missed so far, and from how uneven work comes.

Owns the budget of the promise and the risk that follows from it, how much more work varies than
chance explains, and how long load that goes on and off is waited for. Hands numbers to demand.
"""

from __future__ import annotations

import math

from readyplane_planner import forecast
from readyplane_planner.decide.values import Budget, Memory, Unevenness
from readyplane_planner.forecast import Series
from readyplane_planner.signals import Observation

UNEVEN_TAU_S = 900.0
UNEVEN_SPAN_S, UNEVEN_MAX = 10.0, 5.0
GAPS_MAX, GAP_S_MAX = 4.0, 900.0
BUDGET_TAU_S = 3600.0
BUDGET_PRIOR_S, REQUESTS_FEW = 600.0, 50.0
"""So much of the present traffic is pretended to have missed as often as it may."""
RISK_GAIN, RISK_RANGE = 3.0, (0.1, 4.0)
"""How risk answers to a budget that is spent (1) or not touched (0), and by what factor at most: much
further down than up, since whoever breaks the promise has no reason to save."""


def uneven(before: Unevenness, observation: Observation, series: Series, each: float) -> Unevenness:
    """With the last tick: its work against the mean of the moments around it.

    `each`: tokens² a token of work that chance adds, the mean prompt with its spread.
    """
    dt_s, rate = observation.dt_s, observation.prefill_work
    if dt_s <= 0 or not rate.known or len(series.recent) < 4:
        return before
    mean = forecast.trailing(series, UNEVEN_SPAN_S)
    if mean <= 0:
        return before
    ticks = max(2.0, UNEVEN_SPAN_S / dt_s)
    fade = math.exp(-dt_s / UNEVEN_TAU_S)
    # The tick is part of the mean it is held against.
    seen = (rate.get() - mean) ** 2 * ticks / (ticks - 1.0)
    return Unevenness(before.seen * fade + seen, before.chance * fade + mean * each / dt_s)


def dispersion(found: Unevenness) -> float:
    """At least 1. Weighted by work: the busy moments are the ones that matter."""
    if found.chance <= 0:
        return 1.0
    return min(UNEVEN_MAX, max(1.0, found.seen / found.chance))


def spent(observation: Observation, before: Budget) -> Budget:
    """With what arrived and what missed since; while that is not known nothing changes."""
    dt_s = observation.dt_s
    if dt_s <= 0 or not (observation.arrivals.known and observation.missed.known):
        return before
    fade = math.exp(-dt_s / BUDGET_TAU_S)
    return Budget(
        before.arrived * fade + observation.arrivals.get() * dt_s,
        before.missed * fade + observation.missed.get() * dt_s,
    )


def of(budget: Budget, allowed: float, *, arrivals: float) -> float:
    """The share of requests to plan to be late, from the share that may be and the one that was.

    Nobody knows which risk of the model comes to which share of misses on this traffic: what was
    missed tells. A planner that misses less than it may holds more than it must.
    """
    prior = max(REQUESTS_FEW, arrivals * BUDGET_PRIOR_S)
    share = (budget.missed + allowed * prior) / (budget.arrived + prior)
    low, high = RISK_RANGE
    factor = math.exp(RISK_GAIN * (1.0 - share / allowed))
    return allowed * min(high, max(low, factor))


def gone(memory: Memory, *, now_s: float) -> bool:
    """Whether load that is away has been away for longer than it ever is.

    Traffic that goes on and off comes back sooner than a worker that was let go: until it has been
    away for several of its usual gaps, the fleet for its return stands.
    """
    gap_s = forecast.bursts(memory.work_p).off_s
    if gap_s is None or memory.idle_since_s is None:
        return True
    return now_s - memory.idle_since_s > min(GAP_S_MAX, GAPS_MAX * gap_s)
