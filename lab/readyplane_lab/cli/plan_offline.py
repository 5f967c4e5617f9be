"""The part of `readyplane plan` that asks without a running planner: a scenario, played in the fluid.

Owns which moment of the run is asked about. Hands the comparison to plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane_lab.proof import entrants
from readyplane_lab.proof.inputs import make_case
from readyplane_lab.proof.ours import CONTENDER
from readyplane_lab.proof.play import play_fielded
from readyplane_lab.proof.port import find
from readyplane_planner.decide import Decision, Memory, Plan, decide
from readyplane_planner.journal import Inputs, decided
from readyplane_planner.policy import make_plan, overlay, read_policy
from readyplane_planner.signals import Observation
from readyplane_planner.whatif import applied, compared, read_changes


class Moment:
    """The planner's own brain, keeping what it was given at one moment of a run.

    Args:
        at_s: seconds since the first tick; None for the one with the most requests a second.
    """

    def __init__(self, at_s: float | None) -> None:
        self._at_s = at_s
        self._began_s: float | None = None
        self._most = -1.0
        self.kept: Inputs | None = None

    def __call__(
        self,
        observation: Observation,
        plan: Plan,
        memory: Memory,
        *,
        now_s: float,
        decision_id: str,
    ) -> tuple[Decision, Memory]:
        """Decide, and keep the inputs if this is the moment."""
        self._began_s = now_s if self._began_s is None else self._began_s
        if self._at_s is None:
            rate = observation.arrivals.get(0.0)
            wanted = rate > self._most
            self._most = max(self._most, rate)
        else:
            wanted = now_s - self._began_s <= self._at_s
        if wanted:
            self.kept = Inputs(observation, plan, memory, now_s, decision_id)
        return decide(observation, plan, memory, now_s=now_s, decision_id=decision_id)


def ask_scenario(name: str, changes: Mapping[str, str], *, at_s: float | None) -> dict[str, Any]:
    """Play a scenario under the default policy and ask about one moment of it.

    Raises:
        InvalidField: no such scenario or moment; whatever `applied` refuses.
    """
    asked = read_changes(changes)
    if at_s is not None and not (math.isfinite(at_s) and at_s >= 0):
        raise InvalidField("--at", at_s, "give seconds from 0")
    case = make_case(find(name, entrants.scenarios(), "--scenario"))
    fielded = CONTENDER.make(CONTENDER.default, case.setting)
    moment = Moment(at_s)
    play_fielded(case, replace(fielded, brain=moment), mode="fluid")
    if moment.kept is None:
        raise InvalidField("--scenario", name, "it has no tick at all")
    inputs = moment.kept
    question = applied(
        inputs,
        asked,
        policy=read_policy(overlay(case.policy, fielded.policy)),
        plan_of=lambda policy: make_plan(
            policy, version=inputs.plan.version, manifest_digest=inputs.plan.manifest_digest
        ),
    )
    then, _memory = decided(question.inputs)
    return {"scenario": case.key, **compared(inputs, question, then)}
