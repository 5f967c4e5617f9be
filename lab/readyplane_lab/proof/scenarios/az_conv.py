"""The Azure 2023 conversation hour: what is read and what is written rise at different times."""

from __future__ import annotations

from collections.abc import Sequence

from readyplane_lab.proof.evidence import DECODE, PREFILL, attains, targets_within, unmet
from readyplane_lab.proof.port import Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.public import public_trace
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_lab.workload.scaling import scaled


def requests(scale: float, seed: int) -> Sequence[WorkloadRequest]:
    """The trace as published, repeated with jitter."""
    return scaled(public_trace("azure2023_conv.csv.zst", seed=0).requests, scale, seed)


def check(run: RunResult) -> tuple[str, ...]:
    """Attainment, and pools that do not move in step."""
    ratios = {round(p / max(1, d), 2) for _, p, d in run.targets}
    p, d = (targets_within(run, pool, 0.0, run.span_s) for pool in (PREFILL, DECODE))
    swing = (
        f"P went from {min(p)} to {max(p)}, D from {min(d)} to {max(d)}, "
        "but P has the larger swing of work (peak to mean 1.9 against 1.3)"
    )
    return unmet(
        attains(run, 0.95),
        (max(p) * min(d) > min(p) * max(d), swing),
        (len(ratios) > 1, "P and D were kept in one ratio, although their work is uncorrelated"),
    )


SCENARIO = Scenario(
    name="az-conv",
    title="Azure 2023 conversation hour, 19,366 requests: P and D work uncorrelated",
    kind="replay",
    requests=requests,
    expected=(
        "P follows the minutes of long prompts while D stays nearly level; "
        "at least 95 % of the arrivals meet both targets."
    ),
    check=check,
)
