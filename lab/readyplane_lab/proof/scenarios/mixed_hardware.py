"""Two classes for both stages: who is taken for what follows from profile and price.

An A100 takes 2.1 times as long for a prompt at 0.4 of the price, so it is the cheaper one for P; of
output it makes a sixth of what an H100 makes within the token target, and is no good for D. There
are four A100s only: what P needs beyond them is H100s. An H100 is worth two of them, so what goes
when the load falls is whichever fits the surplus.
"""

from __future__ import annotations

from readyplane_lab.proof.evidence import DECODE, PREFILL, WARM_S, attains, ordered, unmet
from readyplane_lab.proof.port import CLASS_DEFAULT, Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.shapes import Mix, Shaped, constant, product, sine

SPAN_S = 1800.0
A100, H100 = "a100-tp4", "h100-tp4"
CHEAP, QUOTA = 0.4, 4
CLASSES = [
    {"worker_class": A100, "profile": "a100-tp4-llama70b", "price": CHEAP, "max": QUOTA},
    {"worker_class": H100, "profile": CLASS_DEFAULT},
]
STEP_S = 5.0


def check(run: RunResult) -> tuple[str, ...]:
    """The cheap ones first and no more than there are, the fast ones for what is left."""
    cheap, fast = _held(run, PREFILL, A100), _held(run, PREFILL, H100)
    early = [
        x
        for x in ordered(run)
        if (x.pool, x.worker_class) == (PREFILL, H100) and _at(run, A100, x.allocated_s) < QUOTA
    ]
    return unmet(
        (max(cheap) <= QUOTA, f"{max(cheap)} A100s were held, {QUOTA} there are"),
        (max(fast) > 0, "P grew by no H100 when the A100s had run out"),
        (not early, f"{len(early)} H100s were started for P while A100s were to be had"),
        (sum(cheap) > 2 * sum(fast), "P held more than one H100 for two A100s, which are cheaper"),
        (max(_held(run, DECODE, A100)) == 0, "D took A100s, which cannot keep its target"),
        attains(run, 0.93, WARM_S),
    )


def _held(run: RunResult, pool: str, worker_class: str) -> list[int]:
    """Workers of a class that a pool holds, every few seconds once it is warm."""
    mine = [x for x in run.lives if (x.pool, x.worker_class) == (pool, worker_class)]
    times = range(int(WARM_S / STEP_S), int(run.span_s / STEP_S))
    return [sum(x.allocated_s <= k * STEP_S < x.released_s for x in mine) for k in times]


def _at(run: RunResult, worker_class: str, at_s: float) -> int:
    """Workers of a class that P holds at a moment, those ordered then included."""
    mine = [x for x in run.lives if (x.pool, x.worker_class) == (PREFILL, worker_class)]
    return sum(x.allocated_s <= at_s < x.released_s for x in mine)


SCENARIO = Scenario(
    name="mixed-hardware",
    title="Four A100s at 0.4 of the price and half the speed, H100s beside them, load that swings",
    requests=Shaped(
        product(constant(12.0), sine(600.0, 0.33)),
        Mix(hit=constant(0.1), isl_sigma=0.6, isl_max=3500.0),
        SPAN_S,
    ),
    expected=(
        "P takes the A100s first, whose work is cheaper, and H100s when they have run out; D takes "
        "H100s alone; 93 % of the arrivals meet both targets."
    ),
    check=check,
    worker_class="a100-tp4-llama70b",
    decode_class=CLASS_DEFAULT,
    policy={
        "prefill": {"classes": CLASSES, "worker_class": A100, "profile": "a100-tp4-llama70b"},
        "decode": {"classes": CLASSES, "worker_class": H100, "profile": CLASS_DEFAULT},
    },
)
