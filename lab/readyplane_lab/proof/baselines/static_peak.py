"""B0, static peak: as many workers as the whole run's peak needs, known in hindsight.

Each pool is sized by its own peak. The knob is a fraction of it: below 1 because a little may be
late, above 1 because queues form before capacity is used up.
"""

from __future__ import annotations

from readyplane_lab.proof.baselines.parts import constant
from readyplane_lab.proof.port import Contender, Fielded, Setting


def make(fraction: float, setting: Setting) -> Fielded:
    """`fraction` of each pool's largest need."""
    future = setting.hindsight
    need_p = fraction * float(future.need_p.max(initial=0.0))
    need_d = fraction * float(future.need_d.max(initial=0.0))
    return constant.fielded(need_p, need_d, setting)


CONTENDER = Contender(
    name="static-peak",
    title="A fleet of fixed size, sized for the peak that hindsight knows.",
    source="provisioning for the peak, the usual practice without an autoscaler",
    knob="fraction of the peak need",
    values=(0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5),
    default=1.0,
    make=make,
    hindsight=True,
)
