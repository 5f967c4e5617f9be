"""What giving weights costs those who are served: watched while weights go out (R9.1).

Owns the watch: reads the engine's own measurements in turns, hands `transfer` what it saw of requests
beside what went out, and keeps the answer to "what did the push do" for metrics. Decides nothing:
`pacing` does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from readyplane.kit.clock import Clock
from readyplane_agent.pacing import ServingTimes, between
from readyplane_agent.transfer import TransferServer

WATCH_EVERY_S = 0.5
# With nobody reading, only the baseline is kept fresh.
IDLE_EVERY_S = 2.0
LOOK_EVERY_S = 0.1


class Watch:
    """The watch of one worker.

    Args:
        serving_times: asks the engine. transfer: whose rate depends on it.
    """

    def __init__(
        self,
        serving_times: Callable[[], Awaitable[ServingTimes]],
        transfer: TransferServer,
        clock: Clock,
    ) -> None:
        self._ask, self._transfer, self._clock = serving_times, transfer, clock

    async def keep(self) -> None:
        """Watch for as long as the worker serves."""
        self._transfer.serve()
        before, at_s = await self._ask(), self._clock.monotonic_s()
        given = self._transfer.bytes_served
        while True:
            await self._turn()
            after, now_s = await self._ask(), self._clock.monotonic_s()
            served = self._transfer.bytes_served
            rate = (served - given) / max(1e-3, now_s - at_s)
            self._transfer.observe(between(before, after), given_bytes_per_s=rate)
            before, at_s, given = after, now_s, served

    async def _turn(self) -> None:
        """Wait for the end of a window; the first reader ends one in which there was none."""
        until_s = self._clock.monotonic_s() + IDLE_EVERY_S
        while not self._transfer.in_use and self._clock.monotonic_s() < until_s:
            await self._clock.sleep(LOOK_EVERY_S)
        if self._transfer.in_use:
            await self._clock.sleep(WATCH_EVERY_S)
