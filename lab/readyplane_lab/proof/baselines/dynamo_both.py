"""B5, Dynamo's planner with both modes: the throughput result is the floor of the load mode.

While a pool is in transition nothing moves, not even up to a new floor. The knob multiplies the
predicted requests of the floor and divides the slack that the load mode's SLA leaves; published
is 1 for both.
"""

from __future__ import annotations

from readyplane_lab.proof.baselines.parts import dynamo
from readyplane_lab.proof.baselines.parts.brain import RuleBrain
from readyplane_lab.proof.port import Contender, Fielded, Setting


def make(margin: float, setting: Setting) -> Fielded:
    """Both modes with one margin."""
    rule = dynamo.Dynamo(setting, throughput=True, load=True, demand=margin, slack=1.0 / margin)
    return Fielded(RuleBrain(rule, dynamo.DynamoState()), policy={"tick_s": dynamo.TICK_S})


CONTENDER = Contender(
    name="dynamo",
    title="NVIDIA Dynamo's SLA planner, both modes: throughput is the floor, load does the rest.",
    source=dynamo.SOURCE,
    knob="margin on the predicted requests and on the SLA's slack",
    values=(1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.2, 4.0),
    default=1.0,
    make=make,
)
