"""Who is admitted while not everybody can be: an order of the planner, enforced at the desk.

Owns one model's order and what it does to a request, and counting arrivals by priority, which the
planner's order rests on; `rations` brings orders in and to the other routers. An order ends by
itself on this router's clock, so that a planner that is gone leaves no door shut. Nobody of the
highest priority that came lately is refused, whatever an order says: with one priority alone it
refuses nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from readyplane.core.errors import InvalidField, Overloaded
from readyplane.core.ration import PrioritySignals, Ration

PRIORITIES_MAX = 16
PRIORITY_MAX = 2**31 - 1
PRESENT_S = 30.0
"""A priority is present for so long after its last request."""
FORGOTTEN_S = 600.0
"""One that has not come for so long makes room for another."""
TTL_S_MAX = 1000.0
REASON_MAX = 500
RETRY_S_MIN, RETRY_S_MAX = 1.0, 30.0


def check_ration(order: Ration) -> None:
    """Refuse an order that cannot be.

    Raises:
        InvalidField: a share, a time or a text out of its bounds.
    """
    if not 0.0 <= order.admit_share <= 1.0:
        raise InvalidField("order.admit_share", order.admit_share, "give a share of 0 to 1")
    if not 0.0 < order.ttl_s <= TTL_S_MAX and order.admit_share < 1.0:
        raise InvalidField("order.ttl_s", order.ttl_s, f"give more than 0 and up to {TTL_S_MAX:g}")
    if not 0.0 <= order.retry_after_s <= 86_400.0:
        raise InvalidField("order.retry_after_s", order.retry_after_s, "give 0 to 86400")
    if abs(order.priority) > PRIORITY_MAX:
        raise InvalidField("order.priority", order.priority, f"stay within ±{PRIORITY_MAX}")
    if len(order.reason) > REASON_MAX or len(order.scale_decision_id) > REASON_MAX:
        raise InvalidField("order.reason", order.reason, f"give up to {REASON_MAX} characters")


@dataclass(slots=True)
class _Count:
    seen_s: float
    arrivals: int = 0
    tokens: int = 0
    rationed: int = 0


class Rationing:
    """One model's order, and its arrivals by priority."""

    def __init__(self) -> None:
        """No order, no arrivals."""
        self._counts: dict[int, _Count] = {}
        self._order: Ration | None = None
        self._until_s = 0.0
        self._offered = 0.0  # tokens of the order's own priority since it was given, and those of
        self._admitted = 0.0  # them that were admitted

    def take(self, order: Ration, *, now_s: float) -> None:
        """An order in the place of the one before; one that admits everybody ends it."""
        before = self.order(now_s=now_s)
        if order.admit_share >= 1.0 or order.ttl_s <= 0.0:
            self._order = None
            return
        new = before is None or before.priority != order.priority
        if new or (before is not None and before.admit_share != order.admit_share):
            self._offered = self._admitted = 0.0
        self._order, self._until_s = order, now_s + min(order.ttl_s, TTL_S_MAX)

    def order(self, *, now_s: float) -> Ration | None:
        """What is in force, with the seconds that it still lasts."""
        if self._order is None or now_s >= self._until_s:
            self._order = None
            return None
        return replace(self._order, ttl_s=self._until_s - now_s)

    def arrived(self, priority: int, tokens: int, *, now_s: float) -> str:
        """Count a request of `tokens` to be computed; why it is refused, empty when it is admitted."""
        count = self._counted(priority, now_s)
        count.arrivals += 1
        count.tokens += tokens
        count.seen_s = now_s
        if self._order is None:
            return ""
        why = self._refusal(priority, tokens, now_s)
        count.rationed += bool(why)
        return why

    def error(self, why: str, *, now_s: float) -> Overloaded:
        """A refusal as the error that its caller gets."""
        order = self.order(now_s=now_s)
        after_s = 0.0 if order is None else order.retry_after_s or order.ttl_s
        return Overloaded(why, min(RETRY_S_MAX, max(RETRY_S_MIN, after_s)))

    def snapshot(self) -> tuple[PrioritySignals, ...]:
        """Arrivals by priority, the highest first."""
        return tuple(
            PrioritySignals(priority, c.arrivals, c.tokens, c.rationed)
            for priority, c in sorted(self._counts.items(), reverse=True)
        )

    def _refusal(self, priority: int, tokens: int, now_s: float) -> str:
        order = self.order(now_s=now_s)
        if order is None or priority > order.priority or priority >= self._highest(now_s):
            return ""
        if priority == order.priority:
            self._offered += tokens
            if self._admitted + tokens <= order.admit_share * self._offered:
                self._admitted += tokens
                return ""
            whom = f"of priority {priority} {order.admit_share:.0%} of the work is admitted"
        else:
            whom = f"priorities below {order.priority} are not admitted"
        by = f" by {order.scale_decision_id}" if order.scale_decision_id else ""
        return f"{whom}, ordered{by}: {order.reason or 'no reason given'}"

    def _highest(self, now_s: float) -> int:
        """Highest priority that is present; the one that asks is."""
        return max(p for p, c in self._counts.items() if now_s - c.seen_s <= PRESENT_S)

    def _counted(self, priority: int, now_s: float) -> _Count:
        """Counter of a priority; of too many, that of the nearest below, or of the lowest."""
        priority = max(-PRIORITY_MAX, min(PRIORITY_MAX, priority))
        found = self._counts.get(priority)
        if found is not None:
            return found
        if len(self._counts) >= PRIORITIES_MAX:
            oldest = min(self._counts, key=lambda p: (self._counts[p].seen_s, p))
            if now_s - self._counts[oldest].seen_s <= FORGOTTEN_S:
                below = [p for p in self._counts if p < priority]
                return self._counts[max(below) if below else min(self._counts)]
            del self._counts[oldest]
        made = self._counts[priority] = _Count(now_s)
        return made
