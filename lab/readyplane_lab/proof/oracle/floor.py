"""A cost that no policy with zero misses can be below, as a linear programme.

`layers` over whole needs is the optimum of a planner that works cell by cell, and a real run may be
cheaper: it may carry work of one cell over into the next within the slack, so that a need of 2.1
workers is met by two, and it may keep a worker for half a cell, where a plan pays for a whole one.
Nothing of the kind is possible here, because nothing is asserted but what holds for every run:

* Let C(t) be the work done up to t. What has not arrived is not done, what is due is: at the end of
  each cell, C lies between the work due and the work arrived (`Demand`).
* A worker does at most one second of work a second. So what is done in a cell is at most its length
  times y, the mean number of serving workers in it: a real number, and free within the cell.
* A start becomes a step up of the number of serving workers. A mean over cells never rises more in
  total than what it is the mean of, so the sum of the rises of y is at most the number of starts,
  and each costs the seconds billed before it serves.

Every run without a miss therefore is a point of the programme with at most its own bill; the
minimum is below all of them. For the same reason the start is charged with what no start can
undercut, and a drain is not charged at all, since a draining worker still serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, diags_array, eye_array, hstack, vstack

from readyplane.core.work import Slo
from readyplane_lab.proof.oracle.demand import Work
from readyplane_lab.simulator.outcome import Floats

CELLS_MAX = 2000


@dataclass(frozen=True, slots=True)
class Demand:
    """Pieces of work as columns: seconds of one worker, not before `from_s` nor after `due_s`."""

    from_s: Floats
    due_s: Floats
    work_s: Floats

    def arrived(self, at_s: Floats) -> Floats:
        """Work that may have been done by each instant; not what arrives in that very moment."""
        return _upto(self.from_s, self.work_s, at_s, side="left")

    def due(self, at_s: Floats) -> Floats:
        """Work that must have been done by each instant."""
        return _upto(self.due_s, self.work_s, at_s, side="right")


@dataclass(frozen=True, slots=True)
class Floor:
    """Of one pool.

    Attributes:
        workers: mean number in each cell of an optimum. cell_s: length of a cell.
        cost_s: worker-seconds billed at least, starts included. starts: sum of the rises.
    """

    workers: Floats
    cell_s: float
    cost_s: float
    starts: float


def prefill_demand(work: Work, slo: Slo) -> Demand:
    """Prompts: from their arrival to TTFT, or as soon as one worker can where that is later."""
    return Demand(work.at_s, work.at_s + np.maximum(slo.ttft_s, work.prefill_s), work.prefill_s)


def decode_demand(work: Work, slo: Slo) -> Demand:
    """Answers: from arrival to the last token that keeps both targets."""
    first_s = np.maximum(slo.ttft_s, work.prefill_s + slo.tpot_s)
    due_s = work.at_s + first_s + work.allowed_s - slo.tpot_s
    return Demand(work.at_s, due_s, work.decode_s)


def together(demands: Sequence[Demand]) -> Demand:
    """For workers that do all of it, as convertible ones do."""
    columns = [[getattr(d, name) for d in demands] for name in ("from_s", "due_s", "work_s")]
    return Demand(*(np.concatenate(column) for column in columns))


def floor(
    demand: Demand,
    *,
    span_s: float,
    start_s: float,
    initial: int,
    low: int = 0,
    cells: int = CELLS_MAX,
) -> Floor:
    """The least bill of one pool within [0, span].

    Args:
        demand: of `request_work(..., strict=True)`. span_s: of the bill, above 0.
        start_s: seconds billed before a worker serves that no start can undercut.
        initial: workers that serve at 0. low: least that any policy may have.
        cells: of equal length; more of them are tighter.

    Raises:
        ArithmeticError: the solver gave up.
    """
    cell_s = span_s / cells
    ends_s: Floats = cell_s * np.arange(1, cells + 1, dtype=np.float64)
    due, arrived = demand.due(ends_s), demand.arrived(ends_s)
    # Columns: y (mean workers), u (rises), C (work done).
    one = eye_array(cells)
    step = diags_array([np.ones(cells), -np.ones(cells - 1)], offsets=[0, -1])
    none = csr_array((cells, cells))
    rows = vstack([hstack([-cell_s * one, none, step]), hstack([step, -one, none])], format="csr")
    right = np.zeros(2 * cells)
    right[cells] = initial
    found = linprog(
        np.concatenate([np.full(cells, cell_s), np.full(cells, start_s), np.zeros(cells)]),
        A_ub=rows,
        b_ub=right,
        bounds=np.column_stack(
            [
                np.concatenate([np.full(cells, float(low)), np.zeros(cells), due]),
                np.concatenate([np.full(2 * cells, np.inf), np.maximum(arrived, due)]),
            ]
        ),
        method="highs",
    )
    if found.status != 0:
        raise ArithmeticError(f"the floor was not found: {found.message}")
    rises = found.x[cells : 2 * cells]
    return Floor(found.x[:cells], cell_s, float(found.fun), float(rises.sum()))


def _upto(
    when_s: Floats, work_s: Floats, at_s: Floats, *, side: Literal["left", "right"]
) -> Floats:
    order = np.argsort(when_s, kind="stable")
    total = np.concatenate(([0.0], np.cumsum(work_s[order])))
    return total[np.searchsorted(when_s[order], at_s, side=side)]
