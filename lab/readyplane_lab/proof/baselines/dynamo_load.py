"""B5, Dynamo's planner in load mode alone: one worker more or less every 5 s, by SLA estimates.

Both pools hold while either is in transition, while reports are missing, and before five of them.
Requests that the router holds back count as queued at the pool that they wait for. The knob is the
SLA that is configured, as a share of the slack between an unloaded engine and the SLO; published
is 1, the SLO itself.
"""

from __future__ import annotations

from readyplane_lab.proof.baselines.parts import dynamo
from readyplane_lab.proof.baselines.parts.brain import RuleBrain
from readyplane_lab.proof.port import Contender, Fielded, Setting


def make(slack: float, setting: Setting) -> Fielded:
    """Load mode with that SLA."""
    rule = dynamo.Dynamo(setting, throughput=False, load=True, slack=slack)
    return Fielded(RuleBrain(rule, dynamo.DynamoState()), policy={"tick_s": dynamo.TICK_S})


CONTENDER = Contender(
    name="dynamo-load",
    title="NVIDIA Dynamo's SLA planner, load mode: one worker at a time by estimated latency.",
    source=dynamo.SOURCE,
    knob="configured SLA, as a share of the slack up to the SLO",
    values=(1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02),
    default=1.0,
    make=make,
)
