"""The figures of one run, the same for every policy and for both modes of the simulator.

Owns what each figure means. Hands `Scores` to whoever compares; a figure that a run cannot tell is
None, never zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from readyplane.core.work import Slo
from readyplane_lab.proof.port import Hindsight
from readyplane_lab.simulator.outcome import Floats, Life, RunResult, Served

EXCESS_CAP = 10.0
"""Most that one request adds to a violation, in multiples of its target; a miss without an answer
adds just that."""
POOLS = ("prefill", "decode")
IDLE = re.compile(r"gpu_s\.\w+\.idle")
"""Counts of the event mode: GPU-seconds in which a ready worker had nothing to do."""


@dataclass(frozen=True, slots=True)
class Times:
    """What a change of the fleet costs in this setting, seconds: a start, a drain of (P, D)."""

    t_ready_s: float
    drain_s: tuple[float, float]

    @property
    def turn_s(self) -> tuple[float, float]:
        """There and back again sooner than that is a reversal, by pool."""
        return (2 * (self.t_ready_s + self.drain_s[0]), 2 * (self.t_ready_s + self.drain_s[1]))


@dataclass(frozen=True, slots=True)
class Scores:
    """One run in figures.

    Attributes:
        arrivals: requests. attainment: share of all arrivals with both targets met.
        violation: token-weighted excess over the targets, in tokens (each request capped).
        excess_s: seconds late to the first token, summed over answered requests.
        ttft_p50_s ... tpot_p99_s: of answered requests; None when there were none.
        gpu_hours: billed in the window; boot, standby, ready, drain: its parts; never: GPU-hours of
            workers that neither served nor stood by. cost: with prices. peak_cost_per_h: at the dearest moment.
        starts: ordered in the window. wasted: of them, released before serving one T_ready.
        reversals: changes of direction whose legs, before and after, were both too short to pay.
        short_s: seconds with fewer ready workers than needed. effect_s: median length of such a
            time (demand exceeds capacity until it does no more); None without one.
        ready_after_s: median of order to ready. idle_gpu_hours: None where the run does not tell.
        counts: whatever the run counted. tick_p50_s, tick_p99_s: of the planner, CPU.
    """

    arrivals: int
    attainment: float
    outcomes: Mapping[str, int]
    violation: float
    excess_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None
    tpot_p99_s: float | None
    gpu_hours: float
    boot_gpu_hours: float
    standby_gpu_hours: float
    ready_gpu_hours: float
    drain_gpu_hours: float
    never_gpu_hours: float
    idle_gpu_hours: float | None
    cost: float
    peak_cost_per_h: float
    starts: int
    wasted: int
    reversals: int
    reversals_per_h: float
    short_s: float
    effect_s: float | None
    ready_after_s: float | None
    counts: Mapping[str, float]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def score(run: RunResult, *, slo: Slo, times: Times, hindsight: Hindsight) -> Scores:
    """All figures of one run.

    Args:
        slo: both targets. times: of the setting, for reversals and waste.
        hindsight: what was needed when, for the times of short supply.
    """
    served, span_s = run.served, run.span_s
    total = float(served.weight.sum())
    met = (served.ttft_s <= slo.ttft_s) & (served.tpot_s <= slo.tpot_s)
    ttft, tpot = _quantiles(served.ttft_s, served.weight), _quantiles(served.tpot_s, served.weight)
    bill = _bill(run.lives, span_s)
    started = [life for life in run.lives if life.allocated_s >= 0 and life.decision_id]
    turns = sum(
        reversals([(t, (p, d)[i]) for t, p, d in run.targets], times.turn_s[i]) for i in range(2)
    )
    short = _short(run.lives, hindsight, span_s)
    waits = [life.took_s for life in started if life.took_s is not None]
    idle = [s for name, s in run.counts.items() if IDLE.fullmatch(name)]
    return Scores(
        arrivals=round(total),
        attainment=float(served.weight[met].sum() / total) if total else 1.0,
        outcomes=dict(run.outcomes),
        violation=_violation(served, slo),
        excess_s=_excess(served, slo),
        ttft_p50_s=ttft[0],
        ttft_p95_s=ttft[1],
        ttft_p99_s=ttft[2],
        tpot_p50_s=tpot[0],
        tpot_p95_s=tpot[1],
        tpot_p99_s=tpot[2],
        gpu_hours=sum(bill.values()) / 3600,
        boot_gpu_hours=bill["boot"] / 3600,
        standby_gpu_hours=bill["standby"] / 3600,
        ready_gpu_hours=bill["ready"] / 3600,
        drain_gpu_hours=bill["drain"] / 3600,
        never_gpu_hours=bill["never"] / 3600,
        idle_gpu_hours=sum(idle) / 3600 if idle else None,
        cost=_cost(run.lives, span_s),
        peak_cost_per_h=_peak_cost(run.lives, span_s),
        starts=len(started),
        wasted=sum(wasted(life, times.t_ready_s, span_s) for life in started),
        reversals=turns,
        reversals_per_h=turns / max(1e-9, span_s / 3600),
        short_s=float(sum(b - a for a, b in short)),
        effect_s=float(np.median([b - a for a, b in short])) if short else None,
        ready_after_s=float(np.median(waits)) if waits else None,
        counts=dict(run.counts),
    )


def wasted(life: Life, t_ready_s: float, span_s: float) -> bool:
    """Whether a start did not pay: given back before it had served for one T_ready.

    What the end of the run cut off is nobody's waste, nor is what a crash or a reclaim took.
    """
    if life.released_s >= span_s or life.failure:
        return False
    end_s = life.released_s if life.drain_s is None else life.drain_s
    return life.ready_s is None or end_s - life.ready_s < t_ready_s


def reversals(targets: Sequence[tuple[float, int]], turn_s: float) -> int:
    """Changes of direction with a short leg on either side.

    A leg lasts from the first move in its direction to the first move in the other; the last one is
    cut off by the end of the run and counts as long. Up for the day
    and down for the night is two long legs and no reversal; up and down within `turn_s`, and up
    again within `turn_s`, is one: it paid a start and a drain and served nobody.
    """
    begins: list[float] = []
    direction = 0
    for (_, before), (at_s, after) in pairwise(targets):
        step = (after > before) - (after < before)
        if step and step != direction:
            begins.append(at_s)
            direction = step
    legs = [b - a for a, b in pairwise([*begins, math.inf])]
    return sum(a < turn_s and b < turn_s for a, b in pairwise(legs))


def ready_series(lives: Sequence[Life], pool: str, at_s: Floats) -> Floats:
    """Workers of a pool that serve new requests at each of the given times."""
    begin = np.sort([x.ready_s for x in lives if x.pool == pool and x.ready_s is not None])
    end = np.sort(
        [
            x.released_s if x.drain_s is None else x.drain_s
            for x in lives
            if x.pool == pool and x.ready_s is not None
        ]
    )
    up = np.searchsorted(begin, at_s, side="right")
    return np.asarray(up - np.searchsorted(end, at_s, side="right"), dtype=float)


def held_series(lives: Sequence[Life], pool: str, at_s: Floats) -> Floats:
    """Workers of a pool that are paid for at each of the given times."""
    begin = np.sort([x.allocated_s for x in lives if x.pool == pool])
    end = np.sort([x.released_s for x in lives if x.pool == pool])
    up = np.searchsorted(begin, at_s, side="right")
    return np.asarray(up - np.searchsorted(end, at_s, side="right"), dtype=float)


def _quantiles(values: Floats, weight: Floats) -> tuple[float | None, float | None, float | None]:
    keep = np.isfinite(values)
    if not keep.any():
        return None, None, None
    order = np.argsort(values[keep], kind="stable")
    x, w = values[keep][order], weight[keep][order]
    up = np.cumsum(w)
    found = [float(x[min(len(x) - 1, np.searchsorted(up, q * up[-1]))]) for q in (0.5, 0.95, 0.99)]
    return found[0], found[1], found[2]


def _violation(served: Served, slo: Slo) -> float:
    late = np.clip(served.ttft_s / slo.ttft_s - 1, 0, EXCESS_CAP) * served.isl
    slow = np.clip(served.tpot_s / slo.tpot_s - 1, 0, EXCESS_CAP) * served.osl
    return float(((late + slow) * served.weight).sum())


def _excess(served: Served, slo: Slo) -> float:
    answered = np.isfinite(served.ttft_s)
    late = np.maximum(0.0, served.ttft_s[answered] - slo.ttft_s)
    return float((late * served.weight[answered]).sum())


def _bill(lives: Sequence[Life], span_s: float) -> dict[str, float]:
    """GPU-seconds within the window by what the worker was doing."""
    bill = dict.fromkeys(("boot", "standby", "ready", "drain", "never"), 0.0)

    def add(part: str, life: Life, begin_s: float, end_s: float) -> None:
        bill[part] += life.gpus * max(0.0, min(span_s, end_s) - max(0.0, begin_s))

    for life in lives:
        serves_s = life.released_s if life.ready_s is None else life.ready_s
        began_s = life.allocated_s
        for stood_s, told_s in life.waits:
            add("boot", life, began_s, stood_s)
            add("standby", life, stood_s, told_s)
            began_s = told_s
        started = life.ready_s is not None or life.waits
        add("boot" if started else "never", life, began_s, serves_s)
        if life.ready_s is not None:
            drain_s = life.released_s if life.drain_s is None else life.drain_s
            add("ready", life, life.ready_s, drain_s)
            add("drain", life, drain_s, life.released_s)
    return bill


def _cost(lives: Sequence[Life], span_s: float) -> float:
    return sum(
        life.gpus
        * life.price_per_gpu_hour
        * max(0.0, min(span_s, life.released_s) - max(0.0, life.allocated_s))
        / 3600
        for life in lives
    )


def _peak_cost(lives: Sequence[Life], span_s: float) -> float:
    events: list[tuple[float, float]] = []
    for life in lives:
        begin_s, end_s = max(0.0, life.allocated_s), min(span_s, life.released_s)
        if end_s > begin_s:
            rate = life.gpus * life.price_per_gpu_hour
            events += [(begin_s, rate), (end_s, -rate)]
    now = most = 0.0
    for _, rate in sorted(events):
        now += rate
        most = max(most, now)
    return most


def _short(lives: Sequence[Life], hindsight: Hindsight, span_s: float) -> list[tuple[float, float]]:
    """Times in which either pool had fewer ready workers than it needed."""
    at_s: Floats = np.arange(len(hindsight.need_p), dtype=np.float64) * hindsight.step_s
    at_s = at_s[at_s < span_s]
    under = np.zeros(len(at_s), dtype=bool)
    for pool, need in zip(POOLS, (hindsight.need_p, hindsight.need_d), strict=True):
        under |= ready_series(lives, pool, at_s + hindsight.step_s / 2) < need[: len(at_s)]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], under, [False]]).astype(int)))
    return [
        (float(a * hindsight.step_s), float(b * hindsight.step_s))
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]
