"""The tenth day of ServeGen's m-large: a working day with two half-hour bursts in the evening.

Of its fourteen days the one with the highest peak to mean (2.7, with day 11, whose peak is the
first half-hour only): below 100 requests/s at seven in the morning, 523 at its busiest, and one step
of 1.8 means within ten minutes. A static fleet for the peak idles most of the day.
"""

from __future__ import annotations

from collections.abc import Sequence

from readyplane_lab.proof.evidence import PREFILL, attains, mean_target, targets_within, unmet
from readyplane_lab.proof.port import Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_lab.workload.servegen import servegen_day

DAY = 9
PUBLISHED = 0.03
"""Share of the published rates at scale 1: about 8 workers at the busiest."""


def requests(scale: float, seed: int) -> Sequence[WorkloadRequest]:
    """Drawn from the client rates."""
    return servegen_day("m-large", DAY, PUBLISHED * scale, seed)


def check(run: RunResult) -> tuple[str, ...]:
    """The night is cheap and the evening is served."""
    most = max(targets_within(run, PREFILL, 0.0, run.span_s))
    night = mean_target(run, PREFILL, 6 * 3600.0, 9 * 3600.0)
    return unmet(
        attains(run, 0.95),
        (night <= 0.6 * most, f"P was at {night:.1f} in the quiet morning, {most} at most"),
    )


SCENARIO = Scenario(
    name="servegen-large-day",
    title="ServeGen m-large, day 10 of 14, drawn per client: peak to mean 2.7, two evening bursts",
    kind="replay",
    requests=requests,
    expected=(
        "The fleet follows the day: P in the quiet morning (6 to 9 h) is at most 60 % of its "
        "evening peak, and at least 95 % of the arrivals meet both targets."
    ),
    check=check,
)
