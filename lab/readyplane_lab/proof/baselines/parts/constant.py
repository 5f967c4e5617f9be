"""A fleet that never changes: the same targets at every tick."""

from __future__ import annotations

import math
from dataclasses import dataclass

from readyplane_lab.proof.baselines.parts.brain import RuleBrain, bounded
from readyplane_lab.proof.baselines.parts.facts import Facts
from readyplane_lab.proof.port import Fielded, Setting
from readyplane_planner.decide.follow import Targets


@dataclass(frozen=True, slots=True)
class Constant:
    """Rule: both numbers of workers, whatever happens."""

    prefill: int
    decode: int

    def step(self, facts: Facts, state: None) -> tuple[Targets, None]:
        """The same again."""
        del facts
        return Targets(self.prefill, self.decode, "static fleet"), state


def fielded(need_p: float, need_d: float, setting: Setting) -> Fielded:
    """A static fleet that is there from the beginning, within the setting's bounds."""
    prefill = bounded(math.ceil(need_p - 1e-9), setting.low[0], setting.high[0])
    decode = bounded(math.ceil(need_d - 1e-9), setting.low[1], setting.high[1])
    return Fielded(
        RuleBrain(Constant(prefill, decode), None),
        policy={"tick_s": 5.0},
        initial=(prefill, decode),
    )
