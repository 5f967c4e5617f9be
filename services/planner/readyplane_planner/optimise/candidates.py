"""What the chosen targets were weighed against: their neighbours, each with its cost in GPU-seconds.

Owns the price of a pair of targets over the horizon, for a person and for the journal: the search
itself is `size`. Hands Candidates to the proposal. Cheap enough for every tick: a pool's share is
worked out once for each of its sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from readyplane_planner import capacity
from readyplane_planner.optimise.values import Bounds, Candidate, Parts, Problem

MISS_PRICE = 20.0
"""A token served too late costs as much as so many times the GPU time that serves it."""
HORIZONS = 2.0
"""T_ready until what is ordered now serves, and as long again in which it does."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What one pool of a certain size adds to a pair: its parts, and why it is not enough."""

    parts: Parts
    why_not: str = ""


def weigh(problem: Problem, p: int, d: int) -> tuple[Candidate, ...]:
    """The pair (p, d) first, then the fleet as it is and the neighbours by one worker.

    Args:
        p, d: what the optimiser proposes; workers, those on their way included.
    """
    horizon_s = HORIZONS * max(problem.t_ready_p_s, problem.t_ready_d_s)
    now = (_live(problem.supply_p), _live(problem.supply_d))
    share_p = cache(lambda n: _prefill(problem, n, now[0], horizon_s))
    share_d = cache(lambda n: _decode(problem, n, now[1], horizon_s))
    pairs = [(p, d), now, (p + 1, d), (p - 1, d), (p, d + 1), (p, d - 1)]
    return tuple(
        _candidate(problem, pair, share_p, share_d)
        for pair in dict.fromkeys(pairs)
        if min(pair) >= 0
    )


def _candidate(
    problem: Problem,
    pair: tuple[int, int],
    share_p: Callable[[int], _Share],
    share_d: Callable[[int], _Share],
) -> Candidate:
    p, d = pair
    of_p, of_d = share_p(p), share_d(d)
    parts = Parts(
        of_p.parts.capacity + of_d.parts.capacity,
        of_p.parts.start_drain + of_d.parts.start_drain,
        of_p.parts.slo + of_d.parts.slo,
    )
    gpus = p * problem.bounds_p.gpus + d * problem.bounds_d.gpus
    budget = problem.budget_gpus
    over = budget is not None and gpus > budget
    beyond = f"{gpus} GPUs exceed the budget of {budget}" if over else ""
    why_not = "; ".join(
        why
        for why in (
            _outside(p, problem.bounds_p, "P"),
            _outside(d, problem.bounds_d, "D"),
            beyond,
            of_p.why_not,
            of_d.why_not,
        )
        if why
    )
    cost = parts.capacity + parts.start_drain + parts.slo
    return Candidate(p, d, cost, parts, not why_not, why_not)


def _outside(count: int, bounds: Bounds, name: str) -> str:
    if count > bounds.high:
        return f"{name} may have {bounds.high}"
    return f"{name} has to have {bounds.low}" if count < bounds.low else ""


def _live(supply: capacity.Supply) -> int:
    return math.ceil(supply.total)


def _prefill(problem: Problem, count: int, live: int, horizon_s: float) -> _Share:
    """P: who waits longer than the TTFT target leaves room for, beyond what its quantile allows.

    It is enough when it is so without those that may be lost (`spare`).
    """
    model, demand, ready_s = problem.prefill, problem.demand_p, problem.t_ready_p_s
    gpus = problem.bounds_p.gpus
    allowed = 1.0 - problem.quantile

    def late(wanted: float, workers: int) -> float:
        if wanted <= 0 and demand.backlog <= 0:
            return 0.0
        if workers <= 0 or model.rate <= 0:
            return 1.0
        clear_s = max(problem.catch_up_s, ready_s / 2.0)
        served = capacity.served_tokens(model.rate, problem.supply_p.steps(ready_s), workers)
        served += workers * model.rate * clear_s
        wait_s = max(0.0, problem.ttft_target_s - model.own_s - model.overhead_s)
        return capacity.late_share(
            model, demand.backlog, wanted, workers, served, ready_s + clear_s, wait_s
        )

    missed = max(0.0, late(demand.lasting, count) - allowed) * demand.lasting * horizon_s
    sure = max(0, count - problem.bounds_p.spare)
    share = late(demand.lasting * (1.0 + problem.headroom), sure)
    why_not = ""
    if share > allowed:
        why_not = (
            f"with {sure} P {share:.0%} of the requests would miss TTFT at the planned demand, "
            f"{allowed:.0%} may"
        )
    going_s = model.own_s + model.overhead_s
    parts = _parts(count, live, gpus, ready_s, going_s, horizon_s, missed, model.rate)
    return _Share(parts, why_not)


def _decode(problem: Problem, count: int, live: int, horizon_s: float) -> _Share:
    """D: tokens that cannot be made within the TPOT target, and sequences that find no place."""
    model, demand, ready_s = problem.decode, problem.demand_d, problem.t_ready_d_s
    target_s = problem.tpot_target_s
    rate, most = model.rate_at(target_s), model.sequences_at(target_s)
    residence_s = max(1e-9, model.osl * target_s)
    fade = math.exp(-ready_s / residence_s)

    def lacking(wanted: float, chance: float, workers: int) -> float:
        """Share beyond the rate or the places; `chance`: sequences vary by so many deviations."""
        by_rate = 1.0 - workers * rate / wanted if wanted > 0 else 0.0
        steady = capacity.steady_sequences(model, wanted, workers)
        if math.isinf(steady):
            return max(by_rate, 0.0) or 1.0
        now = steady + (demand.sequences - steady) * fade
        held = max(steady + chance * math.sqrt(steady), now)
        by_place = 1.0 - workers * most / held if held > 0.5 else 0.0
        return max(0.0, by_rate, by_place)

    missed = lacking(demand.lasting, 0.0, count) * demand.lasting * horizon_s
    chance = NormalDist().inv_cdf(problem.quantile)
    sure = max(0, count - problem.bounds_d.spare)
    share = lacking(demand.lasting * (1.0 + problem.headroom), chance, sure)
    why_not = ""
    if share > 1e-9:
        why_not = f"with {sure} D {share:.0%} of the planned tokens would miss TPOT"
    parts = _parts(
        count, live, problem.bounds_d.gpus, ready_s, residence_s, horizon_s, missed, rate
    )
    return _Share(parts, why_not)


def _parts(
    count: int,
    live: int,
    gpus: int,
    ready_s: float,
    going_s: float,
    horizon_s: float,
    missed_tokens: float,
    rate: float,
) -> Parts:
    """GPU-seconds of one pool, from allocation to release.

    Args:
        going_s: until a worker that is let go is free. missed_tokens: served too late. rate: of
            one worker, tokens/s.
    """
    more, fewer = max(0, count - live), max(0, live - count)
    serving = min(count, live) * horizon_s + more * max(0.0, horizon_s - ready_s)
    moving = more * min(ready_s, horizon_s) + fewer * min(going_s, horizon_s)
    slo = missed_tokens / rate * gpus * MISS_PRICE if rate > 0 else 0.0
    return Parts(serving * gpus, moving * gpus, slo)
