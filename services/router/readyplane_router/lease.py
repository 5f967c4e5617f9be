"""Leases: grant, renew, expire, fence; and how long a router may serve without its store.

Owns the verdicts on (worker id, incarnation, epoch); the stores keep the values, and the store's
clock alone judges an expiry. The state machine of a worker is the table `TRANSITIONS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from readyplane.core.worker import WorkerState

INCARNATIONS_KEPT = 16

TRANSITIONS: Mapping[WorkerState, frozenset[WorkerState]] = {
    WorkerState.ORDERED: frozenset({WorkerState.PROVISIONED, WorkerState.GONE}),
    WorkerState.PROVISIONED: frozenset(
        {WorkerState.READY, WorkerState.STANDBY, WorkerState.DRAINING, WorkerState.GONE}
    ),
    WorkerState.STANDBY: frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.GONE}),
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.STALLED, WorkerState.GONE}),
    WorkerState.STALLED: frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.GONE}),
    WorkerState.DRAINING: frozenset({WorkerState.GONE}),
    WorkerState.GONE: frozenset(),
}


def may_become(now: WorkerState, then: WorkerState) -> bool:
    """Whether a worker may go from one state to the other (staying is always allowed)."""
    return then is now or then in TRANSITIONS[now]


@dataclass(frozen=True, slots=True)
class Held:
    """A lease as a store keeps it.

    Attributes:
        expires_s: on the clock of the store. ended: given up, expired or fenced.
        past: incarnations of this worker id that were fenced, newest last.
    """

    worker_id: str
    incarnation: str
    epoch: int
    ttl_s: float
    expires_s: float
    ended: bool = False
    past: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease was granted; `fenced` is the one it replaced, `repeated` when it was held already."""

    held: Held
    fenced: Held | None = None
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """The caller holds nothing (any more)."""

    why: str


@dataclass(frozen=True, slots=True)
class Stale:
    """The caller's epoch has been fenced off by a newer one."""

    epoch: int


def grant(
    current: Held | None,
    *,
    worker_id: str,
    incarnation: str,
    epoch: int,
    ttl_s: float,
    now_s: float,
) -> Granted | Lost | Stale:
    """Grant to an incarnation; a living older one is fenced, a fenced one never comes back.

    One incarnation asking twice gets its lease again, with the same epoch. An incarnation whose
    lease has expired may ask again (it gets the new epoch, and must pass the gate again).
    """
    held = Held(worker_id, incarnation, epoch, ttl_s, now_s + ttl_s)
    if current is None:
        return Granted(held)
    if incarnation in current.past:
        return Lost("a newer incarnation of this worker has taken over; this process is over")
    if current.incarnation == incarnation and not current.ended:
        again = replace(current, ttl_s=ttl_s, expires_s=now_s + ttl_s)
        return Granted(again, repeated=True)
    if epoch <= current.epoch:
        return Stale(current.epoch)
    if current.incarnation == incarnation:
        return Granted(replace(held, past=current.past))
    past = (*current.past, current.incarnation)[-INCARNATIONS_KEPT:]
    return Granted(replace(held, past=past), fenced=None if current.ended else current)


def renew(
    current: Held | None, *, incarnation: str, epoch: int, now_s: float
) -> Held | Lost | Stale:
    """The renewed lease, or why there is nothing to renew."""
    if current is None:
        return Lost("no lease is known for this worker")
    if current.incarnation != incarnation:
        return Stale(current.epoch) if epoch < current.epoch else Lost("another incarnation has it")
    if epoch != current.epoch:
        return Stale(current.epoch)
    if current.ended:
        return Lost("the lease has ended")
    return replace(current, expires_s=now_s + current.ttl_s)


def expired(leases: Iterable[Held], *, now_s: float) -> list[Held]:
    """Leases that have run out by the store's clock, not yet ended."""
    return [held for held in leases if not held.ended and held.expires_s <= now_s]


class Standing(StrEnum):
    """How a router stands to its store."""

    FRESH = "fresh"
    DEGRADED = "degraded"
    CUT_OFF = "cut_off"


def standing(*, away_since_s: float | None, now_s: float, absence_max_s: float) -> Standing:
    """Fresh while the store answers, degraded for a bounded time without it, then cut off."""
    if away_since_s is None:
        return Standing.FRESH
    return Standing.DEGRADED if now_s - away_since_s <= absence_max_s else Standing.CUT_OFF


def may_judge_expiry(
    *, away_since_s: float | None, answering_since_s: float, now_s: float, ttl_s: float
) -> bool:
    """Whether leases may be declared expired now.

    Absence of the store is not death: nobody expires while it is away, nor within one ttl of its
    return (or of this router's start), so that every living worker has had time to renew there.
    """
    return away_since_s is None and now_s - answering_since_s > ttl_s
