"""The forecasts of both pools with top clients apart, where requests are labelled by client.

Owns feeding the parts with what the observation says of clients, and moving what else was forecast
along with level and bound. Without labels every value passes through as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from readyplane_planner import forecast
from readyplane_planner.decide.values import Memory, Plan
from readyplane_planner.forecast import Apart, Forecast, Series
from readyplane_planner.signals import Observation, Signal


@dataclass(frozen=True, slots=True)
class Asked:
    """One pool's forecast: of the whole, the one to go by, and what is remembered of parts."""

    whole: Forecast
    made: Forecast
    apart: Apart

    def moved(self, rate: float) -> float:
        """Another quantile of the whole: its place between level and bound is kept."""
        was, now = self.whole, self.made
        if now is was:
            return rate
        width = was.upper - was.level
        if width <= 0:
            return rate + now.upper - was.upper
        return max(0.0, now.level + (rate - was.level) * (now.upper - now.level) / width)


def asked(
    observation: Observation,
    plan: Plan,
    memory: Memory,
    works: tuple[tuple[Series, Signal, Forecast], tuple[Series, Signal, Forecast]],
    osl: float,
    *,
    now_s: float,
) -> tuple[Asked, Asked]:
    """Both pools: each with its series, which has taken the signal in, and the forecast of it."""
    told_p = {c.name: c.prefill_work.get() for c in observation.clients if c.prefill_work.known}
    told_d = {c.name: c.arrivals.get() * osl for c in observation.clients if c.arrivals.known}
    p, d = works
    return (
        _one(memory.apart_p, told_p, *p, observation.dt_s, plan, now_s),
        _one(memory.apart_d, told_d, *d, observation.dt_s, plan, now_s),
    )


def _one(
    apart: Apart,
    told: Mapping[str, float],
    series: Series,
    rate: Signal,
    whole: Forecast,
    dt_s: float,
    plan: Plan,
    now_s: float,
) -> Asked:
    knobs = plan.knobs
    if not rate.known or dt_s <= 0:
        return Asked(whole, whole, forecast.interrupted(apart))
    apart = forecast.seen(apart, told, series, rate.get(), dt_s=dt_s, now_s=now_s, knobs=knobs)
    made = forecast.chosen(apart, series, whole, knobs=knobs)
    apart = forecast.remembered(apart, series, horizon_s=whole.horizon_s, now_s=now_s, knobs=knobs)
    return Asked(whole, made, apart)
