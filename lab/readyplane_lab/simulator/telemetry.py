"""What may happen to the router's answers on their way to the planner, and to its wall clock.

Owns disturbances of observation alone: the world itself is as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from readyplane.core.errors import Unavailable
from readyplane.kit.clock import Clock
from readyplane.ports import ModelSignals, RouterSignals

BROKEN = "finished_total"
"""What comes in is known without it, and so is what is queued: only that nobody may go is not."""
DIP = 8
"""More than comes in most ticks, far less than was ever counted."""
GROWING = (
    "arrivals_total",
    "arrival_tokens_total",
    "arrival_uncached_tokens_total",
)
COUNTERS = tuple(f.name for f in fields(ModelSignals) if f.name.endswith("_total"))
STANDING = ("queued_requests", "queued_tokens")


class Telemetry:
    """The way of the signals; undisturbed unless told otherwise.

    Attributes:
        stale_until_s, missing_until_s: virtual seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self.stale_until_s = 0.0
        self.missing_until_s = 0.0
        self._factor = 1.0
        self._clock = clock
        self._last: RouterSignals | None = None
        self._spoilt: dict[str, float] = {}
        self._life = _Life()
        self._answers = 0

    def distort(self, how: str, *, until_s: float) -> None:
        """Spoil the answers until then, in that way; a restart is of this moment alone."""
        self._spoilt[how] = until_s

    def outlier(self, factor: float) -> None:
        """The next answer exaggerates."""
        self._factor = factor

    def passed(self, found: RouterSignals) -> RouterSignals:
        """What arrives of an answer.

        Raises:
            Unavailable: nothing does.
        """
        now_s = self._clock.monotonic_s()
        if now_s < self.missing_until_s:
            raise Unavailable("the router's signals are lost", "wait until they are back")
        if now_s < self.stale_until_s and self._last is not None:
            return self._last
        found = self._distorted(found, now_s)
        last, self._last = self._last, found
        factor, self._factor = self._factor, 1.0
        if factor == 1.0:
            return found
        before = {} if last is None else last.models
        models = {
            name: _exaggerated(part, before.get(name), factor)
            for name, part in found.models.items()
        }
        return replace(found, models=models)

    def _distorted(self, found: RouterSignals, now_s: float) -> RouterSignals:
        ways = {how for how, until_s in self._spoilt.items() if now_s < until_s}
        if "restarted" in self._spoilt:
            del self._spoilt["restarted"]
            self._life = self._life.another(found)
        found = self._life.seen(found)
        self._answers += 1
        if "empty" in ways:
            return replace(found, models={})
        changes: dict[str, float | None] = {}
        if ways & {"broken", "partial"}:
            changes = {BROKEN: math.nan if "broken" in ways else None}
        models = {
            name: replace(part, **cast("Any", changes)) for name, part in found.models.items()
        }
        if "dipped" in ways and self._answers % 2:
            models = {
                name: _less(part, dict.fromkeys(COUNTERS, DIP)) for name, part in models.items()
            }
        return replace(found, models=models)


@dataclass(frozen=True, slots=True)
class _Life:
    """What a router's other life had counted before this one; the simulated router never restarts."""

    number: int = 0
    uptime_s: float = 0.0
    before: Mapping[str, ModelSignals] = field(default_factory=dict)

    def another(self, found: RouterSignals) -> _Life:
        return _Life(self.number + 1, found.uptime_s, dict(found.models))

    def seen(self, found: RouterSignals) -> RouterSignals:
        if not self.number:
            return found
        models = {}
        for name, part in found.models.items():
            then = self.before.get(name, ModelSignals(name))
            models[name] = _less(part, {c: getattr(then, c) for c in COUNTERS})
        return replace(
            found,
            incarnation=f"{found.incarnation}-{self.number}",
            uptime_s=found.uptime_s - self.uptime_s,
            models=models,
        )


def _less(part: ModelSignals, by: Mapping[str, int]) -> ModelSignals:
    lower = {name: max(0, getattr(part, name) - less) for name, less in by.items()}
    return replace(part, **cast("Any", lower))


def _exaggerated(part: ModelSignals, before: ModelSignals | None, factor: float) -> ModelSignals:
    changes = {}
    for name in GROWING:
        now = getattr(part, name)
        then = now if before is None else getattr(before, name)
        changes[name] = round(then + factor * (now - then))
    for name in STANDING:
        changes[name] = round(factor * getattr(part, name))
    return replace(part, **changes)


class SteppedClock:
    """A clock whose wall time may jump; its monotonic time never does."""

    def __init__(self, clock: Clock) -> None:
        self.offset_s = 0.0
        self._clock = clock

    def monotonic_s(self) -> float:
        """See Clock."""
        return self._clock.monotonic_s()

    def wall_s(self) -> float:
        """See Clock."""
        return self._clock.wall_s() + self.offset_s

    async def sleep(self, seconds: float) -> None:
        """See Clock."""
        await self._clock.sleep(seconds)
