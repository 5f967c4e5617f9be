"""What is told to workers with their renewals: drain, leave, activate, flip, tell your KV anew.

Owns giving a worker a word and taking it back. A word is said at once where its session listens,
and rides on lease renewals until it is done, so that a lost message is repaired by the next one. A
member takes the words of other routers from the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from readyplane.core.errors import NotFound, Refused, StaleEpoch
from readyplane.core.worker import Holds, Lease, Role, Worker, WorkerState
from readyplane.ports import Directive, RenewalAnswer
from readyplane_router.members import Member
from readyplane_router.replica import Replica
from readyplane_router.told import (
    ACTIVATE,
    FLIP,
    Told,
    is_to_tell,
    why_not_activate,
    why_not_flip,
)

ACTIVATE_S_DEFAULT = 60.0
LOAD_S_DEFAULT = 900.0
"""Of a standby that holds a process only: all of its start but the imports is still to come."""

log = logging.getLogger(__name__)


class Telling(Replica):
    """Words to workers."""

    def _addressed(self, worker_id: str, epoch: int) -> Member:
        """The member that is meant.

        Raises:
            NotFound: no such worker lives. StaleEpoch: another incarnation lives.
        """
        member = self._members.get(worker_id)
        if member is None or member.state is WorkerState.GONE:
            raise NotFound("worker", worker_id, "list the workers")
        if epoch and epoch != member.epoch:
            raise StaleEpoch("worker epoch", epoch, member.epoch, "list the workers and ask again")
        return member

    async def drain(
        self,
        worker_id: str,
        *,
        epoch: int,
        reason: str,
        deadline_s: float,
        scale_decision_id: str,
    ) -> Worker:
        """No new assignment from now on. A worker that is to flip leaves instead.

        Raises:
            NotFound: no such worker lives. StaleEpoch: another incarnation lives.
        """
        member = self._addressed(worker_id, epoch)
        bound_s = deadline_s if deadline_s > 0 else self.policy.drain_deadline_s
        flips = member.told is not None and member.told.kind == FLIP
        if member.state is not WorkerState.DRAINING or flips:
            why = _why(reason, scale_decision_id)
            member.told = None
            if flips:
                member.drain_reason = why
            else:
                self._drain(member, why, bound_s, self._clock.monotonic_s())
            member.say()
            await self._tell(member)
        return member.view()

    async def activate(
        self,
        worker_id: str,
        *,
        epoch: int,
        reason: str,
        deadline_s: float,
        scale_decision_id: str,
    ) -> Worker:
        """A standby is to serve. Told again it changes nothing, nor the deadline.

        Without a deadline (0) it is given what suits what it holds.

        Raises:
            NotFound, StaleEpoch: as for a drain. Refused: it is about to end.
        """
        member = self._addressed(worker_id, epoch)
        reasons = why_not_activate(member.offer, member.state)
        if reasons:
            raise Refused(f"activation of {worker_id}", reasons, "take another standby")
        if member.told is None and is_to_tell(member.offer, member.state):
            now_s = self._clock.monotonic_s()
            bare = member.holds is Holds.PROCESS
            usual_s = LOAD_S_DEFAULT if bare else ACTIVATE_S_DEFAULT
            bound_s = deadline_s if deadline_s > 0 else usual_s
            member.tell(ACTIVATE, _why(reason, scale_decision_id), now_s=now_s, for_s=bound_s)
            self._roster.bump()
            member.say()
            await self._tell(member)
        return member.view()

    async def flip(
        self,
        worker_id: str,
        *,
        role: Role,
        epoch: int,
        reason: str,
        deadline_s: float,
        scale_decision_id: str,
    ) -> Worker:
        """A ready worker is to serve the other stage: it drains, then registers for that one.

        Raises:
            NotFound, StaleEpoch: as for a drain. Refused: with every reason why it cannot.
        """
        member = self._addressed(worker_id, epoch)
        serves = member.offer.role is role and member.told is None
        if serves and member.state in (WorkerState.READY, WorkerState.STALLED):
            return member.view()
        flips = member.serving is not None and member.serving.flips
        reasons = why_not_flip(member.offer, member.state, role, flips=flips, told=member.told)
        if reasons:
            raise Refused(f"flip of {worker_id}", reasons, "start a worker of that stage")
        if member.told is None:
            now_s = self._clock.monotonic_s()
            bound_s = deadline_s if deadline_s > 0 else self.policy.drain_deadline_s
            why = f"it becomes {role}: {_why(reason, scale_decision_id)}"
            member.tell(FLIP, why, now_s=now_s, for_s=bound_s, role=role)
            self._drain(member, why, bound_s, now_s)
            member.say()
            await self._tell(member)
        return member.view()

    def _told_still(self, fresh: Member, before: Member | None) -> None:
        """A word to serve outlives the lease it was given under: it is told on under the next one.

        For as long as it was given and no longer, and to the same process only: what this router
        told it, or what the worker says that it was told, where this router does not know.
        """
        offer = fresh.offer
        left_s, reason = offer.told_left_s, offer.told_reason
        fresh.offer = replace(offer, told_left_s=None, told_reason="")  # of that moment alone
        if not offer.standby:
            return
        now_s = self._clock.monotonic_s()
        told = None
        if before is not None and before.offer.incarnation == offer.incarnation:
            told = before.told
        if told is not None and told.kind == ACTIVATE:
            if now_s >= told.until_s:
                self._ran_out(fresh, told)
                return
            fresh.words, fresh.told = 1, replace(told, number=1)
        elif left_s is not None and left_s > 0:
            fresh.tell(ACTIVATE, reason, now_s=now_s, for_s=left_s)
        if fresh.told is not None:
            self.counts["activations_carried"] += 1
            log.info(
                "a worker that was told to serve has another lease, and is told on",
                extra={"worker": offer.worker_id, "why": fresh.told.reason},
            )

    def hear(self, worker_id: str, incarnation: str, told: Callable[[RenewalAnswer], None]) -> None:
        """Say to `told` what this incarnation is to do, whenever that changes."""
        member = self._members.get(worker_id)
        if member is None or member.offer.incarnation != incarnation:
            return

        def say() -> None:
            told(self._answer(member, self._clock.monotonic_s()))

        member.on_word = say

    def _lease(self, member: Member) -> Lease:
        offer = member.offer
        return Lease(offer.worker_id, offer.incarnation, member.epoch, self.policy.lease_ttl_s)

    def _answer(self, member: Member, now_s: float) -> RenewalAnswer:
        return RenewalAnswer(self._lease(member), self._directives(member, now_s))

    def _directives(self, member: Member, now_s: float) -> tuple[Directive, ...]:
        out = []
        told = member.told
        if member.state is WorkerState.DRAINING:
            left_s = max(0.0, (member.leave_at_s or now_s) - now_s)
            idle = member.active == 0 and (member.drained or member.seat is None)
            over = idle or left_s <= 0.0
            why = "drained" if idle else "the drain deadline has passed"
            if told is not None and told.kind == FLIP:
                reason = why if over else told.reason
                out.append(Directive(FLIP, 0.0 if over else left_s, reason, told.role))
            elif over:
                out.append(Directive("leave", 0.0, why))
            else:
                out.append(Directive("drain", left_s, member.drain_reason))
        elif member.group.failure:
            out.append(Directive("stop", 0.0, f"its group failed: {member.group.failure}"))
        elif told is not None and told.kind == ACTIVATE and now_s < told.until_s:
            out.append(Directive(ACTIVATE, told.until_s - now_s, told.reason))
        if self._desk(member.offer.model).index.is_suspect(member.key):
            out.append(Directive("replay_kv", None, "KV events are missing"))
        return tuple(out)

    async def _expire_word(self, member: Member, now_s: float) -> None:
        """An activation that was not followed in time is taken back."""
        told = member.told
        if told is None or told.kind != ACTIVATE or now_s < told.until_s:
            return
        member.told = None
        self._ran_out(member, told)
        self._roster.bump()
        await self._tell(member)

    def _ran_out(self, member: Member, told: Told) -> None:
        self.counts["activations_expired"] += 1
        log.warning(
            "an activation was not followed in time",
            extra={"worker": member.offer.worker_id, "why": told.reason},
        )


def _why(reason: str, scale_decision_id: str) -> str:
    why = reason or "asked for"
    return f"{why} ({scale_decision_id})" if scale_decision_id else why
