"""Who is alive, and how it became routable: leases, groups, the gate, drains, the store's absence.

Owns the members of one router and their way from register to gone, and keeps the store told. Hands
seats to the desks. While the store is away nobody is declared dead; when it is back, it is refilled
from what is known here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from readyplane.core.errors import (
    Conflict,
    InvalidField,
    LostLease,
    NotFound,
    StaleEpoch,
    Unavailable,
)
from readyplane.core.identity import Manifest
from readyplane.core.profile import ClassProfile
from readyplane.core.worker import (
    CheckResult,
    Fleet,
    Lease,
    Serving,
    Worker,
    WorkerOffer,
    WorkerState,
)
from readyplane.kit.clock import Clock
from readyplane.ports import (
    Directive,
    GateVerdict,
    GroupStatus,
    KvEventBatch,
    RankReport,
    Renewal,
    RenewalAnswer,
)
from readyplane_router import gate, group, lease, sharing
from readyplane_router.desk import Desk
from readyplane_router.epochs import Epochs
from readyplane_router.lease import Standing
from readyplane_router.members import Member, check_offer, new_group
from readyplane_router.policy import RouterPolicy
from readyplane_router.store import Change, KvEntry, Record, Renew, Store, Vitals

MANIFESTS_KEPT_MAX = 32
PROFILES_MAX = 256
KV_PENDING_BATCHES_MAX = 10_000
EPOCH_VERSIONS = 1 << 24
FOLLOW_RETRY_S = 1.0
RESYNC_EVERY_TICKS = 10

log = logging.getLogger(__name__)


class Manifests(Protocol):
    """What the router needs of a registry; any `ports.Registry` is one."""

    async def get_manifest(self, digest: str) -> Manifest:
        """One manifest. Raises NotFound."""
        ...

    async def resolve(self, reference: str) -> Manifest:
        """By digest, tag or model name. Raises NotFound."""
        ...


class Membership:
    """The members of one router."""

    def __init__(
        self,
        *,
        store: Store,
        epochs: Epochs,
        clock: Clock,
        registry: Manifests | None,
        profiles: dict[str, ClassProfile],
        incarnation: str,
        policy: RouterPolicy,
        desk: Callable[[str], Desk],
        pump: Callable[[str], None],
        owe: Callable[[str, Sequence[tuple[str, int]]], None],
        on_admitted: Callable[[Worker], None] | None,
    ) -> None:
        """Built by the service; `desk`, `pump` and `owe` are its own."""
        self.policy = policy
        self.profiles = profiles
        self.routers = 1
        self.just_back = False
        self.counts = {
            "granted": 0,
            "fenced": 0,
            "expired": 0,
            "left": 0,
            "admitted": 0,
            "refused": 0,
            "store_absences": 0,
            "drain_aborts": 0,
        }
        self._store, self._epochs, self._clock, self._registry = store, epochs, clock, registry
        self._incarnation = incarnation
        self._desk, self._pump, self._owe, self._on_admitted = desk, pump, owe, on_admitted
        self._members: dict[str, Member] = {}
        self._manifests: dict[str, Manifest] = {}
        self._version = 0
        self._changed = asyncio.Event()
        self._away_since_s: float | None = None
        self._answering_since_s = clock.monotonic_s()
        self._ticks = 0
        self._kv_positions: dict[str, str] = {}
        self._kv_pending: list[tuple[str, KvEntry]] = []

    # ------------------------------------------------------------------------ the store

    @property
    def answering(self) -> bool:
        """Whether the store answered last."""
        return self._away_since_s is None

    def standing(self) -> Standing:
        """Fresh, degraded, or cut off from the store."""
        return lease.standing(
            away_since_s=self._away_since_s,
            now_s=self._clock.monotonic_s(),
            absence_max_s=self.policy.redis_absence_max_s,
        )

    def store_failed(self, error: Unavailable) -> None:
        """The store did not answer: serve from what is known, degraded, and keep asking."""
        if self._away_since_s is None:
            self._away_since_s = self._clock.monotonic_s()
            self.counts["store_absences"] += 1
            self._bump()
            log.warning("the store is away, serving degraded", extra={"error": str(error)})

    async def start(self) -> None:
        """Take over what the store knows.

        Raises:
            Unavailable: store or epochs do not answer.
        """
        self._version = await self._epochs.next() * EPOCH_VERSIONS
        await self._store.ping()
        self._answering_since_s = self._clock.monotonic_s()
        await self._resync()

    async def tick(self) -> None:
        """One round: renewals to the store, expiries from it, stalls, drains, the others' news."""
        self._ticks += 1
        self.just_back = False
        now_s = self._clock.monotonic_s()
        try:
            if self._away_since_s is not None:
                await self._store.ping()
                await self._refill()
            await self._flush()
            if lease.may_judge_expiry(
                away_since_s=self._away_since_s,
                answering_since_s=self._answering_since_s,
                now_s=now_s,
                ttl_s=self.policy.lease_ttl_s,
            ):
                for change in await self._store.expire():
                    await self._expired(change)
            if self._store.shared:
                await self._share()
        except Unavailable as error:
            self.store_failed(error)
        await self._look_after(now_s)

    async def _refill(self) -> None:
        """The store is back, perhaps empty or older: put back who is alive here."""
        for member in list(self._members.values()):
            if member.state is WorkerState.GONE or not member.mine:
                continue
            record = member.record(self._incarnation)
            kept = await self._store.restore(
                record, ttl_s=self.policy.lease_ttl_s, vitals=member.vitals()
            )
            if kept:
                await self._tell_seat(member)
        self._away_since_s = None
        self._answering_since_s = self._clock.monotonic_s()
        self.just_back = True
        self._bump()
        log.warning("the store is back", extra={"members": len(self._members)})

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
        before = self.routers
        self.routers = await self._store.attend(
            self._incarnation, ttl_s=3 * self.policy.tick_s + self.policy.lease_ttl_s
        )
        if self.routers > 1:
            await self._share_kv(joined=before < 2)
        else:
            self._kv_pending.clear()
        if self.routers > 1 or self._ticks % RESYNC_EVERY_TICKS == 0:
            await self._resync()

    async def _share_kv(self, *, joined: bool) -> None:
        pending, self._kv_pending = self._kv_pending, []
        for model, entry in pending:
            await self._store.append_kv(model, entry)
        now_s = self._clock.monotonic_s()
        for model in {m.offer.model for m in self._members.values() if m.seat is not None}:
            self._kv_positions[model] = await sharing.read_log(
                self._store,
                model,
                self._desk(model).index,
                after=self._kv_positions.get(model, ""),
                own=self._incarnation,
                now_s=now_s,
            )
        for member in list(self._members.values()):
            if member.seat is None:
                continue
            index, offer = self._desk(member.offer.model).index, member.offer
            if member.mine and (joined or self._ticks % RESYNC_EVERY_TICKS == 0):
                held = index.snapshot(member.key)
                if held is not None:
                    data = sharing.pack_snapshot(*held)
                    await self._store.put_snapshot(
                        offer.model, offer.worker_id, offer.incarnation, data
                    )
            elif not member.mine and (index.is_suspect(member.key) or index.unheard(member.key)):
                await sharing.catch_up(
                    self._store,
                    offer.model,
                    index,
                    worker_id=offer.worker_id,
                    incarnation=offer.incarnation,
                    now_s=now_s,
                )

    async def follow(self) -> None:
        """Follow the changes that other routers make; endless, resumes after an absence."""
        while True:
            try:
                async for change in self._store.watch():
                    await self._look_up(change)
            except Unavailable as error:
                self.store_failed(error)
            await self._clock.sleep(FOLLOW_RETRY_S)

    async def _resync(self) -> None:
        for record, vitals in await self._store.workers():
            self._apply(record, vitals)

    async def _look_up(self, change: Change) -> None:
        found = await self._store.worker(change.model, change.worker_id)
        if found is not None:
            self._apply(*found)

    async def refresh_if_shut(self, refused: str, model: str) -> None:
        """A seat was refused for another reason than being full: this view is old."""
        if refused.endswith(("no free sequence", "no free blocks")):
            return
        try:
            await self._resync()
            await self._store.ping()
        except Unavailable as error:
            self.store_failed(error)
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
                replace(new_group(record.offer), epoch=record.group_epoch),
                provisioned_s=_mono(record.provisioned_wall_s, wall_s, now_s),
                provisioned_wall_s=record.provisioned_wall_s,
                renewed_s=now_s,
                moved_s=now_s,
            )
            self._members[worker_id] = member
            self._bump()
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
        if record.serving is not None and member.seat is None:
            profile = self._profile(record.serving, record.checks)
            if profile is None:
                log.warning("no profile for a worker", extra={"profile": record.serving.profile})
                return
            member.serving, member.checks = record.serving, record.checks
            member.ready_s = _mono(record.ready_wall_s, wall_s, now_s)
            member.ready_wall_s = record.ready_wall_s
            member.become(WorkerState.READY)
            self._seat(member, profile, now_s)
        if record.state is WorkerState.DRAINING and member.state is not WorkerState.DRAINING:
            self._drain(member, record.drain_reason, record.drain_deadline_s, now_s)
        elif (
            record.state in (WorkerState.STALLED, WorkerState.READY)
            and not member.mine
            and member.state is not record.state
            and member.become(record.state)
        ):
            self._shut_by_state(member)
            self._bump()

    # ------------------------------------------------------------------------ views

    def fleet(self, model: str = "") -> Fleet:
        """The members as frozen values."""
        standing = self.standing()
        return Fleet(
            self._version,
            {
                worker_id: member.view()
                for worker_id, member in self._members.items()
                if model in ("", member.offer.model)
            },
            "" if standing is Standing.FRESH else f"the store is away ({standing})",
        )

    async def watch(self, model: str = "") -> AsyncGenerator[Fleet]:
        """The fleet now and after every change of a state."""
        seen = -1
        while True:
            changed = self._changed
            if seen != self._version:
                seen = self._version
                yield self.fleet(model)
            else:
                await changed.wait()

    def serves(self, model: str) -> bool:
        """Whether any living worker has this model."""
        return any(
            m.offer.model == model and m.state is not WorkerState.GONE
            for m in self._members.values()
        )

    async def is_published(self, model: str) -> bool:
        """Whether the registry knows the model; True when nobody can say."""
        if self._registry is None:
            return False
        try:
            await self._registry.resolve(model)
        except NotFound:
            return False
        except Unavailable:
            return True
        return True

    def _bump(self) -> None:
        self._version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ------------------------------------------------------------------------ leases

    async def register(self, offer: WorkerOffer) -> Lease:
        """Grant a lease; an older incarnation is fenced off.

        Raises:
            InvalidField: the offer. LostLease: this incarnation was fenced. Unavailable: epochs.
        """
        check_offer(offer)
        member = self._members.get(offer.worker_id)
        if (
            member is not None
            and member.offer.incarnation == offer.incarnation
            and member.state is not WorkerState.GONE
        ):
            member.mine = True
            self._renewed(member)
            return self._lease(member)
        if member is not None and member.offer.model != offer.model:
            await self._end(member, "the same worker id registered for another model")
        epoch = await self._epochs.next()
        now_s = self._clock.monotonic_s()
        fresh = Member(
            offer,
            epoch,
            WorkerState.PROVISIONED,
            new_group(offer),
            mine=True,
            provisioned_s=now_s,
            provisioned_wall_s=self._clock.wall_s(),
            renewed_s=now_s,
            moved_s=now_s,
        )
        fresh.epoch = await self._grant(fresh)
        before = self._members.get(offer.worker_id)
        if before is not None and before.epoch > fresh.epoch:
            raise StaleEpoch("lease", fresh.epoch, before.epoch, "a newer incarnation took over")
        if before is not None and before.state is not WorkerState.GONE:
            self.counts["fenced"] += 1
            self._gone(before, "fenced by a newer incarnation")
        self._members[offer.worker_id] = fresh
        self.counts["granted"] += 1
        self._desk(offer.model)
        self._bump()
        return self._lease(fresh)

    async def _grant(self, member: Member) -> int:
        """Grant at the store, or, while it is away, by the same rules here."""
        offer = member.offer
        if self.answering:
            try:
                granted = await self._store.grant(
                    member.record(self._incarnation), ttl_s=self.policy.lease_ttl_s
                )
                if isinstance(granted, lease.Lost):
                    raise LostLease(offer.worker_id, offer.incarnation, granted.why)
                if isinstance(granted, lease.Stale):
                    raise StaleEpoch(
                        "lease", member.epoch, granted.epoch, "register again for a newer epoch"
                    )
                return granted.epoch
            except Unavailable as error:
                self.store_failed(error)
        if self.standing() is Standing.CUT_OFF:
            raise Unavailable("the lease store is away", "check that Redis runs", 2.0)
        return member.epoch

    async def renew(self, renewal: Renewal) -> RenewalAnswer:
        """Renew a lease, take the news in, hand directives out.

        Raises:
            LostLease, StaleEpoch: the worker must register again, or stop.
        """
        member = await self._member(renewal.worker_id, renewal.incarnation, renewal.epoch)
        now_s = self._clock.monotonic_s()
        member.mine = True
        self._renewed(member)
        if renewal.progress is not None:
            member.progress = renewal.progress
        if renewal.load is not None:
            member.heard(renewal.load, now_s=now_s)
        if renewal.drained and not member.drained:
            member.drained = True
        if renewal.kv_events:
            self._kv_events(member, renewal.kv_events, now_s)
        return RenewalAnswer(self._lease(member), self._directives(member, now_s))

    async def leave(self, worker_id: str, incarnation: str, epoch: int, *, reason: str) -> None:
        """Give a lease up; idempotent, and no harm to a successor (field report B145)."""
        member = self._members.get(worker_id)
        if member is None or member.offer.incarnation != incarnation or member.epoch != epoch:
            return
        if member.state is not WorkerState.GONE:
            self.counts["left"] += 1
            await self._end(member, reason or "it left")

    async def _member(self, worker_id: str, incarnation: str, epoch: int) -> Member:
        member = self._members.get(worker_id)
        if (member is None or member.epoch < epoch) and self.answering:
            try:  # its session may have been with another router until now
                await self._resync()
            except Unavailable as error:
                self.store_failed(error)
            member = self._members.get(worker_id)
        if member is None:
            raise LostLease(worker_id, incarnation, "no lease is known for this worker")
        if member.offer.incarnation != incarnation:
            raise LostLease(worker_id, incarnation, "another incarnation has it")
        if member.epoch != epoch:
            raise StaleEpoch("lease epoch", epoch, member.epoch, "register again")
        if member.state is WorkerState.GONE:
            raise LostLease(worker_id, incarnation, member.drain_reason or "the lease has ended")
        return member

    def _renewed(self, member: Member) -> None:
        member.renewed_s = self._clock.monotonic_s()
        member.dirty = True

    def _lease(self, member: Member) -> Lease:
        offer = member.offer
        return Lease(offer.worker_id, offer.incarnation, member.epoch, self.policy.lease_ttl_s)

    async def _end(self, member: Member, why: str) -> None:
        self._gone(member, why)
        if self.answering:
            try:
                await self._store.end(member.record(self._incarnation))
            except Unavailable as error:
                self.store_failed(error)

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
        self._bump()
        self._pump(member.offer.model)

    # ------------------------------------------------------------------------ KV events

    def _kv_events(self, member: Member, batches: Sequence[KvEventBatch], now_s: float) -> None:
        if member.seat is None:
            return
        index, offer = self._desk(member.offer.model).index, member.offer
        for batch in batches:
            events = [(event.kind, event.block_hashes) for event in batch.events]
            index.apply(member.key, batch.sequence, events, now_s=now_s)
            if self.routers > 1 and len(self._kv_pending) < KV_PENDING_BATCHES_MAX:
                packed = sharing.pack_batch(batch.sequence, events)
                entry = KvEntry("", self._incarnation, offer.worker_id, offer.incarnation, packed)
                self._kv_pending.append((offer.model, entry))

    # ------------------------------------------------------------------------ group and gate

    async def report_rank(self, report: RankReport) -> GroupStatus:
        """One rank's step; the epoch is published when the barrier falls."""
        member = await self._member(report.worker_id, report.incarnation, report.epoch)
        member.group = group.report(
            member.group,
            rank=report.rank,
            step=report.step,
            manifest_digest=report.manifest_digest,
            detail=report.detail,
        )
        if member.group.complete and member.group.state == group.FORMING:
            epoch = await self._epochs.next()
            member.group = group.publish(member.group, epoch)
        if member.group.state == group.FAILED and member.seat is not None:
            await self._end(member, f"its group failed: {member.group.failure}")
        waiting = member.group.waiting_for()
        if member.group.failure:
            waiting = (member.group.failure,)
        return GroupStatus(member.group.state, member.group.epoch, waiting)

    async def admit(
        self,
        worker_id: str,
        incarnation: str,
        epoch: int,
        *,
        serving: Serving,
        checks: Sequence[CheckResult],
    ) -> GateVerdict:
        """Judge the gate evidence; admitted means routable from now on."""
        member = await self._member(worker_id, incarnation, epoch)
        if member.state in (WorkerState.READY, WorkerState.STALLED):
            return GateVerdict(admitted=True, checks=member.checks)
        if member.state is WorkerState.DRAINING:
            return GateVerdict(
                admitted=False, reasons=(f"it is to be drained: {member.drain_reason}",)
            )
        manifest = await self._manifest(member.offer)
        try:
            profile = self._profile(serving, checks)
        except InvalidField as error:
            return self._refused(member, (f"profile: {error}",), tuple(checks))
        verdict = gate.judge(serving, checks, self._expectations(member, manifest))
        if isinstance(verdict, gate.Refuse) or profile is None:
            reasons = verdict.reasons if isinstance(verdict, gate.Refuse) else ("no profile",)
            return self._refused(member, reasons, verdict.checks)
        if not await self._still_held(member):
            return self._refused(member, ("lease: it ended meanwhile",), verdict.checks)
        now_s = self._clock.monotonic_s()
        member.checks, member.serving = verdict.checks, serving
        member.ready_s, member.ready_wall_s = now_s, self._clock.wall_s()
        member.become(WorkerState.READY)
        self._seat(member, profile, now_s)
        await self._tell(member)
        self.counts["admitted"] += 1
        if self._on_admitted is not None:
            self._on_admitted(member.view())
        self._pump(member.offer.model)
        return GateVerdict(admitted=True, checks=verdict.checks)

    def _refused(
        self, member: Member, reasons: tuple[str, ...], checks: tuple[CheckResult, ...]
    ) -> GateVerdict:
        member.checks = checks
        self.counts["refused"] += 1
        log.warning(
            "the gate refused a worker",
            extra={"worker": member.offer.worker_id, "reasons": "; ".join(reasons)},
        )
        self._bump()
        return GateVerdict(admitted=False, reasons=reasons, checks=checks)

    def _expectations(self, member: Member, manifest: Manifest | None) -> gate.Expectations:
        now_s = self._clock.monotonic_s()
        since_s = now_s - member.renewed_s
        return gate.Expectations(
            offer=member.offer,
            manifest=manifest,
            epoch=member.epoch,
            lease_valid=since_s <= self.policy.lease_ttl_s or not self.answering,
            lease_why=f"not renewed for {since_s:.1f} s",
            group_state=member.group.state,
            group_epoch=member.group.epoch,
            profiles={name: profile.digest for name, profile in self.profiles.items()},
            allow_attached=self.policy.allow_attached,
        )

    async def _still_held(self, member: Member) -> bool:
        return (
            self._members.get(member.offer.worker_id) is member
            and member.state is WorkerState.PROVISIONED
        )

    async def _manifest(self, offer: WorkerOffer) -> Manifest | None:
        if not offer.manifest_digest:
            return None
        known = self._manifests.get(offer.manifest_digest)
        if known is not None:
            return known
        if self._registry is None:
            return None
        try:
            found = await self._registry.get_manifest(offer.manifest_digest)
        except NotFound:
            if offer.attached:
                return None
            raise
        if len(self._manifests) >= MANIFESTS_KEPT_MAX:
            self._manifests.pop(next(iter(self._manifests)))
        self._manifests[offer.manifest_digest] = found
        return found

    def _profile(self, serving: Serving, checks: Sequence[CheckResult]) -> ClassProfile | None:
        """The registered profile, registering the one that the evidence carries if it is new."""
        known = self.profiles.get(serving.profile)
        if known is None and len(self.profiles) < PROFILES_MAX:
            offered = gate.offered_profile(checks)
            if offered is not None and offered.name == serving.profile:
                self.profiles[offered.name] = offered
                return offered
        return known

    def _seat(self, member: Member, profile: ClassProfile, now_s: float) -> None:
        desk = self._desk(member.offer.model)
        correction = desk.corrections.get(profile.name)
        seat = member.take_seat(profile, factor=correction.factor if correction else 1.0)
        desk.seat_worker(seat, now_s=now_s)
        self._shut_by_state(member)
        self._bump()

    async def _tell(self, member: Member) -> None:
        """Tell the store what a member has become."""
        if not self.answering:
            return
        try:
            await self._store.put(member.record(self._incarnation))
            await self._tell_seat(member)
        except Unavailable as error:
            self.store_failed(error)

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

    # ------------------------------------------------------------------------ drain

    async def drain(
        self,
        worker_id: str,
        *,
        epoch: int,
        reason: str,
        deadline_s: float,
        scale_decision_id: str,
    ) -> Worker:
        """No new assignment from now on.

        Raises:
            NotFound: no such worker lives. StaleEpoch: another incarnation lives.
        """
        member = self._members.get(worker_id)
        if member is None or member.state is WorkerState.GONE:
            raise NotFound("worker", worker_id, "list the workers")
        if epoch and epoch != member.epoch:
            raise StaleEpoch("worker epoch", epoch, member.epoch, "list the workers and ask again")
        bound_s = deadline_s if deadline_s > 0 else self.policy.drain_deadline_s
        if member.state is not WorkerState.DRAINING:
            why = f"{reason or 'asked for'}"
            if scale_decision_id:
                why += f" ({scale_decision_id})"
            self._drain(member, why, bound_s, self._clock.monotonic_s())
            await self._tell(member)
        return member.view()

    def _drain(self, member: Member, reason: str, deadline_s: float, now_s: float) -> None:
        if not member.become(WorkerState.DRAINING):
            raise Conflict("worker state", "one that can drain", str(member.state), "look again")
        member.drain_reason, member.drain_deadline_s = reason, deadline_s
        member.draining_s, member.leave_at_s = now_s, now_s + deadline_s
        member.draining_wall_s = self._clock.wall_s()
        self._shut_by_state(member)
        self._bump()

    def _directives(self, member: Member, now_s: float) -> tuple[Directive, ...]:
        out = []
        if member.state is WorkerState.DRAINING:
            left_s = max(0.0, (member.leave_at_s or now_s) - now_s)
            idle = member.active == 0 and (member.drained or member.seat is None)
            if idle or left_s <= 0.0:
                why = "drained" if idle else "the drain deadline has passed"
                out.append(Directive("leave", 0.0, why))
            else:
                out.append(Directive("drain", left_s, member.drain_reason))
        if member.seat is not None and self._desk(member.offer.model).index.is_suspect(member.key):
            out.append(Directive("replay_kv", None, "KV events are missing"))
        return tuple(out)

    # ------------------------------------------------------------------------ looking after

    async def _look_after(self, now_s: float) -> None:
        """Stalls, drain deadlines, ramps, old reports, and members that are long gone."""
        for member in list(self._members.values()):
            if member.state is WorkerState.GONE:
                await self._forget(member, now_s)
            elif member.state is WorkerState.DRAINING:
                self._past_deadline(member, now_s)
            elif member.state in (WorkerState.READY, WorkerState.STALLED) and member.mine:
                await self._stall_or_recover(member)
            if member.seat is not None:
                member.seat.sequences_cap = self._cap(member, now_s)
        for model in {m.offer.model for m in self._members.values()}:
            self._desk(model).look_at_circuits(now_s=now_s)

    async def _stall_or_recover(self, member: Member) -> None:
        stalled = member.stalled_for_s() >= self.policy.stalled_after_s
        wanted = WorkerState.STALLED if stalled else WorkerState.READY
        if member.state is not wanted and member.become(wanted):
            self._shut_by_state(member)
            log.warning(
                "worker stalled" if stalled else "worker recovered",
                extra={"worker": member.offer.worker_id},
            )
            self._bump()
            await self._tell(member)

    def _past_deadline(self, member: Member, now_s: float) -> None:
        if member.leave_at_s is None or now_s < member.leave_at_s or member.seat is None:
            return
        desk = self._desk(member.offer.model)
        lost = desk.abort_on(member.key, now_s=now_s)
        self.counts["drain_aborts"] += len(lost)
        self._owe(member.offer.model, [(reservation_id, -1) for reservation_id in lost])

    async def _forget(self, member: Member, now_s: float) -> None:
        if member.gone_s is None or now_s - member.gone_s < self.policy.gone_kept_s:
            return
        offer = member.offer
        if self.answering:
            try:
                await self._store.forget(offer.model, offer.worker_id, member.epoch)
                await self._store.put_snapshot(offer.model, offer.worker_id, offer.incarnation, b"")
            except Unavailable as error:
                self.store_failed(error)
        if self._members.get(offer.worker_id) is member:
            del self._members[offer.worker_id]
            self._bump()

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
        if not self.answering:  # a share granted beforehand: the others serve without asking too
            cap = max(1, cap // max(1, self.routers))
        return cap


def _mono(then_wall_s: float | None, wall_s: float, now_s: float) -> float | None:
    """A wall time of another router on this router's clock; for showing ages, not for judging."""
    if then_wall_s is None:
        return None
    return now_s - max(0.0, wall_s - then_wall_s)
