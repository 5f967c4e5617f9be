"""B5, Dynamo's planner in throughput mode alone, its default: 180 s, no view of queues or starts.

An interval without requests, or without any finished, holds: the planner's model has no length to
go by then. The knob multiplies the predicted requests; published is 1, with engines counted at
their full rate within the SLA.
"""

from __future__ import annotations

from readyplane_lab.proof.baselines.parts import dynamo
from readyplane_lab.proof.baselines.parts.brain import RuleBrain
from readyplane_lab.proof.port import Contender, Fielded, Setting


def make(demand: float, setting: Setting) -> Fielded:
    """Throughput mode for `demand` times the predicted requests."""
    rule = dynamo.Dynamo(setting, throughput=True, load=False, demand=demand)
    return Fielded(RuleBrain(rule, dynamo.DynamoState()), policy={"tick_s": dynamo.TICK_S})


CONTENDER = Contender(
    name="dynamo-throughput",
    title="NVIDIA Dynamo's SLA planner, throughput mode: the last 180 s will come again.",
    source=dynamo.SOURCE,
    knob="multiple of the predicted requests",
    values=(1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.2, 4.0),
    default=1.0,
    make=make,
)
