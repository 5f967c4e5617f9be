"""The decision: (observation, plan, memory, now) -> (Decision, Memory), and nothing else.

Owns the order in which the brains are asked and the sentence a person reads. Hands the Decision to
the service, which journals it, acts on it and shows it. The same call replays a journal record.
"""

from readyplane_planner.decide.brain import decide
from readyplane_planner.decide.values import (
    POOLS,
    ROLE_OF,
    Decision,
    Drain,
    Expected,
    Memory,
    OpenOrder,
    Plan,
    PoolDecision,
    PoolPlan,
    Reason,
    Release,
    StartOrder,
)

__all__ = [
    "POOLS",
    "ROLE_OF",
    "Decision",
    "Drain",
    "Expected",
    "Memory",
    "OpenOrder",
    "Plan",
    "PoolDecision",
    "PoolPlan",
    "Reason",
    "Release",
    "StartOrder",
    "decide",
]
