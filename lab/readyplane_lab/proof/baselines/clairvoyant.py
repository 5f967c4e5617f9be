"""B9, the clairvoyant plan played for real: the fleet of O_LB, ordered in time.

The optimum over the known need (`oracle/layers.py`) with a margin; every worker is ordered a P90 of
T_ready before it is needed. With the smallest margin that attains, its bill is O_SIM, the achievable
end of the bracket in which the true optimum lies (`oracle/osim.py`).
"""

from __future__ import annotations

from readyplane_lab.proof.oracle.plan import Scripted, plan_of
from readyplane_lab.proof.port import Contender, Fielded, Setting

TICK_S = 5.0


def make(margin: float, setting: Setting) -> Fielded:
    """The plan for `margin` times the need."""
    plan = plan_of(setting, margin=margin)
    return Fielded(Scripted(plan, lead_s=setting.t_ready.p90_s), policy={"tick_s": TICK_S})


CONTENDER = Contender(
    name="clairvoyant",
    title="The cheapest fleet over the need as it will be, started in time.",
    source="optimal offline right-sizing by layers",
    knob="multiplier of the need",
    values=(0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.6, 2.0),
    default=1.0,
    make=make,
    aware=True,
    hindsight=True,
    bound=True,
)
