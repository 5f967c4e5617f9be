"""What a run of the world came to, request by request, and the same in the words of both modes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from readyplane_lab.simulator.gateway import Record
from readyplane_lab.simulator.outcome import Floats, Life, RunResult, Served


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
            span_s=records[-1].at_s - records[0].at_s,
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
