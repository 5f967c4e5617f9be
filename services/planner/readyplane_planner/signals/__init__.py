"""Samples become an Observation: typed signals with unit and age, in which unknown is never zero.

Owns the judgement of every number that reaches the planner: differencing counters by incarnation,
refusing NaN, infinities and absurd values, joining worker series with the living fleet, and telling
idle from no data. Hands an Observation to decide. Work is token work, never request counts (R4).
"""

from readyplane_planner.signals.observe import ROUTERS, observe, stands_still
from readyplane_planner.signals.samples import check
from readyplane_planner.signals.values import (
    SHRINK_NEEDS,
    Allocation,
    ClientCount,
    ClientWork,
    GenerationEnds,
    Kind,
    Latency,
    Lengths,
    NodeView,
    Observation,
    PriorityWork,
    Priors,
    Refusal,
    RouterSample,
    Signal,
    WorkerView,
)

__all__ = [
    "ROUTERS",
    "SHRINK_NEEDS",
    "Allocation",
    "ClientCount",
    "ClientWork",
    "GenerationEnds",
    "Kind",
    "Latency",
    "Lengths",
    "NodeView",
    "Observation",
    "PriorityWork",
    "Priors",
    "Refusal",
    "RouterSample",
    "Signal",
    "WorkerView",
    "check",
    "observe",
    "stands_still",
]
