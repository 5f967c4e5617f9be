"""How often something that failed is tried again: a bound for each call, and a budget for all. Pure.

Retries of single calls multiply an outage: with four tries each, a store that is down gets four
times its load when it can bear least. So all calls share a budget that first tries fill slowly and
retries empty; when it is empty a call fails at its first try. Waits are drawn from the whole span
up to a bound that doubles (full jitter), so that callers who failed together do not return together.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds of trying again.

    Attributes:
        tries_max: of one call, the first included.
        first_wait_s, wait_max_s: the span of the wait doubles from the first to the most.
        budget_retries_max: how many retries may be saved up.
        per_call: what a first try adds to the budget. per_second: what time adds.
    """

    tries_max: int = 4
    first_wait_s: float = 0.1
    wait_max_s: float = 5.0
    budget_retries_max: float = 20.0
    per_call: float = 0.1
    per_second: float = 0.2


@dataclass(frozen=True, slots=True)
class Budget:
    """Retries that may still be made, as of `at_s`."""

    retries: float
    at_s: float


def full(policy: RetryPolicy, *, now_s: float) -> Budget:
    """The budget to begin with."""
    return Budget(policy.budget_retries_max, now_s)


def called(budget: Budget, policy: RetryPolicy, *, now_s: float) -> Budget:
    """The budget after one more first try."""
    return Budget(
        min(policy.budget_retries_max, _now(budget, policy, now_s) + policy.per_call), now_s
    )


def retried(budget: Budget, policy: RetryPolicy, *, now_s: float) -> Budget | None:
    """The budget after one more retry; None when there is none left to make."""
    left = _now(budget, policy, now_s) - 1.0
    return None if left < 0 else Budget(left, now_s)


def _now(budget: Budget, policy: RetryPolicy, now_s: float) -> float:
    gained = max(0.0, now_s - budget.at_s) * policy.per_second
    return min(policy.budget_retries_max, budget.retries + gained)


def wait_s(policy: RetryPolicy, *, tries: int, share: float) -> float:
    """Seconds before the next try.

    Args:
        tries: that were made. share: random, from 0 to 1.
    """
    span_s = policy.first_wait_s * float(2 ** (tries - 1))
    return share * min(policy.wait_max_s, span_s)
