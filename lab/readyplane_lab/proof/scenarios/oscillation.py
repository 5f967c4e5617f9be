"""A load that comes and goes, faster and slower than workers can.

Periods are 0.5, 1, 2 and 4 times the T_ready of the centre point (60 s). Whoever follows a load that
turns faster than workers start pays for starts and drains, and is late each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from readyplane_lab.proof.evidence import (
    NOMINAL_T_READY_S,
    POOLS,
    WARM_S,
    attains,
    quick_turns,
    unmet,
)
from readyplane_lab.proof.port import Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_lab.workload.shapes import Mix, Shaped, constant, product, sine, square

SPAN_S = 1800.0
TURNS_PER_HOUR_MAX = 6.0
"""Of each pool, with both legs shorter than two starts as they were in the run."""
PERIODS = (0.5, 1.0, 2.0, 4.0)
PLAYED = ("120s", "phases")
"""In every proof; the others are variants."""


def check(run: RunResult) -> tuple[str, ...]:
    """Within the bound of reversals."""
    most = round(TURNS_PER_HOUR_MAX * run.span_s / 3600.0)
    claims = [attains(run, 0.85, WARM_S)]
    for pool in POOLS:
        turns = quick_turns(run, pool)
        claims.append((turns <= most, f"{pool} reversed {turns} times, {most} at most"))
    return unmet(*claims)


def _scenario(
    name: str, title: str, requests: Callable[[float, int], Sequence[WorkloadRequest]]
) -> Scenario:
    return Scenario(
        name=f"oscillation-{name}",
        title=title,
        requests=requests,
        expected=(
            "Neither pool reverses more than six times an hour (up and down again within two "
            "starts), and at least 85 % of the arrivals meet both targets."
        ),
        check=check,
        variant=name not in PLAYED,
    )


def _square(share: float) -> Scenario:
    period_s = share * NOMINAL_T_READY_S
    return _scenario(
        f"{period_s:g}s",
        f"Load on and off by three to one, period {period_s:g} s = {share:g} starts",
        Shaped(square(period_s, 24.0, 8.0), Mix(hit=constant(0.3)), SPAN_S),
    )


SINE_S, PHASES_S = 2.0 * NOMINAL_T_READY_S, 4.0 * NOMINAL_T_READY_S
SCENARIOS = (
    *(_square(share) for share in PERIODS),
    _scenario(
        "sine",
        f"Load as a sine by half of its mean, period {SINE_S:g} s = 2 starts",
        Shaped(product(constant(16.0), sine(SINE_S, 0.5)), Mix(hit=constant(0.3)), SPAN_S),
    ),
    _scenario(
        "phases",
        f"Prompts and answers lengthen in turn, period {PHASES_S:g} s = 4 starts",
        Shaped(
            constant(13.0),
            Mix(
                isl_max=3500.0,
                osl_max=600.0,
                isl_factor=sine(PHASES_S, 0.6),
                osl_factor=sine(PHASES_S, 0.6, phase=0.5),
            ),
            SPAN_S,
        ),
    ),
)
