"""A published rule as a planner's brain: keeps its state, reads facts, follows its targets.

Owns what no rule should have to say: nothing is decided before the first request has arrived (the
rules have no history then, and the fleet of the beginning is the same for all), and a convertible
decoder is a member of the decode pool alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from readyplane.core.worker import Role
from readyplane_lab.proof.baselines.parts.facts import Facts, Recent, read
from readyplane_planner.decide.follow import Targets, follow
from readyplane_planner.decide.values import Decision, Memory, Plan
from readyplane_planner.signals import Observation

State = TypeVar("State")


class Rule(Protocol[State]):
    """A pure step over explicit state."""

    def step(self, facts: Facts, state: State) -> tuple[Targets, State]:
        """Targets of this tick and the state for the next."""
        ...


class RuleBrain(Generic[State]):
    """`readyplane_planner.decide.follow.Brain` of one rule, for one run."""

    def __init__(self, rule: Rule[State], state: State) -> None:
        self._rule = rule
        self._state = state
        self._recent = Recent()

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
        observation = convertible_as_decode(observation)
        facts, self._recent = read(observation, plan, memory, self._recent, now_s=now_s)
        if self._recent.begun:
            targets, self._state = self._rule.step(facts, self._state)
        else:
            why = "nothing has arrived yet"
            targets = Targets(facts.prefill.live, facts.decode.live, why)
        return follow(targets, observation, plan, memory, now_s=now_s, decision_id=decision_id)


def convertible_as_decode(observation: Observation) -> Observation:
    """Workers and allocations that serve both stages belong to the decode pool."""
    roles = [w.role for w in observation.workers] + [a.role for a in observation.allocations]
    if Role.BOTH not in roles:
        return observation
    return replace(
        observation,
        workers=tuple(
            replace(w, role=Role.DECODE) if w.role is Role.BOTH else w for w in observation.workers
        ),
        allocations=tuple(
            replace(a, role=Role.DECODE) if a.role is Role.BOTH else a
            for a in observation.allocations
        ),
    )


def held(before: int | None, live: int) -> int:
    """What a rule keeps when it knows nothing: its last target, or the workers there are."""
    return live if before is None else before


def bounded(want: float, low: int, high: int) -> int:
    """A whole number of workers within bounds."""
    return int(min(high, max(low, want)))
