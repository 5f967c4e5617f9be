"""A scale-down under answers of ten minutes: nobody is cut off."""

from __future__ import annotations

from readyplane_lab.proof.evidence import DECODE, WARM_S, attains, finishes, shrinkage, unmet
from readyplane_lab.proof.port import Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.shapes import Mix, Shaped, step

SPAN_S = 1800.0
FALL_S = 800.0
DEADLINE_S = 1200.0


def check(run: RunResult) -> tuple[str, ...]:
    """D shrinks, and everything finishes."""
    fallen = shrinkage(run, DECODE, FALL_S, SPAN_S)
    failed = sum(bool(x.failure) for x in run.lives)
    return unmet(
        (fallen >= 1, "D did not shrink in 1,000 s with a quarter of the load"),
        finishes(run),
        (failed == 0, f"{failed} workers ended other than by being released"),
        attains(run, 0.9, WARM_S),
    )


SCENARIO = Scenario(
    name="long-drain",
    title="5 % of the answers have 8,000 to 16,000 tokens; the load falls to a quarter half-way",
    requests=Shaped(
        step(FALL_S, 3.6, 0.9), Mix(long_share=0.05, long_osl=(8_000.0, 16_000.0)), SPAN_S
    ),
    expected=(
        "D shrinks after the fall, every request finishes and no worker is ended while it serves; "
        "at least 90 % of the arrivals meet both targets."
    ),
    check=check,
    policy={"drain_deadline_s": DEADLINE_S},
)
