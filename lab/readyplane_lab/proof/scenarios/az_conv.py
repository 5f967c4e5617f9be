"""The Azure 2023 conversation hour: what is read and what is written rise at different times."""

from __future__ import annotations

from collections.abc import Sequence

from readyplane_lab.proof.evidence import DECODE, PREFILL, attained, targets_within, unmet
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
    prefill = targets_within(run, PREFILL, 0.0, run.span_s)
    decode = targets_within(run, DECODE, 0.0, run.span_s)
    swing = (
        f"P went from {min(prefill)} to {max(prefill)}, D from {min(decode)} to {max(decode)}, "
        "but P has the larger swing of work (peak to mean 1.9 against 1.3)"
    )
    return unmet(
        (attained(run) >= 0.95, f"attained {attained(run):.1%} of all arrivals, 95 % expected"),
        (max(prefill) * min(decode) > min(prefill) * max(decode), swing),
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
