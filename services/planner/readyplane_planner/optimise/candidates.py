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

from readyplane_planner import capacity
from readyplane_planner.optimise import needs
from readyplane_planner.optimise.size import ROUND
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
    """P: prompts that wait longer than the TTFT target leaves room for, beyond the risk.

    It is enough when it is so without those that may be lost (`spare`).
    """
    model, demand = problem.prefill, problem.demand_p
    going_s = model.own_s + model.overhead_s
    return _weighed(
        problem,
        needs.late_prompts(problem) if model.rate > 0 else _nobody,
        needs.raised(demand, 1.0 + problem.headroom, needs.catching_up(problem)),
        (count, live, problem.bounds_p, "P", "TTFT"),
        (problem.t_ready_p_s, going_s, horizon_s),
        model.rate,
    )


def _decode(problem: Problem, count: int, live: int, horizon_s: float) -> _Share:
    """D: answers that cannot begin within the TPOT target and the KV, beyond the risk."""
    model, demand, target_s = problem.decode, problem.demand_d, problem.tpot_target_s
    rate, most = model.rate_at(target_s), model.sequences_at(target_s)
    late = needs.late_answers(problem) if rate > 0 else _nobody
    held = needs.staying(problem)
    return _weighed(
        problem,
        lambda n, spread: 1.0 if held > n * most + 1e-9 else late(n, spread),
        needs.raised(demand, 1.0 + problem.headroom, needs.handed_over(problem)),
        (count, live, problem.bounds_d, "D", "TPOT"),
        (problem.t_ready_d_s, max(1e-9, model.osl * target_s), horizon_s),
        rate,
    )


def _nobody(workers: float, spread: needs.Spread) -> float:
    """Who makes nothing serves nobody."""
    del workers
    return 1.0 if any(rate > 0 for rate, _ in spread) else 0.0


def _weighed(
    problem: Problem,
    late: needs.Late,
    spread: needs.Spread,
    pool: tuple[int, int, Bounds, str, str],
    times_s: tuple[float, float, float],
    rate: float,
) -> _Share:
    """One pool of `count` beside `live`: `times_s` are until ready, until gone, the horizon."""
    count, live, bounds, name, target = pool
    mean = sum(tokens * share for tokens, share in spread)
    missed = max(0.0, late(count, spread) - problem.risk) * mean * times_s[2] if mean > 0 else 0.0
    sure = max(0, count - bounds.spare)
    share = late(max(0.0, sure + ROUND), spread) if mean > 0 else 0.0
    why_not = ""
    if share > problem.risk:
        why_not = (
            f"with {sure} {name} {share:.1%} of the requests would miss {target} at the planned "
            f"demand, {problem.risk:.1%} may"
        )
    return _Share(_parts(count, live, bounds.gpus, *times_s, missed, rate), why_not)


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
