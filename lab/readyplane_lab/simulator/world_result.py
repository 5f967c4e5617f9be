"""What a run of the world came to, request by request, and the same in the words of both modes.

Owns how what happened is told: times on the clock of the run, which begins with the first arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from readyplane_lab.simulator.gateway import Record
from readyplane_lab.simulator.outcome import Floats, Life, RunResult, Served
from readyplane_lab.simulator.worker import SimWorker


@dataclass(frozen=True, slots=True)
class WorldResult:
    """What a run came to, with every request's record. Series are sampled every 5 virtual seconds.

    Attributes:
        seconds: first arrival to last record. began_wall_s: the first arrival on the virtual wall
            clock, on which decisions are dated.
    """

    records: tuple[Record, ...]
    asked: tuple[int, ...]
    lives: tuple[Life, ...]
    decisions: tuple[dict[str, Any], ...]
    series: Mapping[str, Any]
    targets: tuple[tuple[float, int, int], ...]
    counts: Mapping[str, float]
    seconds: float
    began_wall_s: float
    planner_s: tuple[float, ...] = field(default=(), compare=False)

    def run(self) -> RunResult:
        """The same in the words that both modes share."""
        records = self.records

        def column(name: str) -> Floats:
            values = [getattr(r, name) for r in records]
            return np.array([np.inf if v is None else v for v in values], dtype=np.float64)

        return RunResult(
            span_s=records[-1].at_s,
            lives=self.lives,
            served=Served(
                at_s=column("at_s"),
                isl=column("isl"),
                osl=np.array(self.asked, dtype=np.float64),
                ttft_s=column("ttft_s"),
                tpot_s=column("tpot_s"),
                weight=np.ones(len(records)),
            ),
            outcomes=dict(sorted(Counter(r.outcome for r in records).items())),
            targets=self.targets,
            series=self.series,
            decisions=tuple({**d, "at_s": d["at_s"] - self.began_wall_s} for d in self.decisions),
            counts=self.counts,
            planner_s=self.planner_s,
        )


def lives_of(
    worker: SimWorker, *, prices: Mapping[str, float], began_s: float, ended_s: float
) -> Iterator[Life]:
    """One allocation on the clock of the run, a life for each stage that it served.

    `prices` are those that are not the profile's.
    """

    def since(at_s: float | None) -> float | None:
        return None if at_s is None else at_s - began_s

    worker_class = worker.order.worker_class
    phases = (*worker.past, worker.phase)
    for number, phase in enumerate(phases):
        released_s = ended_s if phase.released_s is None else min(ended_s, phase.released_s)
        yield Life(
            worker_id=worker.order.worker_id + ("-flip" * number),
            pool=phase.pool,
            worker_class=worker_class,
            gpus=worker.profile.gpus,
            price_per_gpu_hour=prices.get(worker_class, worker.profile.price_per_gpu_hour),
            allocated_s=phase.allocated_s - began_s,
            ready_s=since(phase.ready_s),
            drain_s=since(phase.drain_s),
            released_s=released_s - began_s,
            tier=str(phase.tier),
            failure=worker.failure if number == len(phases) - 1 else "",
            decision_id=worker.order.scale_decision_id,
            start_s=phase.start_s - began_s,
            waits=tuple((a - began_s, b - began_s) for a, b in phase.waits),
        )


def row_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a series keeps of the planner's state."""
    row: dict[str, Any] = {}
    for name, pool in (state.get("pools") or {}).items():
        for key in ("desired", "provisioned", "ready", "draining", "load", "queue_tokens"):
            row[f"{name}.{key}"] = pool.get(key)
    for name in ("ttft", "tpot"):
        actual = state.get("latency", {}).get(name, {}).get("actual", {})
        row[f"{name}.p90_s"] = actual.get("p90_s") if actual.get("count") else None
    return row


def from_zero(
    targets: Sequence[tuple[float, int, int]], began_s: float
) -> tuple[tuple[float, int, int], ...]:
    """Targets on the clock of the run: those in force at its beginning stand at 0."""
    before = [t for t in targets if t[0] <= began_s]
    after = [(at_s - began_s, p, d) for at_s, p, d in targets if at_s > began_s]
    first = [(0.0, *before[-1][1:])] if before else []
    if not first and after:
        first = [(0.0, *after.pop(0)[1:])]
    return (*first, *after)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns; None where a row lacks one."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}
