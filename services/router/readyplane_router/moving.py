"""Another decode worker for a request that decodes already: its KV comes from where it decodes now.

Owns one use-case of the service. The brain is asked as ever, but with the whole of what was read and
written so far counted as held by every worker whose KV format fits: nothing is left to prefill, and
what remains is who decodes. Nobody waits for it: the request goes on where it is until then.
Facts that were under way in that moment name the old reservation, as do those of a gateway that did
not get the answer: they are the new one's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from readyplane.core.errors import InvalidField, NotFound, Overloaded
from readyplane.core.work import RequestEvent, RequestShape, reservation_id_of
from readyplane.kit.clock import Clock
from readyplane.ports import Pair
from readyplane_router.answers import check_shape, end_of, ends_of, learn, pair_from
from readyplane_router.bookings import Held, Owed
from readyplane_router.desk import Desk
from readyplane_router.ledger import Ledger
from readyplane_router.pair import Chosen, decide
from readyplane_router.policy import RouterPolicy
from readyplane_router.seats import ALL_SIDES
from readyplane_router.waiting import Waiting

TAKE_TRIES_MAX = 4
ONWARD_MAX = 10_000
"""Moves whose old reservation is remembered; its facts are late by seconds."""


class Moving:
    """Moves of one router."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        policy: RouterPolicy,
        desks: Mapping[str, Desk],
        pump: Callable[[str], None],
    ) -> None:
        """Nothing moved yet."""
        self._ledger, self._clock, self._policy = ledger, clock, policy
        self._desks, self._pump = desks, pump
        self._onward: dict[str, str] = {}
        self.moved = self.refused = 0

    def now(self, reservation_id: str) -> str:
        """What took the place of a reservation; itself where nothing did."""
        while (onward := self._onward.get(reservation_id)) is not None:
            reservation_id = onward
        return reservation_id

    def followed(self, events: Sequence[RequestEvent]) -> Sequence[RequestEvent]:
        """The events, each of the reservation that its request has now."""
        if not any(event.reservation_id in self._onward for event in events):
            return events
        return [replace(e, reservation_id=self.now(e.reservation_id)) for e in events]

    async def move(
        self, shape: RequestShape, *, reservation_id: str, worker_id: str, emitted: int
    ) -> Pair:
        """Reserve another decode worker and give the old reservation back.

        Args:
            shape: as it was routed. reservation_id: what it has. worker_id: where its KV is.
            emitted: output tokens so far.

        Raises:
            NotFound: that worker is not known, or the request ended just now. Overloaded: no other
            worker has room now, or fits.
        """
        check_shape(shape)
        if emitted < 1:
            raise InvalidField("emitted", emitted, "move a request that decodes already")
        desk = self._desks.get(shape.model)
        if desk is None:
            raise NotFound("model", shape.model, "list the models")
        source = next((s for s in desk.seats.values() if s.worker_id == worker_id), None)
        if source is None:
            raise NotFound("worker", worker_id, "list the workers")
        fits = {s.key for s in desk.decodes if s is not source and s.kv_key == source.kv_key}
        new_id = reservation_id_of(shape.request_id, reservation_id)
        had = desk.held.get(new_id)
        if had is not None and had.pair is not None:
            return had.pair  # the answer to the same call was lost
        left = None if shape.max_tokens is None else max(1, shape.max_tokens - emitted)
        whole = replace(
            shape, isl=shape.isl + emitted, token_ids=b"", block_hashes=(), max_tokens=left
        )
        ends_here = reservation_id in desk.held
        for _ in range(TAKE_TRIES_MAX):
            held = self._booked(desk, new_id, whole, fits, emitted)
            pair = held.pair = self._pair(held)
            taken = await self._ledger.take(desk, held)
            if not taken.refused:
                now_s = self._clock.monotonic_s()
                was = desk.drop(reservation_id, now_s=now_s)
                lost = desk.ends.found(reservation_id)
                if ends_here and was is None and lost is None:
                    desk.drop(new_id, now_s=now_s)
                    await self._ledger.tell(desk.model, Owed([(new_id, ALL_SIDES)]))
                    raise NotFound("reservation", reservation_id, "its request ended meanwhile")
                self.moved += 1
                self._goes_on(reservation_id, new_id)
                await self._ledger.tell(desk.model, Owed([(reservation_id, ALL_SIDES)]))
                self._pump(desk.model)
                return pair_from(taken.payload) if taken.repeated else pair
            desk.drop(new_id, now_s=self._clock.monotonic_s())
            for seat, used in zip(ends_of(held), taken.used, strict=False):
                learn(seat, used)
        self.refused += 1
        raise Overloaded("other routers were first, time and again", desk.retry_after_s())

    def _goes_on(self, reservation_id: str, new_id: str) -> None:
        self._onward[reservation_id] = new_id
        while len(self._onward) > ONWARD_MAX:
            del self._onward[next(iter(self._onward))]

    def _booked(
        self, desk: Desk, new_id: str, whole: RequestShape, fits: set[str], emitted: int
    ) -> Held:
        now_s = self._clock.monotonic_s()
        granted: asyncio.Future[Held] = asyncio.get_running_loop().create_future()
        entry = Waiting(
            new_id,
            whole,
            whole.slo or self._policy.pair.slo,
            (0, False, 0.0, 0.0, 0),
            now_s,
            now_s,
            granted,
        )
        ask = replace(
            desk.ask(entry, now_s=now_s),
            cached_tokens=dict.fromkeys(fits, whole.isl),
            brings_kv=True,
        )
        able = [seat for seat in desk.decodes if seat.key in fits]
        # Whoever holds all of it serves it alone, whatever the policy says of other prompts.
        policy = replace(self._policy.pair, skip_prefill=True)
        verdict = decide(ask, (), able, policy, now_s=now_s)
        if not isinstance(verdict, Chosen):
            self.refused += 1
            raise Overloaded(
                "no other decode worker that fits has room for it now", desk.retry_after_s()
            )
        held = desk.book(new_id, whole, verdict, hashes=(), waited_s=0.0, now_s=now_s)
        desk.decodes_already(held, emitted, now_s=now_s)
        return held

    def _pair(self, held: Held) -> Pair:
        return Pair(
            reservation_id=held.reservation_id,
            prefill=end_of(held.prefill, held.prefill_cached),
            decode=end_of(held.decode, held.decode_cached),
            local=held.local,
            predicted_ttft_s=held.terms.ttft_s,
            predicted_tpot_s=held.terms.tpot_s,
            waited_s=0.0,
            ttl_s=self._policy.reservation_ttl_s,
        )
