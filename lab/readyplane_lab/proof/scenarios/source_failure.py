"""The peer that feeds a scale-up dies half-way; a second one turns out to lie."""

from __future__ import annotations

from readyplane_lab.proof.evidence import POOLS, finishes, growth, recovers, unmet
from readyplane_lab.proof.port import Disturbances, Scenario
from readyplane_lab.proof.scenarios.cold_cluster import LOAD, SPAN_S, STEP_S
from readyplane_lab.proof.scenarios.warm_peer import STARTUP
from readyplane_lab.simulator.faults import SourceDies, SourceLies
from readyplane_lab.simulator.outcome import RunResult


def disturb(_span_s: float, _seed: int) -> Disturbances:
    """Each hits the next peer that gives."""
    return Disturbances((SourceDies(STEP_S), SourceLies(STEP_S + 120.0)))


def check(run: RunResult) -> tuple[str, ...]:
    """Transfers went on elsewhere, and the fleet came to be."""
    claims = [
        (growth(run, pool, STEP_S - 30.0, SPAN_S) >= 1, f"{pool} did not grow with the load")
        for pool in POOLS
    ]
    claims += [recovers(run, 0.9, STEP_S, after_s=300.0), finishes(run, 0.98, besides="refused")]
    if any(name.startswith("sources.") for name in run.counts):  # a fluid moves no bytes
        resumed = run.counts.get("sources.resumed", 0)
        lost = run.counts.get("sources.peers_gone", 0) + run.counts.get("sources.lies", 0)
        claims += [
            (lost >= 1, "no source failed while it gave"),
            (resumed >= lost, f"of {lost:g} transfers that lost their source {resumed:g} went on"),
        ]
    return unmet(*claims)


SCENARIO = Scenario(
    name="source-failure",
    title="The warm peer's scale-up; a peer dies at half of a transfer, later one gives wrong bytes",
    requests=LOAD,
    expected=(
        "Transfers go on from another source at the first missing mark, both pools grow, 98 % of "
        "the requests finish or are refused at once, and 300 s after the last start of the first "
        "minute is ready 90 % meet both targets."
    ),
    check=check,
    disturb=disturb,
    startup=STARTUP,
)
