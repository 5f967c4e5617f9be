"""Starts that would fail again wherever they are made: an artifact is not ordered any more (B132).

An agent says of its failure when the same start would meet it again: bytes that are wrong or missing
at every source, another identity than ordered, a signature that the policy wants, an engine that
cannot what it was ordered to. After DEAD_END_STARTS such ends of one pool's artifact without a good
start between them nothing more is ordered of it, and that is said at every tick. Where the engine
cannot stand by as ordered, only standbys are ordered no more.

It ends with another artifact, with any new version of the policy (`readyplane policy again` makes one
that changes nothing), and when a start of the artifact gets ready after all. Who was ready before
says nothing: its bytes may have been right then. What a roll-out starts beside the others has a bound
of its own (`starts_failed_max`), with which it goes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from readyplane_planner.decide.pools import Pool
from readyplane_planner.decide.values import DeadEnd, Memory, Plan, Reason
from readyplane_planner.signals import Observation

DEAD_END_STARTS = 2
DEAD_ENDS_MAX = 16
WHY_CHARS_MAX = 300
WORKERS_MAX = 64
NOT_OFFERED = "not_offered"
"""The end of a start whose engine cannot what was ordered."""


def noted(memory: Memory, observation: Observation, plan: Plan, pools: Iterable[Pool]) -> Memory:
    """The memory with the ends that are seen now, each counted once, of what was ordered here."""
    kept = {
        (d.pool, d.digest, d.standby): d
        for d in memory.dead_ends
        if d.policy_version == plan.version
    }
    open_orders = {o.worker_id: o for o in memory.orders}
    for ended in observation.dead_ends:
        order = open_orders.get(ended.worker_id)
        if order is None:
            continue
        standby = order.standby and ended.kind == NOT_OFFERED
        key = order.pool, order.digest, standby
        new = DeadEnd(order.pool, order.digest, "", "", 0, (), plan.version, standby)
        before = kept.get(key) or new
        if ended.worker_id not in before.worker_ids:
            kept[key] = replace(
                before,
                kind=ended.kind,
                why=ended.why[:WHY_CHARS_MAX],
                starts=before.starts + 1,
                worker_ids=(*before.worker_ids, ended.worker_id)[-WORKERS_MAX:],
            )
    for pool in pools:
        good = (*pool.ready, *pool.unpairable, *pool.standby)
        for worker_id in {w.worker_id for w in good} & open_orders.keys():
            order = open_orders[worker_id]
            kept.pop((pool.name, order.digest, False), None)
            if order.standby:
                kept.pop((pool.name, order.digest, True), None)
    found = tuple(kept.values())[-DEAD_ENDS_MAX:]
    return memory if found == memory.dead_ends else replace(memory, dead_ends=found)


def shut(memory: Memory, pool: str, digest: str, *, standby: bool = False) -> DeadEnd | None:
    """Why nothing is ordered of an artifact, or no `standby` of it; None where it is."""
    for found in memory.dead_ends:
        concerns = standby or not found.standby
        same = (found.pool, found.digest) == (pool, digest)
        if same and concerns and found.starts >= DEAD_END_STARTS:
            return found
    return None


def shut_now(memory: Memory) -> tuple[DeadEnd, ...]:
    """All that nothing is ordered of."""
    return tuple(d for d in memory.dead_ends if d.starts >= DEAD_END_STARTS)


def told(found: DeadEnd) -> Reason:
    """The condition in words, with its way out."""
    if found.standby:
        text = (
            f"{found.starts} standbys have ended for good ({found.kind}; {found.worker_ids[-1]}: "
            f"{found.why}): no more are ordered; set policy.{found.pool}.standby_holds to weights, "
            f"or {found.pool}.standby to 0"
        )
        return Reason("dead_end", text, found.pool)
    text = (
        f"{found.starts} starts of {found.digest[:19]} have ended for good ({found.kind}; "
        f"{found.worker_ids[-1]}: {found.why}): no more are ordered; publish or name another artifact, "
        "or mend this one and say `readyplane policy again`"
    )
    return Reason("dead_end", text, found.pool)
