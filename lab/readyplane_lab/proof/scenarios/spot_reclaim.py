"""Workers are taken back, with notices of 120 s and of 30 s."""

from __future__ import annotations

from readyplane.core.worker import Role
from readyplane_lab.proof.evidence import attains, finishes, ordered, unmet
from readyplane_lab.proof.port import Disturbances, Scenario
from readyplane_lab.simulator.faults import SpotReclaim
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.shapes import Mix, Shaped, constant

SPAN_S = 1500.0
FIRST_S = 450.0
RECLAIMS = (
    SpotReclaim(FIRST_S, Role.PREFILL, notice_s=30.0),
    SpotReclaim(600.0, Role.DECODE, notice_s=120.0),
    SpotReclaim(900.0, Role.DECODE, notice_s=30.0),
)


def disturb(_span_s: float, _seed: int) -> Disturbances:
    """One prefill worker, then two decode workers."""
    return Disturbances(RECLAIMS)


def check(run: RunResult) -> tuple[str, ...]:
    """What is taken is replaced, and what it served is served."""
    return unmet(
        (len(ordered(run, FIRST_S)) >= 1, "nobody was ordered in place of three workers"),
        attains(run, 0.9, FIRST_S),
        finishes(run, 0.995),
    )


SCENARIO = Scenario(
    name="spot-reclaim",
    title="A steady load; three workers are taken back with notices of 30, 120 and 30 s",
    requests=Shaped(constant(21.0), Mix(hit=constant(0.4)), SPAN_S),
    expected=(
        "What is short is replaced, 99.5 % of the requests finish (those of a notice too short "
        "are paired again), and 90 % of the arrivals since the first notice meet both targets."
    ),
    check=check,
    disturb=disturb,
)
