"""A class for each stage: prompts on A100s, tokens on H100s.

A planner that chooses among classes is not there yet: each pool has one, by policy. What is tried is
that a pool is sized by the profile of its own class. An A100 takes 2.2 times as long for a prompt at
half the price, and holds nine sequences within the token target where an H100 holds fifty, so it is
fit for P only.
"""

from __future__ import annotations

from readyplane_lab.proof.evidence import DECODE, PREFILL, WARM_S, attains, mean_target, unmet
from readyplane_lab.proof.port import CLASS_DEFAULT, Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.shapes import Mix, Shaped, constant, product, sine

SPAN_S = 1800.0
CLASSES = {PREFILL: "a100-tp4", DECODE: "h100-tp4"}


def check(run: RunResult) -> tuple[str, ...]:
    """Each pool has workers of its class, as many as that class needs."""
    p, d = (mean_target(run, pool, WARM_S, run.span_s) for pool in (PREFILL, DECODE))
    strangers = sum(x.worker_class != CLASSES[x.pool] for x in run.lives)
    return unmet(
        (strangers == 0, f"{strangers} workers were of another class than their pool's"),
        (p > d, f"P had {p:.1f} workers and D {d:.1f}: P was not sized by the slower class"),
        attains(run, 0.93, WARM_S),
    )


SCENARIO = Scenario(
    name="mixed-hardware",
    title="P of A100s at half the price and half the speed, D of H100s, load swinging by a third",
    requests=Shaped(
        product(constant(12.0), sine(600.0, 0.33)),
        Mix(hit=constant(0.1), isl_sigma=0.6, isl_max=3500.0),
        SPAN_S,
    ),
    expected=(
        "Each pool is sized by its own class: P (A100) has more workers than D (H100), though it "
        "has less work in H100 seconds, and 93 % of the arrivals meet both targets."
    ),
    check=check,
    worker_class="a100-tp4-llama70b",
    decode_class=CLASS_DEFAULT,
)
