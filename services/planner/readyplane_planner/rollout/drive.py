"""One tick of a roll-out: what happened, which phase follows, who comes and who goes.

Owns the state from tick to tick and what each phase asks for. `events` says what happened, the table
which phase follows, `moves` who may go, `health` how the new generation does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from readyplane_planner import guard
from readyplane_planner.rollout import health, moves
from readyplane_planner.rollout.events import Seen, event_of, short
from readyplane_planner.rollout.health import Finding
from readyplane_planner.rollout.table import Event, follow
from readyplane_planner.rollout.values import (
    ACTIVE,
    HELD,
    RESTING,
    Evidence,
    Facts,
    Generation,
    Member,
    Phase,
    Rollout,
    Rules,
    Sides,
    Stage,
    Step,
    Tally,
    Told,
)

BLIND_S = 30.0


@dataclass(frozen=True, slots=True)
class Turn:
    """The tick's outcome: what to do, the state, the generation of new workers, and all in words."""

    step: Step
    state: Rollout
    generation: Generation
    told: Told


def advance(
    state: Rollout,
    generation: Generation,
    sides: Sides,
    facts: Facts,
    rules: Rules,
    *,
    promised: float,
    now_s: float,
) -> Turn:
    """One tick.

    Args:
        generation: of new workers so far. promised: share of requests that the policy promises to
            meet both targets. now_s: planner's monotonic clock.
    """
    if facts.known:
        generation = _established(generation, sides, facts.wanted)
    if facts.hold or not generation.digest:
        first = generation if generation.digest else Generation(facts.wanted, 1)
        step = Step(first, state.goal, owns=state.phase not in RESTING)
        seen = Seen(sides, facts, rules, first, promised, now_s)
        return Turn(step, state, generation, _told(state, None, seen, state, first))
    seen = Seen(sides, facts, rules, generation, promised, now_s)
    left = state
    state, finding = _watched(_counted_on(state, seen), seen)
    event, why = event_of(state, seen, finding)
    if event is not None:
        state = _entered(state, event, why, seen)
    if rules.asked is not None and rules.asked.id != state.asked and facts.known:
        state = replace(state, asked=rules.asked.id)
    step = _step(state, seen, finding)
    if state.phase in RESTING:
        generation = state.goal if state.goal.digest else generation
    else:
        generation = step.grow
    return Turn(step, state, generation, _told(state, finding, seen, left, generation))


def quiet(
    state: Rollout, generation: Generation, digests: Iterable[str], wanted: str, rules: Rules
) -> bool:
    """Whether one generation serves and nothing else is wanted, so that `rest` is all there is.

    Args:
        digests: of everyone there.
    """
    known = ("", generation.digest)
    return (
        state.phase in RESTING
        and generation.digest != ""
        and wanted in (*known, state.rejected)
        and (rules.asked is None or rules.asked.id == state.asked)
        and all(digest in known for digest in digests)
    )


def rest(
    state: Rollout,
    generation: Generation,
    tallies: Mapping[str, Tally] | None,
    rules: Rules,
    *,
    serving: tuple[int, int],
    now_s: float,
) -> Turn:
    """One tick in which there is nothing to do but to note what the generation attains."""
    evidence = health.gather(state.evidence, tallies, "", rules, now_s=now_s)
    state = replace(state, evidence=evidence, ticked_s=now_s)
    now = state.goal if state.goal.digest else generation
    told = Told(
        phase=state.phase,
        to=state.to,
        before=state.before,
        serves=now,
        reason=state.reason,
        by=state.by,
        begun_s=state.begun_s,
        since_s=state.since_s,
        # After a roll-back those that serve are the old ones, beside the `to` that it tells of.
        new=(0, 0) if _back(state) else serving,
        old=serving if _back(state) else (0, 0),
    )
    return Turn(Step(now, now), state, now, told)


def _established(generation: Generation, sides: Sides, wanted: str) -> Generation:
    """What runs already, for a planner that has just begun; else what is wanted."""
    if generation.digest:
        return generation
    running = Counter((m.digest, m.number) for side in sides for m in side.members if m.digest)
    if running:
        (digest, number), _count = max(running.items(), key=lambda item: (item[1], item[0]))
        return Generation(digest, number)
    return Generation(wanted, 1) if wanted else generation


def moved(state: Rollout, by_s: float) -> Rollout:
    """The same state on a clock that is ahead by that."""

    def at(then_s: float | None) -> float | None:
        return None if then_s is None else then_s + by_s

    return replace(
        state,
        begun_s=at(state.begun_s),
        since_s=at(state.since_s),
        progress_s=at(state.progress_s),
        ticked_s=at(state.ticked_s),
        idle_since_s=None,
        evidence=replace(state.evidence, since_s=at(state.evidence.since_s)),
    )


# ------------------------------------------------------------------ what is seen


def _counted_on(state: Rollout, seen: Seen) -> Rollout:
    """Time in which nothing was known, or somebody else decided, is nobody's lack of progress."""
    facts, now_s = seen.facts, seen.now_s
    if not facts.known:
        return state
    before_s = now_s if state.ticked_s is None else state.ticked_s
    blind_s = now_s - before_s
    if blind_s > max(BLIND_S, 3.0 * facts.tick_s) and state.progress_s is not None:
        state = replace(state, progress_s=state.progress_s + blind_s, idle_since_s=None)
    return replace(state, ticked_s=now_s)


def _watched(state: Rollout, seen: Seen) -> tuple[Rollout, Finding | None]:
    """The state with the evidence and the counts of this tick, and what they say."""
    facts, rules, now_s = seen.facts, seen.rules, seen.now_s
    if state.phase in RESTING:
        # What the running generation attains is what the next one is compared with.
        evidence = health.gather(state.evidence, facts.tallies, "", rules, now_s=now_s)
        return replace(state, evidence=evidence), None
    idle_since_s = state.idle_since_s
    idle_since_s = guard.since(idle_since_s, facts.idle, now_s)
    goal = state.goal.digest
    evidence = health.gather(state.evidence, facts.tallies, goal, rules, now_s=now_s)
    if facts.late is not None:
        evidence = replace(evidence, late=facts.late.get(goal, 0))
    failures = [
        0 if side.came else before + side.failed
        for before, side in zip(state.failures, seen.sides, strict=True)
    ]
    state = replace(
        state,
        evidence=evidence,
        idle_since_s=idle_since_s,
        failures=(failures[0], failures[1]),
        fault=next((side.fault for side in seen.sides if side.fault), state.fault),
    )
    serving = seen.serving(goal).get(goal, [0, 0])
    came = (seen.old(goal) + seen.leaving(goal), sum(serving))
    best = state.best
    if facts.known and (best is None or came[0] < best[0] or came[1] > best[1]):
        best = came if best is None else (min(came[0], best[0]), max(came[1], best[1]))
        state = replace(state, best=best, progress_s=now_s)
    return state, health.judge(evidence, rules, promised=seen.promised)


# ------------------------------------------------------------------ what follows


def _entered(state: Rollout, event: Event, why: str, seen: Seen) -> Rollout:
    """The state in the phase that follows."""
    following = follow(state.phase, event, state.resumes)
    if following is None:
        return state
    now_s, left = seen.now_s, state.phase
    if left is Phase.ROLLING_BACK and following in {Phase.ROLLED_BACK, Phase.FAILED}:
        # Why it went back is what a person asks later; how that ended comes after it.
        why = f"{state.cause or state.reason}; {why}"
    state = replace(state, phase=following, reason=why, since_s=now_s, progress_s=now_s, best=None)
    if event is Event.BEGIN:
        return _begun(state, left, seen)
    if following is Phase.PAUSED:
        return replace(state, resumes=left)
    if event is Event.RESUME:
        return replace(
            state,
            failures=(0, 0),
            # Who resumes has looked: what was waited for in vain is waited for no more.
            waived=True,
            evidence=health.renewed(state.evidence),
        )
    if following is Phase.ROLLING_BACK:
        return replace(
            state,
            failures=(0, 0),
            waived=False,
            rejected=state.to.digest,
            evidence=Evidence(),
            cause=state.cause or why,
            fault="",
        )
    if following in {Phase.DONE, Phase.ROLLED_BACK}:
        evidence = health.swapped(state.evidence, seen.rules)
        return replace(state, evidence=evidence, idle_since_s=None)
    return state


def _begun(state: Rollout, left: Phase, seen: Seen) -> Rollout:
    """A roll-out begins, or turns to yet another artifact; the generation that served stays behind."""
    wanted, asked = seen.facts.wanted, seen.rules.asked
    pairs = [(m.digest, m.number) for side in seen.sides for m in side.members]
    before = seen.generation
    if left not in RESTING:
        # The one that was under way has proved nothing: what was before it is what one returns to.
        before = state.before if wanted != state.before.digest else state.to
    if before.digest == wanted:
        strays = Counter(pair for pair in pairs if pair[0] not in ("", wanted))
        found = max(strays.items(), key=lambda item: (item[1], item[0]), default=None)
        before = Generation(*found[0]) if found is not None else Generation()
    running = [number for digest, number in pairs if digest == wanted]
    top = max((number for _digest, number in pairs), default=0)
    number = max(running, default=max(top, before.number, state.to.number) + 1)
    by = asked.by if asked is not None and asked.id != state.asked else ""
    begun = replace(
        state,
        to=Generation(wanted, number),
        before=before,
        by=by,
        begun_s=seen.now_s,
        idle_since_s=None,
        resumes=Phase.IDLE,
        waived=False,
        rejected="" if state.rejected == wanted else state.rejected,
        failures=(0, 0),
        evidence=health.renewed(state.evidence),
        fault="",
        cause="",
    )
    if left in RESTING and not seen.old(wanted):
        text = "no worker of another generation is there"
        return replace(begun, phase=Phase.DONE, reason=text)
    return begun


def _step(state: Rollout, seen: Seen, finding: Finding | None) -> Step:
    """What the phase asks for."""
    phase, goal, rules = state.phase, state.goal, seen.rules
    if phase in RESTING:
        now = goal if goal.digest else seen.generation
        return Step(now, now)
    grow, surge = goal, (0, 0)
    nobody: moves.Ids = ((), ())
    retire, cancel = nobody, nobody
    if phase in HELD:
        grow = _proven(state, seen)
        if seen.facts.known:
            retire = moves.shed(seen.sides, grow.digest, surge=rules.surge)
    else:
        if phase is Phase.SURGING:
            grow = _proven(state, seen)
            if seen.facts.known:
                retire = moves.shed(
                    seen.sides, grow.digest, surge=rules.surge, unproved=goal.digest
                )
        if seen.facts.orders:
            surge = moves.starts(
                seen.sides,
                goal.digest,
                surge=rules.surge,
                first=phase is Phase.SURGING,
                room_gpus=seen.facts.room_gpus,
            )
        if seen.facts.known and phase is not Phase.SURGING:
            retire = moves.retire(seen.sides, goal.digest)
        if phase is Phase.ROLLING_BACK:
            cancel = _starting(state, seen)
    said = [f"{state.phase}: {line}" for line in _lines(state, seen, finding)]
    return Step(grow, goal, surge, retire, cancel, owns=True, said=tuple(said))


def _proven(state: Rollout, seen: Seen) -> Generation:
    """Which of the two generations takes what the demand adds: the one that serves pairs.

    Before the new one has proved itself it is the old one, as long as that serves at all.
    """
    counts = seen.serving(state.to.digest)
    old, new = (counts.get(g.digest, [0, 0]) for g in (state.before, state.to))
    if state.phase is Phase.SURGING or Phase.SURGING is state.resumes:
        serves = state.before.digest and moves.pairs(counts, state.before.digest, seen.sides)
        return state.before if serves else state.to
    better = moves.share(old, seen.sides) > moves.share(new, seen.sides)
    return state.before if better and state.before.digest else state.to


def _starting(state: Rollout, seen: Seen) -> moves.Ids:
    """Starts of a generation that is on its way out."""
    p, d = moves.others(seen.sides, state.goal.digest)
    return _ids(p), _ids(d)


def _ids(members: Iterable[Member]) -> tuple[str, ...]:
    return tuple(m.worker_id for m in members if m.stage is Stage.COMING)


def _lines(state: Rollout, seen: Seen, finding: Finding | None) -> Iterator[str]:
    goal = state.goal
    old = seen.others(goal.digest)
    new = seen.serving(goal.digest).get(goal.digest, [0, 0])
    yield (
        f"{new[0]} P and {new[1]} D of {short(goal)} serve, {old[0]} P and {old[1]} D of others "
        f"are left; {state.reason}"
    )
    if finding is not None and state.phase in ACTIVE and state.phase is not Phase.ROLLING_BACK:
        yield finding.text
    if seen.facts.room_gpus is not None and seen.facts.room_gpus < min(
        side.gpus for side in seen.sides
    ):
        yield "the budget has no room for a surge worker: policy.budget_gpus"


def _back(state: Rollout) -> bool:
    """Whether the goal is the generation before the one that was asked for."""
    return bool(state.to.digest) and state.goal.digest != state.to.digest


def _told(
    state: Rollout, finding: Finding | None, seen: Seen, left: Rollout, serves: Generation
) -> Told:
    goal, back = state.goal.digest, _back(state)
    # New and old are of the artifact that was asked for, also while it is gone back from.
    asked = state.to.digest if back else goal
    new = seen.serving(asked).get(asked, [0, 0])
    attained = (None, None) if finding is None else (finding.new, finding.old)
    return Told(
        phase=state.phase,
        turned=(state.phase, state.to) != (left.phase, left.to),
        to=state.to,
        before=state.before,
        serves=serves,
        reason=state.reason,
        by=state.by,
        begun_s=state.begun_s,
        since_s=state.since_s,
        new=(new[0], new[1]),
        old=seen.others(asked) if asked else (0, 0),
        leaving=seen.leaving(goal) if goal else 0,
        attained_new=attained[1] if back else attained[0],
        attained_old=attained[0] if back else attained[1],
        samples=0 if finding is None else finding.samples,
    )
