"""Every worker goes in its turn while the load stays, as in a roll-out with a surge of one.

Generations (another artifact, a version barrier, a roll-back) do not run in the simulator yet. What
is tried is their effect on the fleet: one worker after another is told to drain and is gone after
four minutes, and must have been replaced by then.
"""

from __future__ import annotations

from readyplane.core.worker import Role
from readyplane_lab.proof.evidence import POOLS, attains, finishes, ordered, unmet
from readyplane_lab.proof.port import Disturbances, Scenario
from readyplane_lab.simulator.faults import SpotReclaim
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.shapes import Mix, Shaped, constant

SPAN_S = 1800.0
FIRST_S, EVERY_S, NOTICE_S = 300.0, 120.0, 240.0


def disturb(span_s: float, _seed: int) -> Disturbances:
    """P and D in turn, until all of a small fleet have gone."""
    moments = range(round(FIRST_S), round(span_s - NOTICE_S), round(EVERY_S))
    roles = (Role.PREFILL, Role.DECODE)
    return Disturbances(
        tuple(SpotReclaim(float(at_s), roles[i % 2], NOTICE_S) for i, at_s in enumerate(moments))
    )


def check(run: RunResult) -> tuple[str, ...]:
    """Replaced before they are gone, and nobody noticed."""
    cut = sum(x.failure == "reclaimed" for x in run.lives)
    claims = [
        (len([x for x in ordered(run, FIRST_S) if x.pool == pool]) >= 3, f"{pool}: few successors")
        for pool in POOLS
    ]
    claims += [
        (cut == 0, f"{cut} workers had not finished when their notice ran out"),
        finishes(run),
        attains(run, 0.95),
    ]
    return unmet(*claims)


SCENARIO = Scenario(
    name="rolling-upgrade",
    title="A steady load while one worker after another is told to drain and replaced",
    requests=Shaped(constant(21.0), Mix(hit=constant(0.4)), SPAN_S),
    expected=(
        "Each worker is replaced and drained within its notice of 240 s, every request finishes, "
        "and 95 % of the arrivals meet both targets."
    ),
    check=check,
    disturb=disturb,
)
