"""Both legs at once, for engines that meet: the prefill engine waits until the decode engine is there.

Owns the time in which two legs of one request run side by side (SGLang's bootstrap). Neither can end
without the other, so the first that fails ends both at once (B71), and both engines are told by the
request's id. What the client sees and the router hears is `proxy`'s, as for legs that follow each
other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from readyplane.kit.clock import Clock
from readyplane.ports import End, Pair
from readyplane_gateway.bounds import Bounds
from readyplane_gateway.engine_http import Trouble
from readyplane_gateway.legs import Abandoned, DecodeLeg, Handover, LegFailed, Legs
from readyplane_gateway.metrics import Meters
from readyplane_gateway.onward import Way
from readyplane_gateway.openai import Failure
from readyplane_gateway.reporter import Booking
from readyplane_gateway.tokens import ClientFault

# A prefill engine answers when the KV is over, which is about when the decode engine's first token
# comes; what it has to say after an answer is complete is waited for no longer than this.
LAST_WORD_S_MAX = 2.0
# Whose connection breaks is to blame before who merely says that the other one did not come.
BROKEN = frozenset({Trouble.CONNECT, Trouble.BROKEN})


class _Answers(Protocol):
    async def __call__(
        self, way: Way, booking: Booking, leg: DecodeLeg, handover: Handover, /
    ) -> Failure | None: ...


class Meeting:
    """Serves requests over pairs of engines that meet.

    Args:
        stream, whole: pass a decode leg's answer on. prefilled: the prefill leg is over, and may be
            told. later: run a bounded piece of work that outlives its request.
    """

    def __init__(
        self,
        *,
        legs: Legs,
        clock: Clock,
        bounds: Bounds,
        meters: Meters,
        stream: _Answers,
        whole: _Answers,
        prefilled: Callable[[Booking, Handover], None],
        later: Callable[[Awaitable[object]], None],
    ) -> None:
        self._legs, self._clock, self._bounds, self._meters = legs, clock, bounds, meters
        self._stream, self._whole = stream, whole
        self._prefilled, self._later = prefilled, later

    async def legs_of(self, way: Way, booking: Booking) -> Failure | None:
        """Both legs of a pair. Raises LegFailed (of the leg that is to blame), ClientFault."""
        pair, call = booking.pair, way.call
        assert pair.bootstrap_room is not None
        body = way.bodies.meeting(pair.prefill.bootstrap, pair.bootstrap_room, pair.reservation_id)
        handover = Handover(b'{"bootstrap_room":%d}' % pair.bootstrap_room, None)
        call.stage = "prefill"
        wait_s = self._first_s(pair)
        prefill = asyncio.ensure_future(self._prefill(way, pair, body, wait_s))
        outcome, began_s = "failed", self._clock.monotonic_s()
        try:
            leg = await self._legs.decode(
                "decode",
                pair.decode,
                body,
                way.ask.kind.path,
                request_id=pair.reservation_id,
                within_s=wait_s if way.ask.stream else wait_s + self._bounds.decode_total_s_max,
            )
            with leg:
                prefill.add_done_callback(partial(self._over, way, booking, leg, handover))
                failure = await self._answer(way, booking, leg, handover)
            outcome = "ok" if failure is None else "failed"
            return failure
        except LegFailed as failed:
            raise _to_blame(failed, prefill, pair) from failed
        except ClientFault:
            outcome = "refused"
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._meters.leg.labels("decode", outcome).observe(self._clock.monotonic_s() - began_s)
            self._later(self._end(pair, prefill, whole=outcome == "ok"))

    async def _answer(
        self, way: Way, booking: Booking, leg: DecodeLeg, handover: Handover
    ) -> Failure | None:
        if not way.ask.stream:
            return await self._whole(way, booking, leg, handover)
        await leg.accepted()
        return await self._stream(way, booking, leg, handover)

    def _first_s(self, pair: Pair) -> float:
        """Bound on silence before the first token: a prefill, and the way to a decode engine."""
        bounds = self._bounds
        prefill_s = pair.predicted_ttft_s * bounds.prefill_factor + bounds.prefill_slack_s
        return prefill_s + bounds.decode_first_s_max

    async def _prefill(self, way: Way, pair: Pair, body: bytes, within_s: float) -> int | None:
        outcome, began_s = "failed", self._clock.monotonic_s()
        try:
            cached = await self._legs.prefill_beside(
                pair.prefill,
                body,
                way.ask.kind.path,
                request_id=pair.reservation_id,
                within_s=within_s,
            )
            outcome = "ok"
            return cached
        except ClientFault:
            outcome = "refused"
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._meters.leg.labels("prefill", outcome).observe(self._clock.monotonic_s() - began_s)

    def _over(
        self,
        way: Way,
        booking: Booking,
        leg: DecodeLeg,
        handover: Handover,
        prefill: asyncio.Future[int | None],
    ) -> None:
        """The prefill leg has ended: well, or the decode leg has nothing to wait for any more."""
        if prefill.cancelled():
            return
        error = prefill.exception()
        if error is not None:
            if not way.call.begun:  # afterwards the decode engine has all that it needs
                leg.cut(f"the prefill leg failed ({error})")
            return
        handover.cached_tokens = prefill.result()
        if not way.call.begun:
            way.call.stage = "decode"
            if way.call.ahead is None:
                self._prefilled(booking, handover)

    async def _end(self, pair: Pair, prefill: asyncio.Future[int | None], *, whole: bool) -> None:
        """Leave nobody waiting: an engine that is alone would do so for half an hour."""
        if whole:
            await asyncio.wait({prefill}, timeout=LAST_WORD_S_MAX)
        alone = not prefill.done()
        prefill.cancel()
        await asyncio.wait({prefill})
        if not prefill.cancelled():
            prefill.exception()  # it was judged, or does not matter any more
        if whole and not alone:
            return
        ends = [pair.prefill] if whole else [pair.prefill, pair.decode]
        await asyncio.gather(*(self._cut_off(end, pair.reservation_id) for end in ends))

    async def _cut_off(self, end: End, rid: str) -> None:
        how: Abandoned = await self._legs.cut_off(end, rid)
        self._meters.abandoned.labels(how).inc()


def _to_blame(
    failed: LegFailed, prefill: asyncio.Future[int | None], pair: Pair
) -> LegFailed | ClientFault:
    """The failure that is told of two legs, of which at least the decode leg has failed."""
    first = prefill.exception() if prefill.done() and not prefill.cancelled() else None
    if isinstance(first, LegFailed | ClientFault):
        own = failed.trouble in BROKEN and not failed.cut
        theirs = isinstance(first, LegFailed) and first.trouble in BROKEN
        return failed if own and not theirs else first
    if failed.lost_source:
        failed.leg, failed.end = "handover", pair.prefill
    return failed
