"""Readyplane's own planner as a contender: the production brain under its default policy.

Its knob is there for the curve of cost over attainment; what is judged is the default.
"""

from __future__ import annotations

from readyplane_lab.proof.port import Contender, Fielded, Setting
from readyplane_planner.decide import decide
from readyplane_planner.policy import DecodePolicy, Policy

HEADROOM_DEFAULT = float(Policy.model_fields["headroom"].default)
CONVERTIBLE_DEFAULT = bool(DecodePolicy.model_fields["convertible"].default)


def make(knob: float, setting: Setting) -> Fielded:
    """The default policy; the knob replaces its headroom where it is not the default."""
    del setting
    return Fielded(
        brain=decide,
        policy={} if knob == HEADROOM_DEFAULT else {"headroom": knob},
        convertible=CONVERTIBLE_DEFAULT,
    )


CONTENDER = Contender(
    name="readyplane",
    title="Readyplane's planner: plans one T_ready ahead, pending capacity counted",
    source="this project",
    knob="headroom",
    values=(0.0, 0.05, HEADROOM_DEFAULT, 0.15, 0.2, 0.3, 0.45, 0.6),
    default=HEADROOM_DEFAULT,
    make=make,
    aware=True,
)
