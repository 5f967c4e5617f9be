"""Actions with short lead times: standbys that are told to serve, workers that change their stage.

Owns the memory of what was told until it is done, refused or over, how such a worker counts
meanwhile, and who is chosen. It says neither when nor how many: that is the brain's, which puts what
these give into its Decision, and `noted` into its Memory.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from readyplane.core.startup import StartQuantiles
from readyplane.core.worker import WorkerState
from readyplane_planner.decide.values import (
    ROLE_OF,
    Activation,
    Changing,
    Flip,
    Memory,
    Plan,
    Reason,
)
from readyplane_planner.guard import Verdict
from readyplane_planner.signals import Observation, WorkerView

if TYPE_CHECKING:
    from readyplane_planner.decide.pools import Pool

ACTIVATE, FLIP = "activate", "flip"
LOAD = "load"
"""How the activation of a standby is called that holds a process only: a start without imports."""
ACTIVATE_S_MAX = 30.0
"""An activation is told for so long; one that takes longer would be slower than a start."""
LOAD_S_MAX = 900.0
"""A standby that has to load first is told for so long."""
UNSEEN_S_MAX = 15.0
TURNED = "turned_by_hand"
"""The code of what is said of a flip that no planner asked for."""
PRIORS = {
    # Measured in the local stack (docs/fast-tier.md): renewal, canary and gate; for a flip the
    # renewal, a drain of next to nothing, the whole proof and the gate. The tail is a longer drain.
    ACTIVATE: StartQuantiles(1.0, 2.5, 5.0, 0, 0.0),
    FLIP: StartQuantiles(3.0, 10.0, 30.0, 0, 0.0),
}
LOAD_PRIOR = StartQuantiles(30.0, 60.0, 120.0, 0, 0.0)
"""Until loads were seen they are taken for whole starts, where those are known (`pools`)."""
OTHER = {"prefill": "decode", "decode": "prefill"}


def left_s(mode: str, age_s: float) -> float | None:
    """Seconds until a worker that was told serves, at a guess; None for one that only starts.

    Its start is paid for already: it is never cancelled as one that is far away.
    """
    known = PRIORS.get(mode)
    return None if known is None else max(0.1, known.p50_s - age_s)


def activations(standby: Iterable[WorkerView], count: int, pool: str) -> tuple[Activation, ...]:
    """At most `count` standbys to be told to serve: of the newest generation the oldest first.

    Who has its weights serves sooner than who has a process only, and is told before it.
    """
    ranked = sorted(
        standby, key=lambda w: (w.bare, -w.generation, -(w.standby_age_s or 0.0), w.worker_id)
    )
    return tuple(
        Activation(w.worker_id, pool, w.epoch, LOAD_S_MAX, "a standby that has imported loads")
        if w.bare
        else Activation(w.worker_id, pool, w.epoch, ACTIVATE_S_MAX, "a standby serves at once")
        for w in ranked[: max(0, count)]
    )


def flips(ready: Iterable[WorkerView], count: int, pool: str, plan: Plan) -> tuple[Flip, ...]:
    """At most `count` ready workers to serve the other stage: who holds the least goes first.

    Only who can, is not attached and has served for `min_ready_s`.
    """
    able = [
        w
        for w in ready
        if w.flips
        and not (w.attached or w.convertible or w.told)
        and (w.ready_age_s or 0.0) >= plan.min_ready_s
    ]
    ranked = sorted(
        able, key=lambda w: (w.active, w.promised_prefill_tokens, -w.epoch, w.worker_id)
    )
    return tuple(
        Flip(
            w.worker_id,
            pool,
            OTHER[pool],
            w.epoch,
            plan.drain_deadline_s,
            f"holds {w.active} sequences and {w.promised_prefill_tokens} promised tokens",
        )
        for w in ranked[: max(0, count)]
    )


def spare(pool: Pool, target: int, plan: Plan) -> int:
    """How many of those that serve a pool could lose now: what is on its way is no supply.

    Args:
        target: workers that the pool is to have when it has shrunk; never counted below its floor.
    """
    return max(0, len(pool.ready) - max(target, plan.pool(pool.name).limits.low))


@dataclass(frozen=True, slots=True)
class Shortcuts:
    """What need not be started because it is nearly there.

    Attributes:
        came, went: workers of (P, D) that a pool gains, loses by it.
    """

    activations: tuple[Activation, ...] = ()
    flips: tuple[Flip, ...] = ()
    came: tuple[int, int] = (0, 0)
    went: tuple[int, int] = (0, 0)
    said: tuple[Reason, ...] = ()


def shortcuts(
    pools: tuple[Pool, Pool],
    verdicts: tuple[Verdict, Verdict],
    plan: Plan,
    *,
    digest: str,
    rolling: bool,
) -> Shortcuts:
    """Of what the pools grow by: first who stands by, then who is not needed in the other stage.

    Args:
        digest: artifact of new workers; a standby of another one is left alone.
        rolling: generations are mixed: nobody changes the stage meanwhile.
    """
    if plan.paused:
        return Shortcuts()
    came, went = [0, 0], [0, 0]
    told: list[Activation] = []
    turned: list[Flip] = []
    said: list[Reason] = []
    for place, (pool, verdict) in enumerate(zip(pools, verdicts, strict=True)):
        fitting = [w for w in pool.standby if w.manifest_digest == digest]
        mine = activations(fitting, verdict.grow, pool.name)
        told.extend(mine)
        came[place] += len(mine)
        if mine:
            text = f"{len(mine)} standbys serve: {', '.join(a.worker_id for a in mine)}"
            said.append(Reason("activated", text, pool.name))
    for place in (0, 1) if plan.flip and not rolling else ():
        giver, taker = pools[place], 1 - place
        if plan.prefill.worker_class != plan.decode.worker_class:
            break
        count = min(verdicts[place].shrink, verdicts[taker].grow - came[taker])
        count = min(count, spare(giver, verdicts[place].target, plan))
        current = [w for w in giver.ready if w.manifest_digest == digest]
        theirs = flips(current, count, giver.name, plan)
        turned.extend(theirs)
        came[taker] += len(theirs)
        went[place] += len(theirs)
        if theirs:
            text = f"{', '.join(f.worker_id for f in theirs)} will serve {pools[taker].name}"
            said.append(Reason("flipped", text, giver.name))
    return Shortcuts(
        tuple(told), tuple(turned), (came[0], came[1]), (went[0], went[1]), tuple(said)
    )


def too_many(pool: Pool, count: int, used: Container[str]) -> list[str]:
    """Of the standbys and those that are to become one: the youngest, who are paid for least.

    What a planner ordered carries its decision; whoever was loaded by hand is left to that hand.
    """
    young = sorted(
        (c for c in pool.preparing if c.decision_id), key=lambda c: (c.age_s, c.worker_id)
    )
    old = sorted(
        (w for w in pool.standby if w.scale_decision_id and not w.attached),
        key=lambda w: (w.generation, w.standby_age_s or 0.0, w.worker_id),
    )
    names = [c.worker_id for c in young] + [w.worker_id for w in old if w.worker_id not in used]
    return names[:count]


def noted(
    memory: Memory, told: Iterable[Activation], turned: Iterable[Flip], *, now_s: float
) -> Memory:
    """The memory with what a decision tells; the same worker is told one thing at a time."""
    changing = {c.worker_id: c for c in memory.changing}
    for one in told:
        changing.setdefault(
            one.worker_id, Changing(one.worker_id, ACTIVATE, one.pool, now_s, one.deadline_s)
        )
    for other in turned:
        changing.setdefault(
            other.worker_id, Changing(other.worker_id, FLIP, other.to, now_s, other.deadline_s)
        )
    kept = tuple(changing[name] for name in sorted(changing))
    return memory if kept == memory.changing else replace(memory, changing=kept)


def settled(observation: Observation, memory: Memory) -> Memory:
    """The memory without what is done, was refused, or is over; times are the planner's.

    A worker that cannot be seen may be between its two leases: it is waited for a while.
    """
    if not memory.changing:
        return memory
    workers = {w.worker_id: w for w in observation.workers}
    refused = {r.worker_id for r in observation.refused}
    ended = {a.worker_id for a in observation.allocations if a.state in {"exited", "failed"}}
    now_s = observation.taken_s

    def open_still(told: Changing) -> bool:
        worker = workers.get(told.worker_id)
        age_s = now_s - told.since_s
        if told.worker_id in refused or told.worker_id in ended:
            return False
        if worker is None:
            return not observation.fleet_known or age_s <= told.deadline_s + UNSEEN_S_MAX
        if worker.state is WorkerState.READY and worker.role.serves(ROLE_OF[told.to]):
            return False
        return age_s <= told.deadline_s + UNSEEN_S_MAX

    kept = tuple(c for c in memory.changing if open_still(c))
    return memory if kept == memory.changing else replace(memory, changing=kept)


def changes(observation: Observation, memory: Memory) -> dict[str, Changing]:
    """By worker: what it is told and has not done, by our memory, or by the router's word alone.

    A planner that has just begun learns of flips and activations from the router.
    """
    found = {c.worker_id: c for c in memory.changing}
    for worker in observation.workers:
        if not worker.told or worker.worker_id in found:
            continue
        name = "prefill" if worker.role is ROLE_OF["prefill"] else "decode"
        to = OTHER[name] if worker.told == FLIP else name
        found[worker.worker_id] = Changing(
            worker.worker_id,
            worker.told,
            to,
            observation.taken_s,
            LOAD_S_MAX if worker.bare else ACTIVATE_S_MAX,
        )
    return found


def by_hand(observation: Observation, memory: Memory) -> list[Reason]:
    """Workers that a person told to serve the other stage, on their way or there since the last look.

    The pool they leave has not lost them. `memory`: before what is done was taken out of it.
    """
    own = {c.worker_id for c in memory.changing if c.kind == FLIP}
    known = {"prefill": memory.owned_p.known or (), "decode": memory.owned_d.known or ()}
    left = {name: set(members) for name, members in known.items()}
    said = []
    for worker in observation.workers:
        pool = "prefill" if worker.role is ROLE_OF["prefill"] else "decode"
        if worker.worker_id in left[OTHER[pool]]:
            pool = OTHER[pool]
        elif worker.told != FLIP:
            continue
        if worker.worker_id not in own:
            text = f"{worker.worker_id} was told by hand to serve {OTHER[pool]}"
            said.append(Reason(TURNED, text, pool))
    return said


def untold(observation: Observation, memory: Memory) -> tuple[list[Activation], list[Flip]]:
    """What the router does not show although it was told: the call was lost, it is made again."""
    workers = {w.worker_id: w for w in observation.workers}
    told: list[Activation] = []
    turned: list[Flip] = []
    for change in memory.changing:
        worker = workers.get(change.worker_id)
        if worker is None or worker.told:
            continue
        left_s = change.deadline_s - (observation.taken_s - change.since_s)
        if left_s <= 0:
            continue
        if change.kind == ACTIVATE and worker.state is WorkerState.STANDBY:
            told.append(Activation(worker.worker_id, change.to, 0, left_s, "told again"))
        elif change.kind == FLIP and worker.state is WorkerState.READY:
            turned.append(
                Flip(worker.worker_id, OTHER[change.to], change.to, 0, left_s, "told again")
            )
    return told, turned


def moved(changing: tuple[Changing, ...], by_s: float) -> tuple[Changing, ...]:
    """The same memory on a clock that is ahead by that."""
    return tuple(replace(c, since_s=c.since_s + by_s) for c in changing)
