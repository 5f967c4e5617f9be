"""One tick: observe, forecast, predict, optimise, guard, and say it in orders and reasons."""

from __future__ import annotations

import math
from dataclasses import replace

from readyplane_planner import guard, optimise
from readyplane_planner.decide import (
    acting,
    blindly,
    dead_ends,
    degrade,
    demand,
    effect,
    fast,
    judging,
    late,
    mixing,
    outlook,
    placing,
    prewarm,
    reasons,
    rebase,
    risk,
    stances,
    young,
)
from readyplane_planner.decide.outlook import Both
from readyplane_planner.decide.pools import (
    Pool,
    census,
    eta_s,
    not_draining,
    quantiles_of,
)
from readyplane_planner.decide.values import (
    POOLS,
    Decision,
    Memory,
    Plan,
    PoolDecision,
    Reason,
)
from readyplane_planner.guard import Counts, Verdict
from readyplane_planner.optimise import Demand, Optimiser, Problem, Proposal
from readyplane_planner.optimise.check import checked
from readyplane_planner.rollout import RESTING
from readyplane_planner.signals import Kind, Observation

UNPAIRABLE_SAID_MAX = 5
NEXT = 2
"""Starts of each pool that are looked ahead to when artifacts are placed."""
SILENT_SAID_MAX = 8
FAILING_MAX = 10
"""So many times in a row a foreign optimiser may fail before the planner's own takes its place."""


def decide(
    observation: Observation,
    plan: Plan,
    memory: Memory,
    *,
    now_s: float,
    decision_id: str,
    optimiser: Optimiser = optimise.size,
) -> tuple[Decision, Memory]:
    """The decision of one tick.

    Args:
        now_s: planner's monotonic clock. decision_id: becomes part of every new worker's name.
        optimiser: proposes targets; guard judges whatever it proposes, and stands in for it when
            it fails (R23.2).
    """
    turned = fast.by_hand(observation, memory)
    limits, memory = judging.measured(observation, plan), not_draining(observation, memory)
    memory = rebase.rebased(memory, plan)
    pools = (
        census("prefill", observation, plan, memory, now_s=now_s),
        census("decode", observation, plan, memory, now_s=now_s),
    )
    mixing.weigh(pools, observation, plan, memory)
    model, memory = demand.needs(observation, plan, memory, pools, now_s=now_s)
    seen = outlook.predict(observation, plan, model, pools)
    said: list[Reason] = [*turned, *_facts(observation, plan, pools, memory)]
    problem = _problem(observation, plan, model, pools, seen)
    pressed = young.pressed(observation, plan, model, pools[0].ready_worth, seen)
    proposal, memory = _propose(
        observation, plan, memory, problem, pools, seen, pressed, optimiser, said
    )
    proposal, memory = prewarm.raised(
        proposal, observation, plan, memory, problem, said, now_s=now_s
    )
    counts = judging.counts(observation, plan, memory, model, pools, seen)
    proposal, choices, mixed = mixing.choose(
        proposal, observation, plan, memory, pools, counts, now_s=now_s
    )
    said.extend(mixed)
    proposal, memory = late.lifted(proposal, observation, plan, memory, pools[0], said, now_s=now_s)
    cares, memory = stances.look(observation, plan, memory, pools, model, seen, said, now_s=now_s)
    verdicts, memory = judging.judge(
        observation, plan, memory, pools, counts, limits, proposal, cares, said, now_s=now_s
    )
    acted = acting.act(
        observation, plan, memory, pools, verdicts, said, decision_id, choices, now_s=now_s
    )
    before = (memory.guard_p.desired, memory.guard_d.desired)
    # Who could not be given up is still there: the other pool counts on its GPUs in vain.
    acted.verdicts = guard.within(acted.verdicts, counts, limits, plan.budget_gpus, before)
    ration, memory = degrade.ordered(
        observation, plan, acted.memory, problem, model, seen, said, now_s=now_s
    )
    both = [
        _pool_decision(name, observation, plan, memory, verdict, proposal, count, pool, model, seen)
        for name, verdict, count, pool in zip(POOLS, acted.verdicts, counts, pools, strict=True)
    ]
    explained = reasons.explained(
        said,
        both,
        plan,
        proposal,
        observation,
        (memory.guard_p, memory.guard_d),
        limits,
        [sum(o.pool == name for o in acted.orders) for name in POOLS],
        now_s=now_s,
    )
    memory = replace(
        memory,
        guard_p=judging.took(0, limits[0], memory, acted, now_s=now_s),
        guard_d=judging.took(1, limits[1], memory, acted, now_s=now_s),
        last_s=now_s,
    )
    decision = Decision(
        decision_id=decision_id,
        model=plan.model,
        at_s=now_s,
        policy_version=plan.version,
        policy_digest=plan.digest,
        prefill=both[0],
        decode=both[1],
        orders=tuple(acted.orders),
        drains=tuple(acted.drains),
        releases=tuple(acted.releases),
        why=explained,
        signals=observation.signals(),
        signal_ages_s={
            name: signal.age_s if signal.value is not None else None
            for name, signal in observation.signals().items()
        },
        infeasible=() if proposal is None else proposal.infeasible,
        stranded_p=0 if proposal is None else proposal.stranded_p,
        degraded=_degraded(observation),
        rollout=acted.rollout,
        activations=acted.activations,
        flips=acted.flips,
        ration=ration,
        dead_ends=dead_ends.shut_now(memory),
        candidates=() if proposal is None else proposal.candidates,
        binding=effect.binding(explained),
        expected=effect.expected(observation, plan, model, pools, seen, acted),
        placements=placing.placements(
            observation,
            plan,
            [(n, c.more.worker_class, NEXT) for n, c in zip(POOLS, choices, strict=True)],
        ),
    )
    return decision, memory


def _facts(observation: Observation, plan: Plan, pools: Both, memory: Memory) -> list[Reason]:
    """What was wrong with the data and what happened to starts, before any rule speaks."""
    said = [Reason("bad_value", f"refused sample {name}") for name in observation.bad[:5]]
    said.extend(Reason("source_silent", text) for text in observation.silent[:SILENT_SAID_MAX])
    windows = [w.window_s for n, w in observation.latency.items() if n.endswith("_actual")]
    if max(windows, default=0.0) > plan.actual_window_s:
        text = (
            f"the router's latencies cover {max(windows):.0f} s and policy.load.window_s allows "
            f"{plan.actual_window_s:.0f} s: actual latencies count as unknown"
        )
        said.append(Reason("actual_unknown", text))
    if observation.idle:
        said.append(Reason("idle", "no arrivals and nothing in flight"))
    for pool in pools:
        profile = plan.pool(pool.name).profile
        if not profile.measured:
            text = f"{profile.name} was never measured: `readyplane profile measure` does that"
            said.append(Reason("profile_unmeasured", text, pool.name))
        said.extend(
            Reason("unpairable", f"{w.worker_id} is not counted: {w.unpairable}", pool.name)
            for w in pool.unpairable[:UNPAIRABLE_SAID_MAX]
        )
        said.extend(
            Reason("refused", f"{r.worker_id}: {r.reason}", pool.name)
            for r in observation.refused
            if r.pool == pool.name
        )
        said.extend(Reason("overdue", r.why, pool.name) for r in pool.releases)
        said.extend(_waiting(observation, pool))
        refused = {r.worker_id for r in observation.refused}
        said.extend(
            Reason("start_failed", f"{worker_id} did not become ready", pool.name)
            for worker_id in pool.failed
            if worker_id not in refused
        )
        desired = memory.guard(pool.name).desired
        live = pool.live
        lost = len(pool.failed) + len(pool.overdue)
        if desired is not None and memory.rollout.phase not in RESTING:
            live = min(live, desired)  # what a roll-out puts beside the others is meant to be there
        if desired is not None and live != desired and not lost and observation.fleet_known:
            text = f"desired {desired}, observed {live} ready or on their way"
            said.append(Reason("drift", text, pool.name))
    return said


def _waiting(observation: Observation, pool: Pool) -> list[Reason]:
    """Why orders that were taken have not begun, in the actuator's words (B36)."""
    whys = {a.worker_id: a.reason for a in observation.allocations if a.state == "pending"}
    return [
        Reason(
            "pending", f"{c.worker_id} has waited {c.age_s:.0f} s: {whys[c.worker_id]}", pool.name
        )
        for c in (*pool.coming, *pool.overdue)
        if whys.get(c.worker_id)
    ][:UNPAIRABLE_SAID_MAX]


def _problem(
    observation: Observation, plan: Plan, model: demand.Needs, pools: Both, seen: outlook.Forecasts
) -> Problem:
    """Both pools of this instant, in the words of the optimiser."""
    return Problem(
        prefill=model.model_p,
        decode=model.model_d,
        demand_p=Demand(
            model.work_p.level,
            model.work_p.upper,
            model.lasting_p,
            backlog=observation.queue.get(),
            spread=model.spread_p,
        ),
        demand_d=Demand(
            model.work_d.level,
            model.work_d.upper,
            model.lasting_d,
            sequences=seen.sequences,
            spread=model.spread_d,
        ),
        supply_p=seen.supply_p,
        supply_d=seen.supply_d,
        bounds_p=mixing.bounds(plan, pools[0]),
        bounds_d=mixing.bounds(plan, pools[1]),
        t_ready_p_s=observation.t_ready["prefill"].p90_s,
        t_ready_d_s=observation.t_ready["decode"].p90_s,
        ttft_target_s=plan.ttft_s,
        tpot_target_s=plan.tpot_s,
        catch_up_s=plan.catch_up_s,
        headroom=plan.headroom,
        band=plan.band,
        quantile=plan.slo_quantile,
        risk=model.risk,
        # Classes differ in their GPUs: what a mix of them takes is bounded where it is chosen.
        budget_gpus=None if plan.prefill.classes or plan.decode.classes else plan.budget_gpus,
    )


def _propose(
    observation: Observation,
    plan: Plan,
    memory: Memory,
    problem: Problem,
    pools: Both,
    seen: outlook.Forecasts,
    pressed: tuple[bool, bool],
    optimiser: Optimiser,
    said: list[Reason],
) -> tuple[Proposal | None, Memory]:
    """Ask the optimiser where the demand is known; else only what is certain may grow a pool."""
    live_p, live_d = (math.ceil(p.live_worth) for p in pools)
    if not blindly.knows(observation):
        return blindly.stand_in(observation, plan, memory, problem, (live_p, live_d), said)
    memory = replace(memory, blind=0) if memory.blind else memory
    if observation.idle and risk.gone(memory, now_s=observation.taken_s):
        # Nothing arrives and nothing runs: what was forecast from the past must not hold a pool.
        idle = Demand(0.0, 0.0)
        problem = replace(problem, demand_p=idle, demand_d=idle)
    try:
        proposal = optimiser(problem)
        if optimiser is not optimise.size:
            proposal = checked(proposal, problem)
        weighed = optimise.weigh(problem, proposal.p, proposal.d)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it does, the guard goes on
        said.append(Reason("optimiser_failed", f"{type(error).__name__}: {error}"))
        memory = replace(memory, fallbacks=memory.fallbacks + 1, failing=memory.failing + 1)
        if optimiser is not optimise.size and memory.failing > FAILING_MAX:
            # One that fails and fails is none: the planner's own stands in, until it answers again.
            said.append(Reason("optimiser_replaced", f"it failed {memory.failing} times in a row"))
            return optimise.size(problem), memory
        p = guard.fallback(live=live_p, load=seen.load_p.value, limits=plan.prefill.limits)
        d = guard.fallback(live=live_d, load=seen.load_d.value, limits=plan.decode.limits)
        kept = Proposal(p, d, max(p, live_p), max(d, live_d))
        return kept, memory
    said.extend(Reason(code, text, pool) for code, text, pool in proposal.reasons)
    memory = replace(memory, failing=0) if memory.failing else memory
    proposal = young.held(proposal, plan, memory, (live_p, live_d), pressed)
    return replace(proposal, candidates=weighed), memory


def _pool_decision(
    name: str,
    observation: Observation,
    plan: Plan,
    memory: Memory,
    verdict: Verdict,
    proposal: Proposal | None,
    counts: Counts,
    pool: Pool,
    model: demand.Needs,
    seen: outlook.Forecasts,
) -> PoolDecision:
    is_p = name == "prefill"
    quantiles = observation.t_ready[name]
    wanted = keep = None
    if proposal is not None:
        wanted, keep = (proposal.p, proposal.p_keep) if is_p else (proposal.d, proposal.d_keep)
    desired = memory.guard(name).desired
    correction = memory.correct_p if is_p else memory.correct_d
    return PoolDecision(
        before=counts.live if desired is None else desired,
        target=verdict.target,
        wanted=wanted,
        keep=keep,
        counts=counts,
        load=seen.load_p if is_p else seen.load_d,
        forecast=model.work_p if is_p else model.work_d,
        worker_rate=model.model_p.rate if is_p else model.model_d.rate_at(plan.tpot_s),
        correction=correction.factor,
        t_ready=quantiles,
        etas_s=tuple(
            sorted(
                eta_s(c.age_s, quantiles_of(observation, name, c), late=False) for c in pool.coming
            )
        ),
    )


def _degraded(observation: Observation) -> str:
    """Why decisions rest on less than everything; empty when nothing is missing."""
    if observation.degraded:
        return observation.degraded
    unknown = [
        n for n in observation.unknown() if observation.signals()[n].kind is not Kind.WARMING
    ]
    if unknown:
        return f"{', '.join(unknown)}: {observation.signals()[unknown[0]].why}"
    return "" if observation.allocations_known else "the actuator does not answer"
