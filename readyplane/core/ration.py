"""An order of admission: who is refused while not everybody can be served, and what came by priority.

Owns the words that planner and router share for it; the planner gives the order, the router follows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ration:
    """Who is admitted while not everybody can be, for a bounded time.

    Attributes:
        priority: whoever is less important is refused; of those who have it, `admit_share` of their
            prompt tokens is admitted, 0 to 1; the more important are not touched.
        ttl_s: of an order, how long it lasts; of one in force, how long it still does.
        retry_after_s: when whoever is refused may come again.
    """

    priority: int
    admit_share: float
    ttl_s: float
    reason: str = ""
    scale_decision_id: str = ""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PrioritySignals:
    """What arrived with one priority since the router began; `rationed_total` of it was refused by
    an order of admission.
    """

    priority: int
    arrivals_total: int = 0
    arrival_uncached_tokens_total: int = 0
    rationed_total: int = 0
