"""More is wanted than the cluster gives: one worker, and for seven minutes no other."""

from __future__ import annotations

from readyplane_lab.proof.evidence import POOLS, attains, finishes, ordered, quick_turns, unmet
from readyplane_lab.proof.port import Disturbances, Scenario
from readyplane_lab.simulator.faults import QuotaDenied
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.shapes import Mix, Shaped, constant, step

SPAN_S = 1800.0
STEP_S, DENIED_S = 400.0, 420.0
ASKED_EVERY_S = 4.0
"""No more often is a refused order tried again, on average."""


def disturb(_span_s: float, _seed: int) -> Disturbances:
    """Just when it would be needed."""
    return Disturbances((QuotaDenied(STEP_S, DENIED_S, granted=1),))


def check(run: RunResult) -> tuple[str, ...]:
    """Asks with patience, takes what there is, grows when it may."""
    end_s = STEP_S + DENIED_S
    refused = run.counts.get("orders_refused", 0.0)
    turns = sum(quick_turns(run, pool) for pool in POOLS)
    claims = [
        (any(x.pool == pool for x in ordered(run, end_s)), f"{pool} did not grow once it could")
        for pool in POOLS
    ]
    claims += [
        (turns <= 2, f"targets turned {turns} times while nothing could be had"),
        (refused <= DENIED_S / ASKED_EVERY_S * 2, f"{refused:g} orders were sent to be refused"),
        attains(run, 0.85, end_s + 500.0),
        finishes(run, 0.75),
    ]
    return unmet(*claims)


SCENARIO = Scenario(
    name="quota-denied",
    title="The load doubles, and for 420 s the cluster grants one worker of what is asked",
    requests=Shaped(step(STEP_S, 10.0, 20.0), Mix(hit=constant(0.3)), SPAN_S),
    expected=(
        "Refused orders are tried again with pauses (four seconds and more), targets do not turn "
        "meanwhile, both pools grow once they may, and from 500 s after that on 85 % of the "
        "arrivals meet both targets."
    ),
    check=check,
    disturb=disturb,
)
