"""Every worker goes in its turn while the load stays, as in a roll-out with a surge of one.

Generations (another artifact, a version barrier, a roll-back) do not run in the simulator yet. What
is tried is their effect on the fleet: one worker after another is told to drain and is gone after
four minutes, so it takes no new work while its successor starts: without a surge before it, that
minute is short of a worker.
"""

from __future__ import annotations

from readyplane.core.worker import Role
from readyplane_lab.proof.evidence import attains, finishes, ordered, unmet
from readyplane_lab.proof.port import Disturbances, Scenario
from readyplane_lab.simulator.faults import SpotReclaim
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.shapes import Mix, Shaped, constant

SPAN_S = 1800.0
FIRST_S, EVERY_S, NOTICE_S = 300.0, 240.0, 240.0


def disturb(span_s: float, _seed: int) -> Disturbances:
    """P and D in turn."""
    moments = range(round(FIRST_S), round(span_s - NOTICE_S), round(EVERY_S))
    roles = (Role.PREFILL, Role.DECODE)
    return Disturbances(
        tuple(SpotReclaim(float(at_s), roles[i % 2], NOTICE_S) for i, at_s in enumerate(moments))
    )


def check(run: RunResult) -> tuple[str, ...]:
    """Replaced before they are gone, and nobody noticed."""
    cut = sum(x.failure == "reclaimed" for x in run.lives)
    successors = len(ordered(run, FIRST_S))
    return unmet(
        (successors >= 3, f"{successors} workers were ordered in place of six"),
        (cut == 0, f"{cut} workers had not finished when their notice ran out"),
        finishes(run),
        attains(run, 0.85),
    )


SCENARIO = Scenario(
    name="rolling-upgrade",
    title="A steady load while one worker after another is told to drain and replaced",
    requests=Shaped(constant(21.0), Mix(hit=constant(0.4)), SPAN_S),
    expected=(
        "Workers are replaced and drained within their notice of 240 s, every request finishes, "
        "and 85 % of the arrivals meet both targets."
    ),
    check=check,
    disturb=disturb,
)
