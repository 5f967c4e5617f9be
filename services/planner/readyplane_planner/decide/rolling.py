"""What a roll-out is told of both pools, and its turn in this tick.

Owns putting the census into the words of the rollout brain. Handed to `acting`, which does what the
turn asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from readyplane_planner import rollout
from readyplane_planner.decide import denials
from readyplane_planner.decide.pools import Pool
from readyplane_planner.decide.values import POOLS, Memory, Plan
from readyplane_planner.guard import Counts, Verdict
from readyplane_planner.rollout import Facts, Member, Side, Stage, Tally
from readyplane_planner.signals import Observation, WorkerView

Both = tuple[Pool, Pool]
FAULT_CHARS_MAX = 400


def turn(
    observation: Observation,
    plan: Plan,
    memory: Memory,
    pools: Both,
    verdicts: tuple[Verdict, Verdict],
    *,
    now_s: float,
) -> rollout.Turn:
    """The roll-out's turn, after the guard said what each pool shall have."""
    told = observation.generations
    tallies = None
    if told is not None:
        tallies = {w.digest: Tally(w.finished, w.attained, w.failed) for w in told}
    state, generation, wanted = memory.rollout, memory.generation, plan.manifest_digest
    if not plan.paused and rollout.quiet(state, generation, _digests(pools), wanted, plan.rollout):
        p, d = (sum(not w.attached and _served_long(w, plan) for w in pool.ready) for pool in pools)
        return rollout.rest(state, generation, tallies, plan.rollout, serving=(p, d), now_s=now_s)
    sides = [
        _side(pool, verdict, observation, plan, memory, now_s=now_s)
        for pool, verdict in zip(pools, verdicts, strict=True)
    ]
    starts_s = [observation.t_ready[name].p99_s * plan.eta_bound_factor for name in POOLS]
    facts = Facts(
        wanted=wanted,
        hold=plan.paused,
        known=observation.fleet_known and observation.allocations_known,
        orders=observation.allocations_known,
        idle=observation.idle,
        tallies=tallies,
        late=None if told is None else {w.digest: w.late for w in told},
        start_s=max(starts_s),
        drain_s=plan.drain_deadline_s + plan.orphan_s,
        tick_s=plan.tick_s,
        room_gpus=_room_gpus(plan, pools, verdicts),
    )
    return rollout.advance(
        state,
        generation,
        (sides[0], sides[1]),
        facts,
        plan.rollout,
        promised=plan.slo_quantile,
        now_s=now_s,
    )


def without_surge(counts: Counts, pool: Pool, memory: Memory) -> Counts:
    """A roll-out's extra workers stand beside the target and must not become it."""
    desired = memory.guard(pool.name).desired
    if memory.rollout.phase in rollout.RESTING or desired is None:
        return counts
    extra = max(0, counts.live - desired)
    from_pending = min(extra, counts.pending)
    return replace(
        counts, pending=counts.pending - from_pending, ready=counts.ready - extra + from_pending
    )


def _side(
    pool: Pool,
    verdict: Verdict,
    observation: Observation,
    plan: Plan,
    memory: Memory,
    *,
    now_s: float,
) -> Side:
    """One pool; attached engines are somebody else's, and what they serve is not to be replaced."""
    members = [
        Member(
            w.worker_id,
            w.manifest_digest,
            w.generation,
            Stage.READY if _served_long(w, plan) else Stage.FRESH,
            w.active,
        )
        for w in pool.ready
        if not w.attached
    ]
    members += [
        Member(w.worker_id, w.manifest_digest, w.generation, Stage.ALONE, w.active)
        for w in pool.waiting
    ]
    members += [
        Member(c.worker_id, c.digest, c.number, Stage.COMING) for c in pool.coming if not c.attached
    ]
    attached = sum(w.attached for w in pool.ready) + sum(c.attached for c in pool.coming)
    ordered = {o.worker_id for o in memory.orders if o.digest == memory.rollout.goal.digest}
    lost = {*pool.failed, *(c.worker_id for c in pool.overdue)}
    refused = {r.worker_id for r in observation.refused}
    ended = (lost & ordered) - refused
    # One that ended for good has left the fleet by then, and its words are kept apart.
    whys = {w.worker_id: w.failure for w in observation.workers if w.failure}
    whys |= {e.worker_id: e.why for e in observation.dead_ends if e.why}
    faults = (whys[name] for name in sorted(ended) if name in whys)
    limits = plan.pool(pool.name).limits
    return Side(
        members=tuple(members),
        target=max(0, verdict.target - attached),
        grow=verdict.grow,
        shrink=verdict.shrink,
        leaving=tuple(w.manifest_digest for w in pool.draining),
        step_up=limits.step_up,
        step_down=limits.step_down,
        pending_max=limits.pending_max,
        waits=now_s < memory.guard(pool.name).retry_s
        or denials.shut(memory, pool.name, plan.pool(pool.name).names, now_s=now_s) is not None,
        gpus=limits.gpus,
        failed=len(ended),
        fault=next(faults, "")[:FAULT_CHARS_MAX],
        came=len(ordered & {w.worker_id for w in pool.ready}),
    )


def _digests(pools: Both) -> Iterator[str]:
    """Of everyone of the planner's own who serves or is to."""
    for pool in pools:
        for workers in (pool.ready, pool.waiting):
            yield from (w.manifest_digest for w in workers if not w.attached)
        yield from (c.digest for c in pool.coming if not c.attached)


def _served_long(worker: WorkerView, plan: Plan) -> bool:
    return (worker.ready_age_s or 0.0) >= plan.min_ready_s


def _room_gpus(plan: Plan, pools: Both, verdicts: tuple[Verdict, Verdict]) -> int | None:
    """GPUs of the budget that nobody holds and the guard has not given away in this tick."""
    if plan.budget_gpus is None:
        return None
    room = plan.budget_gpus
    for pool, verdict in zip(pools, verdicts, strict=True):
        held = pool.counts(backlog=False, breach=False).held
        room -= (held + verdict.grow) * plan.pool(pool.name).limits.gpus
    return max(0, room)
