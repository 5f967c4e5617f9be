"""Readyplane's own planner as a contender: the production brain under its default policy.

Its knob is there for the curve of cost over attainment; what is judged is the default.
"""

from __future__ import annotations

from readyplane_lab.proof.port import Contender, Fielded, Setting
from readyplane_planner.decide import decide
from readyplane_planner.policy import DecodePolicy, SloPolicy

ATTAINMENT_DEFAULT = float(SloPolicy.model_fields["attainment"].default)
CONVERTIBLE_DEFAULT = bool(DecodePolicy.model_fields["convertible"].default)


def make(knob: float, setting: Setting) -> Fielded:
    """The default policy; the knob replaces its promise where it is not the default."""
    del setting
    return Fielded(
        brain=decide,
        policy={} if knob == ATTAINMENT_DEFAULT else {"slo": {"attainment": knob}},
        convertible=CONVERTIBLE_DEFAULT,
    )


CONTENDER = Contender(
    name="readyplane",
    title="Readyplane's planner: plans one T_ready ahead, pending capacity counted",
    source="this project",
    knob="promise",
    values=(0.9, 0.95, 0.975, 0.985, ATTAINMENT_DEFAULT, 0.995, 0.998, 0.9995),
    default=ATTAINMENT_DEFAULT,
    make=make,
    aware=True,
)
