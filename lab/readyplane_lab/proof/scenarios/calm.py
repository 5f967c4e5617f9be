"""Nothing happens: the test of actions that nobody needs."""

from __future__ import annotations

from readyplane_lab.proof.evidence import (
    POOLS,
    WARM_S,
    a_few,
    attains,
    quick_turns,
    targets_within,
    unmet,
)
from readyplane_lab.proof.port import Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.shapes import Mix, Shaped, constant

SPAN_S = 1500.0


def check(run: RunResult) -> tuple[str, ...]:
    """Nothing that Poisson arrivals do is a reason to start or to drain."""
    claims = [attains(run, 0.97, WARM_S)]
    for pool in POOLS:
        wanted = targets_within(run, pool, WARM_S, run.span_s)
        least, most, turns = min(wanted), max(wanted), quick_turns(run, pool)
        claims += [
            (most - least <= a_few(most), f"{pool} went from {least} to {most} for no reason"),
            (turns == 0, f"{pool} changed its direction {turns} times for no reason"),
        ]
    return unmet(*claims)


SCENARIO = Scenario(
    name="calm",
    title="Poisson arrivals at one rate, lengths and prefix hits of a chat",
    requests=Shaped(constant(21.0), Mix(hit=constant(0.4)), SPAN_S),
    expected=(
        "Targets stay within one worker (a seventh of a large fleet) after the first minutes, "
        "never turn, and at least 97 % of the arrivals meet both targets."
    ),
    check=check,
)
