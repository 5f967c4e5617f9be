"""What may happen to the router's answers on their way to the planner, and to its wall clock.

Owns disturbances of observation alone: the world itself is as it was.
"""

from __future__ import annotations

from dataclasses import replace

from readyplane.core.errors import Unavailable
from readyplane.kit.clock import Clock
from readyplane.ports import ModelSignals, RouterSignals

GROWING = (
    "arrivals_total",
    "arrival_tokens_total",
    "arrival_uncached_tokens_total",
)
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
