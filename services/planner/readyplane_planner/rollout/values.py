"""The values of a roll-out: generations, phases, rules, what is seen, and what is asked for.

All are frozen and made of plain fields, so that a journal record replays them bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Generation:
    """An artifact that workers serve, and its number; numbers only grow."""

    digest: str = ""
    number: int = 0


class Phase(StrEnum):
    """Where a roll-out is."""

    IDLE = "idle"
    SURGING = "surging"
    MOVING = "moving"
    VERIFYING = "verifying"
    DONE = "done"
    PAUSED = "paused"
    ROLLING_BACK = "rolling_back"
    ROLLED_BACK = "rolled_back"
    FAILED = "failed"


ACTIVE = frozenset({Phase.SURGING, Phase.MOVING, Phase.VERIFYING, Phase.ROLLING_BACK})
"""The brain moves workers, and time is measured."""
HELD = frozenset({Phase.PAUSED, Phase.FAILED})
"""Generations stay as they stand until a person speaks."""
RESTING = frozenset({Phase.IDLE, Phase.DONE, Phase.ROLLED_BACK})
"""One generation serves."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person asked for, once: go, pause, resume or undo. `at_s`: seconds since the epoch."""

    id: str
    action: str
    by: str = ""
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rules:
    """What the policy wants of a roll-out (see `RolloutPolicy` for each field)."""

    surge: int = 1
    pause_on: tuple[str, ...] = ("unknown",)
    rollback_below: float = 0.9
    verify_s: float = 60.0
    samples_min: int = 20
    starts_failed_max: int = 3
    patience_s: float = 600.0
    asked: Asked | None = None


@dataclass(frozen=True, slots=True)
class Tally:
    """Requests of a generation: finished, of those with both targets met, and lost on the way."""

    finished: int = 0
    attained: int = 0
    failed: int = 0

    @property
    def ended(self) -> int:
        """All that ended one way or the other."""
        return self.finished + self.failed

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(
            self.finished + other.finished,
            self.attained + other.attained,
            self.failed + other.failed,
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a window of time tells of the new generation and of all others.

    Two halves: `*_now` is being filled, `*_past` is the one before. `since_s`: of the newer half.
    `baseline`: the share that the other generations attained when they last had enough samples.
    `late`: requests that the new one has under way and that are too late already.
    """

    new_now: Tally = Tally()
    new_past: Tally = Tally()
    old_now: Tally = Tally()
    old_past: Tally = Tally()
    since_s: float | None = None
    baseline: float | None = None
    late: int = 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """Where the roll-out is; everything that one tick hands to the next.

    Attributes:
        to, before: the generations it goes to and comes from. by: who asked; empty for a moved tag.
        since_s, begun_s: clock at which this phase and the whole began; progress_s: of the last
            worker that came or went; ticked_s: of the last tick that knew. idle_since_s: since when nobody has asked for anything.
        best: (other workers left, new workers ready) as far as it has come.
        resumes: the phase that a resume goes back to. waived: a person goes on without evidence.
        rejected: an artifact that was rolled back: not tried again until somebody asks.
        asked: id of the last wish of a person that was followed.
        failures: starts of the generation that is ordered which failed in a row, by pool.
        fault: what the last of them failed by, as its agent said it; empty when none told.
        cause: why it goes or went back; empty as long as it did not.
    """

    phase: Phase = Phase.IDLE
    to: Generation = Generation()
    before: Generation = Generation()
    reason: str = ""
    by: str = ""
    begun_s: float | None = None
    since_s: float | None = None
    progress_s: float | None = None
    ticked_s: float | None = None
    idle_since_s: float | None = None
    best: tuple[int, int] | None = None
    resumes: Phase = Phase.IDLE
    waived: bool = False
    rejected: str = ""
    asked: str = ""
    failures: tuple[int, int] = (0, 0)
    evidence: Evidence = Evidence()
    fault: str = ""
    cause: str = ""

    @property
    def goal(self) -> Generation:
        """The generation that is to be the only one."""
        back = Phase.ROLLING_BACK
        if self.phase in {back, Phase.ROLLED_BACK, Phase.FAILED} or (
            self.phase is Phase.PAUSED and self.resumes is back
        ):
            return self.before
        return self.to


class Stage(StrEnum):
    """What a worker is to a roll-out: serving long enough, just ready, without partner, starting."""

    READY = "ready"
    FRESH = "fresh"
    ALONE = "alone"
    COMING = "coming"


@dataclass(frozen=True, slots=True)
class Member:
    """One of the planner's own workers that is not leaving. `active`: sequences assigned to it."""

    worker_id: str
    digest: str
    number: int
    stage: Stage
    active: int = 0


@dataclass(frozen=True, slots=True)
class Side:
    """One pool as a roll-out sees it; workers.

    Attributes:
        target: what the pool shall have. grow, shrink: what the guard lets it gain or lose now.
        leaving: artifacts of those who drain. waits: orders are backing off.
        gpus: of one worker. failed, came: starts of the ordered generation lost or ready just now;
        fault: what one of those that were lost failed by, where its agent told.
    """

    members: tuple[Member, ...]
    target: int
    grow: int = 0
    shrink: int = 0
    leaving: tuple[str, ...] = ()
    step_up: int = 2
    step_down: int = 1
    pending_max: int = 4
    waits: bool = False
    gpus: int = 1
    failed: int = 0
    came: int = 0
    fault: str = ""


Sides = tuple[Side, Side]


@dataclass(frozen=True, slots=True)
class Facts:
    """What else a tick knows.

    Attributes:
        wanted: artifact that policy or tag name, empty when not known.
        hold: somebody else decides (the policy is paused, another planner leads).
        known: fleet and allocations are fresh; without that nobody goes.
        orders: whether the actuator can be asked. idle: known to have no demand.
        tallies: ends since the last tick by artifact, late: requests under way that are too late
            already; None when not known.
        start_s: bound of a start; drain_s: of a drain; tick_s: between two ticks. room_gpus: free in the budget, None for any.
    """

    wanted: str
    hold: bool = False
    known: bool = True
    orders: bool = True
    idle: bool = False
    tallies: Mapping[str, Tally] | None = None
    late: Mapping[str, int] | None = None
    start_s: float = 0.0
    drain_s: float = 0.0
    tick_s: float = 1.0
    room_gpus: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What the roll-out asks for now; pairs are (prefill, decode).

    Attributes:
        grow: the generation of workers that the guard lets a pool gain. surge: extra starts of
            `goal`. retire: workers to drain. cancel: starts to give back.
        owns: generations are mixed, so that who goes is chosen here and not by the pool alone.
        said: sentences for the decision.
    """

    grow: Generation
    goal: Generation
    surge: tuple[int, int] = (0, 0)
    retire: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    cancel: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    owns: bool = False
    said: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Told:
    """A roll-out as a decision tells of it; pairs are (prefill, decode) workers.

    Attributes:
        turned: it entered this phase with this decision. serves: what new workers are of.
        new: of `to`, serving long enough, also while it is gone back from. old: of other
            generations. leaving: of those who shall go, who drain. attained_*: shares of requests,
            None when too few ended. samples: that ended on the new generation.
    """

    phase: Phase = Phase.IDLE
    turned: bool = False
    to: Generation = Generation()
    before: Generation = Generation()
    serves: Generation = Generation()
    reason: str = ""
    by: str = ""
    begun_s: float | None = None
    since_s: float | None = None
    new: tuple[int, int] = (0, 0)
    old: tuple[int, int] = (0, 0)
    leaving: int = 0
    attained_new: float | None = None
    attained_old: float | None = None
    samples: int = 0
