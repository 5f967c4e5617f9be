"""The way of one request: route, prefill leg, decode leg, and what happens when something breaks.

Owns the order of things and hands facts to the router through a `Booking`. A leg that fails before
the client has seen anything is re-paired once; afterwards a failure ends the stream with an error
chunk. However a request ends (the client leaving at any point is one way), both legs are cancelled
and the reservation has exactly one end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from readyplane.core.errors import (
    PromptTooLong,
    ReadyplaneError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from readyplane.core.work import (
    EventKind,
    RequestEvent,
    RequestShape,
    pack_tokens,
    reservation_id_of,
)
from readyplane.kit.clock import Clock
from readyplane.ports import End, Pair, Router
from readyplane_gateway.ahead import Refused, RouteAhead, Unconfirmed, choose
from readyplane_gateway.bounds import Bounds
from readyplane_gateway.engine_http import Trouble
from readyplane_gateway.fleet import FleetView, ModelFacts, RouterRefuses
from readyplane_gateway.legs import Bodies, DecodeLeg, Handover, LegFailed, Legs
from readyplane_gateway.meeting import Meeting
from readyplane_gateway.metrics import Meters
from readyplane_gateway.moves import Moves
from readyplane_gateway.onward import Onward, Way
from readyplane_gateway.openai import Ask, Failure, check_length, check_size, failure_of
from readyplane_gateway.pump import Call, Header, Pump, Sink, pair_headers
from readyplane_gateway.reporter import Booking, Reporter
from readyplane_gateway.sse import SseScan
from readyplane_gateway.tokens import ClientFault, Tokens

CHARACTERS_PER_TOKEN = 4
FLUSH_BEFORE_REPAIR_S = 0.5
RETRY_FIRST_S = 0.1
RETRY_S_MAX = 1.0
# Troubles of a prefill leg after which its engine may hold KV: the answer was not read to its end.
MAY_HAVE_ENDED = frozenset({Trouble.SLOW, Trouble.BROKEN, Trouble.TOO_LARGE, "unreadable"})
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)

log = logging.getLogger(__name__)


class Proxy:
    """Serves checked requests."""

    def __init__(
        self,
        *,
        router: Router,
        clock: Clock,
        bounds: Bounds,
        fleet: FleetView,
        tokens: Tokens,
        legs: Legs,
        reporter: Reporter,
        meters: Meters,
        show_pair: bool,
        later: Callable[[Awaitable[object]], None],
        moves: Moves,
        route_ahead: RouteAhead | None = None,
    ) -> None:
        """`show_pair`: name workers and reservation in the answer's headers. `later`: run a
        bounded piece of work that outlives its request. `route_ahead`: of a router in this process.
        """
        self._router = router
        self._clock = clock
        self._bounds = bounds
        self._fleet = fleet
        self._tokens = tokens
        self._legs = legs
        self._reporter = reporter
        self._meters = meters
        self._show_pair = show_pair
        self._later = later
        self._onward = Onward(
            legs=legs, moves=moves, bounds=bounds, meters=meters, anew=self._anew, later=later
        )
        self._meeting = Meeting(
            legs=legs,
            clock=clock,
            bounds=bounds,
            meters=meters,
            stream=self._stream,
            whole=self._answer,
            prefilled=self._prefilled,
            later=later,
        )
        self._route_ahead = route_ahead
        self._unreserved: set[asyncio.Future[Pair]] = set()

    async def serve(self, ask: Ask, call: Call, sink: Sink) -> Failure | None:
        """Serve one request; returns the failure that ended a stream which had begun, else None.

        Raises:
            ReadyplaneError, ClientFault, LegFailed: nothing has been sent to the client yet.
        """
        facts = self._fleet.find(ask.model)
        call.stage = "tokenise"
        self._check_size(ask, facts.max_model_len)
        token_ids = await self._tokens.of(
            ask, partial(facts.tokeniser_urls, ask.text_bytes), facts.tokenizer
        )
        shape = self._shape(ask, call, facts, token_ids)
        call.stage = "route"
        booking = self._book(call, await self._route(call, shape))
        try:
            return await self._serve_booked(ask, call, sink, shape, booking, token_ids)
        except LegFailed as failed:
            call.bookings[-1].leg_failed(failed.end.worker_id, failed.why, busy=failed.busy)
            raise
        except BaseException as error:
            self._let_go(call)
            for open_booking in call.bookings:
                open_booking.aborted(_detail(error))
            raise

    # ------------------------------------------------------------------ pairing

    def _check_size(self, ask: Ask, limit_tokens: int | None) -> None:
        """Raises PromptTooLong: it cannot fit, and no engine is to be held up by it."""
        if limit_tokens is not None:
            check_size(ask, limit_tokens, self._bounds.prompt_bytes_per_token_max)

    def _shape(
        self, ask: Ask, call: Call, facts: ModelFacts, token_ids: tuple[int, ...] | None
    ) -> RequestShape:
        if not token_ids:  # nobody is there who tokenises it: the router still counts the demand
            isl, packed = 1 + ask.characters // CHARACTERS_PER_TOKEN, b""
        else:
            isl = len(token_ids)
            if facts.max_model_len is not None:
                check_length(isl, ask.max_tokens, facts.max_model_len)
            packed = pack_tokens(token_ids)
        return RequestShape(
            request_id=call.request_id,
            model=ask.model,
            isl=isl,
            token_ids=packed,
            max_tokens=ask.max_tokens,
            priority=ask.priority,
            tenant=call.tenant,
            slo=call.slo,
            cache_salt=ask.cache_salt,
        )

    def _book(self, call: Call, pair: Pair) -> Booking:
        booking = Booking(pair, self._reporter)
        call.bookings.append(booking)
        return booking

    async def _route(
        self,
        call: Call,
        shape: RequestShape,
        *,
        replaces: str = "",
        avoid: Sequence[str] = (),
    ) -> Pair:
        """A pair; a router that is away is asked again within `router_wait_s_max`.

        Raises:
            ReadyplaneError: what the router said, Unavailable, or RouterRefuses.
        """
        give_up_s = self._clock.monotonic_s() + self._bounds.router_wait_s_max
        pause_s = RETRY_FIRST_S
        while True:
            try:
                if self._route_ahead is None:
                    return await self._ask_router(shape, replaces, avoid)
                return await self._choose(self._route_ahead, call, shape, replaces, avoid)
            except (Unsupported, Unauthenticated) as error:  # nothing of the client's is meant
                raise RouterRefuses(str(error)) from error
            except Unavailable as error:
                self._meters.router_waits.labels("route").inc()
                if self._clock.monotonic_s() + pause_s > give_up_s:
                    what = f"the router does not answer ({error.what})"
                    self._disown(reservation_id_of(shape.request_id, replaces))
                    raise Unavailable(what, "try again", retry_after_s=2.0) from error
                await self._clock.sleep(pause_s)
                pause_s = min(RETRY_S_MAX, pause_s * 2)

    def _disown(self, reservation_id: str) -> None:
        """It may have been reserved all the same, by a call whose answer was lost."""
        event = RequestEvent(reservation_id, EventKind.ABORTED, detail="its answer did not come")
        self._reporter.tell(event, now=True)

    async def _ask_router(self, shape: RequestShape, replaces: str, avoid: Sequence[str]) -> Pair:
        """One call. When the client leaves meanwhile, what the router has reserved is given back."""
        asking = asyncio.ensure_future(self._router.route(shape, replaces=replaces, avoid=avoid))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._later(self._give_back(asking))
            raise

    async def _choose(
        self,
        route: RouteAhead,
        call: Call,
        shape: RequestShape,
        replaces: str,
        avoid: Sequence[str],
    ) -> Pair:
        """As `_ask_router`, but done as soon as a pair has been chosen: `call.ahead` has the rest."""
        asking, first = choose(route, shape, replaces, avoid)
        try:
            pair = await first
        except asyncio.CancelledError:
            self._later(self._give_back(asking))
            raise
        if pair is None or asking.done():
            return asking.result()
        call.ahead = Unconfirmed(pair, asking)
        return pair

    def _let_go(self, call: Call) -> None:
        """A request that ends while its pair is being reserved: what comes of that is given back."""
        ahead, call.ahead = call.ahead, None
        if ahead is not None:
            call.bookings[-1].void()
            self._later(self._give_back(ahead.asking))

    async def _give_back(self, asking: asyncio.Future[Pair]) -> None:
        """An answer under way is waited for; a request that queues in the router is taken out."""
        await asyncio.wait({asking}, timeout=self._bounds.route_grace_s)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, ReadyplaneError):
            pair = await asking
            Booking(pair, self._reporter).aborted("the client left while it was being paired")

    async def _repair(
        self, call: Call, shape: RequestShape, booking: Booking, failed: LegFailed
    ) -> Booking:
        """Another pair instead of one of which a leg failed. Raises LegFailed when there is none."""
        self._meters.repairs.labels(failed.leg, failed.trouble).inc()
        log.info("re-pairing", extra={"request_id": call.request_id, "why": str(failed)})
        booking.leg_failed(failed.end.worker_id, failed.why, busy=failed.busy)
        call.stage = "route"
        # What is known of the old pair must be told before it is replaced.
        await self._reporter.flush(FLUSH_BEFORE_REPAIR_S)
        try:
            pair = await self._route(
                call,
                shape,
                replaces=booking.pair.reservation_id,
                avoid=(failed.end.worker_id,),
            )
        except PromptTooLong:
            raise
        except ReadyplaneError as error:
            log.info("no other pair", extra={"request_id": call.request_id, "why": str(error)})
            failed.why = f"{failed.why}; {error}"
            raise failed from error
        return self._book(call, pair)

    # ------------------------------------------------------------------ legs

    async def _serve_booked(
        self,
        ask: Ask,
        call: Call,
        sink: Sink,
        shape: RequestShape,
        booking: Booking,
        token_ids: tuple[int, ...] | None,
    ) -> Failure | None:
        if token_ids is None:  # the pair is the first engine there is
            call.stage = "tokenise"
            self._check_size(ask, self._fleet.limit_tokens(ask.model))  # known by now
            urls = [booking.pair.prefill.engine_url, booking.pair.decode.engine_url]
            token_ids = await self._tokens.of(ask, lambda: urls, "")
        way = Way(ask, call, sink, shape, Bodies.of(ask, token_ids), token_ids)
        try:
            return await self._both_legs(way, booking)
        except LegFailed as failed:
            if call.begun:
                raise
            booking = await self._repair(call, shape, booking, failed)
        return await self._both_legs(way, booking)

    async def _anew(
        self, way: Way, booking: Booking, failed: LegFailed
    ) -> tuple[Booking, Handover]:
        """Another pair instead of a failed one, and its prefill leg."""
        fresh = await self._repair(way.call, way.shape, booking, failed)
        return fresh, await self._hand_over(way.call, fresh, way.bodies)

    async def _both_legs(self, way: Way, booking: Booking) -> Failure | None:
        """Both legs of a pair, which may still be being reserved: nothing is told or answered
        before that, and a pair that was not reserved gives way to the one that was.

        Raises:
            LegFailed, ClientFault. ReadyplaneError: no pair was reserved after all.
        """
        call, ahead = way.call, way.call.ahead
        if ahead is None:
            return await self._legs_of(way, booking)
        try:
            with ahead:
                return await self._legs_of(way, booking)
        except Refused:
            pass
        except (LegFailed, ClientFault):
            if call.ahead is None or await ahead.confirmed() is booking.pair:
                call.ahead = None
                raise
        booking.pair = await ahead.confirmed()
        call.ahead = None
        return await self._legs_of(way, booking)

    async def _stands(self, call: Call, booking: Booking, handover: Handover) -> None:
        """The pair is reserved; now it may be told and answered.

        Raises:
            Refused: another one was. ReadyplaneError: none was.
        """
        if call.ahead is not None:
            if await call.ahead.confirmed() is not booking.pair:
                raise Refused
            call.ahead = None
        self._prefilled(booking, handover)

    def _prefilled(self, booking: Booking, handover: Handover) -> None:
        if handover.told:
            return
        handover.told = True
        if not booking.pair.local:
            booking.prefill_done(handover.cached_tokens)
        self._count(booking, handover)

    def _count(self, booking: Booking, handover: Handover) -> None:
        how = "handed_over" if handover.params else "missing"
        self._meters.handovers.labels("local" if booking.pair.local else how).inc()

    async def _legs_of(self, way: Way, booking: Booking) -> Failure | None:
        if booking.pair.bootstrap_room is not None:
            return await self._meeting.legs_of(way, booking)
        ask, call, bodies = way.ask, way.call, way.bodies
        handover = await self._prefill(call, booking, bodies)
        pair = booking.pair
        if call.ahead is None:
            self._prefilled(booking, handover)
        call.stage = "decode"
        leg_name = "local" if pair.local else "decode"
        began_s = self._clock.monotonic_s()
        outcome = "failed"
        try:
            within_s = (
                self._bounds.decode_first_s_max if ask.stream else self._bounds.decode_total_s_max
            )
            leg = await self._legs.decode(
                leg_name,
                pair.decode,
                bodies.decode(handover.params),
                ask.kind.path,
                request_id=pair.reservation_id,
                within_s=within_s,
            )
            with leg:
                if ask.stream:
                    await leg.accepted()
                    failure = await self._stream(way, booking, leg, handover)
                else:
                    failure = await self._answer(way, booking, leg, handover)
            outcome = "ok" if failure is None else "failed"
            return failure
        except LegFailed as failed:
            if handover.params and not call.begun and await self._legs.lost(failed, pair.prefill):
                failed.leg, failed.end = "handover", pair.prefill
            raise
        except ClientFault:
            outcome = "refused"
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._meters.leg.labels(leg_name, outcome).observe(self._clock.monotonic_s() - began_s)
            if handover.params and not call.begun:
                self._later(self._abandon(pair.prefill, params=handover.params))

    async def _hand_over(self, call: Call, booking: Booking, bodies: Bodies) -> Handover:
        """The prefill leg alone, of a pair that may still be being reserved; when it has ended, so
        has that, and `booking` has the pair that was reserved.

        Raises:
            LegFailed, ClientFault. ReadyplaneError: no pair was reserved after all.
        """
        ahead = call.ahead
        if ahead is None:
            return await self._prefill(call, booking, bodies)
        handover = None
        try:
            with ahead:
                handover = await self._prefill(call, booking, bodies)
        except Refused:
            pass
        except (LegFailed, ClientFault):
            if await ahead.confirmed() is booking.pair:
                call.ahead = None
                raise
        chosen, pair = booking.pair, None
        try:
            pair = await ahead.confirmed()
        finally:
            if handover is not None and handover.params and pair is not chosen:
                self._later(self._abandon(chosen.prefill, params=handover.params))
        call.ahead = None
        if handover is not None and pair is chosen:
            return handover
        booking.pair = pair
        return await self._prefill(call, booking, bodies)

    async def _prefill(self, call: Call, booking: Booking, bodies: Bodies) -> Handover:
        pair = booking.pair
        if pair.local:
            return Handover(b"", None)
        if pair.bootstrap_room is not None:
            why = "its engine takes no prefill leg without a decode leg beside it"
            raise LegFailed("prefill", pair.prefill, "meets", why)
        call.stage = "prefill"
        began_s = self._clock.monotonic_s()
        outcome = "failed"
        within_s = (
            pair.predicted_ttft_s * self._bounds.prefill_factor + self._bounds.prefill_slack_s
        )
        try:
            handover = await self._legs.prefill(
                pair.prefill, bodies, request_id=pair.reservation_id, within_s=within_s
            )
            outcome = "ok"
        except ClientFault:
            outcome = "refused"
            raise
        except LegFailed as failed:
            if failed.trouble in MAY_HAVE_ENDED:
                self._later(self._abandon(pair.prefill, request_id=pair.reservation_id))
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            self._later(self._abandon(pair.prefill, request_id=pair.reservation_id))
            raise
        finally:
            self._meters.leg.labels("prefill", outcome).observe(self._clock.monotonic_s() - began_s)
        return handover

    async def _abandon(self, end: End, *, params: bytes = b"", request_id: str = "") -> None:
        how = await self._legs.abandon(end, params=params, request_id=request_id)
        self._meters.abandoned.labels(how).inc()

    async def _answer(
        self, way: Way, booking: Booking, leg: DecodeLeg, handover: Handover
    ) -> Failure | None:
        """An answer in one piece, passed on as it came.

        Its first token is not seen, so that no latency sample is made of it; it attains when it
        came as early as a stream that meets both SLOs would have ended.
        """
        ask, call, sink = way.ask, way.call, way.sink
        answer, usage = await self._onward.whole(way, leg)
        ahead = call.ahead
        if ahead is not None and ahead.asking.done():
            await self._stands(call, booking, handover)
            ahead = None
        elapsed_s = self._clock.monotonic_s() - call.arrived_s
        tokens = (usage.completion_tokens if usage else None) or 0
        slo = call.slo or self._bounds.slo
        call.begun = True
        call.stage = "answer"
        await sink.whole(200, answer, self._pair_headers(booking, handover))
        self._meters.output_tokens.labels(ask.model).inc(tokens)
        attained = elapsed_s <= slo.ttft_s + slo.tpot_s * max(0, tokens - 1)

        def finish() -> None:
            call.bookings[-1].finished(
                output_tokens=tokens,
                ttft_s=None,
                tpot_s=None,
                attained=attained,
                cached_tokens=handover.cached_tokens,
            )

        if ahead is None:
            self._prefilled(booking, handover)
            finish()
        else:
            call.ahead = None
            ahead.served()
            self._unreserved.add(ahead.asking)
            ahead.asking.add_done_callback(partial(self._reserved_late, booking, handover, finish))
        return None

    def _reserved_late(
        self,
        booking: Booking,
        handover: Handover,
        finish: Callable[[], None],
        asking: asyncio.Future[Pair],
    ) -> None:
        """The whole answer was there before its pair was reserved: nothing is left to reserve for,
        and whatever was reserved is told that it is over.
        """
        self._unreserved.discard(asking)
        error = None if asking.cancelled() else asking.exception()
        if asking.cancelled() or error is not None:
            booking.void()  # there is nothing to tell it of
            if error is not None and not isinstance(error, ReadyplaneError):
                log.error("a reservation failed after its answer", exc_info=error)
            return
        booking.pair = asking.result()
        self._count(booking, handover)
        finish()  # which says that its prefill is over, too

    async def settle(self, within_s: float) -> None:
        """Wait until answers that were given before their pair was reserved have been told."""
        if self._unreserved:
            await asyncio.wait(tuple(self._unreserved), timeout=within_s)

    async def _stream(
        self, way: Way, booking: Booking, leg: DecodeLeg, handover: Handover
    ) -> Failure | None:
        ask, call, sink = way.ask, way.call, way.sink
        pump = Pump(self._clock, self._bounds, call, booking, leg)
        scan = SseScan(keep_last=ask.include_usage, keep_each=ask.usage_in_each)
        first = await pump.first(scan)
        await self._stands(call, booking, handover)
        pump.first_token(scan.tokens)
        await sink.start(200, [*STREAM_HEADERS, *self._pair_headers(booking, handover)])
        call.begun = True
        call.stage = "stream"
        self._meters.ttft.labels(ask.model).observe(pump.ttft_s)
        try:
            await sink.send(first)
            await self._onward.rest(way, leg, pump, scan)
        except LegFailed as failed:
            call.bookings[-1].leg_failed(failed.end.worker_id, failed.why, busy=failed.busy)
            failure = failed.failure()
            await sink.send(b"data: " + failure.document() + b"\n\n")
            return failure
        if scan.error:
            call.bookings[-1].aborted("the engine ended the stream with an error")
            return Failure(500, "server_error", "engine_error", scan.error.decode(errors="replace"))
        self._finish(ask, call, call.bookings[-1], scan, pump, handover)
        return None

    def _finish(
        self,
        ask: Ask,
        call: Call,
        booking: Booking,
        scan: SseScan,
        pump: Pump,
        handover: Handover,
    ) -> None:
        tokens = scan.tokens
        tpot_s = pump.tpot_s(tokens)
        slo = call.slo or self._bounds.slo
        attained = pump.ttft_s <= slo.ttft_s and (tpot_s is None or tpot_s <= slo.tpot_s)
        booking.finished(
            output_tokens=tokens,
            ttft_s=pump.ttft_s,
            tpot_s=tpot_s,
            attained=attained,
            cached_tokens=handover.cached_tokens,
        )
        if tpot_s is not None:
            self._meters.tpot.labels(ask.model).observe(tpot_s)
        self._meters.output_tokens.labels(ask.model).inc(tokens)

    def _pair_headers(self, booking: Booking, handover: Handover) -> list[Header]:
        return pair_headers(booking.pair, handover) if self._show_pair else []


def _detail(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "the client left"
    if isinstance(error, ReadyplaneError):
        return failure_of(error).message
    return str(error) or type(error).__name__
