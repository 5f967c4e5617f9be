"""Six hours of the twelfth day of ServeGen's m-small: two bursts out of a level evening.

Of its fourteen days the one with the highest peak to mean (2.7): from 1,100 to 3,160 and to 3,880
requests/s within ten minutes each, for twenty minutes. Prompts are so short (median 40 tokens) that
a fleet of any size serves hundreds of requests a second, so only the hours around the bursts are
drawn, from 17 h on.
"""

from __future__ import annotations

from collections.abc import Sequence

from readyplane_lab.proof.evidence import PREFILL, attains, growth, shrinkage, unmet
from readyplane_lab.proof.port import Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_lab.workload.servegen import servegen_day

DAY, FROM_H, HOURS = 11, 17.0, 6.0
PUBLISHED = 0.026
"""Share of the published rates at scale 1: about 8 workers at the busiest."""
FIRST_S, SECOND_S, LEVEL_S = 2 * 3600.0, 3 * 3600.0, 4 * 3600.0


def requests(scale: float, seed: int) -> Sequence[WorkloadRequest]:
    """Drawn from the client rates."""
    return servegen_day("m-small", DAY, PUBLISHED * scale, seed, from_h=FROM_H, hours=HOURS)


def check(run: RunResult) -> tuple[str, ...]:
    """Both bursts are followed, up and down."""
    claims = [attains(run, 0.9)]
    for begin_s, end_s in ((FIRST_S, SECOND_S), (SECOND_S, LEVEL_S)):
        grown = growth(run, PREFILL, begin_s, end_s)
        claims.append((grown >= 1, f"P did not grow in the burst after {begin_s / 3600:g} h"))
    fallen = shrinkage(run, PREFILL, SECOND_S + 1800.0, run.span_s)
    claims.append((fallen >= 1, "P stayed as large as the bursts made it"))
    return unmet(*claims)


SCENARIO = Scenario(
    name="servegen-small-day",
    title="ServeGen m-small, day 12 of 14 from 17 to 23 h, drawn per client: bursts to 2.4 means",
    kind="replay",
    requests=requests,
    expected=(
        "P grows in both twenty-minute bursts and shrinks after them; "
        "at least 90 % of the arrivals meet both targets."
    ),
    check=check,
)
