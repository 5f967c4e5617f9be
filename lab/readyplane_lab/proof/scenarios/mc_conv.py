"""The Mooncake conversation hour: long prompts, real prefixes, calm."""

from __future__ import annotations

from collections.abc import Sequence

from readyplane_lab.proof.evidence import POOLS, attains, targets_within, unmet
from readyplane_lab.proof.port import Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.public import public_trace
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_lab.workload.scaling import scaled

SETTLED_S = 600.0


def requests(scale: float, seed: int) -> Sequence[WorkloadRequest]:
    """The trace with its ticks spread, repeated with jitter; every copy has prefixes of its own."""
    return scaled(public_trace("mooncake_conversation.jsonl.zst", seed=seed).requests, scale, seed)


def check(run: RunResult) -> tuple[str, ...]:
    """Steady load, steady fleet."""
    claims = [attains(run, 0.9)]
    for pool in POOLS:
        wanted = targets_within(run, pool, SETTLED_S, run.span_s)
        least, most = min(wanted), max(wanted)
        claims.append((most <= 2 * least, f"{pool} went from {least} to {most} on a steady load"))
    return unmet(*claims)


SCENARIO = Scenario(
    name="mc-conv",
    title="Mooncake conversation hour, 12,031 requests with their prefixes, 3 s ticks jittered",
    kind="replay",
    requests=requests,
    expected=(
        "Work stays within 1.4 of its mean: neither pool doubles after the first ten minutes, and "
        "at least 90 % of the arrivals meet both targets (prompts of 90,000 new tokens cannot)."
    ),
    check=check,
    worker_class="h200-llama8b-fp8",
)
