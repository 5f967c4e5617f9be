"""What standbys cost: GPU-seconds of those that wait, by pool and by what they hold.

Owns the sum of one planner's life, from what the router shows at each look. A standby with a process
only holds no device memory, and its GPUs all the same: nobody else is given them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from readyplane.core.worker import Holds, Worker, WorkerState
from readyplane_planner.decide import POOLS, ROLE_OF, Plan

GAP_S_MAX = 60.0
"""Longer between two looks than this planner slept or was away: of that nothing is known."""


@dataclass(slots=True)
class StandbyTime:
    """GPU-seconds by (pool, holds)."""

    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    _looked_s: float | None = None

    def look(self, workers: Iterable[Worker], plan: Plan, *, now_s: float) -> None:
        """Count from the look before on; who stands by now did so since."""
        since_s, self._looked_s = self._looked_s, now_s
        took_s = 0.0 if since_s is None else now_s - since_s
        if not 0.0 < took_s <= GAP_S_MAX:
            return
        for worker in workers:
            if worker.state is not WorkerState.STANDBY:
                continue
            pool = next(n for n in POOLS if ROLE_OF[n] is worker.offer.counts_as or n == POOLS[-1])
            gpus = _gpus(plan, pool, worker.offer.worker_class)
            key = pool, str(worker.holds or Holds.WEIGHTS)
            self.seconds[key] = self.seconds.get(key, 0.0) + took_s * gpus

    def by_pool(self, pool: str) -> Mapping[str, float]:
        """GPU-seconds of one pool by what was held."""
        return {holds: s for (name, holds), s in self.seconds.items() if name == pool}


def _gpus(plan: Plan, pool: str, worker_class: str) -> int:
    mine = plan.pool(pool)
    for offered in mine.classes:
        if offered.worker_class == worker_class:
            return offered.profile.gpus
    return mine.profile.gpus
