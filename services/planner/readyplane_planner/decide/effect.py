"""What a decision is bound by and what it should come to, so that it can be judged afterwards.

Owns the expectation of each pool that changes: what capacity comes when, what load follows. Nothing
here moves a target.
"""

from __future__ import annotations

from collections.abc import Iterable

from readyplane_planner import capacity
from readyplane_planner.capacity import Supply
from readyplane_planner.decide import demand, fast
from readyplane_planner.decide.acting import Acted
from readyplane_planner.decide.outlook import Both, Forecasts
from readyplane_planner.decide.pools import Pool
from readyplane_planner.decide.values import Expected, Plan, Reason
from readyplane_planner.signals import Observation

BINDING = frozenset(
    {
        "artifact_unknown",
        "arriving",
        "backlog",
        "backoff",
        "budget",
        "ceiling",
        "cooldown_down",
        "cooldown_up",
        "decode_at_max",
        "floor",
        "gap_limit",
        "hold",
        "hold_headroom",
        "hold_idle",
        "hold_turn",
        "max_step",
        "no_victim",
        "partial_data",
        "paused",
        "prefill_at_max",
        "prefill_capped_by_decode",
        "slo_infeasible",
    }
)
"""Codes of rules that keep a target from what the demand asks for."""


def binding(why: Iterable[Reason]) -> tuple[Reason, ...]:
    """The reasons that bind, in their order."""
    return tuple(r for r in why if r.code in BINDING)


def expected(
    observation: Observation,
    plan: Plan,
    model: demand.Needs,
    pools: Both,
    seen: Forecasts,
    acted: Acted,
) -> tuple[Expected, ...]:
    """Of each pool for which something is ordered, told, drained or cancelled."""
    found: list[Expected] = []
    for pool in pools:
        name, on_the_way = pool.name, {c.worker_id for c in pool.coming}
        # A standby that is ordered serves nobody until it is told to.
        orders = sum(o.pool == name and not o.standby for o in acted.orders)
        woken = sum(a.pool == name for a in acted.activations)
        turned = sum(f.to == name for f in acted.flips)
        more = orders + woken + turned
        fewer = sum(d.pool == name for d in acted.drains)
        fewer += sum(f.pool == name for f in acted.flips)
        fewer += sum(r.worker_id in on_the_way for r in acted.releases)
        if not more and not fewer:
            continue
        starts = observation.t_ready[name]
        if not orders and more:
            starts = fast.PRIORS[fast.FLIP if turned else fast.ACTIVATE]
        going_s = plan.ttft_s if name == "prefill" else observation.lengths.osl * plan.tpot_s
        rate = model.model_p.rate if name == "prefill" else model.model_d.rate_at(plan.tpot_s)
        found.append(
            Expected(
                pool=name,
                workers=more - fewer,
                in_p50_s=starts.p50_s if more else going_s,
                in_p90_s=starts.p90_s if more else going_s,
                rate=(more - fewer) * rate,
                load_now=seen.load_p.value if name == "prefill" else seen.load_d.value,
                load_then=_load_then(plan, model, pool, seen, more - fewer),
            )
        )
    return tuple(found)


def _load_then(
    plan: Plan, model: demand.Needs, pool: Pool, seen: Forecasts, change: int
) -> float | None:
    """Predicted latency over target once the change is there, at the demand's bound."""
    count = max(0.0, pool.live_worth - sum(map(pool.worth_of, pool.waiting)) + change)
    if pool.name == "prefill":
        if seen.ttft is None:
            return None
        made = capacity.predict_ttft(
            model.model_p,
            level=model.lasting_p,
            upper=model.lasting_p,
            backlog=seen.ttft.backlog_tokens if change > 0 else 0.0,
            supply=Supply(count),
            horizon_s=model.work_p.horizon_s,
            quantile=plan.slo_quantile,
        )
        return made.value_s / plan.ttft_s
    if seen.tpot is None:
        return None
    made = capacity.predict_tpot(
        model.model_d,
        level=model.work_d.upper,
        upper=model.work_d.upper,
        sequences=seen.sequences,
        supply=Supply(count),
        horizon_s=model.work_d.horizon_s,
    )
    return made.value_s / plan.tpot_s
