"""Who is alive, and how it became routable: leases, groups, the gate, drains, the store's absence.

Owns the members of one router and their way from register to gone, and keeps the store told. Hands
seats to the desks. While the store is away nobody is declared dead; when it is back, it is refilled
from what is known here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from readyplane.core.errors import (
    InvalidField,
    LostLease,
    StaleEpoch,
    Unavailable,
)
from readyplane.core.kv import KvEventBatch
from readyplane.core.worker import (
    CheckResult,
    Holds,
    Lease,
    Serving,
    WorkerOffer,
    WorkerState,
)
from readyplane.ports import GateVerdict, GroupStatus, RankReport, Renewal, RenewalAnswer
from readyplane_router import gate, group, lease, stages
from readyplane_router.lease import Standing
from readyplane_router.members import Member, check_offer, new_group
from readyplane_router.telling import Telling
from readyplane_router.told import ACTIVATE, COUNT_OF, FLIP

KV_BLOCKS_MAX = 4_000_000
FOLLOW_RETRY_S = 1.0
RESYNC_EVERY_TICKS = 10


log = logging.getLogger(__name__)


class Membership(Telling):
    """What workers ask for, and what is done for them."""

    async def is_published(self, model: str) -> bool:
        """Whether the registry knows the model."""
        return await self._admission.is_published(model)

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
            self._renewed(member)
            await self._keep(member)
            return self._lease(member)
        if member is not None and offer.incarnation in member.past:
            why = "a newer incarnation of this worker has taken over; this process is over"
            raise LostLease(offer.worker_id, offer.incarnation, why)
        if member is not None and member.offer.model != offer.model:
            await self._end(member, "the same worker id registered for another model")
        epoch = await self._epochs.next()
        now_s = self._clock.monotonic_s()
        fresh = Member(
            offer,
            epoch,
            WorkerState.PROVISIONED,
            new_group(offer, now_s=now_s),
            mine=True,
            provisioned_s=now_s,
            provisioned_wall_s=self._clock.wall_s(),
            renewed_s=now_s,
            moved_s=now_s,
        )
        self._told_still(fresh, member)
        fresh.epoch = await self._grant(fresh)
        before = self._members.get(offer.worker_id)
        if before is not None and before.epoch > fresh.epoch:
            raise StaleEpoch("lease", fresh.epoch, before.epoch, "a newer incarnation took over")
        if before is not None and before.state is not WorkerState.GONE:
            self.counts["fenced"] += 1
            self._gone(before, "fenced by a newer incarnation")
        if before is not None:
            fresh.past = before.past_with(offer.incarnation)
            told = before.told
            if told is not None and told.kind == FLIP and told.role is offer.role:
                fresh.asked_s, fresh.asked = told.since_s, FLIP
        self._members[offer.worker_id] = fresh
        self.counts["granted"] += 1
        self._desk(offer.model)
        self._roster.bump()
        return self._lease(fresh)

    async def _grant(self, member: Member) -> int:
        """Grant at the store, or, while it is away, by the same rules here."""
        offer = member.offer
        if self._link.answering:
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
                self._link.failed(error)
        if self._link.standing() is Standing.CUT_OFF:
            raise Unavailable("the lease store is away", "check that Redis runs", 2.0)
        return member.epoch

    async def renew(self, renewal: Renewal) -> RenewalAnswer:
        """Renew a lease, take the news in, hand directives out.

        Raises:
            LostLease, StaleEpoch: the worker must register again, or stop.
        """
        member = await self._member(renewal.worker_id, renewal.incarnation, renewal.epoch)
        now_s = self._clock.monotonic_s()
        self._renewed(member)
        if not member.mine:
            await self._keep(member)
        if renewal.progress is not None:
            member.progress = renewal.progress
        if renewal.load is not None:
            member.heard(renewal.load, now_s=now_s)
            hits = self._desk(member.offer.model).hits
            hits.reported(member.key, renewal.load.cached_tokens_total, now_s=now_s)
        if renewal.drained and not member.drained:
            member.drained = True
        if member.offer.standby:
            await self._waits(member, renewal.stands_by, now_s)
        if renewal.kv_events:
            self._kv_events(member, renewal.kv_events, now_s)
        return self._answer(member, now_s)

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
        if (member is None or member.epoch < epoch) and self._link.answering:
            try:  # its session may have been with another router until now
                await self._resync()
            except Unavailable as error:
                self._link.failed(error)
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

    async def _keep(self, member: Member) -> None:
        """Its session is here (from now on): the others are told whose word counts."""
        if not member.mine:
            member.mine = True
            await self._tell(member)

    def _renewed(self, member: Member) -> None:
        member.renewed_s = self._clock.monotonic_s()
        member.dirty = True

    # ------------------------------------------------------------------------ KV events

    def _kv_events(self, member: Member, batches: Sequence[KvEventBatch], now_s: float) -> None:
        index = self._desk(member.offer.model).index
        index.add(member.key, blocks_max=KV_BLOCKS_MAX)  # events come before the gate, too
        if any(event.kind == "stored" for batch in batches for event in batch.events):
            member.moved_s = now_s  # blocks that were computed are a sign of life
        for batch in batches:
            index.apply(member.key, batch.sequence, batch.events, now_s=now_s)
            if self._link.routers > 1:
                self._sharing.heard(member, batch)

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
            life=report.life,
            communicator=report.communicator,
            progress=report.progress,
            now_s=self._clock.monotonic_s(),
        )
        if member.group.complete and member.group.state == group.FORMING:
            epoch = await self._epochs.next()
            member.group = group.publish(member.group, epoch)
        await self._end_of_failed(member)
        waiting = member.group.waiting_for()
        if member.group.failure:
            waiting = (member.group.failure,)
        return GroupStatus(member.group.state, member.group.epoch, waiting)

    async def _end_of_failed(self, member: Member) -> None:
        """A failed group serves nobody; while it forms its ranks are told to stop (`telling`)."""
        if member.group.state != group.FAILED:
            return
        serves = (WorkerState.READY, WorkerState.STALLED, WorkerState.STANDBY)
        if member.seat is not None or member.state in serves:
            await self._end(member, f"its group failed: {member.group.failure}")

    async def admit(
        self,
        worker_id: str,
        incarnation: str,
        epoch: int,
        *,
        serving: Serving,
        checks: Sequence[CheckResult],
    ) -> GateVerdict:
        """Judge the gate evidence; admitted means routable from now on, or standing by.

        Who serves already changes the stage of its capacity profile with it, and nothing else.
        """
        member = await self._member(worker_id, incarnation, epoch)
        if member.state in (WorkerState.READY, WorkerState.STALLED):
            return await self._staged(member, serving, checks)
        proved = member.serving is not None
        if proved and member.state is WorkerState.STANDBY and self._stands_by(member):
            return GateVerdict(admitted=True, checks=member.checks, standby=True)
        if member.state is WorkerState.DRAINING:
            return GateVerdict(
                admitted=False, reasons=(f"it is to be drained: {member.drain_reason}",)
            )
        manifest = await self._admission.manifest(member.offer)
        try:
            profile = self._admission.profile(serving, checks)
        except InvalidField as error:
            return self._refused(member, (f"profile: {error}",), tuple(checks))
        silent_s = self._clock.monotonic_s() - member.renewed_s
        wanted = self._admission.expectations(
            member, manifest, silent_s=silent_s, answering=self._link.answering
        )
        verdict = gate.judge(serving, checks, wanted)
        if isinstance(verdict, gate.Refuse) or profile is None:
            reasons = verdict.reasons if isinstance(verdict, gate.Refuse) else ("no profile",)
            return self._refused(member, reasons, verdict.checks)
        if not await self._still_held(member):
            return self._refused(member, ("lease: it ended meanwhile",), verdict.checks)
        now_s = self._clock.monotonic_s()
        member.checks, member.serving = verdict.checks, serving
        if self._stands_by(member):
            # Judged and told apart: no seat, so that no request can ever meet it.
            member.become(WorkerState.STANDBY)
            self.counts["stood_by"] += 1
            self._roster.bump()
            await self._tell(member)
            return GateVerdict(admitted=True, checks=verdict.checks, standby=True)
        if member.told is not None and member.told.kind == ACTIVATE:
            member.asked_s, member.asked, member.told = member.told.since_s, ACTIVATE, None
        member.ready_s, member.ready_wall_s = now_s, self._clock.wall_s()
        member.become(WorkerState.READY)
        self._seat(member, profile, now_s)
        await self._tell(member)
        self.counts["admitted"] += 1
        if member.asked and member.asked_s is not None:
            self.counts[COUNT_OF[member.asked]] += 1
            took_s = now_s - member.asked_s
            log.info(
                "worker serves as told",
                extra={"worker": worker_id, "what": member.asked, "seconds": round(took_s, 3)},
            )
            if self._on_followed is not None:
                self._on_followed(member.asked, member.view(), took_s)
            member.asked = ""
        elif self._on_admitted is not None:
            self._on_admitted(member.view())
        self._pump(member.offer.model)
        return GateVerdict(admitted=True, checks=verdict.checks)

    async def _staged(
        self, member: Member, serving: Serving, checks: Sequence[CheckResult]
    ) -> GateVerdict:
        """Another stage of who serves; the same one again changes nothing."""
        before = member.serving
        if before is None or serving.stage == before.stage:
            return GateVerdict(admitted=True, checks=member.checks)
        reasons = stages.why_not_stage(before, serving, checks)
        profile = None if reasons else self._admission.profile(serving, checks)
        if reasons or profile is None:
            self.counts["stages_refused"] += 1
            log.warning(
                "another stage is not believed",
                extra={"worker": member.offer.worker_id, "reasons": "; ".join(reasons)},
            )
            return GateVerdict(False, tuple(reasons) or ("no profile",), tuple(checks))
        member.checks = stages.judged(member.checks, checks)
        self._restage(member, serving, profile)
        self.counts["staged"] += 1
        await self._tell(member)
        self._pump(member.offer.model)
        return GateVerdict(admitted=True, checks=member.checks)

    async def _waits(self, member: Member, holds: Holds | None, now_s: float) -> None:
        """A standby says with what it waits, or that it waits no more.

        One that holds a process only was judged by nobody: it waits all the same, has no seat, and
        is judged whole before it gets one. Its group forms when it begins to load.
        """
        before = member.holds
        if holds is before:
            return
        if holds is Holds.PROCESS and member.state is WorkerState.PROVISIONED:
            if not self._stands_by(member):
                return  # it was told to serve before it waited
            member.become(WorkerState.STANDBY)
            self.counts["stood_by"] += 1
        if before is Holds.PROCESS:
            member.group = new_group(member.offer, now_s=now_s)
        if holds is Holds.ASLEEP:  # it may tell nobody that its cache is gone (B92)
            self._desk(member.offer.model).index.purge(member.key)
        member.holds = holds
        self._roster.bump()
        await self._tell(member)

    def _stands_by(self, member: Member) -> bool:
        """Whether it is not to serve yet, now: an activation may come or run out at any moment."""
        told = member.told
        asked = told is not None and told.kind == ACTIVATE
        return (
            member.offer.standby
            and member.state in (WorkerState.PROVISIONED, WorkerState.STANDBY)
            and not (asked and told is not None and self._clock.monotonic_s() < told.until_s)
        )

    def _refused(
        self, member: Member, reasons: tuple[str, ...], checks: tuple[CheckResult, ...]
    ) -> GateVerdict:
        member.checks = checks
        self.counts["refused"] += 1
        log.warning(
            "the gate refused a worker",
            extra={"worker": member.offer.worker_id, "reasons": "; ".join(reasons)},
        )
        self._roster.bump()
        return GateVerdict(admitted=False, reasons=reasons, checks=checks)

    async def _still_held(self, member: Member) -> bool:
        return self._members.get(member.offer.worker_id) is member and member.state in (
            WorkerState.PROVISIONED,
            WorkerState.STANDBY,
        )

    # ------------------------------------------------------------------------ looking after

    async def look_after(self) -> None:
        """Stalls, drain deadlines, ramps, old reports, and members that are long gone."""
        now_s = self._clock.monotonic_s()
        for member in list(self._members.values()):
            if member.state is WorkerState.GONE:
                await self._forget(member, now_s)
            elif member.state is WorkerState.DRAINING:
                self._past_deadline(member, now_s)
            elif member.state in (WorkerState.READY, WorkerState.STALLED) and member.mine:
                await self._stall_or_recover(member)
            else:
                self._look_at_barrier(member, now_s)
                await self._expire_word(member, now_s)
            if member.seat is not None:
                member.seat.sequences_cap = self._cap(member, now_s)
        for model in {m.offer.model for m in self._members.values()}:
            self._desk(model).look_at_circuits(now_s=now_s)

    def _look_at_barrier(self, member: Member, now_s: float) -> None:
        """A rank that is awaited and does not get on fails its generation."""
        waits = member.state is WorkerState.STANDBY and member.holds is Holds.PROCESS
        if not member.mine or waits or member.group.state != group.FORMING:
            return
        stall_s = self.policy.barrier_stall_s
        member.group = group.overdue(member.group, now_s=now_s, stall_s=stall_s)
        if member.group.failure:
            log.warning(
                "a group failed to form",
                extra={"worker": member.offer.worker_id, "why": member.group.failure},
            )
            self._roster.bump()

    async def _stall_or_recover(self, member: Member) -> None:
        stalled = member.stalls(
            stalled_after_s=self.policy.stalled_after_s, silent_after_s=self.policy.silent_after_s
        )
        wanted = WorkerState.STALLED if stalled else WorkerState.READY
        if member.state is not wanted and member.become(wanted):
            self._shut_by_state(member)
            log.warning(
                "worker stalled" if stalled else "worker recovered",
                extra={"worker": member.offer.worker_id},
            )
            self._roster.bump()
            await self._tell(member)

    def _past_deadline(self, member: Member, now_s: float) -> None:
        if member.leave_at_s is None or now_s < member.leave_at_s or member.seat is None:
            return
        desk = self._desk(member.offer.model)
        lost = desk.abort_on(member.key, now_s=now_s)
        self.counts["drain_aborts"] += len(lost)
        self._owe(member.offer.model, [(reservation_id, -1) for reservation_id in lost])

    async def _forget(self, member: Member, now_s: float) -> None:
        """Forget who has long gone, once the store and the others can have heard of it."""
        if not self._link.answering or member.gone_s is None:
            return
        if now_s - max(member.gone_s, self._link.answering_since_s) < self.policy.gone_kept_s:
            return
        offer = member.offer
        try:
            await self._store.forget(offer.model, offer.worker_id, member.epoch)
            await self._store.put_snapshot(offer.model, offer.worker_id, offer.incarnation, b"")
        except Unavailable as error:
            self._link.failed(error)
            return
        if self._members.get(offer.worker_id) is member:
            del self._members[offer.worker_id]
            self._roster.bump()
