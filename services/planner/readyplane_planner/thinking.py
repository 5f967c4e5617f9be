"""One decision by whatever brain there is: directly, or with a foreign optimiser within its time.

Owns calling the brain, for a tick and for a question, and keeping what a foreign optimiser answered with the other inputs, so that
the journal can replay the decision without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from readyplane_planner.decide import Decision, Memory, decide
from readyplane_planner.decide.follow import Brain
from readyplane_planner.journal import Inputs
from readyplane_planner.optimise import Optimiser
from readyplane_planner.optimise.answer import Asked
from readyplane_planner.optimisers import Thinker, thinker
from readyplane_planner.policy import Policy, make_plan
from readyplane_planner.whatif import applied, compared, read_changes

Thought = tuple[Decision, Memory, Inputs]


async def think(inputs: Inputs, brain: Brain, foreign: Thinker | None) -> Thought:
    """The decision, the memory after it, and the inputs with the answer that it rests on.

    Args:
        foreign: asks the foreign optimiser of the policy; None for the planner's own. Another brain
            than `decide` has no optimiser to ask.
    """

    def call(called: Brain) -> tuple[Decision, Memory]:
        return called(
            inputs.observation,
            inputs.plan,
            inputs.memory,
            now_s=inputs.now_s,
            decision_id=inputs.decision_id,
        )

    def with_foreign(optimiser: Optimiser) -> Thought:
        asked = Asked(optimiser)
        decision, memory = call(partial(decide, optimiser=asked))
        return decision, memory, replace(inputs, answer=asked.answer)

    if foreign is None or brain is not decide:
        return (*call(brain), inputs)
    return await foreign.ask(with_foreign)


async def ask(
    inputs: Inputs, changes: Mapping[str, str], *, policy: Policy, budget_s: float | None
) -> dict[str, Any]:
    """What would be decided under changes, beside what was; see whatif.py.

    Args:
        policy: in force when the inputs were taken. budget_s: for a foreign optimiser.

    Raises:
        UnknownField, InvalidField: a change that is none, or cannot be made.
    """
    plan = inputs.plan
    question = applied(
        inputs,
        read_changes(changes),
        policy=policy,
        plan_of=lambda changed: make_plan(
            changed, version=plan.version, manifest_digest=plan.manifest_digest
        ),
    )
    asked = thinker(question.policy.optimiser, budget_s=budget_s)
    then, _memory, _inputs = await think(question.inputs, decide, asked)
    return compared(inputs, question, then)
