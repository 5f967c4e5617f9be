"""How careful each pool is treated now: drift, hand edits and conflicts, from this tick's evidence.

Owns gathering the evidence for `drift` and `ownership` and applying what they say to verdicts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from readyplane_planner.decide import demand, drift, outlook, ownership
from readyplane_planner.decide.drift import Evidence, Patience, Stance
from readyplane_planner.decide.pools import Pool
from readyplane_planner.decide.values import POOLS, Memory, Plan, Reason
from readyplane_planner.guard import Counts, Limits, Trust, Verdict
from readyplane_planner.signals import Observation

YOUNG_S = 60.0
LOSSES_LAST_S = 120.0
"""After the pause that they asked for, lost starts tell of the present for so long."""


@dataclass(frozen=True, slots=True)
class Care:
    """One pool's: its stance, and why nothing may be done in it (code, text), None for no reason."""

    stance: Stance = field(default_factory=Stance)
    held: tuple[str, str] | None = None
    load: float | None = None


def look(
    observation: Observation,
    plan: Plan,
    memory: Memory,
    pools: tuple[Pool, Pool],
    model: demand.Needs,
    seen: outlook.Forecasts,
    said: list[Reason],
    *,
    now_s: float,
) -> tuple[tuple[Care, Care], Memory]:
    """The care of both pools, and the memory after it."""
    drifts, owned, cares = [], [], []
    everyone = _ours(memory)
    leaving = frozenset(name for name, _since in memory.draining)
    for name, pool in zip(POOLS, pools, strict=True):
        is_p = name == "prefill"
        load = seen.load_p if is_p else seen.load_d
        evidence = _evidence(observation, plan, memory, pool, model, seen, now_s)
        before = memory.drift.prefill if is_p else memory.drift.decode
        seen_drift, stance = drift.look(before, evidence, Patience(band=plan.band), now_s=now_s)
        if observation.idle and stance.conservative:
            # Known to have nothing to do: whatever drifted, nobody is needed for it.
            stance = replace(stance, conservative=False)
        mine, change = ownership.look(
            memory.owned_p if is_p else memory.owned_d,
            pool,
            observation,
            ordered=everyone,
            leaving=leaving,
            young_s=observation.t_ready[name].p50_s + YOUNG_S,
            hold_s=plan.hand_hold_s,
            now_s=now_s,
        )
        if change:
            text = f"somebody else has changed this pool by {change:+d}"
            said.append(Reason("hand_edit", text, name))
        said.extend(Reason(code, text, name) for code, text in stance.reasons)
        drifts.append(seen_drift)
        owned.append(mine)
        cares.append(Care(stance, ownership.held(mine, now_s=now_s), load.value))
    memory = replace(
        memory,
        drift=drift.DriftMemory(*drifts),
        owned_p=owned[0],
        owned_d=owned[1],
    )
    return (cares[0], cares[1]), memory


def _ours(memory: Memory) -> frozenset[str]:
    """Workers of either pool that this planner knows to be no edit: also those that changed pools."""
    known = (*(memory.owned_p.known or ()), *(memory.owned_d.known or ()), *memory.served)
    return frozenset((*known, *(o.worker_id for o in memory.orders)))


def _evidence(
    observation: Observation,
    plan: Plan,
    memory: Memory,
    pool: Pool,
    model: demand.Needs,
    seen: outlook.Forecasts,
    now_s: float,
) -> Evidence:
    is_p = pool.name == "prefill"
    work = model.work_p if is_p else model.work_d
    load = seen.load_p if is_p else seen.load_d
    target_s = plan.ttft_s if is_p else plan.tpot_s
    window = observation.latency.get("ttft_actual" if is_p else "tpot_actual")
    mine = memory.guard(pool.name)
    known = observation.fleet_known and observation.allocations_known
    return Evidence(
        coverage=work.coverage,
        quantile=plan.knobs.quantile,
        judged=work.judged,
        actual=None if load.actual_s is None else load.actual_s / target_s,
        predicted=None if load.predicted_s is None else load.predicted_s / target_s,
        count=0 if window is None else window.count,
        coming=bool(pool.coming or pool.draining or pool.overdue),
        losses=mine.failures if now_s - mine.retry_s < LOSSES_LAST_S else 0,
        missing=max(0, (mine.desired or 0) - pool.live) if known and not plan.paused else 0,
    )


def careful(
    care: Care, wanted: int | None, counts: Counts, limits: Limits, trust: Trust
) -> tuple[int | None, Trust]:
    """(wanted, trust) as the stance has them."""
    stance = care.stance
    if not stance.conservative:
        return wanted, trust
    # Whether more workers help is not known while the model is off: one, and look again.
    over = care.load is not None and care.load > 1.0 and not counts.pending
    if wanted is not None and over:
        wanted = max(wanted, min(limits.high, counts.live + 1))
    return wanted, replace(trust, shrink=False, why=trust.why or stance.reasons[0][1])


def held(care: Care, verdict: Verdict, counts: Counts, limits: Limits) -> Verdict:
    """The verdict, unless a hand edit or a conflict forbids to act on it.

    A hand edit is honoured within the bounds of the policy: whoever wants fewer than the minimum
    changes the minimum. In a conflict not even the floor is ordered: it would be undone as well.
    """
    if care.held is None:
        return verdict
    code, _text = care.held
    if code == "manual_hold" and not limits.low <= counts.live <= limits.high:
        return verdict
    return Verdict(max(limits.low, counts.live), reasons=(*verdict.reasons, care.held))
