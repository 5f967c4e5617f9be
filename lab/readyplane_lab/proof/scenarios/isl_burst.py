"""Prompts become four times as long for two minutes, at once or within 10 or 30 s."""

from __future__ import annotations

from readyplane_lab.proof.evidence import DECODE, PREFILL, WARM_S, attains, growth, unmet
from readyplane_lab.proof.port import Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.shapes import Mix, Shaped, burst, constant

SPAN_S = 1500.0
BEGIN_S, LENGTH_S, FACTOR = 600.0, 120.0, 4.0
RAMPS_S = (0.0, 10.0, 30.0)


def check(run: RunResult) -> tuple[str, ...]:
    """P is what grows."""
    end_s = BEGIN_S + LENGTH_S + 30.0
    p, d = (growth(run, pool, BEGIN_S - 30.0, end_s) for pool in (PREFILL, DECODE))
    return unmet(
        (p >= 1, "P did not grow within the burst"),
        (p > d, f"P grew by {p}, D by {d}, but the burst is work of P above all"),
        attains(run, 0.97, WARM_S, BEGIN_S - 30.0),
        attains(run, 0.95, BEGIN_S + LENGTH_S + 300.0),
    )


def _scenario(ramp_s: float) -> Scenario:
    factor = burst(BEGIN_S, LENGTH_S, FACTOR, ramp_s=ramp_s)
    mix = Mix(isl_sigma=0.6, isl_max=3000.0, isl_factor=factor)
    return Scenario(
        name=f"isl-burst-{ramp_s:g}s" if ramp_s else "isl-burst",
        title=f"Prompts four times as long for 120 s within {ramp_s:g} s, arrivals unchanged",
        requests=Shaped(constant(7.0), mix, SPAN_S),
        expected=(
            "P's target rises within the burst, and by more than D's (whose sequences only hold "
            "more KV); five minutes later at least 95 % of the arrivals meet both targets again."
        ),
        check=check,
        variant=ramp_s > 0,
    )


SCENARIOS = tuple(_scenario(ramp_s) for ramp_s in RAMPS_S)
