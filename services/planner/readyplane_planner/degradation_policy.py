"""The policy's section on who gives way while capacity is on its way, and its words to the brains."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from readyplane_planner.decide.rations import Rules


class DegradationPolicy(BaseModel):
    """What happens to requests of low priority while not everybody can be served in time.

    Attributes:
        mode: `shed` orders the router to refuse the least important while more than `late_max` of
            all requests are predicted to be late; `off` leaves it to the router's queue. Requests
            of one priority are never touched. ttl_s: an order lasts that long unless renewed.
            It is no shorter than three ticks.
        protect_from: that priority and more are never refused; null protects the highest alone.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    mode: Literal["shed", "off"] = "shed"
    late_max: float = Field(default=0.05, ge=0.001, le=1.0)
    ttl_s: float = Field(default=10.0, ge=1.0, le=300.0, allow_inf_nan=False)
    protect_from: int | None = Field(default=None, ge=-(2**31), le=2**31 - 1)

    def rules(self, *, tick_s: float) -> Rules:
        """In the words of the brains."""
        ttl_s = max(self.ttl_s, 3.0 * tick_s)
        return Rules(self.mode == "shed", self.late_max, ttl_s, self.protect_from)
