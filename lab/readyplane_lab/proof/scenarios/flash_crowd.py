"""Ten times the load for twenty seconds: over before any worker is there."""

from __future__ import annotations

from statistics import median

from readyplane_lab.proof.evidence import (
    POOLS,
    WARM_S,
    a_few,
    attains,
    ordered,
    targets_within,
    unmet,
)
from readyplane_lab.proof.port import Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.shapes import Mix, Shaped, burst, constant, product

SPAN_S = 1500.0
BEGIN_S, LENGTH_S, FACTOR = 600.0, 20.0, 10.0


def check(run: RunResult) -> tuple[str, ...]:
    """No workers are bought for what has passed when they come."""
    claims = [attains(run, 0.97, WARM_S, BEGIN_S), attains(run, 0.95, BEGIN_S + 300.0)]
    late = ordered(run, BEGIN_S, BEGIN_S + LENGTH_S + 40.0)
    starts_s = [x.took_s for x in late if x.took_s is not None]
    if starts_s and median(starts_s) > LENGTH_S:
        before = sum(targets_within(run, pool, BEGIN_S - 5.0, BEGIN_S)[0] for pool in POOLS)
        claims.append(
            (
                len(late) <= 2 * a_few(before),
                f"{len(late)} workers were ordered in the crowd, ready {median(starts_s):.0f} s later",
            )
        )
    return unmet(*claims)


SCENARIO = Scenario(
    name="flash-crowd",
    title="Ten times the load for 20 s, which is shorter than a start",
    requests=Shaped(
        product(constant(4.0), burst(BEGIN_S, LENGTH_S, FACTOR)), Mix(hit=constant(0.3)), SPAN_S
    ),
    expected=(
        "Where a start takes longer than the crowd, one worker a pool is ordered at most (a "
        "seventh of a large fleet), and 300 s later 95 % of the arrivals meet both targets."
    ),
    check=check,
)
