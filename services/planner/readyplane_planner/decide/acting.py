"""Verdicts become orders, drains and releases, and the memory of them.

Owns the names of new workers, which start is cancelled before which worker is drained, and the
bookkeeping that keeps an order from being counted twice or forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from readyplane.core.startup import StartQuantiles
from readyplane_planner.decide import dead_ends, fast, mixing, placing, rolling, victims
from readyplane_planner.decide.mixing import Choice, Pick
from readyplane_planner.decide.pools import Pool, arrives_soon
from readyplane_planner.decide.values import (
    POOLS,
    Activation,
    Drain,
    Flip,
    Memory,
    OpenOrder,
    Plan,
    Reason,
    Release,
    StartOrder,
)
from readyplane_planner.guard import Verdict
from readyplane_planner.rollout import RESTING, Generation, Step, Told
from readyplane_planner.signals import Observation

SERVED_MAX = 4096
LIVES_MAX = 32
Both = tuple[Pool, Pool]


@dataclass(slots=True)
class Acted:
    """What is asked for, the memory of it, and the verdicts as far as they could be followed."""

    memory: Memory
    verdicts: tuple[Verdict, Verdict]
    orders: list[StartOrder]
    drains: list[Drain]
    releases: list[Release]
    rollout: Told
    activations: tuple[Activation, ...] = ()
    flips: tuple[Flip, ...] = ()


def act(
    observation: Observation,
    plan: Plan,
    memory: Memory,
    pools: Both,
    verdicts: tuple[Verdict, Verdict],
    reasons: list[Reason],
    decision_id: str,
    choices: tuple[Choice, Choice] | None = None,
    *,
    now_s: float,
) -> Acted:
    """Turn verdicts into orders, drains and releases, and remember them.

    Args:
        choices: of each pool, which classes and modes; None for the only one there is.
    """
    chosen = choices or (mixing.plain(plan, "prefill"), mixing.plain(plan, "decode"))
    turn = rolling.turn(observation, plan, memory, pools, verdicts, now_s=now_s)
    step = turn.step
    memory = replace(memory, generation=turn.generation, rollout=turn.state)
    reasons.extend(Reason("rollout", line) for line in step.said)
    acted = Acted(memory, verdicts, [], [], [], turn.told)
    quick = fast.shortcuts(pools, verdicts, plan, digest=step.grow.digest, rolling=step.owns)
    acted.activations, acted.flips = quick.activations, quick.flips
    reasons.extend(quick.said)
    turned = {f.worker_id for f in quick.flips}
    done: list[Verdict] = []
    for place, (pool, verdict) in enumerate(zip(pools, verdicts, strict=True)):
        if not plan.paused:
            acted.releases.extend(pool.releases)
        grow, shrink = verdict.grow - quick.came[place], verdict.shrink - quick.went[place]
        if grow and not (plan.manifest_digest and step.grow.digest):
            reasons.append(Reason("artifact_unknown", "no artifact to start from", pool.name))
            grow = 0
        ended = dead_ends.shut(memory, pool.name, step.grow.digest)
        if ended is not None:
            reasons.append(dead_ends.told(ended))
            grow = 0
        picks = _affordable(acted, pools, chosen[place].picks(grow), pool.name, plan, reasons)
        # What classes cost is only known here: what the budget does not hold is no target either.
        unpaid, grow = grow - len(picks), len(picks)
        if unpaid:
            least = plan.pool(pool.name).limits.low
            verdict = replace(verdict, target=max(verdict.target - unpaid, least))
        picks = placing.placed(picks, observation, plan, pool.name)
        _order(acted, pool.name, picks, step.grow, plan, decision_id, reasons, now_s=now_s)
        surge = chosen[place].picks(step.surge[place])
        surge = placing.placed(surge, observation, plan, pool.name)
        _surge(acted, pool, surge, step, plan, reasons, decision_id, now_s=now_s)
        acted.releases.extend(
            Release(worker_id, pool.name, "its generation is rolled back")
            for worker_id in step.cancel[place]
        )
        _keep_standbys(acted, pools, place, step.grow, plan, decision_id, reasons, now_s=now_s)
        quantiles = observation.t_ready[pool.name]
        wanted = 0 if step.owns else shrink
        given_up = 0
        spare = fast.spare(pool, verdict.target, plan) - quick.went[place]
        # Who is told to change the stage is not drained for the same surplus.
        stay = replace(pool, ready=[w for w in pool.ready if w.worker_id not in turned])
        for part, count in _by_class(stay, chosen[place].gives, wanted):
            gone, drained = _give_up(acted, part, count, (), plan, quantiles, reasons, spare=spare)
            given_up, spare = given_up + gone, spare - drained
        given_up += _give_up(acted, pool, 0, step.retire[place], plan, quantiles, reasons)[0]
        if step.owns:
            # Who goes while generations are mixed is the roll-out's choice, in its own time.
            done.append(Verdict(verdict.target, grow + quick.came[place], shrink, verdict.reasons))
            continue
        # What could not be given up is still there and wanted as long as it is.
        target = verdict.target + max(0, shrink - given_up)
        grow, given_up = grow + quick.came[place], given_up + quick.went[place]
        done.append(Verdict(target, grow, given_up, verdict.reasons))
    acted.verdicts = (done[0], done[1])
    acted.memory = _remember(acted, observation, pools, plan, now_s=now_s)
    acted.memory = fast.noted(acted.memory, acted.activations, acted.flips, now_s=now_s)
    return acted


def _keep_standbys(
    acted: Acted,
    pools: Both,
    place: int,
    generation: Generation,
    plan: Plan,
    decision_id: str,
    reasons: list[Reason],
    *,
    now_s: float,
) -> None:
    """As many standbys as the policy wants: loaded ahead, in place of those that now serve."""
    pool = pools[place]
    mine = plan.pool(pool.name)
    used = {a.worker_id for a in acted.activations}
    wanted = 0 if plan.paused else mine.standby
    kept = [w for w in pool.standby if w.worker_id not in used]
    if not plan.paused and acted.rollout.phase in RESTING:
        # Once a roll-out is over, whoever is loaded with another artifact stands by for nobody.
        strange = {w.worker_id for w in kept if w.manifest_digest not in ("", generation.digest)}
        why = "it is loaded with an artifact that is served no more"
        acted.releases.extend(Release(name, pool.name, why) for name in sorted(strange))
        kept = [w for w in kept if w.worker_id not in strange]
    missing = wanted - len(kept) - len(pool.preparing)
    if missing > 0 and plan.manifest_digest and generation.digest:
        missing = min(missing, mine.limits.pending_max - len(pool.preparing))
        missing = 0 if now_s < acted.memory.guard(pool.name).retry_s else max(0, missing)
        ended = dead_ends.shut(acted.memory, pool.name, generation.digest, standby=True)
        if ended is not None:
            missing = 0
        if ended is not None and ended.standby:  # what ends all starts was said with these
            reasons.append(dead_ends.told(ended))
        if plan.budget_gpus is not None and mine.limits.gpus:
            held = sum(mixing.gpus_held(p, plan) for p in pools)
            held += sum(plan.pool(o.pool).limits.gpus for o in acted.orders)
            missing = min(missing, max(0, (plan.budget_gpus - held) // mine.limits.gpus))
        picks = mixing.plain(plan, pool.name).picks(missing)
        if picks:
            reasons.append(Reason("standby", f"{len(picks)} more to stand by", pool.name))
        _order(
            acted, pool.name, picks, generation, plan, decision_id, [], now_s=now_s, standby=True
        )
    elif missing < 0 and not plan.paused:
        for name in fast.too_many(pool, -missing, used):
            acted.releases.append(Release(name, pool.name, "more stand by than the policy wants"))


def _surge(
    acted: Acted,
    pool: Pool,
    picks: Sequence[Pick],
    step: Step,
    plan: Plan,
    reasons: list[Reason],
    decision_id: str,
    *,
    now_s: float,
) -> None:
    """Workers of the generation to come, beside those that the pool shall have (R17.2)."""
    if not picks:
        return
    text = f"{len(picks)} more of generation {step.goal.number} start beside the others"
    reasons.append(Reason("rollout", text, pool.name))
    _order(acted, pool.name, picks, step.goal, plan, decision_id, reasons, now_s=now_s)


def _order(
    acted: Acted,
    name: str,
    picks: Sequence[Pick],
    generation: Generation,
    plan: Plan,
    decision_id: str,
    reasons: list[Reason],
    *,
    now_s: float,
    standby: bool = False,
) -> None:
    memory = acted.memory
    suffix = decision_id.rpartition("-")[2]
    for why in dict.fromkeys(pick.why for pick in picks if pick.why):
        reasons.append(Reason("choice", f"{'P' if name == 'prefill' else 'D'}: {why}", name))
    for pick in picks:
        memory = replace(memory, numbered=memory.numbered + 1)
        worker_id = f"{name[0]}-{memory.numbered}-{suffix}"
        start = StartOrder(
            worker_id=worker_id,
            pool=name,
            worker_class=pick.worker_class,
            manifest_digest=generation.digest,
            generation=max(1, generation.number),
            mode=pick.mode,
            convertible_tpot_s=plan.pool(name).convertible_tpot_s,
            nodes=pick.nodes,
            why="; ".join(why for why in (pick.why, pick.way) if why),
            standby=standby,
            holds=plan.pool(name).standby_holds if standby else "weights",
            graph_stages=plan.graph_stages and pick.mode != "eager",
        )
        if pick.way:
            reasons.append(Reason("node", f"{worker_id} would serve on {pick.way}", name))
        acted.orders.append(start)
        order = OpenOrder(
            worker_id,
            name,
            now_s,
            decision_id,
            start.worker_class,
            start.mode,
            start.manifest_digest,
            start.generation,
            standby,
        )
        memory = replace(memory, orders=(*memory.orders, order))
    acted.memory = memory


def _affordable(
    acted: Acted,
    pools: Both,
    picks: tuple[Pick, ...],
    name: str,
    plan: Plan,
    reasons: list[Reason],
) -> tuple[Pick, ...]:
    """Of the picks, those that the budget holds: classes differ in their GPUs.

    Where there is one class, guard has counted them already.
    """
    if plan.budget_gpus is None or not (plan.prefill.classes or plan.decode.classes):
        return picks
    gpus = {
        (pool, c.worker_class): c.profile.gpus
        for pool in POOLS
        for c in mixing.classes_of(plan.pool(pool))
    }
    room = plan.budget_gpus - sum(mixing.gpus_held(pool, plan) for pool in pools)
    room -= sum(gpus[order.pool, order.worker_class] for order in acted.orders)
    kept: list[Pick] = []
    for pick in picks:
        each = gpus[name, pick.worker_class]
        if each <= room:
            kept.append(pick)
            room -= each
    if len(kept) < len(picks):
        text = f"{plan.budget_gpus} GPUs allow {len(kept)} of {len(picks)} new workers now"
        reasons.append(Reason("budget", text, name))
    return tuple(kept)


def _by_class(pool: Pool, gives: Sequence[str], count: int) -> list[tuple[Pool, int]]:
    """Parts of a pool and how many of each are to go; the whole pool where classes do not matter."""
    if not gives or not count:
        return [(pool, count)]
    parts = []
    for kind, number in Counter(gives[:count]).items():
        part = replace(
            pool,
            ready=[w for w in pool.ready if f"{w.worker_class}/{w.mode}" == kind],
            unpairable=[w for w in pool.unpairable if f"{w.worker_class}/{w.mode}" == kind],
            coming=[c for c in pool.coming if f"{c.worker_class}/{c.mode}" == kind],
        )
        parts.append((part, number))
    return parts


def _give_up(
    acted: Acted,
    pool: Pool,
    count: int,
    retire: Sequence[str],
    plan: Plan,
    quantiles: StartQuantiles,
    reasons: list[Reason],
    *,
    spare: int = 0,
) -> tuple[int, int]:
    """Cancel starts first, then drain ready workers; how many went, and how many of them served.

    A start that is about to serve is paid for: it is not cancelled, and nobody is drained to make
    room for it before it is there. What is on its way is no supply: of those that serve at most
    `spare` go, whoever is expected. `retire` is the roll-out's choice and is not bounded here.
    """
    if not count and not retire:
        return 0, 0
    soon = {
        c.worker_id: fast.left_s(c.mode, c.age_s) or arrives_soon(c.age_s, quantiles)
        for c in pool.coming
    }
    far = [c for c in pool.coming if soon[c.worker_id] is None]
    coming = victims.from_coming(far, count)
    near = {w: s for w, s in soon.items() if s is not None}
    if near and count > len(coming):
        first = min(near, key=lambda w: (near[w], w))
        text = (
            f"{first} serves in {near[first]:.1f} s: it is not cancelled, nobody is drained for it"
        )
        reasons.append(Reason("arriving", text, pool.name))
        count = len(coming)
    for item in coming:
        why = f"cancelled after {item.age_s:.1f} s: it is needed no more"
        acted.releases.append(Release(item.worker_id, pool.name, why))
    digest = acted.memory.generation.digest
    left = count - len(coming)
    waiting = pool.waiting
    # Who has not served for as long as it took to start was started for nothing.
    fresh_s = max(plan.min_ready_s, quantiles.p90_s)
    ready = victims.from_ready(waiting, left, digest=digest, min_ready_s=plan.min_ready_s)
    # Nobody who serves is drained as long as one who serves nobody is counted.
    surplus = max(0, left - len(waiting))
    if surplus > max(0, spare):
        surplus = max(0, spare)
        text = (
            f"{surplus} of those that serve may go now: whoever is on its way serves nobody yet, "
            "so nobody is drained for it"
        )
        reasons.append(Reason("arriving", text, pool.name))
    serving = victims.from_ready(pool.ready, surplus, digest=digest, min_ready_s=fresh_s)
    ready += serving
    given_up = len(coming) + len(ready)
    going = set(retire)
    served = [(pool.name, w.ready_age_s) for w in ready if w.ready_age_s is not None]
    lives = (*acted.memory.lives, *served)[-LIVES_MAX:]
    acted.memory = replace(acted.memory, lives=lives)
    ready += [w for w in (*pool.ready, *waiting) if w.worker_id in going and w not in ready]
    for worker in ready:
        why = victims.shown(worker)
        acted.drains.append(
            Drain(worker.worker_id, pool.name, worker.epoch, plan.drain_deadline_s, why)
        )
        reasons.append(Reason("victim", f"{worker.worker_id} {why}", pool.name))
    if count and not coming and not ready:
        reasons.append(
            Reason("no_victim", "every worker is too fresh, busiest or not ours", pool.name)
        )
    return given_up, len(serving)


def _remember(
    acted: Acted, observation: Observation, pools: Both, plan: Plan, *, now_s: float
) -> Memory:
    """Close orders that came, failed or were given up; follow drains until they are gone."""
    memory = acted.memory
    ready = {w.worker_id for p in pools for w in (*p.ready, *p.unpairable)}
    lost = {w for p in pools for w in p.failed} | {c.worker_id for p in pools for c in p.overdue}
    lost |= {r.worker_id for r in acted.releases}
    # Drained to serve the other stage it comes back: that is no end to be followed.
    turns = {name for name, c in fast.changes(observation, memory).items() if c.kind == fast.FLIP}
    alive = {w.worker_id for w in observation.workers}
    held = {a.worker_id for a in observation.allocations if a.state not in {"exited", "failed"}}
    closed = ready | lost | {w.worker_id for p in pools for w in p.standby}
    left = alive | held
    orders = tuple(o for o in memory.orders if o.worker_id not in closed)
    draining = {
        worker_id: since
        for worker_id, since in memory.draining
        if worker_id in left
        or now_s - since < plan.order_grace_s
        or not (observation.fleet_known and observation.allocations_known)
    }
    leaving = [d.worker_id for d in acted.drains]
    leaving += [w.worker_id for p in pools for w in p.draining if w.worker_id not in turns]
    for worker_id in leaving:
        draining.setdefault(worker_id, now_s)
    # What is given back ends in its own time and is counted no more, though it is still seen, or
    # is seen only now; the new time is when it is given back again at the earliest.
    draining.update((r.worker_id, now_s) for r in acted.releases)
    served = tuple(dict.fromkeys((*(s for s in memory.served if s in left), *sorted(ready))))
    before = dict(memory.suspects)
    suspects = {s: before.get(s, now_s) for p in pools for s in p.suspects}
    return replace(
        memory,
        orders=orders,
        draining=tuple(sorted(draining.items())),
        draining_as=_incarnations(draining, observation, memory),
        served=served[-SERVED_MAX:],
        suspects=tuple(sorted(suspects.items())),
    )


def _incarnations(
    draining: Container[str], observation: Observation, memory: Memory
) -> tuple[tuple[str, str], ...]:
    """Which process each of these ids meant when it began to drain, as far as one was seen."""
    seen = {w.worker_id: w.incarnation for w in observation.workers}
    found = seen | dict(memory.draining_as)
    return tuple(sorted((name, process) for name, process in found.items() if name in draining))
