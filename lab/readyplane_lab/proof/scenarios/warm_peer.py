"""The cold cluster again, with ready workers that give their weights on."""

from __future__ import annotations

from readyplane.core.startup import WeightTier
from readyplane_lab.proof.evidence import POOLS, growth, ordered, recovers, unmet
from readyplane_lab.proof.port import Scenario
from readyplane_lab.proof.scenarios.cold_cluster import LOAD, SPAN_S, STEP_S, STORE_BYTES_PER_S
from readyplane_lab.simulator.outcome import RunResult

PEER_BYTES_PER_S = 10 * STORE_BYTES_PER_S
STARTUP = {"store_bytes_per_s": STORE_BYTES_PER_S, "peer_bytes_per_s": PEER_BYTES_PER_S}


def check(run: RunResult) -> tuple[str, ...]:
    """Most weights came from peers, and the starts were the shorter for it."""
    started = [x for x in ordered(run) if x.ready_s is not None and x.tier]
    took_s = {
        warm: sorted(
            x.took_s
            for x in started
            if x.took_s is not None and (x.tier == WeightTier.L1_HOST) == warm
        )
        for warm in (True, False)
    }
    warm, cold = took_s[True], took_s[False]
    claims = [
        (growth(run, pool, STEP_S - 30.0, SPAN_S) >= 1, f"{pool} did not grow with the load")
        for pool in POOLS
    ]
    claims += [
        (
            not started or len(warm) >= len(cold),
            f"{len(warm)} starts were fed by a peer, {len(cold)} by the store",
        ),
        (
            not (warm and cold) or warm[len(warm) // 2] < cold[len(cold) // 2],
            "starts that a peer fed took no less time than those that the store fed",
        ),
        recovers(run, 0.92, STEP_S, after_s=300.0),
    ]
    return unmet(*claims)


SCENARIO = Scenario(
    name="warm-peer",
    title="Six times the load in one step; every ready worker gives its weights to two at once",
    requests=LOAD,
    expected=(
        "Both pools grow, at least half of the starts are fed by peers and take less time than "
        "those from the store, and 300 s after the last start of the first minute is ready 92 % "
        "of the arrivals meet both targets."
    ),
    check=check,
    startup=STARTUP,
)
