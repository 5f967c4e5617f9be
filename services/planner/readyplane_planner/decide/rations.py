"""Whom to refuse while not everybody can be served in time: what is remembered, and the arithmetic.

Owns which priorities give way, and how much of the last of them: the least important first, never
the most important that is present, and no more than brings the others in time. Pure numbers:
`degrade` gathers them and speaks; the router enforces what comes out (R21.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

PRESENT_TAU_S = 30.0
PRESENT_MIN = 0.02
"""A priority whose requests have faded to less than that is not present any more."""
PRIORITIES_MAX = 16
STEP = 0.05
"""Shares are orders to people too: they go by that."""
NEAR = 0.101
"""So near to the one before a share is no new order."""
HALVINGS = 20


@dataclass(frozen=True, slots=True)
class Rules:
    """The policy's `degradation` (see degradation_policy).

    Attributes:
        shed: give orders at all. late_max: share of requests predicted to be late from which on.
        ttl_s: an order lasts so long unless renewed. protect_from: that priority and more are
            never refused; None protects the highest that is present alone.
    """

    shed: bool = True
    late_max: float = 0.05
    ttl_s: float = 10.0
    protect_from: int | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """What came with one priority lately; fading sums of requests and of prompt tokens."""

    priority: int
    requests: float
    tokens: float


@dataclass(frozen=True, slots=True)
class RationMemory:
    """What one decision hands to the next; empty where requests have one priority.

    Attributes:
        seen: by priority, ascending. priority, admit_share: of the order, None for none.
        begun_s, turned_s, renewed_s: since when there is one, since when this one, given last.
        calm_since_s: since when it is not needed any more.
    """

    seen: tuple[Weight, ...] = ()
    priority: int | None = None
    admit_share: float = 1.0
    begun_s: float | None = None
    turned_s: float | None = None
    renewed_s: float | None = None
    calm_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class Rationed:
    """An order of admission in a decision, given anew in each until it ends.

    Attributes:
        priority: less important requests are refused; of its own `admit_share` of the prompt tokens
            is admitted. A share of 1 ends it.
        ttl_s: without another one it ends by itself. retry_after_s: told to whoever is refused.
        late_without, late_with: share of requests predicted to be late, all admitted and so.
        shed_tokens: prompt tokens/s that are refused. begun_ago_s: of the first of these orders.
        turned: another one than in the decision before.
    """

    priority: int
    admit_share: float
    ttl_s: float
    retry_after_s: float
    why: str
    late_without: float
    late_with: float
    shed_tokens: float
    begun_ago_s: float = 0.0
    turned: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """Who gives way, and the shares of all tokens and requests that are refused by it."""

    priority: int
    admit_share: float
    tokens: float
    requests: float


def faded(
    seen: Sequence[Weight], grown: Sequence[tuple[int, float, float]], dt_s: float
) -> tuple[Weight, ...]:
    """The sums with what came in `dt_s`: (priority, requests, tokens); bounded, ascending.

    Empty where it is all of one priority: nobody can be preferred then.
    """
    fade = math.exp(-dt_s / PRESENT_TAU_S)
    sums = {w.priority: (w.requests * fade, w.tokens * fade) for w in seen}
    for priority, requests, tokens in grown:
        before = sums.get(priority, (0.0, 0.0))
        sums[priority] = (before[0] + requests, before[1] + tokens)
    present = [Weight(p, r, t) for p, (r, t) in sorted(sums.items()) if r >= PRESENT_MIN]
    present = present[-PRIORITIES_MAX:]
    return tuple(present) if len(present) > 1 else ()


def excess(late: Callable[[float], float], *, goal: float) -> float:
    """Least share of the demand without which no more than `goal` of the rest is late; 0 to 1.

    Args:
        late: share that is late of so much of the demand.
    """
    if late(1.0) <= goal:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if late(middle) <= goal else (low, middle)
    return 1.0 - low


def cut(
    seen: Sequence[Weight], *, tokens: float, requests: float, protect_from: int | None
) -> Cut | None:
    """Who gives way so that these shares of all tokens and of all requests do; None when nobody may.

    Args:
        seen: ascending. tokens, requests: shares that have to go, as far as there are any to take.
    """
    if len(seen) < 2 or (tokens <= 0 and requests <= 0):
        return None
    least = [w for w in seen[:-1] if protect_from is None or w.priority < protect_from]
    all_tokens = max(1e-9, sum(w.tokens for w in seen))
    all_requests = max(1e-9, sum(w.requests for w in seen))
    gone_tokens = gone_requests = 0.0
    found: Cut | None = None
    for weight in least:
        mine = (weight.tokens / all_tokens, weight.requests / all_requests)
        wanted = max(
            (tokens - gone_tokens) / max(1e-9, mine[0]),
            (requests - gone_requests) / max(1e-9, mine[1]),
        )
        if wanted <= 0:
            break
        share = max(0.0, math.floor((1.0 - wanted) / STEP + 1e-9) * STEP)
        gone_tokens += (1.0 - share) * mine[0]
        gone_requests += (1.0 - share) * mine[1]
        found = Cut(weight.priority, round(share, 4), gone_tokens, gone_requests)
        if share > 0.0:
            break
    return found


def moved(mine: RationMemory, by_s: float) -> RationMemory:
    """The same memory on a clock that is ahead by that."""

    def at(then_s: float | None) -> float | None:
        return None if then_s is None else then_s + by_s

    return replace(
        mine,
        begun_s=at(mine.begun_s),
        turned_s=at(mine.turned_s),
        renewed_s=at(mine.renewed_s),
        calm_since_s=at(mine.calm_since_s),
    )


def harder(one: Cut, other: RationMemory) -> bool:
    """Whether a cut refuses more than the order that stands."""
    if other.priority is None or one.priority != other.priority:
        return other.priority is None or one.priority > other.priority
    return one.admit_share < other.admit_share


def alike(one: Cut, other: RationMemory) -> bool:
    """Whether a cut is the order that stands, or nearly."""
    return one.priority == other.priority and abs(one.admit_share - other.admit_share) <= NEAR
