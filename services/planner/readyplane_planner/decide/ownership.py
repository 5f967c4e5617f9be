"""Whether somebody else changes the fleet too: hand edits, holds, and two owners of one pool (B37, B41).

Owns telling our own changes from others': a worker that nobody here ordered, or one that went without
being drained, released or lost by itself. One such edit is reported and put right, or held for a while
where the policy says so. Edits that come again and again are a conflict: two owners would undo each
other for ever, so the planner waits, longer each time, and says it.
"""

from __future__ import annotations

from dataclasses import replace

from readyplane_planner.decide.pools import Pool
from readyplane_planner.decide.values import Owned
from readyplane_planner.signals import Observation

KNOWN_MAX = 4096
EDITS_MAX = 16
CONFLICT_EDITS = 3
CONFLICT_S = 300.0
PAUSE_S = 60.0
PAUSE_DOUBLINGS_MAX = 4


def look(
    before: Owned,
    pool: Pool,
    observation: Observation,
    *,
    ordered: frozenset[str],
    leaving: frozenset[str],
    young_s: float,
    hold_s: float,
    now_s: float,
) -> tuple[Owned, int]:
    """The memory after this look, and by how many workers somebody else has changed the pool.

    Args:
        ordered: known to be no edit. leaving: drained or given back by this planner. young_s: who
            ends younger than that was undone. hold_s: how long an edit is honoured; 0 puts it right
            at once.
    """
    if not (observation.fleet_known and observation.allocations_known):
        return before, 0
    members = {w.worker_id for w in (*pool.ready, *pool.waiting, *pool.stalled) if not w.attached}
    members |= {c.worker_id for c in pool.coming if not c.attached}
    if before.known is None:
        return replace(before, known=_bounded(members)), 0
    known = set(before.known)
    allocations = {a.worker_id: a for a in observation.allocations}
    by = {w.worker_id: w.scale_decision_id for w in observation.workers}
    by |= {a.worker_id: a.scale_decision_id for a in observation.allocations}
    # Whatever a planner ordered carries its decision; what carries none was started by somebody.
    added = {w for w in members - known - ordered if not by.get(w)}
    ended = [
        allocations[w]
        for w in known - members - leaving
        if w in allocations and allocations[w].state == "exited"
    ]
    change = len(added) - len(ended)
    after = replace(before, known=_bounded(members))
    if not added and not ended:
        return _calmed(after, now_s), 0
    if hold_s > 0:
        after = replace(after, hold_until_s=now_s + hold_s)
    # Machines are taken away at any age (spot); what was only just started was undone.
    undone = [a for a in ended if a.allocated_ago_s - (a.exited_ago_s or 0.0) <= young_s]
    if not added and not undone:
        return after, change
    edits = tuple(e for e in (*before.edits, (now_s, change)) if now_s - e[0] <= CONFLICT_S)
    after = replace(after, edits=edits[-EDITS_MAX:])
    if len(after.edits) >= CONFLICT_EDITS:
        pauses = after.pauses + 1
        pause_s = PAUSE_S * 2.0 ** min(pauses - 1, PAUSE_DOUBLINGS_MAX)
        return replace(after, pauses=pauses, pause_until_s=now_s + pause_s), change
    return after, change


def _calmed(owned: Owned, now_s: float) -> Owned:
    """A hold that has run out, and a conflict that has not come again, are over."""
    if owned.hold_until_s is not None and now_s >= owned.hold_until_s:
        owned = replace(owned, hold_until_s=None)
    last_s = owned.edits[-1][0] if owned.edits else None
    if last_s is not None and now_s - last_s > CONFLICT_S and not _pausing(owned, now_s):
        owned = replace(owned, edits=(), pauses=0, pause_until_s=None)
    return owned


def _pausing(owned: Owned, now_s: float) -> bool:
    return owned.pause_until_s is not None and now_s < owned.pause_until_s


def held(owned: Owned, *, now_s: float) -> tuple[str, str] | None:
    """(code, text) of why nothing is done in the pool now; None when nothing forbids it."""
    if _pausing(owned, now_s):
        left_s = (owned.pause_until_s or now_s) - now_s
        text = (
            f"somebody else has changed this pool {len(owned.edits)} times in {CONFLICT_S:.0f} s: "
            f"nothing is done for {left_s:.0f} s; pause one of the two"
        )
        return "ownership_conflict", text
    if owned.hold_until_s is not None and now_s < owned.hold_until_s:
        text = f"changed by hand: held for {owned.hold_until_s - now_s:.0f} s more"
        return "manual_hold", text
    return None


def moved(owned: Owned, by_s: float) -> Owned:
    """The same memory on a clock that is ahead by that."""

    def at(time_s: float | None) -> float | None:
        return None if time_s is None else time_s + by_s

    return replace(
        owned,
        edits=tuple((at_s + by_s, change) for at_s, change in owned.edits),
        hold_until_s=at(owned.hold_until_s),
        pause_until_s=at(owned.pause_until_s),
    )


def _bounded(members: set[str]) -> tuple[str, ...]:
    return tuple(sorted(members)[:KNOWN_MAX])
