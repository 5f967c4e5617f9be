"""One decision by whatever brain there is: directly, or with a foreign optimiser within its time.

Owns calling the brain and keeping what a foreign optimiser answered with the other inputs, so that
the journal can replay the decision without it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from readyplane_planner.decide import Decision, Memory, decide
from readyplane_planner.decide.follow import Brain
from readyplane_planner.journal import Inputs
from readyplane_planner.optimise import Optimiser
from readyplane_planner.optimise.answer import Asked
from readyplane_planner.optimisers import Thinker

Thought = tuple[Decision, Memory, Inputs]


async def think(inputs: Inputs, brain: Brain, thinker: Thinker | None) -> Thought:
    """The decision, the memory after it, and the inputs with the answer that it rests on.

    Args:
        thinker: asks the foreign optimiser of the policy; None for the planner's own. Another brain
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

    if thinker is None or brain is not decide:
        return (*call(brain), inputs)
    return await thinker.ask(with_foreign)
