"""The Azure 2023 code hour: on and off, bursts shorter than a start."""

from __future__ import annotations

from collections.abc import Sequence

from readyplane_lab.proof.evidence import DECODE, PREFILL, answered, attains, targets_within, unmet
from readyplane_lab.proof.port import Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.public import public_trace
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_lab.workload.scaling import scaled


def requests(scale: float, seed: int) -> Sequence[WorkloadRequest]:
    """The trace as published, repeated with jitter."""
    return scaled(public_trace("azure2023_code.csv.zst", seed=0).requests, scale, seed)


def check(run: RunResult) -> tuple[str, ...]:
    """Whole minutes without a request are survived, and their end is."""
    p, d = (targets_within(run, pool, 0.0, run.span_s) for pool in (PREFILL, DECODE))
    return unmet(
        (min(*p, *d) >= 1, "a pool was given up although requests kept coming back"),
        (max(p) > min(p), f"P stayed at {max(p)} through bursts of four times the mean"),
        (answered(run) >= 0.99, f"{answered(run):.1%} of the arrivals were answered, not 99 %"),
        attains(run, 0.8),
    )


SCENARIO = Scenario(
    name="az-code",
    title="Azure 2023 code hour, 8,819 requests: on and off, bursts shorter than a start",
    kind="replay",
    requests=requests,
    expected=(
        "Quiet minutes neither break the forecast nor empty a pool; P grows in the bursts, "
        "at least 99 % are answered and 80 % meet both targets, since no start is fast enough."
    ),
    check=check,
)
