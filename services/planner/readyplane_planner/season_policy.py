"""The policy's section on what the days before say of today, and its words to the brains."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from readyplane_planner.decide.seasonal import Rules


class SeasonPolicy(BaseModel):
    """Whether a rise that the days before had at this time is met before it comes.

    Attributes:
        mode: `prewarm` raises a target early, by the day's pattern; `off` does not. ahead_s: how
            far is looked; null for twice the P90 of T_ready and a quarter of an hour, which is what
            half-hours tell apart. extra_max: workers of a pool beyond what the forecast needs.
        days_min: that were seen. skill_min: share of what an hour ago misses that the pattern saves.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    mode: Literal["off", "prewarm"] = "prewarm"
    ahead_s: float | None = Field(default=None, gt=0.0, le=86_400.0, allow_inf_nan=False)
    extra_max: int = Field(default=2, ge=0, le=1024)
    days_min: float = Field(default=2.0, ge=1.0, le=60.0, allow_inf_nan=False)
    skill_min: float = Field(default=0.1, ge=0.0, le=1.0)

    @property
    def rules(self) -> Rules:
        """In the words of the brains."""
        on = self.mode == "prewarm" and self.extra_max > 0
        return Rules(on, self.ahead_s, self.extra_max, self.days_min, self.skill_min)
