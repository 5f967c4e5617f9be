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
    workers = _least(_prefill_fits(problem, wanted, demand.backlog))
    keep = _least(_prefill_fits(problem, kept, demand.backlog))
    bare = _least(_prefill_fits(problem, demand.lasting, demand.backlog))
    excess = excess_tokens(problem)
    # Without an excess the calm need is the need.
    calm = (
        _least(_prefill_fits(problem, wanted, demand.backlog - excess)) if excess > 0 else workers
    )
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


def _prefill_fits(problem: Problem, wanted: float, backlog: float) -> Callable[[float], bool]:
    """Whether so many workers are enough; what does not depend on their number is worked out once."""
    model, ready_s = problem.prefill, problem.t_ready_p_s
    clear_s = max(problem.catch_up_s, ready_s / 2.0)
    within_s, wait_s = ready_s + clear_s, slack_s(problem)
    steps = problem.supply_p.steps(ready_s)
    late_max = 1.0 - problem.quantile

    def fits(workers: float) -> bool:
        served = capacity.served_tokens(model.rate, steps, workers)
        served += workers * model.rate * clear_s
        late = capacity.late_share(model, backlog, wanted, workers, served, within_s, wait_s)
        return late <= late_max

    return fits


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
    pool = _DecodePool(problem)
    workers = _least(lambda n: not pool.lacks(n, wanted))
    keep = _least(lambda n: not pool.lacks(n, kept))
    bare = _least(lambda n: not pool.lacks(n, max(demand.lasting, handed)))
    why = pool.lacks(max(STEP, workers - 2 * STEP), wanted) or "demand"
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
        sequences=pool.held(workers, wanted),
        context=model.context,
    )


class _DecodePool:
    """What any number of D workers can do; what does not depend on it is worked out once."""

    def __init__(self, problem: Problem) -> None:
        model, target_s = problem.decode, problem.tpot_target_s
        self._model = model
        self._now = problem.demand_d.sequences
        # Sequences that are there now fade out over their residence while new ones come in.
        residence_s = max(1e-9, model.osl * target_s)
        self._fade = math.exp(-problem.t_ready_d_s / residence_s)
        self._chance = NormalDist().inv_cdf(problem.quantile)
        self._kv_tokens = capacity.KV_FILL_MAX * model.kv_tokens
        self._rate, self._most = model.rate_at(target_s), model.sequences_at(target_s)

    def lacks(self, workers: float, wanted: float) -> str:
        """What so many workers cannot do; empty when they can do all."""
        held = self.held(workers, wanted)
        if held * self._model.context > self._kv_tokens * workers:
            return "memory"
        if wanted > workers * self._rate:
            return "demand"
        return "sequences" if held > workers * self._most else ""

    def held(self, workers: float, wanted: float) -> float:
        """Sequences at once: the quantile of their number, and those of now as far as they last."""
        steady = capacity.steady_sequences(self._model, wanted, workers)
        if math.isinf(steady):
            return steady
        return max(
            steady + self._chance * math.sqrt(steady), steady + (self._now - steady) * self._fade
        )


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
