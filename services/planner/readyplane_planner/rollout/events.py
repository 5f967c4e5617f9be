"""What happened to a roll-out in this tick, read out of what is seen: one event and why.

Owns what speaks against going on, what is proof enough, and what a person's wish means now. Handed
to `drive`, which enters the phase that follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from readyplane_planner.rollout import moves
from readyplane_planner.rollout.health import Finding, Health
from readyplane_planner.rollout.table import Event, follow
from readyplane_planner.rollout.values import (
    ACTIVE,
    RESTING,
    Facts,
    Generation,
    Phase,
    Rollout,
    Rules,
    Sides,
    Stage,
)

SHORT = 15
WISHES: Mapping[str, Event] = {
    "pause": Event.PAUSE,
    "resume": Event.RESUME,
    "undo": Event.UNDO,
}


@dataclass(frozen=True, slots=True)
class Seen:
    """What the brain reads from."""

    sides: Sides
    facts: Facts
    rules: Rules
    generation: Generation
    promised: float
    now_s: float
    served: dict[str, moves.Counts] = field(default_factory=dict)
    strangers: dict[str, tuple[int, int]] = field(default_factory=dict)

    def serving(self, goal: str) -> moves.Counts:
        """Serving workers by artifact, looked up once."""
        found = self.served.get(goal)
        if found is None:
            found = self.served[goal] = moves.serving(self.sides, goal)
        return found

    def others(self, goal: str) -> tuple[int, int]:
        """Workers of other generations by pool, those who drain not counted."""
        found = self.strangers.get(goal)
        if found is None:
            p, d = moves.others(self.sides, goal)
            found = self.strangers[goal] = len(p), len(d)
        return found

    def old(self, goal: str) -> int:
        """The same of both pools."""
        return sum(self.others(goal))

    def leaving(self, goal: str) -> int:
        """Workers of other generations who drain."""
        return sum(x not in ("", goal) for side in self.sides for x in side.leaving)


def event_of(state: Rollout, seen: Seen, finding: Finding | None) -> tuple[Event | None, str]:
    """The weightiest thing that happened, and why in words."""
    asked = seen.rules.asked
    if asked is not None and asked.id != state.asked:
        wish = WISHES.get(asked.action)
        if wish is not None and _means(state, wish):
            return wish, f"{asked.by or 'somebody'} asked to {asked.action}"
    if not seen.facts.known:
        return None, ""
    begins = _begins(state, seen)
    if begins:
        return Event.BEGIN, begins
    if state.phase is Phase.ROLLED_BACK and seen.old(state.goal.digest):
        return Event.BAD, f"workers of {short(state.to)} are there"
    if state.phase not in ACTIVE or finding is None:
        return None, ""
    troubles = _troubles(state, seen, finding)
    if troubles:
        what, why = troubles
        back = state.phase is Phase.ROLLING_BACK
        person = not back and (what in seen.rules.pause_on or not state.before.digest)
        return Event.HALT if person else Event.BAD, why
    return _progress(state, seen, finding)


def _means(state: Rollout, wish: Event) -> bool:
    """Whether a wish means anything now."""
    if wish is Event.UNDO and not state.before.digest:
        return False
    return follow(state.phase, wish, state.resumes) is not None


def _begins(state: Rollout, seen: Seen) -> str:
    """Why another roll-out begins now; empty when none does."""
    wanted, asked = seen.facts.wanted, seen.rules.asked
    again = asked is not None and asked.id != state.asked and asked.action == "go"
    if not wanted:
        return ""
    who = f"{asked.by or 'somebody'} asked for it" if again and asked is not None else ""
    if state.phase in RESTING:
        if wanted != seen.generation.digest:
            if wanted == state.rejected and not again:
                return ""
            return who or "policy or tag name another artifact"
        old = seen.old(wanted)
        return f"{old} workers of another generation are there" if old else ""
    if wanted == state.to.digest:
        return who if again and state.goal != state.to else ""
    if wanted == state.before.digest and state.phase is Phase.ROLLING_BACK:
        return ""
    if wanted == state.rejected and not again:
        return ""
    return who or "policy or tag name another artifact now"


def _troubles(state: Rollout, seen: Seen, finding: Finding) -> tuple[str, str] | None:
    """(kind as in `pause_on`, why): what speaks against going on."""
    rules, now_s = seen.rules, seen.now_s
    for place, count in enumerate(state.failures):
        if count >= rules.starts_failed_max:
            pool = ("prefill", "decode")[place]
            last = f", the last by: {state.fault}" if state.fault else ""
            return "starts", f"{count} {pool} starts of {short(state.goal)} failed in a row{last}"
    going_back = state.phase is Phase.ROLLING_BACK
    if finding.health is Health.UNHEALTHY and not going_back:
        return "attainment", finding.text
    since_s = now_s if state.progress_s is None else state.progress_s
    bound_s = rules.patience_s
    if any(m.stage is Stage.COMING for side in seen.sides for m in side.members):
        bound_s += seen.facts.start_s
    if seen.leaving(state.goal.digest):
        bound_s += seen.facts.drain_s
    if now_s - since_s > bound_s:
        return "unknown", f"no progress for {now_s - since_s:.0f} s; {finding.text}"
    return None


def _progress(state: Rollout, seen: Seen, finding: Finding) -> tuple[Event | None, str]:
    """Whether the phase has done what it is for."""
    goal = state.goal.digest
    old, leaving = seen.old(goal), seen.leaving(goal)
    if state.phase is Phase.VERIFYING:
        since_s = seen.now_s if state.since_s is None else state.since_s
        long = seen.now_s - since_s >= seen.rules.verify_s
        if long and not old and not leaving and _trusted(state, seen, finding):
            return Event.VERIFIED, _evidence_text(state, seen, finding)
        return None, ""
    counts = seen.serving(goal)
    if not old and (state.phase is not Phase.ROLLING_BACK or not leaving):
        return Event.EMPTIED, f"nobody but {short(state.goal)} is left"
    proved = state.phase is Phase.SURGING and moves.pairs(counts, goal, seen.sides)
    if proved and _trusted(state, seen, finding):
        return Event.PROVED, _evidence_text(state, seen, finding)
    return None, ""


def _trusted(state: Rollout, seen: Seen, finding: Finding) -> bool:
    """Whether there is evidence, or none can come, or none is asked for."""
    idle = state.idle_since_s is not None and seen.now_s - state.idle_since_s >= seen.rules.verify_s
    none_asked = seen.rules.samples_min == 0 or state.waived
    return finding.health is Health.HEALTHY or idle or none_asked


def _evidence_text(state: Rollout, seen: Seen, finding: Finding) -> str:
    if finding.health is Health.UNKNOWN and state.idle_since_s is not None:
        return f"nobody has asked for anything for {seen.now_s - state.idle_since_s:.0f} s"
    return finding.text


def short(generation: Generation) -> str:
    """A generation in words."""
    return f"generation {generation.number} ({generation.digest[:SHORT]})"
