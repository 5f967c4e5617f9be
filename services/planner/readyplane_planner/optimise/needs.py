"""How many workers each pool needs, as real numbers: the sizing that the search rounds up.

The fewest with which no more than the risk of all requests are late, over everything that demand
may be one T_ready ahead. P is one queue that all its workers serve within what the TTFT target
leaves for waiting; D makes tokens at the TPOT target, and its waiting line is the rest of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from readyplane_planner.capacity import OUTPUT_CV2, steady_sequences, variance_of
from readyplane_planner.optimise.loss import expected, lost_share, stepped_back
from readyplane_planner.optimise.values import Demand, Need, Problem

WORKERS_MAX = 4096.0
STEP = 0.01
"""Needs are found to that share of a worker."""
NEAR = 1.25
"""Steps of the search for a bracket."""
SLACK_OF_DECODE = 0.5
"""Share of the time for waiting that may be spent in front of D."""
Spread = tuple[tuple[float, float], ...]
Late = Callable[[float, Spread], float]
"""(workers, demands with their probabilities) -> share of requests that are late."""


def prefill_need(problem: Problem) -> Need:
    """P workers that compute all but the risk of the prompts in time."""
    model, demand = problem.prefill, problem.demand_p
    wanted = demand.lasting * (1.0 + problem.headroom)
    extra = catching_up(problem)
    if model.rate <= 0 or wanted + extra <= 0:
        return Need(0.0, 0.0, 0.0, "idle", max(0.0, wanted), max(0.0, model.rate))
    found = _need(problem, late_prompts(problem), demand, model.rate, extra)
    # Whoever is given up takes the prefixes with it that it alone held.
    lost = model.cached / model.tokens / max(1.0, problem.supply_p.total)
    return replace(found, keep=found.keep * (1.0 + lost))


def decode_need(problem: Problem) -> Need:
    """D workers that make the tokens at the TPOT target, and hold who runs now and will still."""
    model, demand = problem.decode, problem.demand_d
    rate = model.rate_at(problem.tpot_target_s)
    wanted = demand.lasting * (1.0 + problem.headroom)
    if rate <= 0 or (wanted <= 0 and demand.sequences <= 0):
        return Need(0.0, 0.0, 0.0, "idle", max(0.0, wanted), max(0.0, rate))
    found = _need(problem, late_answers(problem), demand, rate, handed_over(problem))
    held = staying(problem) / max(1e-9, model.sequences_at(problem.tpot_target_s))
    if held > found.workers:
        found = Need(held, max(held, found.keep), held, "sequences", wanted, rate, problem.risk)
    return found


def late_prompts(problem: Problem) -> Late:
    """Share of the prompts whose wait for P is longer than the TTFT target leaves room for."""
    model, slack = problem.prefill, slack_s(problem)
    each = model.each

    def late(workers: float, spread: Spread) -> float:
        rate = workers * model.rate
        # What is in service keeps nobody waiting, and the more workers the sooner one is free.
        wall = rate * slack + each * (0.3 + 0.7 * math.sqrt(workers))

        def lost(demand: float) -> float:
            variance = variance_of(demand, rate, each * model.dispersion)
            work = lost_share(demand, capacity=rate, wall=wall, variance=variance)
            return stepped_back(work, cv2=model.cv2)

        return expected(spread, lost)

    return late


def late_answers(problem: Problem) -> Late:
    """Share of the answers that D cannot begin in time, within its TPOT target and its KV.

    Its waiting line is what waits in front of it, and the sequences that it may still take beside
    those that run at this demand: a batch grows before anybody waits.
    """
    model = problem.decode
    rate, most = (
        model.rate_at(problem.tpot_target_s),
        model.sequences_at(problem.tpot_target_s),
    )
    slack = SLACK_OF_DECODE * slack_s(problem)
    each = model.osl * (1.0 + OUTPUT_CV2) * problem.prefill.dispersion

    def late(workers: float, spread: Spread) -> float:
        capacity, places = workers * rate, workers * most

        def lost(demand: float) -> float:
            free = max(0.0, places - steady_sequences(model, demand, workers))
            wall = capacity * slack + free * model.osl
            variance = variance_of(demand, capacity, each)
            return lost_share(demand, capacity=capacity, wall=wall, variance=variance)

        return expected(spread, lost)

    return late


def staying(problem: Problem) -> float:
    """Sequences of now that still run when a worker ordered now serves."""
    residence_s = max(1e-9, problem.decode.osl * problem.tpot_target_s)
    return problem.demand_d.sequences * math.exp(-problem.t_ready_d_s / residence_s)


def catching_up(problem: Problem) -> float:
    """Prompt tokens/s that clear what waits beyond the target, within a start and its catch-up.

    Who waits in vain is gone before an ordered worker serves; a queue that stands all the same says
    that more is needed than was forecast.
    """
    model, workers = problem.prefill, problem.supply_p.ready or 1
    room = workers * (model.tokens + model.rate * slack_s(problem) * 0.5)
    excess = max(0.0, problem.demand_p.backlog - room)
    within_s = problem.t_ready_p_s + max(problem.catch_up_s, problem.t_ready_p_s / 2.0)
    return excess / within_s


def handed_over(problem: Problem) -> float:
    """Output tokens/s that follow while P clears its queue."""
    level = problem.demand_p.level
    return catching_up(problem) * problem.demand_d.level / level if level > 0 else 0.0


def slack_s(problem: Problem) -> float:
    """What the TTFT target leaves for waiting."""
    return max(0.0, problem.ttft_target_s - problem.prefill.own_s - problem.prefill.overhead_s)


def raised(demand: Demand, factor: float, extra: float = 0.0) -> Spread:
    """Every demand that may be, times a factor, and what comes on top."""
    spread = demand.spread or ((demand.lasting, 1.0),)
    return tuple((rate * factor + extra, share) for rate, share in spread)


def _need(problem: Problem, late: Late, demand: Demand, rate: float, extra: float) -> Need:
    """The fewest workers; with the band, for shrinking; and for what is expected alone."""
    over = 1.0 + problem.headroom

    def least(spread: Spread, guess: float) -> float:
        return _least(lambda workers: late(workers, spread) <= problem.risk, guess)

    spread = raised(demand, over, extra)
    workers = least(spread, max(tokens for tokens, _ in spread) / rate)
    keep = least(raised(demand, over * (1.0 + problem.band), extra), workers * (1.0 + problem.band))
    expected_only = min(demand.level, demand.lasting) + extra
    bare = least(((expected_only, 1.0),), 1.1 * expected_only / rate)
    planned = demand.lasting * over + extra
    calm = least(raised(demand, over), workers) if extra > 0 else workers
    why = "backlog" if calm < workers - 0.5 else "demand"
    return Need(workers, max(workers, keep), min(workers, bare), why, planned, rate, problem.risk)


def _least(fits: Callable[[float], bool], guess: float) -> float:
    """The fewest workers that fit, to STEP; WORKERS_MAX when not even those do.

    `guess`: near the answer; only how quickly it is found depends on it.
    """
    high = min(WORKERS_MAX, max(STEP, guess))
    low = 0.0
    if fits(high):
        while high > STEP and fits(lower := high / NEAR):
            high = lower
        low = high / NEAR if high > STEP else 0.0
    else:
        while not fits(high):
            if high >= WORKERS_MAX:
                return WORKERS_MAX
            low, high = high, min(WORKERS_MAX, high * NEAR)
    while high - low > STEP:
        middle = (low + high) / 2.0
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
