"""One request under way: what is known of it, where its answer goes, and the stream between.

Owns the times and counts of a stream while it passes from the decode leg to the client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from readyplane.core.work import Slo
from readyplane.kit.clock import Clock
from readyplane.ports import Pair
from readyplane_gateway.ahead import Unconfirmed
from readyplane_gateway.bounds import Bounds
from readyplane_gateway.legs import DecodeLeg, Handover, LegFailed
from readyplane_gateway.reporter import Booking
from readyplane_gateway.sse import SseScan

Header = tuple[bytes, bytes]


class Sink(Protocol):
    """Where the answer goes."""

    async def start(self, status: int, headers: Sequence[Header]) -> None:
        """Status and headers; once."""
        ...

    async def send(self, data: bytes) -> None:
        """Some of the body; waits while the client does not read."""
        ...

    async def whole(self, status: int, body: bytes, headers: Sequence[Header] = ()) -> None:
        """Status, headers and a JSON body that is complete; instead of the others."""
        ...


@dataclass(slots=True)
class Call:
    """What is known of a request beside its body, and how far it has come.

    Attributes:
        request_id: unique, of the gateway; engines and router see it.
        arrived_s: monotonic. slo: named by the request, else None.
        stage: where it is now, for the count of those that left.
        begun: bytes of the answer have gone to the client.
        ahead: the last booking's pair is still being reserved.
    """

    request_id: str
    arrived_s: float
    tenant: str = ""
    slo: Slo | None = None
    stage: str = "arrived"
    begun: bool = False
    bookings: list[Booking] = field(default_factory=list)
    ahead: Unconfirmed | None = None


def pair_headers(pair: Pair, handover: Handover) -> list[Header]:
    """Who serves a request, and how the KV came from one worker to the other."""
    how = "local" if pair.local else "kv" if handover.params else "none"
    return [
        (b"x-readyplane-prefill", pair.prefill.worker_id.encode("latin-1", "replace")),
        (b"x-readyplane-decode", pair.decode.worker_id.encode("latin-1", "replace")),
        (b"x-readyplane-reservation", pair.reservation_id.encode("latin-1", "replace")),
        (b"x-readyplane-handover", how.encode()),
    ]


class Pump:
    """Moves a stream from the decode leg to the client and keeps its times."""

    def __init__(
        self, clock: Clock, bounds: Bounds, call: Call, booking: Booking, leg: DecodeLeg
    ) -> None:
        self._clock = clock
        self._bounds = bounds
        self._call = call
        self._booking = booking
        self._leg = leg
        self._first_s = self._last_s = 0.0
        self._told_tokens = 0
        self.ttft_s = 0.0

    async def first(self, scan: SseScan) -> bytes:
        """The first bytes that hold a token. Raises LegFailed: an error or the end came first."""
        while True:
            data = self._feed(scan, await self._next())
            if scan.error:
                why = f"it answered with an error ({scan.error[:200].decode(errors='replace')})"
                raise LegFailed(self._leg.leg, self._leg.end, "engine_error", why)
            if data and (scan.events or scan.done):
                return data

    def first_token(self, tokens: int) -> None:
        """Note the time of the first token and tell it; `tokens` came with it."""
        self._booking.output_tokens = tokens
        now_s = self._clock.monotonic_s()
        self._first_s = self._last_s = now_s
        self.ttft_s = now_s - self._call.arrived_s
        self._booking.first_token(self.ttft_s)

    async def rest(self, scan: SseScan, sink: Sink) -> None:
        """Everything else, to the end marker or until it goes on elsewhere. Raises LegFailed."""
        events = scan.events
        while not (scan.done or scan.error or scan.moved):
            data = self._feed(scan, await self._next())
            if not data:
                continue
            if scan.events > events:
                events = scan.events
                tokens = self._booking.output_tokens = scan.tokens
                self._last_s = self._clock.monotonic_s()
                if tokens - self._told_tokens >= self._bounds.progress_tokens:
                    self._told_tokens = tokens
                    self._booking.progress()
            await sink.send(data)
        with contextlib.suppress(LegFailed):  # all has come; what ends it lets the connection live
            while await self._leg.piece():
                pass

    def goes_on(self, leg: DecodeLeg, booking: Booking) -> None:
        """Another engine has taken it over."""
        self._leg, self._booking = leg, booking

    def tpot_s(self, tokens: int) -> float | None:
        """Mean seconds per later token, None when there was none."""
        return (self._last_s - self._first_s) / (tokens - 1) if tokens > 1 else None

    async def _next(self) -> bytes:
        data = await self._leg.piece()
        if not data:
            why = "the stream ended before its end marker"
            raise LegFailed(self._leg.leg, self._leg.end, "truncated", why)
        return data

    def _feed(self, scan: SseScan, data: bytes) -> bytes:
        try:
            return scan.feed(data)
        except ValueError as error:
            raise LegFailed(self._leg.leg, self._leg.end, "unreadable", str(error)) from error
