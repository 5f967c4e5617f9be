"""Four days alike, and then a night that does not come."""

from __future__ import annotations

from readyplane_lab.proof.evidence import DECODE, PREFILL, attains, targets_within, unmet
from readyplane_lab.proof.port import Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.shapes import Mix, Shaped, constant, daily, until

DAY_S, DAYS = 300.0, 4
CHANGE_S = (DAYS + 0.5) * DAY_S
SPAN_S = CHANGE_S + 450.0
LOW_RPS, HIGH_RPS = 5.0, 24.0


def check(run: RunResult) -> tuple[str, ...]:
    """What was learned gives way to what is."""
    claims = [attains(run, 0.9, CHANGE_S + 60.0)]
    for pool in (PREFILL, DECODE):
        noon = max(targets_within(run, pool, CHANGE_S - DAY_S / 4, CHANGE_S + DAY_S / 4))
        least = min(targets_within(run, pool, CHANGE_S + DAY_S / 4, SPAN_S))
        claims.append((least >= 0.7 * noon, f"{pool} fell from {noon} to {least} on a level load"))
    return unmet(*claims)


SCENARIO = Scenario(
    name="poisoned-forecast",
    title="Four days of 300 s with a noon of five times the night, then noon stays",
    requests=Shaped(
        until(CHANGE_S, daily(DAY_S, LOW_RPS, HIGH_RPS), constant(HIGH_RPS)),
        Mix(hit=constant(0.3)),
        SPAN_S,
    ),
    expected=(
        "When the learned night does not come, no pool falls below 70 % of its noon, and from a "
        "minute after the change on 90 % of the arrivals meet both targets."
    ),
    check=check,
)
