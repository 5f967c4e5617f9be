"""What a run shows of the planner, in the terms in which a scenario says what it expects.

Owns the readings that the checks of scenarios are made of: targets, starts and kept promises within
a window of the run. All times are seconds since the first arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from readyplane.core.work import Slo
from readyplane_lab.proof.measure import reversals
from readyplane_lab.proof.port import SLO_DEFAULT
from readyplane_lab.simulator.outcome import Life, RunResult

PREFILL, DECODE = POOLS = ("prefill", "decode")
NOMINAL_T_READY_S = 60.0
"""Of the centre point. Scenarios that depend on T_ready are laid out for it."""
WARM_S = 400.0
"""From then on nobody is excused by the fleet of the beginning, however long starts take."""


def unmet(*claims: tuple[bool, str]) -> tuple[str, ...]:
    """The sentences of the claims that are not true."""
    return tuple(sentence for true, sentence in claims if not true)


def moves(run: RunResult, pool: str) -> list[tuple[float, int]]:
    """(seconds, wanted workers) of a pool whenever any target moved."""
    return [(at_s, wanted[pool == DECODE]) for at_s, *wanted in run.targets]


def targets_within(run: RunResult, pool: str, begin_s: float, end_s: float) -> Sequence[int]:
    """Everything that was wanted of a pool from `begin_s` to `end_s`, at least one value."""
    before = [wanted for at_s, wanted in moves(run, pool) if at_s <= begin_s]
    after = [wanted for at_s, wanted in moves(run, pool) if begin_s < at_s <= end_s]
    return [*before[-1:], *after] or [0]


def mean_target(run: RunResult, pool: str, begin_s: float, end_s: float) -> float:
    """What was wanted of a pool, on average over time."""
    steps = [*moves(run, pool), (math.inf, 0)]
    total = sum(
        wanted * max(0.0, min(end_s, until_s) - max(begin_s, at_s))
        for (at_s, wanted), (until_s, _) in pairwise(steps)
    )
    return total / (end_s - begin_s)


def growth(run: RunResult, pool: str, begin_s: float, end_s: float) -> int:
    """The most by which a pool's target rose above what it was at `begin_s`."""
    wanted = targets_within(run, pool, begin_s, end_s)
    return max(wanted) - wanted[0]


def shrinkage(run: RunResult, pool: str, begin_s: float, end_s: float) -> int:
    """The most by which a pool's target fell below what it was at `begin_s`."""
    wanted = targets_within(run, pool, begin_s, end_s)
    return wanted[0] - min(wanted)


def a_few(workers: int) -> int:
    """What a fleet of that size may move for no reason: one, or a seventh of a large one."""
    return max(1, math.ceil(workers / 7))


def quick_turns(run: RunResult, pool: str) -> int:
    """Reversals of a pool whose legs are shorter than two starts, as starts took in this run."""
    took_s = [x.took_s for x in ordered(run) if x.took_s is not None]
    start_s = median(took_s) if took_s else NOMINAL_T_READY_S
    return reversals(moves(run, pool), 2 * start_s)


def attained(
    run: RunResult, begin_s: float = 0.0, end_s: float = math.inf, *, slo: Slo = SLO_DEFAULT
) -> float:
    """Share of a window's arrivals for which both targets were met; 1 where nothing arrived."""
    served = run.served
    met = (served.ttft_s <= slo.ttft_s) & (served.tpot_s <= slo.tpot_s)
    return _share(run, met, begin_s, end_s)


def answered(run: RunResult, begin_s: float = 0.0, end_s: float = math.inf) -> float:
    """Share of a window's arrivals that got a first token; 1 where nothing arrived."""
    return _share(run, np.isfinite(run.served.ttft_s), begin_s, end_s)


def attains(
    run: RunResult, share: float, begin_s: float = 0.0, end_s: float = math.inf
) -> tuple[bool, str]:
    """The claim that at least that share of a window's arrivals met both targets."""
    found = attained(run, begin_s, end_s)
    when = "" if begin_s == 0 and end_s == math.inf else f" from {begin_s:g} to {end_s:g} s"
    return found >= share, f"{found:.1%} of the arrivals{when} met both targets, not {share:.0%}"


def finishes(run: RunResult, share: float = 1.0, *, besides: str = "") -> tuple[bool, str]:
    """The claim that at least that share of all requests finished, or ended as `besides` says."""
    ended = sum(run.outcomes.values())
    others = {n: c for n, c in run.outcomes.items() if n not in {"finished", besides}}
    told = ", ".join(f"{count} {name}" for name, count in sorted(others.items()))
    return sum(others.values()) <= (1 - share) * ended, f"of {ended} requests ended: {told}"


def recovers(run: RunResult, share: float, since_s: float, *, after_s: float) -> tuple[bool, str]:
    """The claim that a load that rose at `since_s` is served, once what was ordered is there.

    Judged from `after_s` after the last worker ordered within a minute is ready; a run that ends
    before that cannot tell.
    """
    ready_s = [x.ready_s for x in ordered(run, since_s, since_s + 60.0) if x.ready_s is not None]
    begin_s = max([since_s, *ready_s]) + after_s
    if begin_s >= run.span_s:
        return True, ""
    return attains(run, share, begin_s)


def ordered(run: RunResult, begin_s: float = 0.0, end_s: float = math.inf) -> list[Life]:
    """Workers that the planner ordered within a window."""
    return [x for x in run.lives if x.decision_id and begin_s <= x.allocated_s < end_s]


def _share(run: RunResult, those: np.ndarray, begin_s: float, end_s: float) -> float:
    served = run.served
    inside = (served.at_s >= begin_s) & (served.at_s < end_s)
    total = float(served.weight[inside].sum())
    return float(served.weight[inside & those].sum()) / total if total else 1.0
