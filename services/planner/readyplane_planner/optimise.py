"""The cheapest feasible pair of P and D targets, both in one decision (R21.2, R23.1).

Owns the search: the fewest workers that keep TTFT and TPOT over the coming T_ready, checked end to
end: D must hold and absorb what P hands over, and P beyond what D can absorb is stranded. A learned
optimiser replaces `size` and nothing else; guard stays outside it (R23.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

from readyplane_planner import capacity
from readyplane_planner.capacity import DecodeModel, PrefillModel, Supply


@dataclass(frozen=True, slots=True)
class Demand:
    """What a pool has to serve: tokens/s expected, its bound, and what waits already.

    Attributes:
        upper: largest rate of a short window. sustained: the part of it that lasts, None for all:
            the rest is noise of single arrivals, which the queue of the model already holds.
        backlog: prompt tokens waiting (P). sequences: running now (D).
    """

    level: float
    upper: float
    sustained: float | None = None
    backlog: float = 0.0
    sequences: float = 0.0

    @property
    def lasting(self) -> float:
        """Tokens/s that have to be served all the time."""
        return self.upper if self.sustained is None else self.sustained


@dataclass(frozen=True, slots=True)
class Bounds:
    """Hard limits of one pool, and what one worker of it costs in GPUs."""

    low: int
    high: int
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """Both pools at one instant.

    Attributes:
        t_ready_s: per pool, until a worker ordered now serves. catch_up_s: a backlog is cleared
            within that time once the capacity is there. headroom: demand is raised by that share.
        band: further share that must fit before anything shrinks (hysteresis).
        quantile: of TTFT. window_s: that `upper` is the rate of. budget_gpus: of both pools.
    """

    prefill: PrefillModel
    decode: DecodeModel
    demand_p: Demand
    demand_d: Demand
    supply_p: Supply
    supply_d: Supply
    bounds_p: Bounds
    bounds_d: Bounds
    t_ready_p_s: float
    t_ready_d_s: float
    ttft_target_s: float
    tpot_target_s: float
    catch_up_s: float = 10.0
    headroom: float = 0.1
    band: float = 0.2
    quantile: float = 0.9
    window_s: float = 10.0
    budget_gpus: int | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """Wanted workers: `p`, `d` to grow to, `p_keep`, `d_keep` (never smaller) to shrink to.

    Attributes:
        reasons: (code, text). infeasible: targets that no number of workers reaches.
        stranded_p: P workers whose hand-over D could not absorb.
    """

    p: int
    d: int
    p_keep: int
    d_keep: int
    reasons: tuple[tuple[str, str], ...] = ()
    infeasible: tuple[str, ...] = ()
    stranded_p: int = 0


Optimiser = Callable[[Problem], Proposal]


def size(problem: Problem) -> Proposal:
    """The smallest feasible targets; ties and impossibilities are said in `reasons`."""
    reasons: list[tuple[str, str]] = []
    problem, infeasible = _reachable(problem, reasons)
    grow = 1.0 + problem.headroom
    keep = grow * (1.0 + problem.band)
    p = prefill_workers(problem, share=grow, reasons=reasons)
    p_keep = max(p, prefill_workers(problem, share=keep, reasons=None))
    d = decode_workers(problem, share=grow, prefill_count=p, reasons=reasons)
    d_keep = max(d, decode_workers(problem, share=keep, prefill_count=p_keep, reasons=None))
    p, stranded = _absorbed(problem, p, d, reasons)
    p, d = _within_budget(problem, p, d, reasons)
    return Proposal(p, d, max(p, p_keep), max(d, d_keep), tuple(reasons), infeasible, stranded)


def _reachable(problem: Problem, reasons: list[tuple[str, str]]) -> tuple[Problem, tuple[str, ...]]:
    """Replace targets that one unloaded worker already misses: no replica count helps (B30)."""
    infeasible: list[str] = []
    best_s = problem.prefill.own_s + problem.prefill.overhead_s
    if best_s > problem.ttft_target_s:
        infeasible.append("ttft")
        used_s = best_s * 1.2
        reasons.append(
            (
                "slo_infeasible",
                _out_of_reach("TTFT", problem.ttft_target_s, best_s, used_s),
            )
        )
        problem = replace(problem, ttft_target_s=used_s)
    best_s = problem.decode.iteration_s(1.0)
    if best_s > problem.tpot_target_s:
        infeasible.append("tpot")
        used_s = best_s * 1.2
        reasons.append(
            (
                "slo_infeasible",
                _out_of_reach("TPOT", problem.tpot_target_s, best_s, used_s),
            )
        )
        problem = replace(problem, tpot_target_s=used_s)
    return problem, tuple(infeasible)


def _out_of_reach(name: str, target_s: float, best_s: float, used_s: float) -> str:
    return (
        f"{name} target {target_s:.3f} s is below the best achievable {best_s:.3f} s; "
        f"planning for {used_s:.3f} s"
    )


def prefill_workers(
    problem: Problem, *, share: float, reasons: list[tuple[str, str]] | None
) -> int:
    """Fewest P workers whose wait keeps the TTFT target once the coming backlog is cleared."""
    model, demand, bounds = problem.prefill, problem.demand_p, problem.bounds_p
    if model.rate <= 0:
        return bounds.low
    wanted = demand.lasting * share
    left = capacity.backlog_after(
        backlog=demand.backlog,
        demand=wanted,
        rate=model.rate,
        supply=problem.supply_p,
        horizon_s=problem.t_ready_p_s,
    )
    # A queue that the target leaves room for needs nobody; only what exceeds it is caught up with.
    slack_s = max(0.0, problem.ttft_target_s - model.own_s - model.overhead_s)
    # Workers that only clear a queue are let go again: not faster than it pays to start them.
    clear_s = max(problem.catch_up_s, problem.t_ready_p_s / 2.0)
    # Within a window of the bound's length the queue may take what the slack allows.
    burst = demand.upper * share * problem.window_s / (problem.window_s + slack_s)
    for n in range(max(1, bounds.low), bounds.high + 1):
        rate = n * model.rate
        excess = max(0.0, left - rate * slack_s * 0.5)
        if max(burst, wanted + excess / clear_s) > rate:
            continue
        wait_s = capacity.waiting_s(
            demand=wanted,
            rate=model.rate,
            workers=n,
            own_s=model.own_s,
            cv2=model.cv2,
            quantile=problem.quantile,
        )
        if wait_s <= slack_s:
            return bounds.low if wanted <= 0 and excess <= 0 else n
    if reasons is not None:
        reasons.append(("prefill_at_max", f"{bounds.high} P workers do not reach the TTFT target"))
    return bounds.high


def decode_workers(
    problem: Problem, *, share: float, prefill_count: int, reasons: list[tuple[str, str]] | None
) -> int:
    """Fewest D workers that keep TPOT and hold the KV of what runs and of what P will hand over."""
    model, demand, bounds = problem.decode, problem.demand_d, problem.bounds_d
    rate = model.rate_at(problem.tpot_target_s)
    if rate <= 0:
        return bounds.low
    wanted = max(demand.lasting * share, _handed_over(problem, prefill_count))
    if wanted > demand.lasting * share and reasons is not None:
        reasons.append(("decode_for_prefill", "D grows to absorb the backlog that P clears"))
    # Sequences that are there now fade out over their residence while new ones come in.
    residence_s = max(1e-9, model.osl * problem.tpot_target_s)
    fade = math.exp(-problem.t_ready_d_s / residence_s)
    most = model.sequences_at(problem.tpot_target_s)
    chance = NormalDist().inv_cdf(problem.quantile)
    for n in range(max(1, bounds.low), bounds.high + 1):
        sequences = capacity.steady_sequences(model, demand=wanted, workers=n)
        # Sequences come and go by chance: plan for the quantile of their number, not its mean.
        held = sequences + chance * math.sqrt(sequences)
        held = max(held, sequences + (demand.sequences - sequences) * fade)
        memory = capacity.KV_FILL_MAX * model.kv_tokens * n
        fits = wanted <= n * rate and held <= n * most and held * model.context <= memory
        if fits:
            return bounds.low if wanted <= 0 and demand.sequences <= 0 else n
    if reasons is not None:
        reasons.append(("decode_at_max", f"{bounds.high} D workers do not reach the TPOT target"))
    return bounds.high


def _handed_over(problem: Problem, prefill_count: int) -> float:
    """Output tokens/s that follow while P clears its backlog at full rate."""
    if problem.demand_p.backlog <= 0 or problem.demand_p.upper <= 0:
        return 0.0
    catching = problem.demand_p.level + problem.demand_p.backlog / problem.catch_up_s
    served = min(prefill_count * problem.prefill.rate, catching)
    return (
        problem.demand_d.level * served / max(problem.demand_p.level, 1e-9)
        if (problem.demand_p.level > 0)
        else 0.0
    )


def _absorbed(problem: Problem, p: int, d: int, reasons: list[tuple[str, str]]) -> tuple[int, int]:
    """Cut P to what D at its own limit can take; what is cut would only have been stranded."""
    demand_p, demand_d = problem.demand_p.lasting, problem.demand_d.lasting
    if d < problem.bounds_d.high or demand_p <= 0 or demand_d <= 0 or p <= problem.bounds_p.low:
        return p, 0
    most = problem.decode.rate_at(problem.tpot_target_s) * d
    useful = demand_p * most / demand_d
    if problem.prefill.rate <= 0 or useful >= demand_p * (1.0 + problem.headroom):
        return p, 0
    backlog = problem.demand_p.backlog / problem.catch_up_s
    for n in range(max(1, problem.bounds_p.low), p):
        if n * problem.prefill.rate >= (useful + backlog) * (1.0 + problem.headroom):
            reasons.append(
                (
                    "prefill_capped_by_decode",
                    f"{p - n} more P workers would be stranded: {d} D workers absorb no more",
                )
            )
            return n, p - n
    return p, 0


def _within_budget(
    problem: Problem, p: int, d: int, reasons: list[tuple[str, str]]
) -> tuple[int, int]:
    """Cut both pools in proportion until they fit the budget; never below a minimum (B45)."""
    budget, bp, bd = problem.budget_gpus, problem.bounds_p, problem.bounds_d
    if budget is None or p * bp.gpus + d * bd.gpus <= budget:
        return p, d
    wanted_p, wanted_d = p, d
    while p * bp.gpus + d * bd.gpus > budget and (p > bp.low or d > bd.low):
        over_p = p / wanted_p if p > bp.low else -1.0
        over_d = d / wanted_d if d > bd.low else -1.0
        if over_p >= over_d:
            p -= 1
        else:
            d -= 1
    reasons.append(
        (
            "budget",
            f"wanted {wanted_p} P and {wanted_d} D, the budget of {budget} GPUs allows {p} and {d}",
        )
    )
    return p, d
