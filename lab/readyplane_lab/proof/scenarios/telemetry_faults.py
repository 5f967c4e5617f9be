"""The planner is told old things, nothing, too much, and the wrong time."""

from __future__ import annotations

from readyplane_lab.proof.evidence import (
    POOLS,
    WARM_S,
    a_few,
    attains,
    finishes,
    growth,
    shrinkage,
    unmet,
)
from readyplane_lab.proof.port import Disturbances, Scenario
from readyplane_lab.simulator.faults import ClockStep, SignalOutlier, SignalsMissing, SignalsStale
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.shapes import Mix, Shaped, constant

SPAN_S = 1600.0
STALE_S, MISSING_S, OUTLIER_S, CLOCK_S = 500.0, 750.0, 1000.0, 1250.0
FOR_S, FACTOR, STEP_S = 60.0, 10.0, 3600.0


def disturb(_span_s: float, _seed: int) -> Disturbances:
    """One after another; the clock jumps forth and back."""
    return Disturbances(
        (
            SignalsStale(STALE_S, FOR_S),
            SignalsMissing(MISSING_S, FOR_S),
            SignalOutlier(OUTLIER_S, FACTOR),
            ClockStep(CLOCK_S, STEP_S),
            ClockStep(CLOCK_S + 120.0, -STEP_S),
        )
    )


def check(run: RunResult) -> tuple[str, ...]:
    """Nothing shrinks blindly, one wrong number buys no fleet, and time only goes on."""
    claims = [attains(run, 0.95, WARM_S), finishes(run, 0.995)]
    for pool in POOLS:
        for what, begin_s in (("stale", STALE_S), ("missing", MISSING_S)):
            fallen = shrinkage(run, pool, begin_s + 10.0, begin_s + FOR_S)
            claims.append((fallen == 0, f"{pool} shrank by {fallen} while signals were {what}"))
        size = max(1, round(sum(x.pool == pool and x.allocated_s < 0 for x in run.lives)))
        for what, begin_s in (("an outlier", OUTLIER_S), ("a step of the clock", CLOCK_S)):
            grown = growth(run, pool, begin_s - 1.0, begin_s + 60.0)
            claims.append((grown <= a_few(size), f"{pool} grew by {grown} on {what}"))
    return unmet(*claims)


SCENARIO = Scenario(
    name="telemetry-faults",
    title="A steady load; signals stale for 60 s, missing for 60 s, tenfold once, the clock stepped",
    requests=Shaped(constant(21.0), Mix(hit=constant(0.4)), SPAN_S),
    expected=(
        "No pool shrinks while signals are stale or missing, one outlier or a step of the clock "
        "adds one worker at most, and 95 % of the arrivals meet both targets."
    ),
    check=check,
    disturb=disturb,
)
