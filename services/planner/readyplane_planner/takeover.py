"""What a new leader takes over from the one before: its memory, and orders that nobody carried out.

Owns reading them off the journal, which is written before anything is done: a leader that was killed
in the middle of an order left it there. Whatever has no outcome is done again under the new number,
by the same worker id, so that it is neither lost nor given twice: the fence keeps the old leader's
own late call out, and actuator and router take an id once.

Times of the memory are of the old leader's clock. They are moved by the age of the decision on the
wall clock; where that has been set back, the decision counts as new.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

import msgspec

from readyplane.core.errors import ReadyplaneError
from readyplane.kit.clock import Clock
from readyplane_planner import forecast, guard, rollout
from readyplane_planner.actuators import Hand
from readyplane_planner.decide import (
    Decision,
    Drain,
    Memory,
    OpenOrder,
    Release,
    StartOrder,
    drift,
    fast,
    ownership,
    rations,
)
from readyplane_planner.forecast import Series
from readyplane_planner.journal import Journal, Outcome, Record, decode_inputs, replayed

log = logging.getLogger(__name__)

RECORDS_MAX = 16
TERMS_MAX = 4096
AGE_S_MAX = 600.0
"""A memory older than that tells of another time; the new leader goes by what it sees."""
AGAIN_S_MAX = 60.0
"""An order that old is not given again: whether it is still needed is decided anew."""
ENDS = {
    "order": frozenset({"ordered", "refused", "provisioned", "ready", "failed", "lost"}),
    "drain": frozenset({"draining", "drain_failed", "drained", "advised", "lost"}),
    "release": frozenset({"released", "release_failed", "lost"}),
}


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What one decision of an earlier leader asked for and nobody is known to have done."""

    decision_id: str
    orders: tuple[StartOrder, ...] = ()
    drains: tuple[Drain, ...] = ()
    releases: tuple[Release, ...] = ()
    policy_version: int = 0


@dataclass(frozen=True, slots=True)
class Heritage:
    """What the journal hands to a new leader.

    Attributes:
        memory: after the last decision, on the new leader's clock; None when there is none.
        again: to be done under the new number. lost: too old for that, to be told.
    """

    memory: Memory | None = None
    again: tuple[Unfinished, ...] = ()
    lost: tuple[Outcome, ...] = ()


class Succession:
    """Hands what an earlier leader left to this planner, once for each of its terms."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._epochs: deque[int] = deque(maxlen=TERMS_MAX)
        self._left = Heritage()

    async def begin(self, leader_epoch: int, model: str) -> None:
        """A term begins: read what is left. Raises Unavailable."""
        self._left = await heritage(
            self._journal,
            model,
            leader_epoch=leader_epoch,
            mine=self._epochs,
            now_s=self._clock.monotonic_s(),
            wall_s=self._clock.wall_s(),
        )
        self._epochs.append(leader_epoch)
        await self._journal.attach(self._left.lost)

    def adopted(self, mine: Memory) -> Memory:
        """The memory to go on with."""
        theirs = self._left.memory
        return mine if theirs is None else adopted(mine, theirs)

    def carry_on(self, hand: Hand, memory: Memory) -> None:
        """Do again what may have been left undone; to be called once older calls are fenced off.

        So are own orders that nobody answered, as long as they are open.
        """
        for left in self._left.again:
            log.info(
                "%d orders, %d drains and %d releases are done again",
                *(len(left.orders), len(left.drains), len(left.releases)),
                extra={"scale_decision_id": left.decision_id},
            )
            hand.carry_out(
                left.decision_id,
                left.orders,
                left.drains,
                left.releases,
                leader_epoch=self._epochs[-1],
                policy_version=left.policy_version,
            )
        self._left = Heritage()
        hand.repeat({o.worker_id for o in memory.orders}, leader_epoch=self._epochs[-1])


async def heritage(
    journal: Journal,
    model: str,
    *,
    leader_epoch: int,
    mine: Container[int],
    now_s: float,
    wall_s: float,
) -> Heritage:
    """What earlier leaders of the model left.

    Args:
        mine: numbers under which this planner has led: who only takes its own lease again knows
            more than the journal does.

    A record that cannot be read (of another version) is left out: what it asked for is seen in the
    fleet, or decided anew.
    """
    try:
        records = await journal.newest(model, limit=RECORDS_MAX)
        # A leader that slept may have written after its successor: the number tells who is newer.
        records.sort(key=lambda r: (_epoch_of(r), r.sequence), reverse=True)
        if records and _epoch_of(records[0]) in mine:
            return Heritage()
        found = [
            await journal.get(record.decision_id)
            for place, record in enumerate(records)
            if _epoch_of(record) < leader_epoch and (place == 0 or record.changed)
        ]
    except ReadyplaneError as error:
        log.warning("nothing is taken over from the journal: %s", error)
        return Heritage()
    memory: Memory | None = None
    again: list[Unfinished] = []
    lost: list[Outcome] = []
    for place, (record, outcomes) in enumerate(found):
        age_s = max(0.0, wall_s - record.create_s)
        if age_s > AGE_S_MAX and place:
            break
        try:
            asked = _asked(record)
            after, decided_s = _memory_after(record, asked) if place == 0 else (Memory(), 0.0)
        except (ReadyplaneError, ValueError, TypeError, ArithmeticError, LookupError) as error:
            log.warning("decision %s is not taken over: %s", record.decision_id, error)
            continue
        if place == 0:
            memory = moved(after, now_s - age_s - decided_s)
            if age_s > AGE_S_MAX:
                # A roll-out stays where it was, however long nobody led: paused, or rolled back.
                memory = Memory(
                    generation=memory.generation, rollout=memory.rollout, numbered=memory.numbered
                )
                break
        if memory is None:
            break
        left = unfinished(asked, outcomes, memory)
        if age_s <= AGAIN_S_MAX:
            again.append(left)
        else:
            lost.extend(_told(left, wall_s))
    again = [u for u in reversed(again) if u.orders or u.drains or u.releases]
    if memory is not None:
        memory = _given_now(memory, {o.worker_id for u in again for o in u.orders}, now_s)
    return Heritage(memory, tuple(again), tuple(lost))


def _asked(record: Record) -> Unfinished:
    """Everything that a decision asked for, as it is written; ValueError where it cannot be read."""
    document = record.document
    return Unfinished(
        record.decision_id,
        msgspec.convert(document["orders"], tuple[StartOrder, ...]),
        msgspec.convert(document["drains"], tuple[Drain, ...]),
        msgspec.convert(document["releases"], tuple[Release, ...]),
        record.policy_version,
    )


def _memory_after(record: Record, asked: Unfinished) -> tuple[Memory, float]:
    """(memory after the decision, the planner's clock of then).

    Decided again; where that comes out differently, another brain or version decided, and what it
    did is added to what it knew.
    """
    decision, after, decided_s = replayed(record)
    if _names(decision) == _names(asked):
        return after, decided_s
    before = decode_inputs(record.inputs).memory
    orders = tuple(
        OpenOrder(
            o.worker_id,
            o.pool,
            decided_s,
            record.decision_id,
            worker_class=o.worker_class,
            mode=o.mode,
            digest=o.manifest_digest,
            number=o.generation,
        )
        for o in asked.orders
    )
    going: tuple[Drain | Release, ...] = (*asked.drains, *asked.releases)
    leaving = ((x.worker_id, decided_s) for x in going)
    return (
        replace(before, orders=(*before.orders, *orders), draining=(*before.draining, *leaving)),
        decided_s,
    )


def _names(asked: Decision | Unfinished) -> tuple[list[str], ...]:
    return (
        [o.worker_id for o in asked.orders],
        [d.worker_id for d in asked.drains],
        [r.worker_id for r in asked.releases],
    )


def unfinished(asked: Unfinished, outcomes: Sequence[Outcome], memory: Memory) -> Unfinished:
    """What of a decision has no outcome and is still wanted by the memory after the last one."""
    opened = {o.worker_id for o in memory.orders}
    leaving = {name for name, _since in memory.draining}

    def told(subject: str, what: str) -> bool:
        return any(o.subject == subject and o.kind in ENDS[what] for o in outcomes)

    return Unfinished(
        asked.decision_id,
        tuple(o for o in asked.orders if o.worker_id in opened and not told(o.worker_id, "order")),
        tuple(d for d in asked.drains if d.worker_id in leaving and not told(d.worker_id, "drain")),
        tuple(
            r for r in asked.releases if r.worker_id in leaving and not told(r.worker_id, "release")
        ),
        asked.policy_version,
    )


def adopted(mine: Memory, theirs: Memory) -> Memory:
    """The memory of the leader before, with what this planner has measured itself.

    A planner that stands by looks at the same signals: its series and corrections are as good. What
    was done, and when, only the leader knows. One that has just begun has measured nothing.
    """
    if mine.work_p.begun_s is None:
        return theirs
    return replace(
        theirs,
        work_p=_with_days(mine.work_p, theirs.work_p),
        work_d=_with_days(mine.work_d, theirs.work_d),
        apart_p=mine.apart_p,
        apart_d=mine.apart_d,
        averages=mine.averages,
        correct_p=mine.correct_p,
        correct_d=mine.correct_d,
        suspects=mine.suspects,
        last_s=mine.last_s,
        bad_samples=mine.bad_samples,
        late_since_s=mine.late_since_s,
        blind=mine.blind,
        drift=mine.drift,
    )


def moved(memory: Memory, by_s: float) -> Memory:
    """The same memory on a clock that is ahead by that; of series only the days can be moved."""
    blank = Memory()
    return replace(
        memory,
        work_p=_days_of(memory.work_p, by_s),
        work_d=_days_of(memory.work_d, by_s),
        apart_p=blank.apart_p,
        apart_d=blank.apart_d,
        averages=blank.averages,
        guard_p=guard.moved(memory.guard_p, by_s),
        guard_d=guard.moved(memory.guard_d, by_s),
        orders=tuple(replace(o, ordered_s=o.ordered_s + by_s) for o in memory.orders),
        denied=tuple(
            replace(d, at_s=d.at_s + by_s, retry_s=d.retry_s + by_s) for d in memory.denied
        ),
        draining=tuple((name, since_s + by_s) for name, since_s in memory.draining),
        suspects=(),
        changing=fast.moved(memory.changing, by_s),
        ration=rations.moved(memory.ration, by_s),
        last_s=None,
        idle_since_s=None,
        late_since_s=None,
        drift=drift.moved(memory.drift, by_s),
        owned_p=ownership.moved(memory.owned_p, by_s),
        owned_d=ownership.moved(memory.owned_d, by_s),
        rollout=rollout.moved(memory.rollout, by_s),
    )


def _days_of(series: Series, by_s: float) -> Series:
    """A series that begins anew and knows the days that were seen."""
    return Series(days=forecast.days_moved(series.days, by_s))


def _with_days(mine: Series, theirs: Series) -> Series:
    """One's own series, with the days of whoever has seen more of them."""
    return replace(mine, days=theirs.days) if theirs.days.closed > mine.days.closed else mine


def _given_now(memory: Memory, worker_ids: Container[str], now_s: float) -> Memory:
    """Orders that are given again are waited for from now on."""
    orders = tuple(
        replace(o, ordered_s=now_s) if o.worker_id in worker_ids else o for o in memory.orders
    )
    return replace(memory, orders=orders)


def _epoch_of(record: Record) -> int:
    return int(record.document.get("leader_epoch", 0))


def _told(left: Unfinished, wall_s: float) -> list[Outcome]:
    note = {"note": "its leader ended before it was done; decided anew"}
    asked: tuple[StartOrder | Drain | Release, ...] = (*left.orders, *left.drains, *left.releases)
    subjects = [x.worker_id for x in asked]
    return [Outcome(left.decision_id, subject, "lost", wall_s, note) for subject in subjects]
