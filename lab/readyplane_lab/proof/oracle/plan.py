"""A plan made in hindsight and the brain that plays it: the clairvoyant planner.

Owns targets over time and when an order must be placed to be there in time. The fleet itself comes
from `bound`. Handed to the baselines, and through them to either mode of the simulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from readyplane_lab.proof.oracle.bound import lower_bound
from readyplane_lab.proof.oracle.layers import Whole
from readyplane_lab.proof.port import Setting
from readyplane_planner.decide.follow import Targets, follow
from readyplane_planner.decide.values import Decision, Memory, Plan
from readyplane_planner.signals import Observation


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Workers that shall be ready, in steps since the first arrival; the last step stays."""

    step_s: float
    prefill: Whole
    decode: Whole

    def wanted(self, from_s: float, until_s: float) -> tuple[int, int]:
        """The most workers of each pool that are planned for any moment of a time."""
        first = min(len(self.prefill) - 1, max(0, math.floor(from_s / self.step_s + 1e-9)))
        last = max(first + 1, math.ceil(until_s / self.step_s - 1e-9))
        return int(self.prefill[first:last].max()), int(self.decode[first:last].max())


def plan_of(setting: Setting, *, margin: float = 1.0) -> FleetPlan:
    """The fleet of O_LB over the need times `margin`, within the bounds that all have."""
    found = lower_bound(setting, margin=margin)
    return FleetPlan(
        setting.hindsight.step_s,
        np.minimum(found.prefill.workers, setting.high[0]),
        np.minimum(found.decode.workers, setting.high[1]),
    )


class Clock:
    """Seconds since the first arrival: a run's fleet of the beginning is ready when it arrives, and
    the planner is asked for the first time at that moment.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None

    def since(self, now_s: float) -> float:
        """On the planner's monotonic clock."""
        if self._began_s is None:
            self._began_s = now_s
        return now_s - self._began_s


class Scripted:
    """Plays a plan: a brain for one run.

    Args:
        plan: of ready workers. lead_s: how long before a worker is needed it is ordered; a tick is
            added, since a worker that is needed between two ticks is ordered at the first.
    """

    def __init__(self, plan: FleetPlan, *, lead_s: float) -> None:
        self._plan = plan
        self._lead_s = lead_s
        self._clock = Clock()

    def __call__(
        self,
        observation: Observation,
        plan: Plan,
        memory: Memory,
        *,
        now_s: float,
        decision_id: str,
    ) -> tuple[Decision, Memory]:
        """One tick."""
        at_s = self._clock.since(now_s)
        prefill, decode = self._plan.wanted(at_s, at_s + self._lead_s + plan.tick_s)
        targets = Targets(prefill, decode, f"as planned for the next {self._lead_s:.0f} s")
        return follow(targets, observation, plan, memory, now_s=now_s, decision_id=decision_id)
