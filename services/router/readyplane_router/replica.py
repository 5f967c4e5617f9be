"""The members of one router kept in step with the store and with the other routers.

Owns what happens to a member, whoever decided it: seated, shut, draining, gone; the batch of
renewals and expiries of each round; and the way back after the store was away: it is refilled from
what is known here, and no epoch goes back. `Membership` adds what workers ask for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from readyplane.core.errors import (
    Conflict,
    Unavailable,
)
from readyplane.core.profile import ClassProfile
from readyplane.core.worker import (
    Holds,
    Role,
    Serving,
    Worker,
    WorkerState,
)
from readyplane.kit.clock import Clock
from readyplane_router import sharing
from readyplane_router.admission import Admission
from readyplane_router.desk import Desk
from readyplane_router.epochs import Epochs
from readyplane_router.link import Link
from readyplane_router.members import Member, new_group
from readyplane_router.pair import times_of
from readyplane_router.policy import RouterPolicy
from readyplane_router.roster import Roster
from readyplane_router.store import Change, Record, Renew, Store, Vitals
from readyplane_router.told import Told

FOLLOW_RETRY_S = 1.0
RESYNC_EVERY_TICKS = 10
REFILLED_AT_ONCE_MAX = 32
COUNTED = (
    *("granted", "fenced", "expired", "left", "admitted", "refused", "drain_aborts"),
    *("stood_by", "activated", "activations_carried", "activations_expired"),
    *("flipped", "staged", "stages_refused"),
)

log = logging.getLogger(__name__)


class Replica:
    """Members, the store, and the other routers."""

    def __init__(
        self,
        *,
        store: Store,
        epochs: Epochs,
        clock: Clock,
        admission: Admission,
        roster: Roster,
        link: Link,
        incarnation: str,
        policy: RouterPolicy,
        desk: Callable[[str], Desk],
        pump: Callable[[str], None],
        owe: Callable[[str, Sequence[tuple[str, int]]], None],
        put_back: Callable[[], Awaitable[None]],
        on_admitted: Callable[[Worker], None] | None,
        on_followed: Callable[[str, Worker, float], None] | None,
    ) -> None:
        """Built by the service; `desk`, `pump`, `owe` and `put_back` are its own."""
        self.policy = policy
        self.counts = dict.fromkeys(COUNTED, 0)
        self._store, self._epochs, self._clock = store, epochs, clock
        self._admission, self._roster, self._link = admission, roster, link
        self._incarnation = incarnation
        self._desk, self._pump, self._owe, self._put_back = desk, pump, owe, put_back
        self._on_admitted, self._on_followed = on_admitted, on_followed
        self._members = roster.members
        self._sharing = sharing.KvSharing(store, incarnation)
        self._ticks = 0
        self._life = ""
        self._ticked_s: float | None = None

    async def start(self) -> None:
        """Take over what the store knows.

        Raises:
            Unavailable: store or epochs do not answer.
        """
        self._roster.begin(await self._epochs.next())
        self._life = await self._store.identity()
        self._link.back()
        if self._store.shared:
            self._link.routers = await self._attend()
        await self._resync()

    async def tick(self) -> None:
        """One round: renewals to the store, expiries from it, the others' news."""
        self._ticks += 1
        now_s, before_s = self._clock.monotonic_s(), self._ticked_s
        self._ticked_s = now_s
        if before_s is not None and now_s - before_s > self.policy.lease_ttl_s / 2:
            log.warning("this router was not running", extra={"seconds": f"{now_s - before_s:.1f}"})
            self._link.doubt()
        try:
            life = await self._store.identity()
            if not self._link.answering or life != self._life:
                # Away, or replaced so quickly that nobody noticed: it may be empty or older.
                # Until it was told everything, nothing is decided by it.
                self._link.refilling()
                self._life = life
                self._sharing.store_is_new()
                await self._refill()
                await self._put_back()
                self._link.back()
            await self._flush()
            if self._link.may_judge_expiry():
                for change in await self._store.expire():
                    await self._expired(change)
            if self._store.shared:
                await self._share()
        except Unavailable as error:
            self._link.failed(error)

    # ------------------------------------------------------------------------ the store

    async def _refill(self) -> None:
        """The store is back, perhaps empty or older: put back who is alive here, and who has gone.

        Not a worker whose session has meanwhile moved: its new keeper's word counts.
        """
        known = {record.offer.worker_id: record for record, _ in await self._store.workers()}
        mine = [member for member in self._members.values() if member.mine]
        for start in range(0, len(mine), REFILLED_AT_ONCE_MAX):
            some = mine[start : start + REFILLED_AT_ONCE_MAX]
            await asyncio.gather(*(self._refill_one(m, known.get(m.offer.worker_id)) for m in some))

    async def _refill_one(self, member: Member, found: Record | None) -> None:
        now_s, ttl_s = self._clock.monotonic_s(), self.policy.lease_ttl_s
        if (
            found is not None
            and found.epoch == member.epoch
            and found.keeper not in ("", self._incarnation)
            and now_s - member.renewed_s > ttl_s / 2
        ):
            self._apply(found, None)
            return
        gone = member.state is WorkerState.GONE
        if gone and (found is None or found.epoch > member.epoch):
            return
        record = member.record(self._incarnation)
        kept = await self._store.restore(record, ttl_s=ttl_s, vitals=member.vitals())
        if kept and gone:
            await self._store.end(record)
        elif kept:
            await self._tell_seat(member)

    async def _flush(self) -> None:
        """Tell the store, in one batch, who has renewed."""
        dirty = [m for m in self._members.values() if m.dirty and m.state is not WorkerState.GONE]
        if not dirty:
            return
        ttl_s = self.policy.lease_ttl_s
        items = [Renew(m.offer.model, m.offer.worker_id, m.epoch, ttl_s, m.vitals()) for m in dirty]
        answers = await self._store.renew(items)
        for member, answer in zip(dirty, answers, strict=True):
            member.dirty = False
            if answer == "unknown":
                await self._store.restore(
                    member.record(self._incarnation), ttl_s=ttl_s, vitals=member.vitals()
                )
                await self._tell_seat(member)
            elif answer == "stale":
                await self._look_up(Change(member.offer.model, member.offer.worker_id))
                if self._members.get(member.offer.worker_id) is member:
                    self._gone(member, "its lease ended at the store")

    async def _expired(self, change: Change) -> None:
        member = self._members.get(change.worker_id)
        if member is None or member.offer.model != change.model:
            return
        found = await self._store.worker(change.model, change.worker_id)
        if found is None or found[0].epoch == member.epoch:
            self.counts["expired"] += 1
            self._gone(member, "its lease expired")

    async def _share(self) -> None:
        """News of other routers: how many there are, KV events, vitals of their workers."""
        before = self._link.routers
        self._link.routers = await self._attend()
        if self._link.routers > 1:
            await self._sharing.round(
                [m for m in self._members.values() if m.seat is not None],
                lambda model: self._desk(model).index,
                joined=before < 2,
                now_s=self._clock.monotonic_s(),
            )
        else:
            self._sharing.alone()
        if self._link.routers > 1 or self._ticks % RESYNC_EVERY_TICKS == 0:
            await self._resync()

    async def _attend(self) -> int:
        ttl_s = 3 * self.policy.tick_s + self.policy.lease_ttl_s
        return await self._store.attend(self._incarnation, ttl_s=ttl_s)

    async def follow(self) -> None:
        """Follow the changes that other routers make; endless, resumes after an absence."""
        while True:
            try:
                async for change in self._store.watch():
                    if self._link.routers > 1:  # else it is an echo of what was done here
                        await self._look_up(change)
            except Unavailable as error:
                self._link.failed(error)
            await self._clock.sleep(FOLLOW_RETRY_S)

    async def _resync(self) -> None:
        before = [m for m in self._members.values() if not m.mine]
        found = await self._store.workers()
        for record, vitals in found:
            self._apply(record, vitals)
        # Ended and forgotten while this router did not listen. A keeper that lives would have put
        # it back by now.
        if self._link.may_judge_expiry():
            known = {record.offer.worker_id for record, _ in found}
            for member in before:
                if member.offer.worker_id not in known and not member.mine:
                    self._gone(member, "the store has forgotten it")

    async def _look_up(self, change: Change) -> None:
        found = await self._store.worker(change.model, change.worker_id)
        if found is not None:
            self._apply(*found)

    async def refresh_if_shut(self, refused: str, model: str) -> None:
        """A seat was refused for another reason than being full: this view, or the store, is old."""
        if refused.endswith(("no free sequence", "no free blocks")):
            return
        try:
            for member in self._members.values():
                member.dirty = member.dirty or member.mine
            await self._flush()
            await self._resync()
        except Unavailable as error:
            self._link.failed(error)
        self._pump(model)

    def _apply(self, record: Record, vitals: Vitals | None) -> None:
        """Take another router's word about a worker: newer epochs and later states win."""
        worker_id = record.offer.worker_id
        member = self._members.get(worker_id)
        if member is not None and record.epoch < member.epoch:
            return
        now_s, wall_s = self._clock.monotonic_s(), self._clock.wall_s()
        if member is None or record.epoch > member.epoch:
            if record.state is WorkerState.GONE:
                if member is not None:
                    self._gone(member, "fenced by a newer incarnation")
                return
            if member is not None:
                self._gone(member, "fenced by a newer incarnation")
            member = Member(
                record.offer,
                record.epoch,
                WorkerState.PROVISIONED,
                replace(
                    new_group(record.offer, now_s=self._clock.monotonic_s()),
                    epoch=record.group_epoch,
                ),
                provisioned_s=_mono(record.provisioned_wall_s, wall_s, now_s),
                provisioned_wall_s=record.provisioned_wall_s,
                renewed_s=now_s,
                moved_s=now_s,
                past=() if member is None else member.past_with(record.offer.incarnation),
            )
            self._members[worker_id] = member
            self._roster.bump()
        if record.keeper and record.keeper != self._incarnation:
            member.mine = False
        self._apply_state(member, record, now_s, wall_s)
        if vitals is not None and not member.mine:
            member.progress = vitals.progress or member.progress
            member.drained = vitals.drained
            member.heard(vitals.load, now_s=now_s)

    def _apply_state(self, member: Member, record: Record, now_s: float, wall_s: float) -> None:
        if record.state is WorkerState.GONE:
            if member.state is not WorkerState.GONE:
                self._gone(member, "it left, or its lease expired, by another router")
            return
        self._hear(member, record, now_s)
        if record.state is WorkerState.STANDBY:
            if member.state is WorkerState.PROVISIONED:
                member.serving, member.checks = record.serving, record.checks
                member.become(WorkerState.STANDBY)
                self._roster.bump()
            if not member.mine:
                member.holds = Holds(record.holds) if record.holds else None
            return
        if record.serving is not None and member.seat is None:
            profile = self._admission.profile(record.serving, record.checks)
            if profile is None:
                log.warning("no profile for a worker", extra={"profile": record.serving.profile})
                return
            member.serving, member.checks = record.serving, record.checks
            member.ready_s = _mono(record.ready_wall_s, wall_s, now_s)
            member.ready_wall_s = record.ready_wall_s
            member.become(WorkerState.READY)
            self._seat(member, profile, now_s)
        elif record.serving is not None and not member.mine and member.serving != record.serving:
            profile = self._admission.profile(record.serving, record.checks)
            if profile is not None:
                member.checks = record.checks
                self._restage(member, record.serving, profile)
        if record.state is WorkerState.DRAINING and member.state is not WorkerState.DRAINING:
            self._drain(member, record.drain_reason, record.drain_deadline_s, now_s)
            member.say()
        elif (
            record.state in (WorkerState.STALLED, WorkerState.READY)
            and not member.mine
            and member.state is not record.state
            and member.become(record.state)
        ):
            self._shut_by_state(member)
            self._roster.bump()

    def _hear(self, member: Member, record: Record, now_s: float) -> None:
        """Words that another router gave or took back; each is heard once, by its number."""
        if record.words > member.words:
            member.words = record.words
            role = Role(record.told_role) if record.told_role else None
            until_s = now_s + record.told_for_s
            if record.told:
                member.told = Told(
                    record.told, now_s, until_s, record.told_reason, role, record.words
                )
                member.say()
            else:
                member.told = None
        elif record.words == member.words and not record.told and not member.mine:
            member.told = None

    # ------------------------------------------------------------------------ what happens

    async def _end(self, member: Member, why: str) -> None:
        self._gone(member, why)
        if self._link.answering:
            try:
                await self._store.end(member.record(self._incarnation))
            except Unavailable as error:
                self._link.failed(error)

    def _gone(self, member: Member, why: str) -> None:
        """It is over for this incarnation: seat, prefixes and reservations go with it."""
        if member.state is WorkerState.GONE:
            return
        member.state = WorkerState.GONE
        member.gone_s = self._clock.monotonic_s()
        member.drain_reason = member.drain_reason or why
        desk = self._desk(member.offer.model)
        lost = desk.unseat_worker(member.key, now_s=member.gone_s)
        member.seat = None
        self._owe(member.offer.model, [(reservation_id, -1) for reservation_id in lost])
        log.info("worker gone", extra={"worker": member.offer.worker_id, "why": why})
        self._roster.bump()
        self._pump(member.offer.model)

    def _seat(self, member: Member, profile: ClassProfile, now_s: float) -> None:
        desk = self._desk(member.offer.model)
        factor, _own = desk.rates.beginning(profile.name)
        seat = member.take_seat(profile, factor=factor)
        desk.seat_worker(seat, now_s=now_s)
        seat.sequences_cap = self._cap(member, now_s)
        self._shut_by_state(member)
        self._roster.bump()

    def _restage(self, member: Member, serving: Serving, profile: ClassProfile) -> None:
        """Its seat promises what it is now: other times, other KV. What is promised on it stays."""
        member.serving = serving
        if member.seat is not None:
            rates = self._desk(member.offer.model).rates
            if member.seat.times.name != profile.name:
                rates.forget(member.key)  # was measured against the times of the stage before
            factors = rates.beginning(profile.name)
            member.seat.promise(times_of(profile), serving.kv_total_blocks, *factors)
        self._roster.bump()

    async def _tell(self, member: Member) -> None:
        """Tell the store what a member has become."""
        if not self._link.answering:
            return
        try:
            await self._store.put(member.record(self._incarnation))
            await self._tell_seat(member)
        except Unavailable as error:
            self._link.failed(error)

    async def _tell_seat(self, member: Member) -> None:
        seat = member.seat
        if seat is None:
            return
        await self._store.seat(
            member.offer.model,
            member.offer.worker_id,
            member.epoch,
            is_open=member.state is WorkerState.READY,
            sequences=seat.max_num_seqs,
            blocks=seat.kv_total_blocks,
        )

    def _shut_by_state(self, member: Member) -> None:
        seat = member.seat
        if seat is None:
            return
        if member.state is WorkerState.READY:
            if not seat.shut.startswith("circuit"):
                seat.shut = ""
        else:
            seat.shut = str(member.state)

    def _drain(self, member: Member, reason: str, deadline_s: float, now_s: float) -> None:
        if not member.become(WorkerState.DRAINING):
            raise Conflict("worker state", "one that can drain", str(member.state), "look again")
        member.drain_reason, member.drain_deadline_s = reason, deadline_s
        member.draining_s, member.leave_at_s = now_s, now_s + deadline_s
        member.draining_wall_s = self._clock.wall_s()
        self._shut_by_state(member)
        self._roster.bump()

    def _cap(self, member: Member, now_s: float) -> int:
        """Most sequences now: the engine's limit, or less for the new, the silent, the cut off."""
        seat, policy = member.seat, self.policy
        if seat is None:
            return 0
        cap = seat.max_num_seqs
        others = any(
            m is not member
            and m.seat is not None
            and m.offer.model == member.offer.model
            and m.offer.role is member.offer.role
            and m.state is WorkerState.READY
            for m in self._members.values()
        )
        if others and member.load_s is not None and now_s - member.load_s > policy.load_stale_s:
            cap = min(cap, policy.stale_sequences_max)
        new = member.ready_s is not None and now_s - member.ready_s < policy.ramp_s
        if others and new and member.load_s is None:
            cap = min(cap, policy.ramp_sequences)
        if (
            not self._link.answering
        ):  # a share granted beforehand: the others serve without asking too
            cap = max(1, cap // max(1, self._link.routers))
        return cap


def _mono(then_wall_s: float | None, wall_s: float, now_s: float) -> float | None:
    """A wall time of another router on this router's clock; for showing ages, not for judging."""
    if then_wall_s is None:
        return None
    return now_s - max(0.0, wall_s - then_wall_s)
