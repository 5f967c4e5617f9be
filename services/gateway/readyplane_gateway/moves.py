"""Requests that decode on a worker which drains: they go on at another one, where engines can do so.

Owns the preparation of a move beside the stream that is still running: another worker is reserved,
then the engine is asked to stop and to say what the other one needs. The stream itself is `proxy`'s;
it ends with reason `moved` and finds here where it goes on. An engine that cannot move is drained by
finishing, and so is a request for which nobody else has room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from readyplane.core.errors import ReadyplaneError
from readyplane.core.work import RequestShape
from readyplane.core.worker import Worker
from readyplane.kit.clock import Clock
from readyplane.ports import End, Mover, Pair
from readyplane_gateway.legs import LegFailed, Legs, MovedOut
from readyplane_gateway.metrics import Meters
from readyplane_gateway.reporter import Booking

MOVES_AT_ONCE_MAX = 8
MOVE_TRIES_MAX = 30
MOVE_AGAIN_S = 2.0
NOT_DECODING = "http_409"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Moved:
    """Where a request goes on, and with what."""

    pair: Pair
    out: MovedOut
    source: End


@dataclass(slots=True, eq=False)
class Running:
    """A decode leg under way. `name`: of the request at its engine (`x-request-id`)."""

    shape: RequestShape
    booking: Booking
    end: End
    name: str
    over: bool = False
    moved: asyncio.Future[Moved | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def key(self) -> tuple[str, str]:
        """The worker it decodes on."""
        return self.end.worker_id, self.end.incarnation


class Moves:
    """All decode legs of a gateway by worker, and the moves of those that drain."""

    def __init__(
        self,
        mover: Mover | None,
        *,
        legs: Legs,
        clock: Clock,
        after_s: float,
        meters: Meters,
        later: Callable[[Awaitable[object]], None],
    ) -> None:
        """`mover`: None moves nothing. `after_s`: what ends within this ends where it is."""
        self._mover, self._legs, self._clock = mover, legs, clock
        self._after_s, self._meters, self._later = after_s, meters, later
        self._running: dict[tuple[str, str], set[Running]] = {}
        self._draining: set[tuple[str, str]] = set()
        self._turns = asyncio.Semaphore(MOVES_AT_ONCE_MAX)

    def began(self, running: Running) -> None:
        """A decode leg has begun to give tokens."""
        self._running.setdefault(running.key, set()).add(running)
        if running.key in self._draining:
            self._later(self._move(running))

    def ended(self, running: Running) -> None:
        """A decode leg is over, however. Idempotent."""
        running.over = True
        mine = self._running.get(running.key)
        if mine is not None:
            mine.discard(running)
            if not mine:
                del self._running[running.key]
        if not running.moved.done():
            running.moved.cancel()

    def drains(self, worker: Worker) -> None:
        """A worker is to leave: what decodes on it moves, if its engine can."""
        key = (worker.worker_id, worker.offer.incarnation)
        if self._mover is None or worker.serving is None or not worker.serving.moves:
            return
        self._draining.add(key)
        for running in tuple(self._running.get(key, ())):
            self._later(self._move(running))

    def gone(self, worker_id: str, incarnation: str) -> None:
        """A worker has left."""
        self._draining.discard((worker_id, incarnation))

    async def _move(self, running: Running) -> None:
        await self._clock.sleep(self._after_s)
        for _ in range(MOVE_TRIES_MAX):
            if running.over or running.booking.ended:
                return
            async with self._turns:
                if await self._tried(running):
                    return
            await self._clock.sleep(MOVE_AGAIN_S)

    async def _tried(self, running: Running) -> bool:
        """One try; False when another one makes sense."""
        if running.over or running.booking.ended or self._mover is None:
            return True
        booking = running.booking
        booking.hold()
        pair = None
        try:
            pair = await self._mover.move(
                running.shape,
                reservation_id=booking.pair.reservation_id,
                worker_id=running.end.worker_id,
                emitted=max(1, booking.output_tokens),
            )
        except ReadyplaneError as error:
            self._meters.moves.labels("no_room").inc()
            log.info("a request stays where it drains: %s", error)
        finally:
            booking.settle(pair)
        if pair is None:
            return False
        if running.moved.done():  # over meanwhile, and told where it is now
            return True
        try:
            out = await self._legs.move_out(running.end, running.name)
        except LegFailed as error:
            # It goes on where it is: it has just ended, has not begun, or its engine keeps it.
            self._meters.moves.labels("refused").inc()
            log.info("a request was not given away: %s", error)
            return error.trouble != NOT_DECODING
        if running.moved.done():  # its client left just now: nobody will read that KV
            self._later(self._legs.abandon(running.end, params=out.params))
            return True
        running.moved.set_result(Moved(pair, out, running.end))
        return True
