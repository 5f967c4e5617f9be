"""B5, Dynamo's planner in throughput mode with its Kalman predictor instead of the constant one.

Requests, prompt and output lengths each follow a local linear trend (level noise 1, trend noise
0.1, observation noise 10). The knob multiplies the predicted requests; published is 1.
"""

from __future__ import annotations

from readyplane_lab.proof.baselines.parts import dynamo
from readyplane_lab.proof.baselines.parts.brain import RuleBrain
from readyplane_lab.proof.port import Contender, Fielded, Setting


def make(demand: float, setting: Setting) -> Fielded:
    """Throughput mode for `demand` times the predicted requests."""
    rule = dynamo.Dynamo(
        setting, throughput=True, load=False, demand=demand, predictor=dynamo.Predictor.KALMAN
    )
    return Fielded(RuleBrain(rule, dynamo.DynamoState()), policy={"tick_s": dynamo.TICK_S})


CONTENDER = Contender(
    name="dynamo-kalman",
    title="NVIDIA Dynamo's SLA planner, throughput mode with a Kalman trend of the traffic.",
    source=dynamo.SOURCE,
    knob="multiple of the predicted requests",
    values=(1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.2, 4.0),
    default=1.0,
    make=make,
)
