"""The Mooncake conversation hour: long prompts, real prefixes, calm."""

from __future__ import annotations

from collections.abc import Sequence

from readyplane_lab.proof.evidence import DECODE, PREFILL, attained, targets_within, unmet
from readyplane_lab.proof.port import Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.public import public_trace
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_lab.workload.scaling import scaled

TITLE = "Mooncake conversation hour, 12,031 requests with their prefixes, ticks of 3 s jittered"


def requests(scale: float, seed: int) -> Sequence[WorkloadRequest]:
    """The trace with its ticks spread, repeated with jitter; every copy has prefixes of its own."""
    return scaled(public_trace("mooncake_conversation.jsonl.zst", seed=seed).requests, scale, seed)


def check(run: RunResult) -> tuple[str, ...]:
    """Steady load, steady fleet."""
    p, d = (targets_within(run, pool, 600.0, run.span_s) for pool in (PREFILL, DECODE))
    return unmet(
        (attained(run) >= 0.9, f"attained {attained(run):.1%} of all arrivals, 90 % expected"),
        (max(p) <= 2 * min(p) + 1, f"P went from {min(p)} to {max(p)} on a steady load"),
        (max(d) <= 2 * min(d) + 1, f"D went from {min(d)} to {max(d)} on a steady load"),
    )


SCENARIO = Scenario(
    name="mc-conv",
    title=TITLE,
    kind="replay",
    requests=requests,
    expected=(
        "Work within 1.3 of its mean: neither pool doubles after the first ten minutes, and at "
        "least 90 % of the arrivals meet both targets (prompts beyond 50,000 tokens cannot)."
    ),
    check=check,
    worker_class="h200-llama8b-fp8",
)
