"""From a proposal to verdicts: what the guard is told of each pool, and what it says.

Owns the counts, the trust in the data, and the times that follow from measured starts and drains.
Hands verdicts to brain.
"""

from __future__ import annotations

from dataclasses import replace

from readyplane_planner import guard
from readyplane_planner.capacity import EVIDENCE_MIN_S
from readyplane_planner.decide import (
    acting,
    dead_ends,
    demand,
    denials,
    outlook,
    reasons,
    rolling,
    stances,
)
from readyplane_planner.decide.outlook import Both
from readyplane_planner.decide.pools import Pool
from readyplane_planner.decide.stances import Care
from readyplane_planner.decide.values import POOLS, Memory, Plan, Reason
from readyplane_planner.guard import Counts, Limits, PoolMemory, Trust, Verdict
from readyplane_planner.optimise import Proposal
from readyplane_planner.signals import Observation


def counts(
    observation: Observation,
    plan: Plan,
    memory: Memory,
    model: demand.Needs,
    pools: Both,
    seen: outlook.Forecasts,
) -> tuple[Counts, Counts]:
    """Counts for the guard; a queue that the TTFT target has no room for is a backlog (B23)."""
    slack_s = max(0.0, plan.ttft_s - model.model_p.own_s)
    most = (pools[0].ready_worth or 1) * model.model_p.rate * slack_s * 0.5
    waiting = observation.queue.known and observation.queue.get() > most
    sequences = seen.sequences
    full = (pools[1].ready_worth or 1) * model.model_d.sequences_at(plan.tpot_s)
    breach_p, breach_d = outlook.breaches(observation, plan, model, pools, seen)
    counts_p = pools[0].counts(backlog=waiting, breach=breach_p)
    counts_d = pools[1].counts(backlog=sequences > full > 0, breach=breach_d)
    return (
        rolling.without_surge(counts_p, pools[0], memory),
        rolling.without_surge(counts_d, pools[1], memory),
    )


def trust_in(observation: Observation, *, seen_before: bool) -> Trust:
    """What the data allows: unknown or partial data may grow a pool and never shrink it."""
    why = reasons.unknown_text(observation, seen_before=seen_before)
    if not observation.fleet_known:
        why = why or "the router's fleet is not known"
    if not observation.allocations_known:
        why = f"{why}; the actuator does not answer" if why else "the actuator does not answer"
    bad = bool(observation.bad)
    known = not observation.unknown() and observation.fleet_known
    return Trust(
        grow=observation.allocations_known,
        shrink=known and not bad and observation.allocations_known,
        why=why or ("a sample was refused" if bad else ""),
    )


def judge(
    observation: Observation,
    plan: Plan,
    memory: Memory,
    pools: Both,
    counts: tuple[Counts, Counts],
    limits: tuple[Limits, Limits],
    proposal: Proposal | None,
    cares: tuple[Care, Care],
    said: list[Reason],
    *,
    now_s: float,
) -> tuple[tuple[Verdict, Verdict], Memory]:
    """Verdicts for both pools, and what the rules said."""
    trust = trust_in(observation, seen_before=memory.work_p.begun_s is not None)
    memory = denials.noted(memory, observation, plan, limits[0], now_s=now_s)
    said.extend(denials.said(memory, pools, now_s=now_s))
    memory = dead_ends.noted(memory, observation, plan, pools)
    verdicts: list[Verdict] = []
    guards: list[PoolMemory] = []
    overrides = dict(memory.overrides)
    rows = zip(POOLS, pools, counts, limits, cares, strict=True)
    for name, pool, count, bounds, care in rows:
        before = memory.guard(name)
        if pool.became_ready:
            before = guard.succeeded(before)
        lost = _losses(pool, memory, observation)
        before = guard.failed(before, lost, limits=bounds, now_s=now_s)
        waits = denials.shut(memory, name, plan.pool(name).names, now_s=now_s)
        wanted = keep = urgent = None
        advised = advice(plan, memory, name)
        if proposal is not None and not advised:
            wanted = proposal.p if name == "prefill" else proposal.d
            urgent = proposal.p_now if name == "prefill" else proposal.d_now
            keep = proposal.p_keep if name == "prefill" else proposal.d_keep
        wanted, trusted = stances.careful(care, wanted, count, bounds, trust)
        verdict, after = guard.judge(
            wanted=wanted,
            keep=keep,
            counts=count,
            memory=before,
            limits=bounds,
            trust=replace(trusted, why="; ".join(w for w in (advised, trusted.why) if w)),
            paused=plan.paused,
            urgent=urgent,
            shut=(0.0, "")
            if waits is None
            else (waits.retry_s, f"orders are refused: {waits.why}"),
            now_s=now_s,
        )
        verdicts.append(stances.held(care, verdict, count, bounds))
        guards.append(after)
    before_both = (memory.guard_p.desired, memory.guard_d.desired)
    pair = guard.budgeted((verdicts[0], verdicts[1]), counts, limits, plan.budget_gpus, before_both)
    for name, verdict in zip(POOLS, pair, strict=True):
        for code, text in verdict.reasons:
            said.append(Reason(code, text, name))
            overrides[code] = overrides.get(code, 0) + 1
    return pair, replace(memory, guard_p=guards[0], guard_d=guards[1], overrides=overrides)


def advice(plan: Plan, memory: Memory, name: str) -> str:
    """Why what the optimiser wants of a pool is only told, and not done; empty where it is done.

    Figures that nobody measured are acted on once enough was learned of the workers that the floor
    keeps, or that a person started.
    """
    profile = plan.pool(name).profile
    learned_s = (memory.correct_p if name == "prefill" else memory.correct_d).evidence_s
    if profile.measured or learned_s >= EVIDENCE_MIN_S:
        return ""
    return (
        f"advice only: {profile.name} was never measured, and its correction rests on "
        f"{learned_s:.0f} of {EVIDENCE_MIN_S:.0f} s"
    )


def measured(observation: Observation, plan: Plan) -> tuple[Limits, Limits]:
    """The plan's limits with the times that follow from measured starts and drains.

    Letting a worker go costs a start later and a drain now, T_ready + T_drain: surplus lasts that
    long before giving up is cheaper than keeping (ski rental), and there and back again within
    twice that is a reversal.
    """

    def timed(limits: Limits, cost_s: float) -> Limits:
        hold_s = cost_s if limits.hold_s is None else limits.hold_s
        return replace(limits, hold_s=hold_s, turn_s=2.0 * cost_s)

    starts = observation.t_ready
    drain_s = observation.lengths.osl * plan.tpot_s
    return (
        timed(plan.prefill.limits, starts["prefill"].p50_s + plan.ttft_s),
        timed(plan.decode.limits, starts["decode"].p50_s + drain_s),
    )


def _losses(pool: Pool, memory: Memory, observation: Observation) -> int:
    """Starts lost in this tick: an order is counted once, when it leaves the open ones.

    An order that was refused never was a start; see `denials`.
    """
    open_ids = {o.worker_id for o in memory.orders}
    lost = {*pool.failed, *(c.worker_id for c in pool.overdue)}
    return len((lost & open_ids) - {r.worker_id for r in observation.refused})


def took(
    place: int, limits: Limits, memory: Memory, acted: acting.Acted, *, now_s: float
) -> PoolMemory:
    """The guard's memory of one pool after what was done."""
    before = memory.guard(POOLS[place])
    return guard.took(before, acted.verdicts[place], turn_s=limits.turn_s, now_s=now_s)
