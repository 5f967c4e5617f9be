"""What the policy wants of the day's pattern, and what a decision remembers of it; see prewarm."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """The policy's `forecast.season` (see season_policy)."""

    on: bool = True
    ahead_s: float | None = None
    extra_max: int = 2
    days_min: float = 2.0
    skill_min: float = 0.1


@dataclass(frozen=True, slots=True)
class Ahead:
    """Workers of (P, D) that the last decision wanted by the day's pattern alone."""

    extra: tuple[int, int] = (0, 0)
