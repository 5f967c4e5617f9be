"""The search: the fewest workers of both pools that are enough, coupled and within the budget."""

from __future__ import annotations

import math
from dataclasses import replace

from readyplane_planner.optimise.needs import catching_up, decode_need, prefill_need
from readyplane_planner.optimise.values import Bounds, Problem, Proposal

Said = list[tuple[str, str, str]]
ROUND = 3 / 128
"""Less than that share of a worker is no worker; a whole number of the steps in which needs are
found, so that whoever weighs a size afterwards finds the same."""


def size(problem: Problem) -> Proposal:
    """The smallest feasible targets; impossibilities are said in `reasons`."""
    said: Said = []
    problem, infeasible = reachable(problem, said)
    need_p = prefill_need(problem)
    p = _whole(need_p.workers, problem.bounds_p, "prefill", said)
    need_d = decode_need(problem)
    d = _whole(need_d.workers, problem.bounds_d, "decode", said)
    p_keep = max(p, _whole(need_p.keep, problem.bounds_p))
    d_keep = max(d, _whole(need_d.keep, problem.bounds_d))
    p, stranded = absorbed(problem, p, d, said)
    p, d = within_budget(problem, p, d, said)
    return Proposal(
        p,
        d,
        max(p, p_keep),
        max(d, d_keep),
        tuple(said),
        infeasible,
        stranded,
        p_now=min(p, _whole(need_p.bare, problem.bounds_p)),
        d_now=min(d, _whole(need_d.bare, problem.bounds_d)),
        need_p=need_p,
        need_d=need_d,
    )


def _whole(workers: float, bounds: Bounds, pool: str = "", said: Said | None = None) -> int:
    """Rounded up and within the bounds; says so when the upper one cuts it."""
    wanted = math.ceil(workers - ROUND)
    if wanted > 0:
        wanted += bounds.spare
    if wanted > bounds.high and said is not None:
        name = "P" if pool == "prefill" else "D"
        text = (
            f"{name} needs {workers:.1f} workers and may have {bounds.high}: the target is missed"
        )
        said.append((f"{pool}_at_max", text, pool))
    return max(bounds.low, min(bounds.high, wanted))


def reachable(problem: Problem, said: Said) -> tuple[Problem, tuple[str, ...]]:
    """Replace targets that one unloaded worker already misses: no replica count helps (B30)."""
    infeasible: list[str] = []
    best_s = problem.prefill.own_s + problem.prefill.overhead_s
    if best_s > problem.ttft_target_s:
        infeasible.append("ttft")
        used_s = best_s * 1.2
        said.append(
            (
                "slo_infeasible",
                _out_of_reach("TTFT", problem.ttft_target_s, best_s, used_s),
                "prefill",
            )
        )
        problem = replace(problem, ttft_target_s=used_s)
    best_s = problem.decode.iteration_s(1.0)
    if best_s > problem.tpot_target_s:
        infeasible.append("tpot")
        used_s = best_s * 1.2
        said.append(
            (
                "slo_infeasible",
                _out_of_reach("TPOT", problem.tpot_target_s, best_s, used_s),
                "decode",
            )
        )
        problem = replace(problem, tpot_target_s=used_s)
    return problem, tuple(infeasible)


def _out_of_reach(name: str, target_s: float, best_s: float, used_s: float) -> str:
    return (
        f"{name} target {target_s:.3f} s is below the best achievable {best_s:.3f} s; "
        f"planning for {used_s:.3f} s"
    )


def absorbed(problem: Problem, p: int, d: int, said: Said) -> tuple[int, int]:
    """Cut P to what D at its own limit can take; what is cut would only have been stranded."""
    demand_p, demand_d = problem.demand_p.lasting, problem.demand_d.lasting
    if d < problem.bounds_d.high or demand_p <= 0 or demand_d <= 0 or p <= problem.bounds_p.low:
        return p, 0
    most = problem.decode.rate_at(problem.tpot_target_s) * d
    useful = demand_p * most / demand_d
    if problem.prefill.rate <= 0 or useful >= demand_p * (1.0 + problem.headroom):
        return p, 0
    extra = catching_up(problem)
    for n in range(max(1, problem.bounds_p.low), p):
        if n * problem.prefill.rate >= (useful + extra) * (1.0 + problem.headroom):
            text = f"{p - n} more P workers would be stranded: {d} D workers absorb no more"
            said.append(("prefill_capped_by_decode", text, "prefill"))
            return n, p - n
    return p, 0


def within_budget(problem: Problem, p: int, d: int, said: Said) -> tuple[int, int]:
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
    said.append(
        (
            "budget",
            f"wanted {wanted_p} P and {wanted_d} D, the budget of {budget} GPUs allows {p} and {d}",
            "",
        )
    )
    return p, d
