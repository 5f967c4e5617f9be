"""What a foreign optimiser answered, kept so that a decision is replayed without it.

Owns the one call of a decision: the answer is checked, and remembered as it was checked; a failure is
remembered as its text. Handed to the journal with the other inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from readyplane_planner.optimise.check import checked
from readyplane_planner.optimise.values import Optimiser, Problem, Proposal

ERROR_MAX = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """What a foreign optimiser answered in one tick: a checked proposal, or how it failed."""

    proposal: Proposal | None = None
    error: str = ""


class NoAnswer(Exception):
    """An optimiser gave no proposal; the text says why."""


class Asked:
    """An optimiser that is asked once in a decision, and what it answered."""

    def __init__(self, inner: Optimiser) -> None:
        self._inner = inner
        self.answer: Answer | None = None

    def __call__(self, problem: Problem) -> Proposal:
        """The checked proposal. Raises NoAnswer."""
        try:
            proposal = checked(self._inner(problem), problem)
        except (Exception, SystemExit) as error:  # whatever a foreign optimiser does
            self.answer = Answer(error=f"{type(error).__name__}: {error}"[:ERROR_MAX])
            raise NoAnswer(self.answer.error) from error
        self.answer = Answer(proposal)
        return proposal


def answered(answer: Answer) -> Optimiser:
    """An optimiser that answers what was answered once, for a replay."""

    def optimise(_problem: Problem) -> Proposal:
        if answer.proposal is None:
            raise NoAnswer(answer.error)
        return answer.proposal

    return optimise
