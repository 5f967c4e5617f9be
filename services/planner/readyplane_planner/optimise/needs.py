"""How many workers each pool needs, as real numbers: the sizing that the search rounds up.

P is one queue that all its workers serve: what waits now, the work that comes until ordered workers
are there, and its random spread must leave the TTFT target its quantile. D must make the tokens at
the TPOT target and hold the sequences and their KV.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

from readyplane_planner import capacity
from readyplane_planner.optimise.values import Need, Problem

WORKERS_MAX = 4096.0
STEP = 0.01
"""Needs are found to that share of a worker."""


def prefill_need(problem: Problem) -> Need:
    """P workers with which the quantile of the wait is within the target after T_ready.

    A backlog may take `catch_up_s` more to be cleared: workers that only clear a queue are let go
    again, and are not ordered faster than it pays to start them.
    """
    model, demand = problem.prefill, problem.demand_p
    wanted = demand.lasting * (1.0 + problem.headroom)
    if model.rate <= 0:
        return Need(0.0, 0.0, 0.0, "idle", wanted, 0.0)
    if wanted <= 0 and demand.backlog <= 0:
        return Need(0.0, 0.0, 0.0, "idle", 0.0, model.rate)
    kept = wanted * (1.0 + problem.band)
    workers = _least(lambda n: _prefill_fits(problem, n, wanted, demand.backlog))
    keep = _least(lambda n: _prefill_fits(problem, n, kept, demand.backlog))
    bare = _least(lambda n: _prefill_fits(problem, n, demand.lasting, demand.backlog))
    excess = excess_tokens(problem)
    calm = _least(lambda n: _prefill_fits(problem, n, wanted, demand.backlog - excess))
    why = "backlog" if excess > 0 and calm < workers - 0.5 else "demand"
    return Need(
        workers, max(workers, keep), min(workers, bare), why, wanted, model.rate, excess=excess
    )


def slack_s(problem: Problem) -> float:
    """What the TTFT target leaves for waiting."""
    return max(0.0, problem.ttft_target_s - problem.prefill.own_s - problem.prefill.overhead_s)


def excess_tokens(problem: Problem) -> float:
    """Prompt tokens beyond those in service and those that half of the slack works off."""
    model, workers = problem.prefill, max(1, problem.supply_p.ready)
    room = workers * (model.tokens + model.rate * slack_s(problem) * 0.5)
    return max(0.0, problem.demand_p.backlog - room)


def _prefill_fits(problem: Problem, workers: float, wanted: float, backlog: float) -> bool:
    model, ready_s = problem.prefill, problem.t_ready_p_s
    clear_s = max(problem.catch_up_s, ready_s / 2.0)
    served = capacity.served_tokens(
        model.rate, problem.supply_p, workers_max=workers, within_s=ready_s
    )
    served += workers * model.rate * clear_s
    within_s = ready_s + clear_s
    late = capacity.late_share(
        model,
        backlog=backlog,
        demand=wanted,
        workers=workers,
        served=served,
        within_s=within_s,
        wait_s=slack_s(problem),
    )
    return late <= 1.0 - problem.quantile


def decode_need(problem: Problem, *, prefill_count: int) -> Need:
    """D workers that keep TPOT and hold what runs and what P will hand over."""
    model, demand = problem.decode, problem.demand_d
    rate = model.rate_at(problem.tpot_target_s)
    own = demand.lasting * (1.0 + problem.headroom)
    handed = _handed_over(problem, prefill_count)
    wanted = max(own, handed)
    if rate <= 0:
        return Need(0.0, 0.0, 0.0, "idle", wanted, 0.0)
    if wanted <= 0 and demand.sequences <= 0:
        return Need(0.0, 0.0, 0.0, "idle", 0.0, rate)
    kept = max(own * (1.0 + problem.band), handed)
    workers = _least(lambda n: not _decode_lacks(problem, n, wanted))
    keep = _least(lambda n: not _decode_lacks(problem, n, kept))
    bare = _least(lambda n: not _decode_lacks(problem, n, max(demand.lasting, handed)))
    why = _decode_lacks(problem, max(STEP, workers - 2 * STEP), wanted) or "demand"
    if handed > own and why in {"demand", "sequences"}:
        why = "handover"
    return Need(
        workers,
        max(workers, keep),
        min(workers, bare),
        why,
        wanted,
        rate,
        excess=excess_tokens(problem),
        sequences=_held(problem, workers, wanted),
        context=model.context,
    )


def _decode_lacks(problem: Problem, workers: float, wanted: float) -> str:
    """What so many workers cannot do; empty when they can do all."""
    model = problem.decode
    held = _held(problem, workers, wanted)
    if held * model.context > capacity.KV_FILL_MAX * model.kv_tokens * workers:
        return "memory"
    if wanted > workers * model.rate_at(problem.tpot_target_s):
        return "demand"
    return "sequences" if held > workers * model.sequences_at(problem.tpot_target_s) else ""


def _held(problem: Problem, workers: float, wanted: float) -> float:
    """Sequences at once: the quantile of their number, and those of now as far as they last."""
    model, now = problem.decode, problem.demand_d.sequences
    # Sequences that are there now fade out over their residence while new ones come in.
    residence_s = max(1e-9, model.osl * problem.tpot_target_s)
    fade = math.exp(-problem.t_ready_d_s / residence_s)
    steady = capacity.steady_sequences(model, demand=wanted, workers=workers)
    if math.isinf(steady):
        return steady
    chance = NormalDist().inv_cdf(problem.quantile)
    return max(steady + chance * math.sqrt(steady), steady + (now - steady) * fade)


def _handed_over(problem: Problem, prefill_count: int) -> float:
    """Output tokens/s that follow while P clears a backlog at full rate; 0 without one."""
    excess, level = excess_tokens(problem), problem.demand_p.level
    if excess <= 0 or level <= 0:
        return 0.0
    served = min(prefill_count * problem.prefill.rate, level + excess / problem.catch_up_s)
    return problem.demand_d.level * served / level


def _least(fits: Callable[[float], bool]) -> float:
    """The fewest workers that fit, to STEP; WORKERS_MAX when not even those do."""
    high = 1.0
    while not fits(high):
        high *= 2.0
        if high > WORKERS_MAX:
            return WORKERS_MAX
    low = 0.0 if high == 1.0 else high / 2.0
    while high - low > STEP:
        middle = (low + high) / 2.0
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
