"""Another revision of the weights while the load stays at four fifths of what is there.

Its KV fits none of the revision before, so a pair is of one generation or it is none. Only the event
mode knows generations; a fluid has nothing to roll out.
"""

from __future__ import annotations

from statistics import median

from readyplane_lab.proof.evidence import POOLS, WARM_S, attains, finishes, ordered, unmet
from readyplane_lab.proof.port import Disturbances, Scenario
from readyplane_lab.simulator.faults import NewArtifact
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.shapes import Mix, Shaped, constant

SPAN_S = 1800.0
PUBLISHED_S = 420.0
QUICK_START_S = 60.0
"""With a surge of one, a small fleet is replaced within the run if starts take no longer."""
PEAK_MAX = 12
ALONE_S_MAX = 10.0
"""Between the last old worker of one stage and that of the other: the last pair goes together."""


def disturb(_span_s: float, _seed: int) -> Disturbances:
    """It is published."""
    return Disturbances((NewArtifact(PUBLISHED_S),))


def check(run: RunResult) -> tuple[str, ...]:
    """Pairs come, pairs go, and nobody notices."""
    new = [x for x in ordered(run, PUBLISHED_S) if x.ready_s is not None]
    old = [x for x in run.lives if x.allocated_s < PUBLISHED_S]
    claims = [finishes(run), attains(run, 0.95, WARM_S)]
    for pool in POOLS:
        first_s = min((x.ready_s or 0.0 for x in new if x.pool == pool), default=run.span_s)
        serving = [x for x in old if x.pool == pool and x.released_s > PUBLISHED_S]
        kept = sum(x.drain_s is None or x.drain_s >= first_s for x in serving)
        claims += [
            (first_s < run.span_s, f"{pool}: nobody served the new revision"),
            (kept >= 1, f"{pool}: all of the old revision went before the new one served"),
        ]
    gone_s = {
        pool: max((x.drain_s or 0.0 for x in old if x.pool == pool), default=0.0) for pool in POOLS
    }
    if all(x.drain_s is not None for x in old):
        alone_s = max(gone_s.values()) - min(gone_s.values())
        claims.append(
            (
                alone_s <= ALONE_S_MAX,
                f"old workers of one stage were left without any of the other for {alone_s:.0f} s",
            )
        )
    starts_s = [x.took_s for x in new if x.took_s is not None]
    if starts_s and median(starts_s) <= QUICK_START_S and len(old) <= PEAK_MAX:
        left = sum(x.drain_s is None and x.released_s > run.span_s - 1.0 for x in old)
        claims.append(
            (left == 0, f"{left} workers of the old revision were still there at the end")
        )
    return unmet(*claims)


SCENARIO = Scenario(
    name="rolling-upgrade",
    title="A steady load while a new revision, whose KV fits no old worker, replaces the old one",
    requests=Shaped(constant(21.0), Mix(hit=constant(0.4)), SPAN_S),
    expected=(
        "The old revision serves until the new one does in both stages, its last pair goes together, "
        "a small fleet with quick starts is replaced within the run, every request finishes, and "
        "95 % meet both targets."
    ),
    check=check,
    disturb=disturb,
)
