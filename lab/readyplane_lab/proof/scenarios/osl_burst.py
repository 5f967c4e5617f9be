"""Answers become four times as long for five minutes; D notices one residence time later."""

from __future__ import annotations

from readyplane_lab.proof.evidence import DECODE, PREFILL, WARM_S, a_few, attains, growth, unmet
from readyplane_lab.proof.evidence import targets_within as within
from readyplane_lab.proof.port import Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.shapes import Mix, Shaped, burst, constant

SPAN_S = 1800.0
BEGIN_S, LENGTH_S, FACTOR = 600.0, 300.0, 4.0


def check(run: RunResult) -> tuple[str, ...]:
    """D is what grows."""
    end_s = BEGIN_S + LENGTH_S + 60.0
    p, d = (growth(run, pool, BEGIN_S - 30.0, end_s) for pool in (PREFILL, DECODE))
    spare = a_few(within(run, PREFILL, BEGIN_S - 30.0, BEGIN_S)[0])
    return unmet(
        (d >= 1 and d > p, f"D grew by {d} and P by {p}, but the burst is work of D alone"),
        (p <= spare, f"P grew by {p} although neither arrivals nor prompts changed"),
        attains(run, 0.97, WARM_S, BEGIN_S - 30.0),
        attains(run, 0.95, BEGIN_S + LENGTH_S + 300.0),
    )


SCENARIO = Scenario(
    name="osl-burst",
    title="Answers four times as long for 300 s, arrivals and prompts unchanged",
    requests=Shaped(
        constant(8.0),
        Mix(osl_max=600.0, osl_factor=burst(BEGIN_S, LENGTH_S, FACTOR), hit=constant(0.3)),
        SPAN_S,
    ),
    expected=(
        "D's target rises within the burst and a minute after it, P's by no more than one (a "
        "seventh of a large fleet); five minutes later 95 % of the arrivals meet both targets."
    ),
    check=check,
)
