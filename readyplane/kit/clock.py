"""The only place that reads time. Everything else is handed a clock or a `now`.

`SystemClock` is real time; the simulator has a twin on virtual time. Durations use the monotonic
clock, so that a stepped wall clock can neither shorten nor freeze a wait.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Time as a dependency."""

    def monotonic_s(self) -> float:
        """Seconds on a clock that never steps; only differences mean anything."""
        ...

    def wall_s(self) -> float:
        """Seconds since the epoch, for records that people read."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """Real time."""

    def monotonic_s(self) -> float:
        """Seconds on the machine's monotonic clock (shared by all processes of one machine)."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait in real time."""
        await asyncio.sleep(max(0.0, seconds))


def cpu_s() -> float:
    """CPU-seconds that this process has used: what a computation cost, whatever else ran."""
    return time.process_time()


def utc(wall_s: float) -> datetime:
    """A timestamp for stores and people."""
    return datetime.fromtimestamp(wall_s, tz=UTC)
