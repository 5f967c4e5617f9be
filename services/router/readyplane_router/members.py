"""Workers as one router keeps them: a mutable member each, and the views made of it.

Owns the translation between a member, the frozen `Worker` that callers see and the `Record` that
routers share. States change along `lease.TRANSITIONS` only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from readyplane.core.errors import InvalidField
from readyplane.core.profile import ClassProfile
from readyplane.core.worker import (
    CheckResult,
    Holds,
    LoadReport,
    Role,
    Serving,
    StartProgress,
    Worker,
    WorkerOffer,
    WorkerState,
)
from readyplane_router import group, lease
from readyplane_router.gate import url_is_plausible
from readyplane_router.pair import Seat, kv_key, seat_key, times_of
from readyplane_router.store import Record, Vitals
from readyplane_router.told import Told

NAME_CHARS_MAX = 253
RANKS_MAX = 4_096


@dataclass(slots=True, eq=False)
class Member:
    """A worker this router knows. Times are readings of this router's clock.

    Attributes:
        mine: its session is with this router. dirty: renewed since the store was last told.
        past: incarnations of this worker id that were fenced.
        moved_s: when its iteration counter last moved (or it had nothing to do).
        leave_at_s: end of its drain deadline.
        told: what it has been told and has not done. words: how many it was told so far.
        holds: of a standby, with what it waits, as its renewals say.
        asked, asked_s: what made it pass the gate (activate or flip), and since when.
        on_word: called when it is told something, where somebody listens for it.
    """

    offer: WorkerOffer
    epoch: int
    state: WorkerState
    group: group.Group
    serving: Serving | None = None
    progress: StartProgress | None = None
    load: LoadReport = field(default_factory=LoadReport)
    load_s: float | None = None
    told_s: float = 0.0
    checks: tuple[CheckResult, ...] = ()
    drain_reason: str = ""
    drain_deadline_s: float = 0.0
    leave_at_s: float | None = None
    drained: bool = False
    seat: Seat | None = None
    mine: bool = False
    dirty: bool = False
    provisioned_s: float | None = None
    ready_s: float | None = None
    draining_s: float | None = None
    gone_s: float | None = None
    renewed_s: float = 0.0
    moved_s: float = 0.0
    ready_wall_s: float | None = None
    provisioned_wall_s: float | None = None
    draining_wall_s: float | None = None
    past: tuple[str, ...] = ()
    told: Told | None = None
    words: int = 0
    holds: Holds | None = None
    asked: str = ""
    asked_s: float | None = None
    on_word: Callable[[], None] | None = None

    def tell(
        self, kind: str, reason: str, *, now_s: float, for_s: float, role: Role | None = None
    ) -> None:
        """Give it one more word."""
        self.words += 1
        self.told = Told(kind, now_s, now_s + for_s, reason, role, self.words)

    def say(self) -> None:
        """Whoever listens for it hears at once what it is to do now."""
        if self.on_word is not None:
            self.on_word()

    def past_with(self, successor: str) -> tuple[str, ...]:
        """Fenced incarnations of this worker id once `successor` has taken over."""
        if successor == self.offer.incarnation:
            return self.past
        return (*self.past, self.offer.incarnation)[-lease.INCARNATIONS_KEPT :]

    @property
    def key(self) -> str:
        """Key of this incarnation's seat and prefixes."""
        return seat_key(self.offer.worker_id, self.offer.incarnation)

    def become(self, state: WorkerState) -> bool:
        """Change state if the table allows it."""
        if not lease.may_become(self.state, state):
            return False
        self.state = state
        return True

    @property
    def active(self) -> int:
        """Requests that still need it, as far as this and the other routers have promised."""
        seat = self.seat
        return 0 if seat is None else seat.assigned + seat.other_sequences

    def view(self) -> Worker:
        """The frozen value for callers."""
        seat = self.seat
        return Worker(
            offer=self.offer,
            epoch=self.epoch,
            state=self.state,
            serving=self.serving,
            progress=self.progress,
            load=self.load,
            checks=self.checks,
            drain_reason=self.drain_reason,
            provisioned_s=self.provisioned_s,
            ready_s=self.ready_s,
            draining_s=self.draining_s,
            renewed_s=self.renewed_s,
            active=self.active,
            promised_prefill_tokens=0 if seat is None else seat.prefill_tokens + seat.other_tokens,
            promised_kv_blocks=0 if seat is None else seat.kv_blocks + seat.other_blocks,
            told="" if self.told is None else self.told.kind,
            holds=self.holds if self.state is WorkerState.STANDBY else None,
            rank_steps=self._rank_steps(),
        )

    def _rank_steps(self) -> tuple[str, ...]:
        """Of several ranks, where this router hears of them or the group is published."""
        hears = self.mine or self.group.epoch > 0
        return self.group.steps() if self.offer.ranks > 1 and hears else ()

    def record(self, keeper: str) -> Record:
        """What the other routers are told."""
        return Record(
            offer=self.offer,
            epoch=self.epoch,
            state=self.state,
            serving=self.serving,
            checks=self.checks,
            drain_reason=self.drain_reason,
            drain_deadline_s=self.drain_deadline_s,
            group_epoch=self.group.epoch,
            keeper=keeper,
            provisioned_wall_s=self.provisioned_wall_s,
            ready_wall_s=self.ready_wall_s,
            draining_wall_s=self.draining_wall_s,
            told="" if self.told is None else self.told.kind,
            told_reason="" if self.told is None else self.told.reason,
            told_role="" if self.told is None or self.told.role is None else str(self.told.role),
            told_for_s=0.0 if self.told is None else self.told.until_s - self.told.since_s,
            words=self.words,
            holds="" if self.holds is None else str(self.holds),
        )

    def vitals(self) -> Vitals:
        """What its renewals said."""
        return Vitals(self.progress, self.load, self.drained)

    def take_seat(self, profile: ClassProfile, *, factor: float) -> Seat:
        """Its seat, made from what it serves."""
        serving = self.serving
        if serving is None:
            raise InvalidField("serving", None, "a worker without serving facts cannot be seated")
        self.seat = Seat(
            lent=self.offer.convertible,
            worker_id=self.offer.worker_id,
            incarnation=self.offer.incarnation,
            key=self.key,
            epoch=self.epoch,
            role=self.offer.role,
            node=self.offer.node,
            engine_url=serving.engine_url,
            bootstrap=serving.bootstrap,
            kv=serving.kv,
            kv_key=kv_key(serving.kv),
            times=times_of(profile),
            block_size=serving.block_size,
            kv_total_blocks=serving.kv_total_blocks,
            max_num_seqs=serving.max_num_seqs,
            max_model_len=serving.max_model_len,
            sequences_cap=serving.max_num_seqs,
            prefill_factor=factor,
        )
        return self.seat

    def heard(self, load: LoadReport, *, now_s: float) -> None:
        """Take an engine report in: signs of life, and load that nobody here has promised."""
        before = self.load
        moved = (
            load.sign_of_life is None
            or load.sign_of_life != before.sign_of_life
            or not load.running
        )
        if moved:
            self.moved_s = max(self.moved_s, now_s - load.age_s)
        self.load, self.load_s, self.told_s = load, now_s - load.age_s, now_s
        seat = self.seat
        if seat is None:
            return
        promised = seat.sequences + seat.other_sequences
        if load.running is not None:
            seat.foreign_sequences = max(0, load.running + (load.waiting or 0) - promised)
        if load.waiting_prefill_tokens is not None:
            # Read a while ago: what was prefilled since is in it, and was promised here.
            promised_tokens = seat.prefill_tokens_most + seat.other_tokens
            seat.foreign_tokens = max(0, load.waiting_prefill_tokens - promised_tokens)
            seat.prefill_tokens_most = seat.prefill_tokens
        if load.kv_used_blocks is not None:
            promised_blocks = seat.kv_blocks + seat.other_blocks
            seat.foreign_blocks = max(0, load.kv_used_blocks - promised_blocks)

    def stalls(self, *, stalled_after_s: float, silent_after_s: float) -> bool:
        """Whether it has running sequences and does not get on, or does not answer at all.

        Nothing was read for `silent_after_s` although its agent renews: nobody knows what it does,
        whatever the last reading said, idle or not. That is longer than `stalled_after_s`: an engine
        that computes a long prompt answers late and works all the same (B48). Or between two readings
        the counter stood still for `stalled_after_s` with running sequences: it hangs (B46). One that
        answers and is idle, or has no counter (`LoadReport.sign_of_life`), is well; what its KV
        events tell is progress too.
        """
        if self.load_s is None:
            return False
        if self.told_s - max(self.load_s, self.moved_s) >= silent_after_s:
            return True
        if not self.load.running or self.load.sign_of_life is None:
            return False
        return self.load_s - self.moved_s >= stalled_after_s


def check_offer(offer: WorkerOffer) -> None:
    """Check what an agent offers.

    Raises:
        InvalidField: names the field, the value and what to write instead.
    """
    for name in ("worker_id", "incarnation", "model", "worker_class", "node"):
        value = getattr(offer, name)
        if not value or len(value) > NAME_CHARS_MAX or not value.isprintable():
            remedy = f"use 1 to {NAME_CHARS_MAX} printable characters"
            raise InvalidField(f"offer.{name}", value, remedy)
    if not 1 <= offer.ranks <= RANKS_MAX:
        raise InvalidField("offer.ranks", offer.ranks, f"use 1 to {RANKS_MAX}")
    if offer.convertible and offer.role is not Role.BOTH:
        raise InvalidField("offer.role", offer.role, "a convertible worker serves both")
    if offer.generation < 0:
        raise InvalidField("offer.generation", offer.generation, "use 0 or more")
    left_s = offer.told_left_s
    if left_s is not None and not (math.isfinite(left_s) and left_s >= 0):
        raise InvalidField("offer.told_left_s", left_s, "use finite seconds from 0, or none")
    if not offer.attached and not offer.manifest_digest:
        raise InvalidField("offer.manifest_digest", "", "say which artifact the worker serves")
    if offer.agent_url and not url_is_plausible(offer.agent_url):
        raise InvalidField("offer.agent_url", offer.agent_url, "use http://host:port")


def new_group(offer: WorkerOffer, *, now_s: float) -> group.Group:
    """The group of a worker that has just registered."""
    return group.Group(offer.ranks, offer.manifest_digest, began_s=now_s)
