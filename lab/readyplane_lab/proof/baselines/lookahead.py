"""B8, O_look: the optimal planner that sees the next T_ready + T_drain perfectly, and no further.

At every tick the optimiser of `oracle/layers.py` plans the known stretch anew, as in a receding
horizon. Longer foresight than the time in which a worker can be had and given back is what it lacks.
"""

from __future__ import annotations

from readyplane_lab.proof.oracle.lookahead import ShortSighted
from readyplane_lab.proof.port import Contender, Fielded, Setting

TICK_S = 5.0


def make(margin: float, setting: Setting) -> Fielded:
    """Short but perfect sight of `margin` times the need."""
    return Fielded(ShortSighted(setting, margin=margin), policy={"tick_s": TICK_S})


CONTENDER = Contender(
    name="lookahead",
    title="Perfect knowledge of the next T_ready + T_drain, planned anew at every tick.",
    source="receding horizon control with perfect prediction",
    knob="multiplier of the need",
    values=(0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.6, 2.0),
    default=1.0,
    make=make,
    aware=True,
    hindsight=True,
    bound=True,
)
