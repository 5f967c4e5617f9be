"""What a simulated run came to, whichever mode ran it: allocations, requests, decisions, series.

The event mode and the fluid mode both end in a `RunResult`, so that everything that measures or
draws is written once. Times are virtual seconds since the first arrival, negative before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Life:
    """One allocation, from the moment it is paid for until it is given back.

    Attributes:
        pool: `prefill` or `decode`. worker_class: of its profile. gpus: of the worker.
        ready_s, drain_s: None where it never served, never drained.
        start_s: when the start that made it ready began: with the order, for a standby that was
            loaded or imported with the word to serve. None: with the order.
        released_s: end of the bill; the run's end where it lived on.
        tier: where its weights came from. failure: why it ended, empty for a release.
        decision_id: what ordered it, empty for the fleet of the beginning.
        waits: from when to when it stood by: it has started, and serves nobody.
    """

    worker_id: str
    pool: str
    worker_class: str
    gpus: int
    price_per_gpu_hour: float
    allocated_s: float
    ready_s: float | None
    drain_s: float | None
    released_s: float
    tier: str = ""
    failure: str = ""
    decision_id: str = ""
    start_s: float | None = None
    waits: tuple[tuple[float, float], ...] = ()

    @property
    def took_s(self) -> float | None:
        """T_ready in seconds, without the time that a standby waited; None: it never served."""
        if self.ready_s is None:
            return None
        return self.ready_s - (self.allocated_s if self.start_s is None else self.start_s)


@dataclass(frozen=True, slots=True)
class Served:
    """All arrivals as columns of one length, in order of arrival.

    Attributes:
        at_s: arrival. isl, osl: tokens. ttft_s, tpot_s: inf where there was none (a refusal, a
            time-out, a failure). weight: requests that the row stands for; 1 in the event mode.
    """

    at_s: Floats
    isl: Floats
    osl: Floats
    ttft_s: Floats
    tpot_s: Floats
    weight: Floats

    def __len__(self) -> int:
        return len(self.at_s)


@dataclass(frozen=True, slots=True)
class RunResult:
    """One policy on one workload.

    Attributes:
        span_s: first to last arrival: the window that is billed. served: every arrival.
        outcomes: requests by how they ended (`finished`, `refused`, `timed_out`, `failed`).
        targets: (seconds, prefill, decode) whenever a target moved, first at 0.
        series: columns by name, `t_s` first. decisions: documents of those that changed something.
        counts: anything countable: `guard_overrides`, `fallbacks`, `repairs`, `preemptions`, ...
        planner_s: CPU-seconds of each tick, measured; not part of a report that must repeat.
    """

    span_s: float
    lives: tuple[Life, ...]
    served: Served
    outcomes: Mapping[str, int]
    targets: tuple[tuple[float, int, int], ...]
    series: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    decisions: tuple[Mapping[str, Any], ...] = ()
    counts: Mapping[str, float] = field(default_factory=dict)
    planner_s: tuple[float, ...] = ()
