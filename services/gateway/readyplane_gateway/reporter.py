"""Facts for the router, in batches: nothing is lost while it is away, nothing grows without bound.

Owns the buffer between the flow and `Router.complete`, and `Booking`, which sees to it that every
reservation ends exactly once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import replace

from readyplane.core.errors import ReadyplaneError
from readyplane.core.work import EventKind, RequestEvent
from readyplane.kit.clock import Clock
from readyplane.ports import Pair, Router
from readyplane_gateway.metrics import Meters

BATCH_EVENTS_MAX = 64
BATCH_EVERY_S = 0.02
PROGRESS_BATCH_EVERY_S = 0.5  # nothing waits for these alone
BUFFER_EVENTS_MAX = 65_536
RETRY_S_MAX = 2.0
CALL_S_MAX = 5.0
PROGRESS_S_MAX = 2.5

log = logging.getLogger(__name__)


class Reporter:
    """Tells the router what happened, at most `BATCH_EVERY_S` late (mere progress a little more)."""

    def __init__(self, router: Router, clock: Clock, meters: Meters) -> None:
        self._router = router
        self._clock = clock
        self._meters = meters
        self._buffer: deque[RequestEvent] = deque()
        self._told = 0  # events ever accepted
        self._done = 0  # events ever sent or dropped
        self._away = False
        self._some = asyncio.Event()
        self._soon = asyncio.Event()
        self._now = asyncio.Event()
        self._progress = asyncio.Condition()

    @property
    def buffered(self) -> int:
        """Events not yet with the router."""
        return len(self._buffer)

    def tell(self, event: RequestEvent, *, now: bool = False) -> None:
        """Take a fact; `now`: do not wait for more (a reservation is to be freed)."""
        if len(self._buffer) >= BUFFER_EVENTS_MAX:
            self._make_room()
        self._buffer.append(event)
        self._told += 1
        self._some.set()
        if event.kind is not EventKind.PROGRESS:
            self._soon.set()
        if now or len(self._buffer) >= BATCH_EVENTS_MAX:
            self._hurry()

    async def run(self) -> None:
        """Send for ever; cancel to end."""
        pause_s = 0.0
        while True:
            await self._some.wait()
            if not pause_s:
                await _within(PROGRESS_BATCH_EVERY_S, self._soon)
                await _within(BATCH_EVERY_S, self._now)
            self._soon.clear()
            self._now.clear()
            sent = await self._send()
            pause_s = 0.0 if sent else min(RETRY_S_MAX, max(0.1, pause_s * 2))
            if pause_s:
                self._meters.router_waits.labels("complete").inc()
                await self._clock.sleep(pause_s)

    async def flush(self, within_s: float) -> bool:
        """Wait until what was told so far is with the router; False when it was not in time."""
        mark = self._told
        self._hurry()
        try:
            async with asyncio.timeout(within_s), self._progress:
                await self._progress.wait_for(lambda: self._done >= mark)
        except TimeoutError:
            return False
        return True

    async def _send(self) -> bool:
        batch = [self._buffer[i] for i in range(min(len(self._buffer), 4 * BATCH_EVENTS_MAX))]
        done = self._done
        try:
            async with asyncio.timeout(CALL_S_MAX):
                unknown = await self._router.complete(batch)
        except (ReadyplaneError, TimeoutError) as error:
            if not self._away:
                log.warning("the router takes no facts: %s", error, extra={"kept": self.buffered})
            self._away = True
            self._meters.events_buffered.set(self.buffered)
            return False
        if self._away:
            log.info("the router takes facts again", extra={"kept": self.buffered})
        self._away = False
        # While the call ran, `_make_room` may have dropped some of these.
        for _ in range(len(batch) - (self._done - done)):
            self._buffer.popleft()
            self._done += 1
        if unknown:
            self._meters.events_unknown.inc(unknown)
        if not self._buffer:
            self._some.clear()
        else:
            self._soon.set()
            if len(self._buffer) >= BATCH_EVENTS_MAX:
                self._hurry()
        self._meters.events_buffered.set(len(self._buffer))
        async with self._progress:
            self._progress.notify_all()
        return True

    def _hurry(self) -> None:
        self._soon.set()
        self._now.set()

    def _make_room(self) -> None:
        """The oldest goes: its reservation has long expired by the router's own clock."""
        self._buffer.popleft()
        self._done += 1
        self._meters.events_dropped.inc()


async def _within(bound_s: float, event: asyncio.Event) -> None:
    if event.is_set():
        return
    try:
        async with asyncio.timeout(bound_s):
            await event.wait()
    except TimeoutError:
        pass


class Booking:
    """One reservation and its end: finished, aborted or leg_failed, exactly once.

    While it runs and nothing else is told, a PROGRESS event every few seconds keeps it from
    expiring, whatever stage its request is in.

    Attributes:
        pair: what was reserved. ended: which end it had, empty while it runs.
        output_tokens: so far, as far as known.
    """

    __slots__ = (
        "_every_s",
        "_kept",
        "_quiet",
        "_reporter",
        "_timer",
        "ended",
        "output_tokens",
        "pair",
    )

    def __init__(self, pair: Pair, reporter: Reporter, *, every_s: float = PROGRESS_S_MAX) -> None:
        self.pair = pair
        self.ended = ""
        self.output_tokens = 0
        self._reporter = reporter
        # A sixth of its life: several may be lost or late.
        self._every_s = max(0.05, min(every_s, pair.ttl_s / 6))
        self._quiet = False
        self._kept: list[tuple[RequestEvent, bool]] | None = None
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._look)

    def prefill_done(self, cached_tokens: int | None) -> None:
        """The prefill leg has ended well."""
        self._tell(
            RequestEvent(
                self.pair.reservation_id, EventKind.PREFILL_DONE, cached_tokens=cached_tokens
            )
        )

    def first_token(self, ttft_s: float) -> None:
        """The first token has come."""
        self.output_tokens = max(1, self.output_tokens)
        self._tell(
            RequestEvent(
                self.pair.reservation_id,
                EventKind.FIRST_TOKEN,
                ttft_s=ttft_s,
                output_tokens=self.output_tokens,
            )
        )

    def progress(self) -> None:
        """Tell how many tokens there are so far."""
        self._tell(
            RequestEvent(
                self.pair.reservation_id, EventKind.PROGRESS, output_tokens=self.output_tokens
            )
        )

    def leg_failed(self, worker_id: str, detail: str, *, busy: bool) -> None:
        """A leg failed, which ends the reservation; a worker that was busy is not blamed (B70)."""
        if not self._end("leg_failed"):
            return
        self._say(
            RequestEvent(
                self.pair.reservation_id,
                EventKind.LEG_FAILED,
                output_tokens=self.output_tokens,
                failed_worker_id=worker_id,
                detail=("busy: " if busy else "") + detail[:400],
            ),
            now=True,
        )

    def finished(
        self,
        *,
        output_tokens: int,
        ttft_s: float | None,
        tpot_s: float | None,
        attained: bool,
        cached_tokens: int | None,
    ) -> None:
        """The answer is complete."""
        if not self._end("finished"):
            return
        self._say(
            RequestEvent(
                self.pair.reservation_id,
                EventKind.FINISHED,
                ttft_s=ttft_s,
                tpot_s=tpot_s,
                output_tokens=output_tokens,
                cached_tokens=cached_tokens,
                attained=attained,
            )
        )

    def aborted(self, detail: str) -> None:
        """Given up; the router is told at once."""
        if not self._end("aborted"):
            return
        self._say(
            RequestEvent(
                self.pair.reservation_id,
                EventKind.ABORTED,
                output_tokens=self.output_tokens,
                detail=detail[:400],
            ),
            now=True,
        )

    def hold(self) -> None:
        """Another reservation is about to take its place: facts are kept until that is decided."""
        if self._kept is None:
            self._kept = []

    def settle(self, pair: Pair | None) -> None:
        """It was decided: `pair` has taken its place, or nothing has. Facts kept go where they
        belong now.
        """
        if pair is not None:
            self.pair = pair
        kept, self._kept = self._kept or [], None
        for event, now in kept:
            self._say(replace(event, reservation_id=self.pair.reservation_id), now=now)

    def _say(self, event: RequestEvent, *, now: bool = False) -> None:
        if self._kept is not None:
            self._kept.append((event, now))
        else:
            self._reporter.tell(event, now=now)

    def void(self) -> None:
        """It was never reserved: there is nothing to end."""
        self._end("void")

    def _end(self, how: str) -> bool:
        if self.ended:
            return False
        self.ended = how
        self._timer.cancel()
        return True

    def _tell(self, event: RequestEvent) -> None:
        if not self.ended:
            self._quiet = False
            self._say(event)

    def _look(self) -> None:
        if self._quiet:
            self.progress()
        self._quiet = True
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._look)
