"""One tick: observe, forecast, predict, optimise, guard, and say it in orders and reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace

from readyplane_planner import capacity, guard, optimise
from readyplane_planner.capacity import Load, Prediction, Supply
from readyplane_planner.decide import acting, demand, reasons
from readyplane_planner.decide.pools import Pool, census, eta_s
from readyplane_planner.decide.values import (
    POOLS,
    Decision,
    Memory,
    Plan,
    PoolDecision,
    Reason,
)
from readyplane_planner.guard import Counts, Limits, PoolMemory, Trust, Verdict
from readyplane_planner.optimise import Bounds, Demand, Optimiser, Problem, Proposal
from readyplane_planner.signals import Kind, Observation

Both = tuple[Pool, Pool]


@dataclass(frozen=True, slots=True)
class _Forecasts:
    """Predicted latencies and the loads they make."""

    ttft: Prediction | None
    tpot: Prediction | None
    load_p: Load
    load_d: Load


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
    memory = _not_draining(observation, memory)
    pools = (
        census("prefill", observation, plan, memory, now_s=now_s),
        census("decode", observation, plan, memory, now_s=now_s),
    )
    serving = len(pools[1].ready) + len(pools[1].draining)
    memory = demand.fold(observation, plan, memory, serving=serving, now_s=now_s)
    model, memory = demand.needs(observation, plan, memory, now_s=now_s)
    memory = demand.corrected(observation, plan, memory, pools, model)
    seen = _predict(observation, plan, model, pools)
    said: list[Reason] = _facts(observation, pools, memory)
    proposal, memory = _propose(observation, plan, memory, model, pools, seen, optimiser, said)
    counts = _counts(observation, plan, memory, model, pools)
    limits = (
        _measured_limits("prefill", observation, plan),
        _measured_limits("decode", observation, plan),
    )
    verdicts, memory = _judge(
        observation, plan, memory, pools, counts, limits, proposal, said, now_s=now_s
    )
    acted = acting.act(observation, plan, memory, pools, verdicts, said, decision_id, now_s=now_s)
    memory = acted.memory
    both = [
        _pool_decision(name, observation, plan, memory, verdict, proposal, count, pool, model, seen)
        for name, verdict, count, pool in zip(POOLS, acted.verdicts, counts, pools, strict=True)
    ]
    explained = reasons.explained(
        said,
        both,
        replace(
            plan,
            prefill=replace(plan.prefill, limits=limits[0]),
            decode=replace(plan.decode, limits=limits[1]),
        ),
        proposal,
        observation,
        (memory.guard_p, memory.guard_d),
        [sum(o.pool == name for o in acted.orders) for name in POOLS],
        now_s=now_s,
    )
    memory = replace(
        memory,
        guard_p=_took(0, memory, acted, limits, now_s=now_s),
        guard_d=_took(1, memory, acted, limits, now_s=now_s),
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
        signal_ages_s={
            name: signal.age_s if signal.value is not None else None
            for name, signal in observation.signals().items()
        },
        infeasible=() if proposal is None else proposal.infeasible,
        stranded_p=0 if proposal is None else proposal.stranded_p,
        degraded=_degraded(observation),
    )
    return decision, memory


def _not_draining(observation: Observation, memory: Memory) -> Memory:
    """A drain that was not taken is no drain: the worker counts as it stands, ready (B35)."""
    refused = {r.worker_id for r in observation.refused}
    if not refused:
        return memory
    return replace(memory, draining=tuple(d for d in memory.draining if d[0] not in refused))


def _took(
    place: int, memory: Memory, acted: acting.Acted, limits: tuple[Limits, Limits], *, now_s: float
) -> PoolMemory:
    before = memory.guard(POOLS[place])
    turn_s = limits[place].turn_s
    return guard.took(before, acted.verdicts[place], turn_s=turn_s, now_s=now_s)


def _facts(observation: Observation, pools: Both, memory: Memory) -> list[Reason]:
    """What was wrong with the data and what happened to starts, before any rule speaks."""
    said = [Reason("bad_value", f"refused sample {name}") for name in observation.bad[:5]]
    if observation.idle:
        said.append(Reason("idle", "no arrivals and nothing in flight"))
    for pool in pools:
        said.extend(
            Reason("refused", f"{r.worker_id}: {r.reason}", pool.name)
            for r in observation.refused
            if r.pool == pool.name
        )
        said.extend(Reason("overdue", r.why, pool.name) for r in pool.releases)
        refused = {r.worker_id for r in observation.refused}
        said.extend(
            Reason("start_failed", f"{worker_id} did not become ready", pool.name)
            for worker_id in pool.failed
            if worker_id not in refused
        )
        desired = memory.guard(pool.name).desired
        live = len(pool.ready) + len(pool.coming)
        lost = len(pool.failed) + len(pool.overdue)
        if desired is not None and live != desired and not lost and observation.fleet_known:
            text = f"desired {desired}, observed {live} ready or on their way"
            said.append(Reason("drift", text, pool.name))
    return said


def _predict(observation: Observation, plan: Plan, model: demand.Needs, pools: Both) -> _Forecasts:
    ttft = tpot = None
    if observation.queue.known and observation.prefill_work.known:
        ttft = capacity.predict_ttft(
            model.model_p,
            level=model.work_p.level,
            upper=model.lasting_p,
            backlog=observation.queue.get(),
            supply=_supply(pools[0], observation),
            horizon_s=model.work_p.horizon_s,
            quantile=plan.slo_quantile,
        )
    if observation.decoding.known and observation.arrivals.known:
        tpot = capacity.predict_tpot(
            model.model_d,
            level=model.work_d.level,
            upper=model.work_d.upper,
            sequences=_sequences(observation, model, pools),
            supply=_supply(pools[1], observation),
            horizon_s=model.work_d.horizon_s,
        )

    def load(name: str, prediction: Prediction | None, target_s: float) -> Load:
        window = observation.latency.get(name)
        return capacity.load_of(
            prediction,
            actual_s=window.p90_s if window is not None and window.count else None,
            count=window.count if window is not None else 0,
            target_s=target_s,
            combine=plan.combine,
            weight=plan.combine_weight,
            count_min=plan.actual_count_min,
        )

    return _Forecasts(
        ttft, tpot, load("ttft_actual", ttft, plan.ttft_s), load("tpot_actual", tpot, plan.tpot_s)
    )


def _sequences(observation: Observation, model: demand.Needs, pools: Both) -> float:
    return demand.sequences_ahead(
        observation,
        model,
        prefill_workers=len(pools[0].ready),
        within_s=model.work_d.horizon_s,
    )


def _supply(pool: Pool, observation: Observation) -> Supply:
    quantiles = observation.t_ready[pool.name]
    etas = sorted(eta_s(c.age_s, quantiles, late=True) for c in pool.coming)
    return Supply(len(pool.ready), tuple(etas))


def _propose(
    observation: Observation,
    plan: Plan,
    memory: Memory,
    model: demand.Needs,
    pools: Both,
    seen: _Forecasts,
    optimiser: Optimiser,
    said: list[Reason],
) -> tuple[Proposal | None, Memory]:
    """Ask the optimiser where the demand is known; else only what is certain may grow a pool."""
    needed = (observation.arrivals, observation.prefill_work, observation.queue)
    if not all(signal.known for signal in (*needed, observation.decoding)):
        return None, memory
    problem = Problem(
        prefill=model.model_p,
        decode=model.model_d,
        demand_p=Demand(
            model.work_p.level,
            model.work_p.upper,
            model.lasting_p,
            backlog=observation.queue.get(),
        ),
        demand_d=Demand(
            model.work_d.level,
            model.work_d.upper,
            model.lasting_d,
            sequences=_sequences(observation, model, pools),
        ),
        supply_p=_supply(pools[0], observation),
        supply_d=_supply(pools[1], observation),
        bounds_p=_bounds(plan, "prefill"),
        bounds_d=_bounds(plan, "decode"),
        t_ready_p_s=observation.t_ready["prefill"].p90_s,
        t_ready_d_s=observation.t_ready["decode"].p90_s,
        ttft_target_s=plan.ttft_s,
        tpot_target_s=plan.tpot_s,
        catch_up_s=plan.catch_up_s,
        headroom=plan.headroom,
        band=plan.band,
        quantile=plan.slo_quantile,
        budget_gpus=plan.budget_gpus,
    )
    if observation.idle:
        # Nothing arrives and nothing runs: what was forecast from the past must not hold a pool.
        idle = Demand(0.0, 0.0)
        problem = replace(problem, demand_p=idle, demand_d=idle)
    try:
        proposal = optimiser(problem)
    except Exception as error:  # noqa: BLE001 - whatever an optimiser does, the guard goes on
        said.append(Reason("optimiser_failed", f"{type(error).__name__}: {error}"))
        live_p, live_d = (len(p.ready) + len(p.coming) for p in pools)
        p = guard.fallback(live=live_p, load=seen.load_p.value, limits=plan.prefill.limits)
        d = guard.fallback(live=live_d, load=seen.load_d.value, limits=plan.decode.limits)
        kept = Proposal(p, d, max(p, live_p), max(d, live_d))
        return kept, replace(memory, fallbacks=memory.fallbacks + 1)
    said.extend(Reason(code, text, pool) for code, text, pool in proposal.reasons)
    return proposal, memory


def _bounds(plan: Plan, name: str) -> Bounds:
    limits = plan.pool(name).limits
    return Bounds(limits.low, limits.high, limits.gpus)


def _counts(
    observation: Observation, plan: Plan, memory: Memory, model: demand.Needs, pools: Both
) -> tuple[Counts, Counts]:
    """Counts for the guard; a queue that the TTFT target has no room for is a backlog (B23)."""
    slack_s = max(0.0, plan.ttft_s - model.model_p.own_s)
    most = max(1, len(pools[0].ready)) * model.model_p.rate * slack_s * 0.5
    waiting = observation.queue.known and observation.queue.get() > most
    sequences = _sequences(observation, model, pools)
    full = max(1, len(pools[1].ready)) * model.model_d.sequences_at(plan.tpot_s)
    breach_p, breach_d = _breaches(observation, plan, model, pools)
    counts_p = pools[0].counts(backlog=waiting, breach=breach_p)
    counts_d = pools[1].counts(backlog=sequences > full > 0, breach=breach_d)
    return (
        _without_surge(counts_p, pools[0], plan, memory),
        _without_surge(counts_d, pools[1], plan, memory),
    )


def _breaches(
    observation: Observation, plan: Plan, model: demand.Needs, pools: Both
) -> tuple[bool, bool]:
    """Whether the workers that are ready now, alone, miss a target beyond the band.

    At the expected demand and not at its bound, over the time that a start takes.
    """
    if not (observation.queue.known and observation.decoding.known):
        return False, False
    ttft = capacity.predict_ttft(
        model.model_p,
        level=model.work_p.level,
        upper=model.work_p.level,
        backlog=observation.queue.get(),
        supply=Supply(len(pools[0].ready)),
        horizon_s=model.work_p.horizon_s,
        quantile=plan.slo_quantile,
    )
    tpot = capacity.predict_tpot(
        model.model_d,
        level=model.work_d.level,
        upper=model.work_d.level,
        sequences=_sequences(observation, model, pools),
        supply=Supply(len(pools[1].ready)),
        horizon_s=model.work_d.horizon_s,
    )
    beyond = 1.0 + plan.band
    return ttft.value_s > plan.ttft_s * beyond, tpot.value_s > plan.tpot_s * beyond


def _without_surge(counts: Counts, pool: Pool, plan: Plan, memory: Memory) -> Counts:
    """A roll-out's extra workers stand beside the target and must not become it."""
    desired = memory.guard(pool.name).desired
    current = memory.generation.digest
    digests = [w.manifest_digest for w in pool.ready] + [c.digest for c in pool.coming]
    rolling = bool(current) and any(digest and digest != current for digest in digests)
    if not rolling or desired is None:
        return counts
    extra = min(plan.surge, max(0, counts.live - desired))
    from_pending = min(extra, counts.pending)
    return replace(
        counts, pending=counts.pending - from_pending, ready=counts.ready - extra + from_pending
    )


def _trust(observation: Observation, *, seen_before: bool) -> Trust:
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


def _judge(
    observation: Observation,
    plan: Plan,
    memory: Memory,
    pools: Both,
    counts: tuple[Counts, Counts],
    limits: tuple[Limits, Limits],
    proposal: Proposal | None,
    said: list[Reason],
    *,
    now_s: float,
) -> tuple[tuple[Verdict, Verdict], Memory]:
    trust = _trust(observation, seen_before=memory.work_p.begun_s is not None)
    verdicts: list[Verdict] = []
    guards: list[PoolMemory] = []
    overrides = dict(memory.overrides)
    for name, pool, count, bounds in zip(POOLS, pools, counts, limits, strict=True):
        before = memory.guard(name)
        if pool.became_ready:
            before = guard.succeeded(before)
        before = guard.failed(before, _losses(pool, memory), limits=bounds, now_s=now_s)
        wanted = keep = urgent = None
        if proposal is not None:
            wanted = proposal.p if name == "prefill" else proposal.d
            urgent = proposal.p_now if name == "prefill" else proposal.d_now
            keep = proposal.p_keep if name == "prefill" else proposal.d_keep
        verdict, after = guard.judge(
            wanted=wanted,
            keep=keep,
            counts=count,
            memory=before,
            limits=bounds,
            trust=trust,
            paused=plan.paused,
            urgent=urgent,
            now_s=now_s,
        )
        verdicts.append(verdict)
        guards.append(after)
    pair = guard.budgeted((verdicts[0], verdicts[1]), counts, limits, plan.budget_gpus)
    for name, verdict in zip(POOLS, pair, strict=True):
        for code, text in verdict.reasons:
            said.append(Reason(code, text, name))
            overrides[code] = overrides.get(code, 0) + 1
    return pair, replace(memory, guard_p=guards[0], guard_d=guards[1], overrides=overrides)


def _measured_limits(name: str, observation: Observation, plan: Plan) -> Limits:
    """Limits with the times that follow from measured starts and drains.

    Letting a worker go costs a start later and a drain now, T_ready + T_drain: surplus lasts that
    long before giving up is cheaper than keeping (ski rental), and a change of direction within
    twice that is a reversal.
    """
    limits = plan.pool(name).limits
    drain_s = observation.lengths.osl * plan.tpot_s if name == "decode" else plan.ttft_s
    cost_s = observation.t_ready[name].p50_s + drain_s
    hold_s = cost_s if limits.hold_s is None else limits.hold_s
    return replace(limits, hold_s=hold_s, turn_s=2.0 * cost_s)


def _losses(pool: Pool, memory: Memory) -> int:
    """Starts lost in this tick: an order is counted once, when it leaves the open ones."""
    open_ids = {o.worker_id for o in memory.orders}
    lost = {*pool.failed, *(c.worker_id for c in pool.overdue)}
    return len(lost & open_ids)


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
    seen: _Forecasts,
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
        etas_s=tuple(sorted(eta_s(c.age_s, quantiles, late=False) for c in pool.coming)),
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
