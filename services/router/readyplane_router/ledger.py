"""What the store is told about reservations, now or as soon as it answers.

Owns the debts of one router: releases that could not be told, reservations to be extended, and what
must be put back when the store has been away. Nothing booked is ever left to be remembered by
nobody: what is not released here runs out there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from readyplane.core.errors import Unavailable
from readyplane.core.work import EventKind, RequestEvent
from readyplane.kit.clock import Clock
from readyplane_router.answers import ends_of, learn, payload_of, take_of
from readyplane_router.bookings import Held, Owed
from readyplane_router.desk import Desk
from readyplane_router.link import Link
from readyplane_router.policy import RouterPolicy
from readyplane_router.seats import ALL_SIDES, INCOMPLETE, TWIN, Take, Taken, Use
from readyplane_router.store import Store

ENDS = (EventKind.FINISHED, EventKind.ABORTED, EventKind.LEG_FAILED)
OWED_MAX = 100_000
OVERDUE_TTLS = (
    1.5  # unheard of for so many lives: who swept it at the store, if anyone, has done so
)
ASKED_RESERVATIONS_MAX = 500  # a model and round


class Ledger:
    """Reservations of this router at the store."""

    def __init__(
        self,
        store: Store,
        link: Link,
        clock: Clock,
        policy: RouterPolicy,
        desks: Mapping[str, Desk],
    ) -> None:
        """Nothing owed."""
        self._store, self._link, self._clock, self._policy = store, link, clock, policy
        self._desks = desks
        self._owed: dict[str, list[tuple[str, int]]] = {}
        self._incomplete: dict[str, list[str]] = {}
        self._missing: dict[str, list[tuple[str, Held]]] = {}
        self._asked: dict[str, int] = {}

    async def take(self, desk: Desk, held: Held) -> Taken:
        """Make a booking binding for all routers; without the store it binds this one only."""
        if not self._link.answering:
            self._link.check_not_cut_off()
            return Taken()
        try:
            taken = await self._store.take(desk.model, self._take_of(held))
            if taken.refused or taken.repeated:
                return taken
            if held.reservation_id not in desk.held:  # lost its worker meanwhile
                await self._store.release(desk.model, [(held.reservation_id, ALL_SIDES)])
                return Taken(refused="a worker of the pair has just gone")
        except Unavailable as error:
            self._link.failed(error)
            return Taken()
        held.in_store = True
        if self._link.routers > 1:
            for seat, used in zip(ends_of(held), taken.used, strict=False):
                learn(seat, used)
        return taken

    async def tell(self, model: str, owed: Owed) -> int:
        """Tell what events meant; what cannot be told now is owed. Returns how many were unknown.

        Growth is not owed: when the store is back, everything held is put back as it is by then.
        """
        if not owed.releases and not owed.grows:
            return 0
        if self._link.answering:
            try:
                for reservation_id, side, blocks in owed.grows:
                    await self._store.grow(model, reservation_id, side, blocks)
                return await self._store.release(model, owed.releases)
            except Unavailable as error:
                self._link.failed(error)
        self.owe(model, owed.releases)
        return 0

    def owe(self, model: str, releases: Sequence[tuple[str, int]]) -> None:
        """Release at the next round. Beyond `OWED_MAX` the oldest are left to run out there."""
        debts = self._owed.setdefault(model, [])
        debts.extend(releases)
        del debts[:-OWED_MAX]

    async def settle(self) -> None:
        """Pay what is owed, extend what is alive, give up what has run out, learn of the others.

        Raises:
            Unavailable: the store; what was not paid stays owed.
        """
        for model in list(self._incomplete):
            await self._put_back(model, self._incomplete.pop(model))
        for model in list(self._owed):
            await self._store.release(model, self._owed[model])
            del self._owed[model]
        self._run_out(absent=False)
        now_s, sweeping = self._clock.monotonic_s(), self._link.may_judge_expiry()
        for model, desk in list(self._desks.items()):
            touched, desk.touched = desk.touched, set()
            await self._store.extend(model, list(touched), ttl_s=self._policy.reservation_ttl_s)
            # After an absence each router needs a while to put back what ran out there meanwhile.
            for reservation_id in await self._store.sweep(model) if sweeping else ():
                desk.ran_out(reservation_id, now_s=now_s)
            if sweeping:
                await self._hear_of_swept(model, desk)
            if self._link.routers > 1 or any(s.other_sequences for s in desk.seats.values()):
                used = await self._store.usage(model)
                for seat in desk.seats.values():
                    learn(seat, used.get(seat.worker_id, Use()))

    async def _hear_of_swept(self, model: str, desk: Desk) -> None:
        """Give up what the store let run out at another router, or in an answer that was lost.

        A sweep is told once, to whoever swept. What the store lacks is given up a round later:
        by then it is known that this was no new life of it, which is told all again instead.
        """
        now_s = self._clock.monotonic_s()
        heard_s = now_s - OVERDUE_TTLS * self._policy.reservation_ttl_s
        for rid, held in self._missing.pop(model, ()):
            if desk.held.get(rid) is held and held.heard_s < heard_s:
                desk.ran_out(rid, now_s=now_s)
        overdue = [
            (rid, held)
            for rid, held in desk.held.items()
            if held.heard_s < heard_s and held.in_store and held.pair is not None
        ]
        if not overdue:
            return
        start = self._asked.get(model, 0)  # in turn: some may live on, heard of at other routers
        some = overdue[start : start + ASKED_RESERVATIONS_MAX]
        self._asked[model] = start + len(some) if start + len(some) < len(overdue) else 0
        gone = set(await self._store.missing(model, [rid for rid, _ in some]))
        self._missing[model] = [(rid, held) for rid, held in some if rid in gone]

    def _run_out(self, *, absent: bool) -> None:
        """Give up, by this router's clock, what the store could not let run out.

        That is what never got there, and, after an absence, whatever was not heard of meanwhile.
        """
        now_s, ttl_s = self._clock.monotonic_s(), self._policy.reservation_ttl_s
        for model, desk in self._desks.items():
            for reservation_id, held in list(desk.held.items()):
                if held.pair is None or (held.in_store and not absent):
                    continue
                if now_s - held.heard_s > ttl_s:
                    desk.ran_out(reservation_id, now_s=now_s)
                    self.owe(model, [(reservation_id, ALL_SIDES)])

    async def put_back(self) -> None:
        """The store is back: make it hold what is held here, whatever it remembers.

        Raises:
            Unavailable: it is away again.
        """
        self._run_out(absent=True)
        self._incomplete.clear()
        self._missing.clear()
        for model, desk in self._desks.items():
            await self._put_back(model, list(desk.held))

    async def _put_back(self, model: str, reservation_ids: Sequence[str]) -> None:
        desk = self._desks[model]
        found = [desk.held[rid] for rid in reservation_ids if rid in desk.held]
        held = [h for h in found if h.pair is not None]
        if not held:
            return
        answers = await self._store.put_back(model, [self._take_of(h) for h in held])
        incomplete = []
        for one, answer in zip(held, answers, strict=True):
            rid = one.reservation_id
            if rid not in desk.held:  # it has ended meanwhile
                self.owe(model, [(rid, ALL_SIDES)])
            elif answer == TWIN:  # asked again at another router, which answered last
                desk.drop(rid, now_s=self._clock.monotonic_s())
                desk.take_conflicts += 1
            else:
                one.in_store = True
                if answer == INCOMPLETE:  # another router has yet to put the worker back
                    incomplete.append(rid)
        if incomplete:
            self._incomplete[model] = incomplete

    def _take_of(self, held: Held) -> Take:
        payload = payload_of(held.pair) if held.pair is not None and self._store.shared else ""
        return take_of(held, payload, self._policy.reservation_ttl_s)

    async def strangers(self, events: Sequence[RequestEvent]) -> int:
        """Events of reservations not held here: another router's, an earlier life's, or nobody's.

        Returns how many nobody knows.
        """
        now_s = self._clock.monotonic_s()
        for event in events:
            if event.kind is EventKind.LEG_FAILED:
                for desk in self._desks.values():
                    desk.leg_failed(event, now_s=now_s)
        if not self._store.shared or not self._link.answering:
            return len(events)
        unknown = 0
        for event in events:
            if event.kind in ENDS:
                unknown += not await self._end_elsewhere(event)
            else:
                for desk in self._desks.values():
                    desk.touched.add(event.reservation_id)
        return unknown

    async def _end_elsewhere(self, event: RequestEvent) -> bool:
        for model, desk in self._desks.items():
            if await self.tell(model, Owed(releases=[(event.reservation_id, ALL_SIDES)])) == 0:
                if event.kind is EventKind.FINISHED:
                    desk.counters.finished += 1
                    desk.counters.output_tokens += event.output_tokens
                    desk.counters.attained += bool(event.attained)
                elif event.kind is EventKind.ABORTED:
                    desk.abort("client")
                else:
                    now_s = self._clock.monotonic_s()
                    desk.lose(event.reservation_id, "leg_failed", 0, now_s=now_s)
                return True
        return False
