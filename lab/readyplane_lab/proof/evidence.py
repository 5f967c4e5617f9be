"""What a run shows of the planner, in the terms in which a scenario says what it expects.

Owns the readings that the checks of scenarios are made of: targets, ready workers and kept
promises within a window of the run. All times are seconds since the first arrival.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from readyplane.core.work import Slo
from readyplane_lab.proof.port import SLO_DEFAULT
from readyplane_lab.simulator.outcome import RunResult

PREFILL, DECODE = "prefill", "decode"


def unmet(*claims: tuple[bool, str]) -> tuple[str, ...]:
    """The sentences of the claims that are not true."""
    return tuple(sentence for true, sentence in claims if not true)


def target(run: RunResult, pool: str, at_s: float) -> int:
    """What was wanted of a pool at a moment."""
    found = 0
    for moved_s, *wanted in run.targets:
        if moved_s > at_s and found:
            break
        found = wanted[pool == DECODE]
    return found


def targets_within(run: RunResult, pool: str, begin_s: float, end_s: float) -> Sequence[int]:
    """Everything that was wanted of a pool from `begin_s` to `end_s`, at least one value."""
    moves = [wanted[pool == DECODE] for at_s, *wanted in run.targets if begin_s < at_s <= end_s]
    return [target(run, pool, begin_s), *moves]


def growth(run: RunResult, pool: str, begin_s: float, end_s: float) -> int:
    """The most by which a pool's target rose above what it was at `begin_s`."""
    wanted = targets_within(run, pool, begin_s, end_s)
    return max(wanted) - wanted[0]


def attained(
    run: RunResult, begin_s: float = 0.0, end_s: float = np.inf, *, slo: Slo = SLO_DEFAULT
) -> float:
    """Share of a window's arrivals for which both targets were met; 1 where nothing arrived."""
    served = run.served
    inside = (served.at_s >= begin_s) & (served.at_s < end_s)
    met = (served.ttft_s <= slo.ttft_s) & (served.tpot_s <= slo.tpot_s)
    total = float(served.weight[inside].sum())
    return float(served.weight[inside & met].sum()) / total if total else 1.0


def unfinished(run: RunResult) -> int:
    """Requests that ended in any other way than finished."""
    return sum(count for outcome, count in run.outcomes.items() if outcome != "finished")
