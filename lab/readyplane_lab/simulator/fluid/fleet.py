"""Workers of the fluid: allocations with their dates, and the bill that follows from them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from readyplane.core.profile import ClassProfile
from readyplane.core.startup import WeightTier
from readyplane.core.worker import WorkerState
from readyplane_lab.simulator.outcome import Life

LEASE_S = 6.0
"""A worker that is gone without a word is counted by the router for so long."""
NEWS_S = 0.5
"""A worker that drains says so often whether it is idle."""


@dataclass(slots=True, eq=False)
class FluidWorker:
    """One allocation.

    Attributes:
        ordinal: of this start in its pool. drain_s, leaves_s: asked to drain; free to leave then.
        lost_until_s: crashed, and the router does not know before then. hidden: the
            router does not know it now.
        free_s: when its prefill queue is worked off. jobs: (done, row, tokens) of it.
        standby: ordered to wait; stood_s: loaded since. asked: told to serve.
        start_s: when its start began, None for with the order: told to serve once it was loaded.
        prefixes: names of those its cache holds. promised, computed: prompt tokens; seen_*: as of the last look.
    """

    worker_id: str
    pool: str
    ordinal: int
    profile: ClassProfile
    decision_id: str
    allocated_s: float
    provisioned_s: float = 0.0
    ready_s: float | None = None
    drain_s: float | None = None
    leaves_s: float | None = None
    released_s: float | None = None
    lost_until_s: float | None = None
    hidden: bool = False
    failure: str = ""
    tier: WeightTier = WeightTier.UNKNOWN
    free_s: float = 0.0
    jobs: deque[tuple[float, int, float]] = field(default_factory=deque)
    prefixes: set[int] = field(default_factory=set)
    promised: float = 0.0
    computed: float = 0.0
    seen_computed: float = 0.0
    seen_promised: float = 0.0
    standby: bool = False
    stood_s: float | None = None
    asked: bool = False
    start_s: float | None = None

    @property
    def named(self) -> tuple[object, ...]:
        """What names its start among all, for the draws; standbys are counted apart."""
        return (self.pool, "standby", self.ordinal) if self.standby else (self.pool, self.ordinal)

    @property
    def loaded_s(self) -> float | None:
        """When its start was over, to serve or to wait."""
        return self.ready_s if self.stood_s is None else self.stood_s

    @property
    def serving(self) -> bool:
        """Ready or draining."""
        return self.ready_s is not None and self.released_s is None

    @property
    def state(self) -> WorkerState:
        """As the router would say; allocated and not registered: ORDERED."""
        if self.ready_s is not None:
            return WorkerState.READY if self.drain_s is None else WorkerState.DRAINING
        if self.stood_s is not None:
            return WorkerState.STANDBY
        return WorkerState.PROVISIONED

    def told(self, now_s: float) -> bool:
        """Whether the router knows it: registered, and its lease has not run out."""
        if self.released_s is not None:
            return self.lost_until_s is not None and now_s < self.lost_until_s
        return self.provisioned_s <= now_s and not self.hidden

    def leave_s(self, idle_s: float) -> float:
        """When it is gone: it heard of the drain at once, and says with the first renewal after it
        has become idle that it is.
        """
        heard_s = self.drain_s or 0.0
        return heard_s + NEWS_S * max(1, math.ceil((idle_s - heard_s) / NEWS_S))

    def life(self, end_s: float) -> Life:
        """For the result."""
        released_s = end_s if self.released_s is None else self.released_s
        waits: tuple[tuple[float, float], ...] = ()
        if self.stood_s is not None:
            waits = ((self.stood_s, released_s if self.start_s is None else self.start_s),)
        return Life(
            worker_id=self.worker_id,
            pool=self.pool,
            worker_class=self.profile.worker_class,
            gpus=self.profile.gpus,
            price_per_gpu_hour=self.profile.price_per_gpu_hour,
            allocated_s=self.allocated_s,
            ready_s=self.ready_s,
            drain_s=self.drain_s,
            released_s=released_s,
            tier=str(self.tier),
            failure=self.failure,
            decision_id=self.decision_id,
            start_s=self.allocated_s if self.start_s is None else self.start_s,
            waits=waits,
        )
