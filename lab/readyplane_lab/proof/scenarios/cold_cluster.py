"""From next to nothing to a fleet, every byte from the object store, whose readers share it."""

from __future__ import annotations

from readyplane.core.startup import WeightTier
from readyplane_lab.proof.evidence import POOLS, growth, ordered, recovers, unmet
from readyplane_lab.proof.port import Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.shapes import Mix, Shaped, constant, step

SPAN_S = 1800.0
STEP_S = 300.0
# Weights are half of a lone start, as those of a large model without any of it on the node.
STORE_BYTES_PER_S = 70e6
LOAD = Shaped(step(STEP_S, 4.0, 24.0), Mix(hit=constant(0.3)), SPAN_S)


def check(run: RunResult) -> tuple[str, ...]:
    """Everything came from the store, and there was enough of it in the end."""
    tiers = {x.tier for x in ordered(run) if x.ready_s is not None and x.tier}
    claims = [
        (growth(run, pool, STEP_S - 30.0, SPAN_S) >= 1, f"{pool} did not grow with the load")
        for pool in POOLS
    ]
    other = sorted(tiers - {str(WeightTier.L4_OBJECT)})
    claims += [
        (not other, f"weights came from {', '.join(other)}, where only the object store has them"),
        recovers(run, 0.9, STEP_S, after_s=300.0),
    ]
    return unmet(*claims)


SCENARIO = Scenario(
    name="cold-cluster",
    title="Six times the load in one step; no local weights and no peers, one store for all",
    requests=LOAD,
    expected=(
        "Both pools grow, all weights come from the object store, and from 300 s after the last "
        "start of the first minute is ready on 90 % of the arrivals meet both targets."
    ),
    check=check,
    startup={"store_bytes_per_s": STORE_BYTES_PER_S, "peer_readers_max": 0},
)
