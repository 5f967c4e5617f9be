"""Which phase follows which, by what happened: the whole life of a roll-out in one table.

Pure data. Whoever is active has a way out by itself (`BAD`, `HALT`), whoever is held has one by a
person (`RESUME`, `UNDO`, `BEGIN`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from readyplane_planner.rollout.values import Phase


class Event(StrEnum):
    """What happened, the weightiest first: of two at once the first one counts."""

    UNDO = "undo"
    BEGIN = "begin"
    """Another artifact is wanted, or workers of another one are there."""
    PAUSE = "pause"
    RESUME = "resume"
    BAD = "bad"
    """The new generation does worse, its starts fail, or nothing is known of it, or some of it are
    there again after it was rolled back: back by itself."""
    HALT = "halt"
    """The same, where the policy lets a person decide, or there is nothing to go back to."""
    EMPTIED = "emptied"
    """Nobody of any other generation is left."""
    PROVED = "proved"
    """A first pair of the new generation serves, and serves well."""
    VERIFIED = "verified"
    """It has served alone for long enough, and well."""


P, E = Phase, Event

TABLE: Mapping[tuple[Phase, Event], Phase] = {
    (P.IDLE, E.BEGIN): P.SURGING,
    (P.SURGING, E.UNDO): P.ROLLING_BACK,
    (P.SURGING, E.BEGIN): P.SURGING,
    (P.SURGING, E.PAUSE): P.PAUSED,
    (P.SURGING, E.BAD): P.ROLLING_BACK,
    (P.SURGING, E.HALT): P.PAUSED,
    (P.SURGING, E.EMPTIED): P.VERIFYING,
    (P.SURGING, E.PROVED): P.MOVING,
    (P.MOVING, E.UNDO): P.ROLLING_BACK,
    (P.MOVING, E.BEGIN): P.SURGING,
    (P.MOVING, E.PAUSE): P.PAUSED,
    (P.MOVING, E.BAD): P.ROLLING_BACK,
    (P.MOVING, E.HALT): P.PAUSED,
    (P.MOVING, E.EMPTIED): P.VERIFYING,
    (P.VERIFYING, E.UNDO): P.ROLLING_BACK,
    (P.VERIFYING, E.BEGIN): P.SURGING,
    (P.VERIFYING, E.PAUSE): P.PAUSED,
    (P.VERIFYING, E.BAD): P.ROLLING_BACK,
    (P.VERIFYING, E.HALT): P.PAUSED,
    (P.VERIFYING, E.VERIFIED): P.DONE,
    (P.DONE, E.UNDO): P.ROLLING_BACK,
    (P.DONE, E.BEGIN): P.SURGING,
    (P.PAUSED, E.UNDO): P.ROLLING_BACK,
    (P.PAUSED, E.BEGIN): P.SURGING,
    (P.ROLLING_BACK, E.BEGIN): P.SURGING,
    (P.ROLLING_BACK, E.PAUSE): P.PAUSED,
    (P.ROLLING_BACK, E.BAD): P.FAILED,
    (P.ROLLING_BACK, E.HALT): P.FAILED,
    (P.ROLLING_BACK, E.EMPTIED): P.ROLLED_BACK,
    (P.ROLLED_BACK, E.BEGIN): P.SURGING,
    (P.ROLLED_BACK, E.BAD): P.ROLLING_BACK,
    (P.FAILED, E.UNDO): P.ROLLING_BACK,
    (P.FAILED, E.BEGIN): P.SURGING,
    (P.FAILED, E.RESUME): P.ROLLING_BACK,
}
"""A paused roll-out resumes where it was, which is part of its state and not of the table."""


def follow(phase: Phase, event: Event, resumes: Phase) -> Phase | None:
    """The next phase; None where the event means nothing."""
    if (phase, event) == (Phase.PAUSED, Event.RESUME):
        return resumes
    return TABLE.get((phase, event))
