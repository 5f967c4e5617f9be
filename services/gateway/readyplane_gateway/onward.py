"""The rest of an answer, wherever it goes on: at the worker that began it, or at others after it.

Owns the change from one decode leg to the next. The next engine gets what the last one said, byte
for byte, and the KV from where it is; the client sees one answer. When the next engine fails before
it has given anything, prompt and answer so far are prefilled anew and it goes on from there, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from readyplane.core.work import RequestShape, pack_tokens
from readyplane.ports import End
from readyplane_gateway.bounds import Bounds
from readyplane_gateway.legs import Bodies, DecodeLeg, Handover, LegFailed, Legs, MovedOut
from readyplane_gateway.metrics import Meters
from readyplane_gateway.moves import Moved, Moves, Running
from readyplane_gateway.openai import Ask, Kind
from readyplane_gateway.pump import Call, Pump, Sink
from readyplane_gateway.reporter import Booking
from readyplane_gateway.sse import SseScan, Usage

MOVED_S_MAX = 5.0


@dataclass(frozen=True, slots=True)
class Way:
    """What stays the same of a request, whoever serves it. `token_ids`: None where not known."""

    ask: Ask
    call: Call
    sink: Sink
    shape: RequestShape
    bodies: Bodies
    token_ids: tuple[int, ...] | None


class Onward:
    """Follows requests from one decode worker to the next.

    Args:
        anew: another pair for a request of which a leg failed, and its prefill leg.
        later: run a bounded piece of work that outlives its request.
    """

    def __init__(
        self,
        *,
        legs: Legs,
        moves: Moves,
        bounds: Bounds,
        meters: Meters,
        anew: Callable[[Way, Booking, LegFailed], Awaitable[tuple[Booking, Handover]]],
        later: Callable[[Awaitable[object]], None],
    ) -> None:
        self._legs, self._moves = legs, moves
        self._bounds, self._meters = bounds, meters
        self._anew, self._later = anew, later

    async def rest(self, way: Way, leg: DecodeLeg, pump: Pump, scan: SseScan) -> None:
        """The rest of a stream whose first token has gone to the client. Raises LegFailed."""

        async def read(now: DecodeLeg) -> bool:
            pump.goes_on(now, way.call.bookings[-1])
            now.idle_within(self._bounds.decode_idle_s_max)
            await pump.rest(scan, way.sink)
            moved, scan.moved = scan.moved, False
            return moved

        await self._follow(way, leg, read, lambda: scan.tokens)

    async def whole(self, way: Way, leg: DecodeLeg) -> tuple[bytes, Usage | None]:
        """An answer in one piece; who ends it says all of it. Raises LegFailed."""
        answer: tuple[bytes, Usage | None] = (b"", None)

        async def read(now: DecodeLeg) -> bool:
            nonlocal answer
            await now.accepted()  # such an answer has no head before its end
            data, usage, moved = await now.whole()
            answer = data, usage
            return moved

        await self._follow(way, leg, read, lambda: 0)
        return answer

    async def _follow(
        self,
        way: Way,
        leg: DecodeLeg,
        read: Callable[[DecodeLeg], Awaitable[bool]],
        given: Callable[[], int],
    ) -> None:
        """Read one leg; when it was given away, the next. `given`: tokens the client has."""
        booking = way.call.bookings[-1]
        running = Running(way.shape, booking, leg.end, leg.name)
        self._moves.began(running)
        try:
            if not await read(leg):
                return
            moved = await self._where_to(running)
        finally:
            self._moves.ended(running)
        before = given()
        out = moved.out
        try:
            await self._next(way, moved.pair.decode, out.params, out, read, given)
            self._meters.moves.labels("moved").inc()
        except LegFailed as failed:
            self._later(self._abandon(moved))
            if given() > before or way.call.bookings[-1] is not booking or not _known(way):
                raise
            await self._again(way, booking, failed, out, read, given)
        except BaseException:
            self._later(self._abandon(moved))
            raise

    async def _next(
        self,
        way: Way,
        end: End,
        params: bytes,
        out: MovedOut,
        read: Callable[[DecodeLeg], Awaitable[bool]],
        given: Callable[[], int],
    ) -> None:
        ask, bounds = way.ask, self._bounds
        leg = await self._legs.decode(
            "decode",
            end,
            way.bodies.decode(params, out.continuation),
            ask.kind.path,
            request_id=way.call.bookings[-1].pair.reservation_id,
            within_s=bounds.decode_first_s_max if ask.stream else bounds.decode_total_s_max,
        )
        with leg:
            if ask.stream:
                await leg.accepted()
            await self._follow(way, leg, read, given)

    async def _again(
        self,
        way: Way,
        booking: Booking,
        failed: LegFailed,
        out: MovedOut,
        read: Callable[[DecodeLeg], Awaitable[bool]],
        given: Callable[[], int],
    ) -> None:
        assert way.token_ids is not None
        self._meters.moves.labels("repaired").inc()
        tokens = (*way.token_ids, *out.output)
        shape = replace(way.shape, isl=len(tokens), token_ids=pack_tokens(tokens))
        longer = replace(way, shape=shape, bodies=Bodies.of(way.ask, tokens), token_ids=tokens)
        fresh, handover = await self._anew(longer, booking, failed)
        fresh.output_tokens = booking.output_tokens
        fresh.progress()
        await self._next(way, fresh.pair.decode, handover.params, out, read, given)

    async def _where_to(self, running: Running) -> Moved:
        try:
            async with asyncio.timeout(MOVED_S_MAX):
                moved = await asyncio.shield(running.moved)
        except TimeoutError:
            moved = None
        if moved is None:
            why = "it gave the request away, and nobody was asked to go on"
            raise LegFailed("decode", running.end, "moved", why)
        return moved

    async def _abandon(self, moved: Moved) -> None:
        how = await self._legs.abandon(moved.source, params=moved.out.params)
        self._meters.abandoned.labels(how).inc()


def _known(way: Way) -> bool:
    """Whether another prefill leg can be given the prompt and the answer so far as tokens."""
    return bool(way.token_ids) and (way.ask.kind is Kind.COMPLETIONS or way.ask.told_by_tokens)
