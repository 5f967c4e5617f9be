"""Prefixes that were known are known no more: the same arrivals are twice the work."""

from __future__ import annotations

from readyplane_lab.proof.evidence import (
    DECODE,
    PREFILL,
    WARM_S,
    a_few,
    attains,
    mean_target,
    unmet,
)
from readyplane_lab.proof.port import Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.shapes import Mix, Shaped, constant, step

SPAN_S = 1600.0
SHIFT_S = 700.0
HIT_BEFORE, HIT_AFTER = 0.6, 0.1


def check(run: RunResult) -> tuple[str, ...]:
    """P grows with arrivals unchanged."""
    p_was, d_was = (mean_target(run, x, WARM_S, SHIFT_S) for x in (PREFILL, DECODE))
    p_is, d_is = (mean_target(run, x, SHIFT_S + 200.0, SPAN_S) for x in (PREFILL, DECODE))
    return unmet(
        (p_is >= 1.4 * p_was, f"P went from {p_was:.1f} to {p_is:.1f} on more than twice the work"),
        (d_is - d_was <= a_few(round(d_was)), f"D went from {d_was:.1f} to {d_is:.1f} on the same"),
        attains(run, 0.95, WARM_S, SHIFT_S),
        attains(run, 0.9, SHIFT_S + 400.0),
    )


SCENARIO = Scenario(
    name="cache-shift",
    title="Prefix hits fall from 60 % to 10 % of the prompt tokens in one step, arrivals unchanged",
    requests=Shaped(
        constant(11.0),
        Mix(
            isl_median=3000.0,
            isl_sigma=0.5,
            isl_max=9000.0,
            hit=step(SHIFT_S, HIT_BEFORE, HIT_AFTER),
        ),
        SPAN_S,
    ),
    expected=(
        "P's prediction is corrected: its target is at least 1.4 times what it was from 200 s "
        "after the shift on, D's stays, and from 400 s on 90 % of the arrivals meet both targets."
    ),
    check=check,
)
