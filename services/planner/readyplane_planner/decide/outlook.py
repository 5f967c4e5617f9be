"""What the pools are heading for: predicted latencies, loads, and whether a target is missed now.

Hands predictions and loads to brain, which decides; nothing here moves a target.
"""

from __future__ import annotations

from dataclasses import dataclass

from readyplane_planner import capacity
from readyplane_planner.capacity import Load, Prediction, Supply
from readyplane_planner.decide import demand
from readyplane_planner.decide.pools import Pool, eta_s, quantiles_of
from readyplane_planner.decide.values import Plan
from readyplane_planner.signals import Observation

Both = tuple[Pool, Pool]


@dataclass(frozen=True, slots=True)
class Forecasts:
    """Predicted latencies, the loads they make, and what they rest on.

    `sequences`: that D has to hold over its T_ready.
    """

    ttft: Prediction | None
    tpot: Prediction | None
    load_p: Load
    load_d: Load
    supply_p: Supply
    supply_d: Supply
    sequences: float


def predict(observation: Observation, plan: Plan, model: demand.Needs, pools: Both) -> Forecasts:
    """TTFT and TPOT that the pools are heading for, and the loads with what was measured (R3.1)."""
    ttft = tpot = None
    supply_p, supply_d = _supply(pools[0], observation), _supply(pools[1], observation)
    sequences = demand.sequences_ahead(
        observation,
        model,
        prefill_workers=pools[0].ready_worth,
        within_s=model.work_d.horizon_s,
    )
    if observation.queue.known and observation.prefill_work.known:
        ttft = capacity.predict_ttft(
            model.model_p,
            level=model.work_p.level,
            upper=model.lasting_p,
            backlog=observation.queue.get(),
            supply=supply_p,
            horizon_s=model.work_p.horizon_s,
            quantile=plan.slo_quantile,
        )
    if observation.decoding.known and observation.arrivals.known:
        tpot = capacity.predict_tpot(
            model.model_d,
            level=model.work_d.level,
            upper=model.work_d.upper,
            sequences=sequences,
            supply=supply_d,
            horizon_s=model.work_d.horizon_s,
        )

    def load(name: str, prediction: Prediction | None, target_s: float) -> Load:
        window = observation.latency.get(name)
        known = window is not None and window.count and window.window_s <= plan.actual_window_s
        return capacity.load_of(
            prediction,
            actual_s=window.p90_s if known and window is not None else None,
            count=window.count if known and window is not None else 0,
            target_s=target_s,
            combine=plan.combine,
            weight=plan.combine_weight,
            count_min=plan.actual_count_min,
        )

    return Forecasts(
        ttft,
        tpot,
        load("ttft_actual", ttft, plan.ttft_s),
        load("tpot_actual", tpot, plan.tpot_s),
        supply_p,
        supply_d,
        sequences,
    )


def breaches(
    observation: Observation, plan: Plan, model: demand.Needs, pools: Both, seen: Forecasts
) -> tuple[bool, bool]:
    """Whether the workers that are ready now, alone, miss a target beyond the band.

    At the expected demand and not at its bound, over the time that a start takes. Where nobody is
    on the way, that is what was predicted already.
    """
    if not (observation.queue.known and observation.decoding.known):
        return False, False
    ready_p, ready_d = pools[0].ready_worth, pools[1].ready_worth
    if seen.ttft is not None and not pools[0].coming:
        ttft_s = seen.ttft.low_s
    else:
        ttft_s = capacity.predict_ttft(
            model.model_p,
            level=model.work_p.level,
            upper=model.work_p.level,
            backlog=observation.queue.get(),
            supply=Supply(ready_p),
            horizon_s=model.work_p.horizon_s,
            quantile=plan.slo_quantile,
        ).value_s
    if seen.tpot is not None and ready_d and not pools[1].coming:
        tpot_s = seen.tpot.low_s
    else:
        tpot_s = capacity.predict_tpot(
            model.model_d,
            level=model.work_d.level,
            upper=model.work_d.level,
            sequences=seen.sequences,
            supply=Supply(ready_d),
            horizon_s=model.work_d.horizon_s,
        ).value_s
    beyond = 1.0 + plan.band
    return ttft_s > plan.ttft_s * beyond, tpot_s > plan.tpot_s * beyond


def _supply(pool: Pool, observation: Observation) -> Supply:
    """Workers that are there, and when the pending ones are expected, cautiously."""
    if not pool.worth:
        quantiles = observation.t_ready[pool.name]
        etas = sorted(eta_s(c.age_s, quantiles, late=True) for c in pool.coming)
        return Supply(len(pool.ready), tuple(etas))
    found = sorted(
        (eta_s(c.age_s, quantiles_of(observation, pool.name, c), late=True), pool.worth_of(c))
        for c in pool.coming
    )
    return Supply(pool.ready_worth, tuple(e for e, _ in found), tuple(w for _, w in found))
