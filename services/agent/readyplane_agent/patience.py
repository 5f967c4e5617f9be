"""How a start asks its services: again while one is away, and under a new lease after a lost one.

Owns the two bounds of that waiting; `starting`, `loading`, `barrier` and `proving` make their calls
through it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from readyplane.core.errors import LostLease, StaleEpoch, Unavailable
from readyplane.core.worker import Lease
from readyplane.kit.clock import Clock

log = logging.getLogger("agent.start")
T = TypeVar("T")

PATIENCE_S = 60.0
PAUSE_S = 0.2
PAUSE_MAX_S = 2.0


class Patient(Protocol):
    """Makes a call, and again while its service is away."""

    async def __call__(self, call: Callable[[], Awaitable[T]]) -> T:
        """The answer. Raises what the call raises."""
        ...


class Patience:
    """`Patient` of one start.

    Args:
        lease: the lease as it stands now.
    """

    def __init__(self, clock: Clock, lease: Callable[[], Lease]) -> None:
        self._clock, self._lease = clock, lease

    async def __call__(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call; a service that is away, or has lost our lease, is given time to come back.

        Raises:
            Unavailable: still away after `PATIENCE_S`. LostLease, StaleEpoch: no new lease came
            (the session asks for it). Whatever else the call raises, at once.
        """
        until_s = self._clock.monotonic_s() + PATIENCE_S
        pause_s = PAUSE_S
        while True:
            epoch = self._lease().epoch
            try:
                return await call()
            except (Unavailable, TimeoutError) as error:
                if self._clock.monotonic_s() + pause_s > until_s:
                    raise
                log.warning("%s; trying again", error)
                await self._clock.sleep(pause_s)
                pause_s = min(PAUSE_MAX_S, pause_s * 2)
            except (LostLease, StaleEpoch):
                await self._another_lease(epoch)

    async def _another_lease(self, epoch: int) -> None:
        """Wait until the session has another lease; raises what the router said if none comes."""
        until_s = self._clock.monotonic_s() + 2 * self._lease().ttl_s
        while self._lease().epoch == epoch:
            if self._clock.monotonic_s() > until_s:
                lease = self._lease()
                raise LostLease(lease.worker_id, lease.incarnation, "no other lease was granted")
            await self._clock.sleep(PAUSE_S)
