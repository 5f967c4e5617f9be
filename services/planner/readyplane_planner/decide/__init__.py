"""The decision: (observation, plan, memory, now) -> (Decision, Memory), and nothing else.

Owns the order in which the brains are asked and the sentence a person reads. Hands the Decision to
the service, which journals it, acts on it and shows it. The same call replays a journal record.
"""

from readyplane_planner.decide.brain import decide
from readyplane_planner.decide.values import (
    POOLS,
    ROLE_OF,
    Activation,
    ClassPlan,
    Decision,
    Drain,
    Expected,
    Flip,
    Memory,
    NodePlan,
    OpenOrder,
    Placement,
    Plan,
    PoolDecision,
    PoolPlan,
    Reason,
    Release,
    StartOrder,
    start_key,
)

__all__ = [
    "POOLS",
    "ROLE_OF",
    "Activation",
    "ClassPlan",
    "Decision",
    "Drain",
    "Expected",
    "Flip",
    "Memory",
    "NodePlan",
    "OpenOrder",
    "Placement",
    "Plan",
    "PoolDecision",
    "PoolPlan",
    "Reason",
    "Release",
    "StartOrder",
    "decide",
    "start_key",
]
