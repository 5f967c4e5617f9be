"""A roll-out: one generation takes the place of another, by whole pairs, and back if it does worse.

Owns the state of a roll-out and what it asks for in each tick (R17.2): how many workers of the new
generation start, who of the old one goes, when it is proved, paused, rolled back. Both pools are
moved together, because a prefill and a decode worker pair only within one generation. Hands decide
the generation of new orders, extra starts, workers to drain and starts to give back.
"""

from readyplane_planner.rollout.drive import Turn, advance, moved, quiet, rest
from readyplane_planner.rollout.values import (
    RESTING,
    Asked,
    Facts,
    Generation,
    Member,
    Phase,
    Rollout,
    Rules,
    Side,
    Sides,
    Stage,
    Step,
    Tally,
    Told,
)

__all__ = [
    "RESTING",
    "Asked",
    "Facts",
    "Generation",
    "Member",
    "Phase",
    "Rollout",
    "Rules",
    "Side",
    "Sides",
    "Stage",
    "Step",
    "Tally",
    "Told",
    "Turn",
    "advance",
    "moved",
    "quiet",
    "rest",
]
