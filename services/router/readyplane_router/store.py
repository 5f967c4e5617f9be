"""What several routers share: worker records, leases, seats with reservations, KV events.

Owns the port and its memory twin; `redis` is the other implementation, and one contract suite
runs over both. A store decides nothing about pairs: `take` compares epochs, an open flag and free
amounts on every side and takes all or nothing. Every expiry is judged by the store's own clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from readyplane.core.worker import (
    CheckResult,
    LoadReport,
    Serving,
    StartProgress,
    WorkerOffer,
    WorkerState,
)
from readyplane.kit.clock import Clock
from readyplane_router import lease
from readyplane_router.ration_store import MemoryRations, RationStore
from readyplane_router.seats import Seats, Take, Taken, Use
from readyplane_router.signal_store import MemorySignals, SignalStore

KV_LOG_BATCHES_MAX = 20_000
KV_PAGE_BATCHES = 1_000


@dataclass(frozen=True, slots=True)
class Record:
    """A worker as every router knows it. `*_wall_s`: seconds since the epoch, for people.

    Attributes:
        drain_deadline_s: duration given with the drain. group_epoch: 0 while not published.
        keeper: the router that holds the worker's session.
        told: what it has been told and has not done, with its reason, role and duration; words:
            how many it was told so far, so that each router hears each once.
        holds: of a standby that waits, with what.
    """

    offer: WorkerOffer
    epoch: int
    state: WorkerState
    serving: Serving | None = None
    checks: tuple[CheckResult, ...] = ()
    drain_reason: str = ""
    drain_deadline_s: float = 0.0
    group_epoch: int = 0
    keeper: str = ""
    provisioned_wall_s: float | None = None
    ready_wall_s: float | None = None
    draining_wall_s: float | None = None
    told: str = ""
    told_reason: str = ""
    told_role: str = ""
    told_for_s: float = 0.0
    words: int = 0
    holds: str = ""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a worker's renewals say; written in batches."""

    progress: StartProgress | None = None
    load: LoadReport = field(default_factory=LoadReport)
    drained: bool = False


@dataclass(frozen=True, slots=True)
class Renew:
    """One lease to renew; `vitals` None leaves what is known."""

    model: str
    worker_id: str
    epoch: int
    ttl_s: float
    vitals: Vitals | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """Something about one worker changed."""

    model: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class KvEntry:
    """One batch in a model's KV log, as packed by `origin`."""

    entry_id: str
    origin: str
    worker_id: str
    incarnation: str
    packed: bytes


class Store(RationStore, SignalStore, Protocol):
    """Shared state. Every method raises Unavailable when the store cannot be reached.

    `shared`: other routers may be reading and writing too.
    """

    shared: bool

    async def identity(self) -> str:
        """Which life of which server answers: another one after a restart or a fail-over."""
        ...

    async def fence(self, model: str, leader_epoch: int) -> int:
        """The greatest number of a leader that any router has seen of the model, with this one."""
        ...

    async def grant(self, record: Record, *, ttl_s: float) -> Record | lease.Lost | lease.Stale:
        """Grant a lease by the rules of `lease.grant`; returns the record that holds it.

        A repeated grant returns the stored record, with its (older) epoch.
        """
        ...

    async def put(self, record: Record) -> bool:
        """Replace the record if its epoch holds the lease; False when it does not."""
        ...

    async def end(self, record: Record) -> bool:
        """End the lease of this epoch, shut its seat, keep the record; False when not held."""
        ...

    async def restore(self, record: Record, *, ttl_s: float, vitals: Vitals | None) -> bool:
        """Put a living worker back into a store that lost it; False when a newer epoch is there."""
        ...

    async def forget(self, model: str, worker_id: str, epoch: int) -> None:
        """Drop the record of an ended lease."""
        ...

    async def renew(self, items: Sequence[Renew]) -> list[str]:
        """For each: `ok`, `unknown` (the store does not have it) or `stale` (ended or fenced)."""
        ...

    async def expire(self) -> list[Change]:
        """End every lease that has run out; each is reported by exactly one call."""
        ...

    async def workers(self) -> list[tuple[Record, Vitals | None]]:
        """All records."""
        ...

    async def worker(self, model: str, worker_id: str) -> tuple[Record, Vitals | None] | None:
        """One record."""
        ...

    async def seat(
        self, model: str, worker_id: str, epoch: int, *, is_open: bool, sequences: int, blocks: int
    ) -> bool:
        """Set capacity; a new epoch starts with nothing used. False for an older epoch."""
        ...

    async def take(self, model: str, take: Take) -> Taken:
        """Reserve on all sides or none."""
        ...

    async def put_back(self, model: str, takes: Sequence[Take]) -> list[str]:
        """Make reservations what their router holds, after an absence; see `seats.PUT_BACK`."""
        ...

    async def release(self, model: str, items: Sequence[tuple[str, int]]) -> int:
        """Give (reservation id, side or ALL_SIDES) back; returns how many were not known."""
        ...

    async def grow(self, model: str, reservation_id: str, side: int, blocks: int) -> bool:
        """Add KV blocks that a reservation has outgrown; never refused. False when not known."""
        ...

    async def extend(self, model: str, reservation_ids: Sequence[str], *, ttl_s: float) -> None:
        """Let reservations live on."""
        ...

    async def missing(self, model: str, reservation_ids: Sequence[str]) -> list[str]:
        """Those of the reservations that the store does not have; changes nothing."""
        ...

    async def sweep(self, model: str) -> list[str]:
        """Release reservations that have run out; each is reported by exactly one call."""
        ...

    async def usage(self, model: str) -> dict[str, Use]:
        """What is promised on each seat."""
        ...

    async def append_kv(self, model: str, entries: Sequence[KvEntry]) -> None:
        """Append to the model's bounded log, in order."""
        ...

    async def read_kv(self, model: str, after: str) -> list[KvEntry]:
        """Entries after that id (empty: from the oldest kept), oldest first, a page at a time."""
        ...

    async def put_snapshot(self, model: str, worker_id: str, incarnation: str, data: bytes) -> None:
        """Keep all blocks of one incarnation; empty data deletes it."""
        ...

    async def snapshot(self, model: str, worker_id: str, incarnation: str) -> bytes:
        """The snapshot, empty when there is none."""
        ...

    def watch(self) -> AsyncIterator[Change]:
        """Changes from now on; some may be missed, so read all again now and then."""
        ...

    async def aclose(self) -> None:
        """Let go of connections."""
        ...


@dataclass(slots=True)
class _Model:
    records: dict[str, Record] = field(default_factory=dict)
    vitals: dict[str, Vitals] = field(default_factory=dict)
    leases: dict[str, lease.Held] = field(default_factory=dict)
    seats: Seats = field(default_factory=Seats)
    kv: deque[KvEntry] = field(default_factory=lambda: deque(maxlen=KV_LOG_BATCHES_MAX))
    kv_count: int = 0
    snapshots: dict[tuple[str, str], bytes] = field(default_factory=dict)


class MemoryStore(MemoryRations, MemorySignals):
    """The twin in memory, on an injected clock: for the simulator and for tests."""

    def __init__(self, clock: Clock, *, shared: bool = False, name: str = "memory") -> None:
        """Empty; `shared` when several services will use this one object."""
        MemoryRations.__init__(self, clock)
        MemorySignals.__init__(self, clock)
        self.shared = shared
        self._name = name
        self._clock = clock
        self._models: dict[str, _Model] = {}
        self._leaders: dict[str, int] = {}
        self._watchers: set[asyncio.Queue[Change]] = set()

    async def identity(self) -> str:
        return self._name

    async def fence(self, model: str, leader_epoch: int) -> int:
        newest = max(self._leaders.get(model, 0), leader_epoch)
        self._leaders[model] = newest
        return newest

    async def grant(self, record: Record, *, ttl_s: float) -> Record | lease.Lost | lease.Stale:
        offer = record.offer
        model = self._model(offer.model)
        verdict = lease.grant(
            model.leases.get(offer.worker_id),
            worker_id=offer.worker_id,
            incarnation=offer.incarnation,
            epoch=record.epoch,
            ttl_s=ttl_s,
            now_s=self._clock.monotonic_s(),
        )
        if not isinstance(verdict, lease.Granted):
            return verdict
        model.leases[offer.worker_id] = verdict.held
        if verdict.repeated:
            return model.records[offer.worker_id]
        model.seats.seats.pop(offer.worker_id, None)
        model.vitals.pop(offer.worker_id, None)
        self._write(model, record)
        return record

    async def put(self, record: Record) -> bool:
        model = self._model(record.offer.model)
        if not self._holds(model, record):
            return False
        self._write(model, record)
        return True

    async def end(self, record: Record) -> bool:
        model = self._model(record.offer.model)
        if not self._holds(model, record):
            return False
        self._end(model, record.offer.worker_id)
        self._write(model, record)
        return True

    async def restore(self, record: Record, *, ttl_s: float, vitals: Vitals | None) -> bool:
        offer = record.offer
        model = self._model(offer.model)
        held = model.leases.get(offer.worker_id)
        if held is not None and held.epoch > record.epoch:
            return False
        past = held.past if held is not None else ()
        expires_s = self._clock.monotonic_s() + ttl_s
        model.leases[offer.worker_id] = lease.Held(
            offer.worker_id, offer.incarnation, record.epoch, ttl_s, expires_s, past=past
        )
        if vitals is not None:
            model.vitals[offer.worker_id] = vitals
        self._write(model, record)
        return True

    async def forget(self, model: str, worker_id: str, epoch: int) -> None:
        found = self._model(model)
        held = found.leases.get(worker_id)
        if held is not None and held.epoch == epoch and held.ended:
            found.records.pop(worker_id, None)
            found.vitals.pop(worker_id, None)
            found.seats.seats.pop(worker_id, None)

    async def renew(self, items: Sequence[Renew]) -> list[str]:
        out = []
        now_s = self._clock.monotonic_s()
        for item in items:
            model = self._model(item.model)
            held = model.leases.get(item.worker_id)
            if held is None:
                out.append("unknown")
            elif held.epoch != item.epoch or held.ended:
                out.append("stale")
            else:
                model.leases[item.worker_id] = replace(held, expires_s=now_s + item.ttl_s)
                if item.vitals is not None:
                    model.vitals[item.worker_id] = item.vitals
                out.append("ok")
        return out

    async def expire(self) -> list[Change]:
        out = []
        now_s = self._clock.monotonic_s()
        for name, model in self._models.items():
            for held in lease.expired(model.leases.values(), now_s=now_s):
                self._end(model, held.worker_id)
                record = model.records.get(held.worker_id)
                if record is not None:
                    self._write(model, replace(record, state=WorkerState.GONE))
                out.append(Change(name, held.worker_id))
        return out

    async def workers(self) -> list[tuple[Record, Vitals | None]]:
        return [
            (record, model.vitals.get(worker_id))
            for model in self._models.values()
            for worker_id, record in model.records.items()
        ]

    async def worker(self, model: str, worker_id: str) -> tuple[Record, Vitals | None] | None:
        found = self._model(model)
        record = found.records.get(worker_id)
        return None if record is None else (record, found.vitals.get(worker_id))

    async def seat(
        self, model: str, worker_id: str, epoch: int, *, is_open: bool, sequences: int, blocks: int
    ) -> bool:
        return self._model(model).seats.seat(
            worker_id, epoch, is_open=is_open, sequences=sequences, blocks=blocks
        )

    async def take(self, model: str, take: Take) -> Taken:
        return self._model(model).seats.take(take, now_s=self._clock.monotonic_s())

    async def put_back(self, model: str, takes: Sequence[Take]) -> list[str]:
        seats, now_s = self._model(model).seats, self._clock.monotonic_s()
        return [seats.put_back(take, now_s=now_s) for take in takes]

    async def release(self, model: str, items: Sequence[tuple[str, int]]) -> int:
        return self._model(model).seats.release(items)

    async def grow(self, model: str, reservation_id: str, side: int, blocks: int) -> bool:
        return self._model(model).seats.grow(reservation_id, side, blocks)

    async def extend(self, model: str, reservation_ids: Sequence[str], *, ttl_s: float) -> None:
        until_s = self._clock.monotonic_s() + ttl_s
        self._model(model).seats.extend(reservation_ids, until_s=until_s)

    async def missing(self, model: str, reservation_ids: Sequence[str]) -> list[str]:
        return self._model(model).seats.missing(reservation_ids)

    async def sweep(self, model: str) -> list[str]:
        return self._model(model).seats.sweep(now_s=self._clock.monotonic_s())

    async def usage(self, model: str) -> dict[str, Use]:
        return self._model(model).seats.usage()

    async def append_kv(self, model: str, entries: Sequence[KvEntry]) -> None:
        found = self._model(model)
        for entry in entries:
            found.kv_count += 1
            found.kv.append(replace(entry, entry_id=f"{found.kv_count:020d}"))

    async def read_kv(self, model: str, after: str) -> list[KvEntry]:
        later = (entry for entry in self._model(model).kv if entry.entry_id > after)
        return list(islice(later, KV_PAGE_BATCHES))

    async def put_snapshot(self, model: str, worker_id: str, incarnation: str, data: bytes) -> None:
        snapshots = self._model(model).snapshots
        if data:
            snapshots[worker_id, incarnation] = data
        else:
            snapshots.pop((worker_id, incarnation), None)

    async def snapshot(self, model: str, worker_id: str, incarnation: str) -> bytes:
        return self._model(model).snapshots.get((worker_id, incarnation), b"")

    async def watch(self) -> AsyncIterator[Change]:
        queue: asyncio.Queue[Change] = asyncio.Queue(maxsize=1_000)
        self._watchers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._watchers.discard(queue)

    async def aclose(self) -> None:
        return

    def _model(self, name: str) -> _Model:
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = _Model()
        return model

    @staticmethod
    def _holds(model: _Model, record: Record) -> bool:
        held = model.leases.get(record.offer.worker_id)
        return held is not None and held.epoch == record.epoch and not held.ended

    def _write(self, model: _Model, record: Record) -> None:
        model.records[record.offer.worker_id] = record
        change = Change(record.offer.model, record.offer.worker_id)
        for queue in self._watchers:
            if not queue.full():
                queue.put_nowait(change)

    @staticmethod
    def _end(model: _Model, worker_id: str) -> None:
        model.leases[worker_id] = replace(model.leases[worker_id], ended=True)
        model.seats.shut(worker_id)
