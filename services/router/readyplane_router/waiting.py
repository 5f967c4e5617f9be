"""A request that waits at a desk, and who makes room when the queue is full.

Owns the order of the queue; `Desk` puts requests in and takes them out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from readyplane.core.work import RequestShape, Slo
from readyplane.ports import Pair
from readyplane_router.bookings import Held

Rank = tuple[int, bool, float, float, int]
"""(less important, cannot be in time, turn among those, deadline, arrival)."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request at the desk.

    Attributes:
        rank: orders the queue: priority, then whether it can be in time, its tenant's turn where it
            cannot and several tenants wait, deadline, arrival.
        work_s: of its prefill where most of it is cached; None before that was looked up.
        held_since_s: when it could first have gone and was held for a better worker instead.
        turn: see `triage.Shares`, once it stepped back.
    """

    reservation_id: str
    shape: RequestShape
    slo: Slo
    rank: Rank
    arrived_s: float
    regime_since_s: float
    granted: asyncio.Future[Held]
    regime: str = ""
    avoid: frozenset[str] = frozenset()
    hashes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    looked_up: tuple[float, dict[str, int]] | None = None
    answer: asyncio.Future[Pair] | None = None
    work_s: float | None = None
    held_since_s: float | None = None
    turn: float = 0.0
    queued: bool = False
    refused: bool = False

    def __lt__(self, other: Waiting) -> bool:
        """Queue order."""
        return self.rank < other.rank

    @property
    def late(self) -> bool:
        """It stepped back."""
        return self.rank[1]

    @property
    def deadline_s(self) -> float:
        """When its first token is due."""
        return self.rank[3]

    def step_back(self, *, in_turns: bool) -> None:
        """Behind those that can be in time, by its tenant's turn or by deadline."""
        turn = self.turn if in_turns else 0.0
        self.rank = (self.rank[0], True, turn, *self.rank[3:])


def to_make_room(queue: Sequence[Waiting], entry: Waiting) -> Waiting | None:
    """Who leaves a full queue for a newcomer: the least important, or the last of a flooding tenant.

    A tenant floods when it has more prompt tokens waiting than the newcomer's would have, at the
    same priority. None: the newcomer itself is refused.
    """
    last = queue[-1]
    if last.shape.priority < entry.shape.priority:
        return last
    tokens: Counter[str] = Counter()
    for one in queue:
        if one.shape.priority == entry.shape.priority:
            tokens[one.shape.tenant] += one.shape.isl
    if not tokens:
        return None
    who, most = tokens.most_common(1)[0]
    if most <= tokens[entry.shape.tenant] + entry.shape.isl:
        return None
    return next(
        one
        for one in reversed(queue)
        if one.shape.tenant == who and one.shape.priority == entry.shape.priority
    )
