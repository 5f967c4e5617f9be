"""Every decision of a run in which anything goes wrong can be taken again and comes out the same."""

import json

import numpy as np
import pytest

from readyplane_planner.decide import Decision, Memory, Plan, decide
from readyplane_planner.journal import (
    Inputs,
    Record,
    decision_document,
    decode_inputs,
    encode_inputs,
    summary_of,
)
from readyplane_planner.recall import recall
from readyplane_planner.signals import Observation
from tests.simulation.sim_world import steady, world
from tests.simulation.test_random_faults import POLICY, SPAN_S, drawn_faults


class Kept:
    """The planner's own brain, with what it was given and what came of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Inputs, Decision, Memory]] = []

    def __call__(
        self,
        observation: Observation,
        plan: Plan,
        memory: Memory,
        *,
        now_s: float,
        decision_id: str,
    ) -> tuple[Decision, Memory]:
        decision, after = decide(observation, plan, memory, now_s=now_s, decision_id=decision_id)
        inputs = Inputs(observation, plan, memory, now_s, decision_id)
        self.calls.append((inputs, decision, after))
        return decision, after


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_every_decision_comes_out_the_same_also_from_the_journal(seed: int) -> None:
    kept = Kept()
    random = np.random.default_rng(seed)
    world(
        kept,
        steady(6.0, SPAN_S, seed=seed),
        faults=drawn_faults(random, 4),
        policy=POLICY,
        seed=seed,
    )
    assert len(kept.calls) > 20
    assert sum(decision.changed for _inputs, decision, _after in kept.calls) >= 2
    for inputs, decision, after in kept.calls:
        packed, digest = encode_inputs(inputs)
        again = decode_inputs(packed)
        assert again == inputs, "nothing is lost on the way through the journal"
        assert encode_inputs(again) == (packed, digest)
        assert decide(
            again.observation,
            again.plan,
            again.memory,
            now_s=again.now_s,
            decision_id=again.decision_id,
        ) == (decision, after)
        document = decision_document(decision, at_s=7.5, leader_epoch=3, inputs_digest=digest)
        record = Record(
            decision.decision_id,
            decision.model,
            7.5,
            decision.changed,
            summary_of(decision),
            decision.policy_version,
            json.loads(json.dumps(document, allow_nan=False)),
            packed,
        )
        found = recall(record)
        assert found["same"] is True, found["differences"]
        assert found["unrecorded"] == []
