"""The cheapest whole fleet over a known need, exactly, by layers (O_LB).

Minimises `sum_t x(t) * step + beta * sum_t (x(t) - x(t-1))^+` over whole `x(t) >= n(t)`, where a
start costs `beta` worker-seconds. Cut the need into layers: worker `j` is wanted where `n >= j`.
The layers do not depend on each other, and in each of them the only question is whether to keep the
worker over a gap: yes if and only if the gap costs no more than a new start. That takes O(T * K)
for T steps and K workers, where dynamic programming over fleets takes O(T * K^2).

Whoever knows the future starts early, so that a start costs money and never latency.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from readyplane_lab.simulator.outcome import Floats

Whole = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layered:
    """The optimum of one pool.

    Attributes:
        workers: of each step. starts: after the beginning, or for more than the first fleet.
        serving_s, starting_s: worker-seconds of either; together the cost.
    """

    workers: Whole
    starts: int
    serving_s: float
    starting_s: float

    @property
    def cost_s(self) -> float:
        """Worker-seconds billed."""
        return self.serving_s + self.starting_s


def layered(
    need: Floats,
    *,
    step_s: float,
    beta_s: float,
    initial: int | None = None,
    low: int = 0,
    span_s: float | None = None,
) -> Layered:
    """The optimum over a need.

    Args:
        need: least workers of each step, not empty. step_s: of a step. beta_s: billed seconds of a
            start, T_ready and the drain that follows some day.
        initial: workers that are there when the first step begins; the first start of a layer is
            free for them. None: as many as the first step needs.
        low: least workers at any time. span_s: where the last step is cut short.
    """
    wanted = np.maximum(np.ceil(need - 1e-9).astype(np.int64), low)
    there = int(wanted[0]) if initial is None else initial
    workers = np.zeros(len(wanted), dtype=np.int64)
    starts = 0
    for level in range(1, int(wanted.max()) + 1):
        on = wanted >= level
        edges = np.flatnonzero(np.diff(np.concatenate(([False], on, [False]))))
        begins, ends = edges[::2], edges[1::2]
        before = np.concatenate(([0], ends[:-1]))
        gaps = (begins - before) * step_s
        kept = gaps <= beta_s
        kept[0] = kept[0] and level <= there
        starts += int(np.count_nonzero(~kept))
        for begin, end in zip(before[kept], begins[kept], strict=True):
            on[begin:end] = True
        workers += on
    last_s = step_s if span_s is None else max(0.0, span_s - step_s * (len(wanted) - 1))
    serving_s = float(workers[:-1].sum() * step_s + workers[-1] * last_s)
    return Layered(workers, starts, serving_s, beta_s * starts)
