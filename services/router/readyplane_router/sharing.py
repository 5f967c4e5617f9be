"""KV events between routers: packed batches in a model's log, and snapshots.

Owns the packed form and the rule of catching up: the router that holds a worker's session writes,
the others read the log, and take a snapshot where they missed something.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from readyplane.core.kv import KvEvent, KvEventBatch
from readyplane.core.work import pack_hashes, unpack_hashes
from readyplane_router.members import Member
from readyplane_router.pair import seat_key
from readyplane_router.prefix import PrefixIndex
from readyplane_router.store import KvEntry, Store

PENDING_BATCHES_MAX = 10_000
SNAPSHOT_EVERY_ROUNDS = 10
FORM = 2
"""Of what is packed. Another form is not read: whoever meets it takes a snapshot, or waits for one."""

Packed = tuple[str, bytes, int | None, str]  # kind, hashes, parent, tier

_encode = msgspec.msgpack.Encoder().encode
_batch = msgspec.msgpack.Decoder(tuple[int, int, list[Packed]])
_snapshot = msgspec.msgpack.Decoder(tuple[int, int, list[tuple[str, bytes]]])


def pack_batch(batch: KvEventBatch) -> bytes:
    """One batch as bytes, 8 for each block."""
    events = [(e.kind, pack_hashes(e.block_hashes), e.parent_hash, e.tier) for e in batch.events]
    return _encode((FORM, batch.sequence, events))


def unpack_batch(data: bytes) -> KvEventBatch | None:
    """Bytes as a batch; None when they are none."""
    try:
        form, sequence, events = _batch.decode(data)
        if form != FORM:
            return None
        return KvEventBatch(
            sequence, tuple(KvEvent(k, unpack_hashes(h), p, t) for k, h, p, t in events)
        )
    except (msgspec.DecodeError, ValueError):
        return None


def pack_snapshot(sequence: int, chains: Iterable[tuple[str, tuple[int, ...]]]) -> bytes:
    """All blocks of one incarnation as bytes, by tier."""
    return _encode((FORM, sequence, [(tier, pack_hashes(blocks)) for tier, blocks in chains]))


def unpack_snapshot(data: bytes) -> tuple[int, list[tuple[str, tuple[int, ...]]]] | None:
    """Bytes as (sequence, chains by tier); None when they are none."""
    try:
        form, sequence, chains = _snapshot.decode(data)
        if form != FORM:
            return None
        return sequence, [(tier, unpack_hashes(blocks)) for tier, blocks in chains]
    except (msgspec.DecodeError, ValueError):
        return None


def apply_entry(index: PrefixIndex, entry: KvEntry, *, now_s: float) -> bool:
    """Apply another router's batch; False when it is garbled or did not fit."""
    found = unpack_batch(entry.packed)
    if found is None:
        index.counts.malformed += 1
        return False
    return index.apply(key_of(entry), found.sequence, found.events, now_s=now_s, replayed=True)


class KvSharing:
    """KV events between this router and the others."""

    def __init__(self, store: Store, own: str) -> None:
        """`own` is this router's incarnation."""
        self._store, self._own = store, own
        self._pending: list[tuple[str, KvEntry]] = []
        self._positions: dict[str, str] = {}
        self._tried: dict[str, int] = {}  # by worker: the snapshot that was taken last, as a hash
        self._rounds = 0

    def heard(self, member: Member, batch: KvEventBatch) -> None:
        """Keep a batch of an own worker for the others; bounded, a loss is repaired by snapshots."""
        if len(self._pending) < PENDING_BATCHES_MAX:
            offer, packed = member.offer, pack_batch(batch)
            entry = KvEntry("", self._own, offer.worker_id, offer.incarnation, packed)
            self._pending.append((offer.model, entry))

    def alone(self) -> None:
        """No other router is there: nobody needs what is pending."""
        self._pending.clear()

    async def round(
        self,
        members: Sequence[Member],
        index_of: Callable[[str], PrefixIndex],
        *,
        joined: bool,
        now_s: float,
    ) -> None:
        """Write own batches, read the others', and catch up where something was missed.

        Args:
            members: seated members. index_of: prefix index of a model.
            joined: another router has just come: snapshots now.
        """
        pending, self._pending = self._pending, []
        for model in dict.fromkeys(model for model, _ in pending):
            await self._store.append_kv(model, [entry for of, entry in pending if of == model])
        for model in {m.offer.model for m in members}:
            self._positions[model] = await read_log(
                self._store,
                model,
                index_of(model),
                after=self._positions.get(model, ""),
                own=self._own,
                now_s=now_s,
            )
        self._rounds += 1
        snapshots = joined or self._rounds % SNAPSHOT_EVERY_ROUNDS == 0
        behind: dict[str, list[Member]] = {}
        for member in members:
            index = index_of(member.offer.model)
            if member.mine and snapshots:
                await self._snapshot(member, index)
            elif not member.mine and (index.is_suspect(member.key) or index.unheard(member.key)):
                behind.setdefault(member.offer.model, []).append(member)
        self._tried = {m.key: self._tried.get(m.key, 0) for of in behind.values() for m in of}
        for model, those in behind.items():
            await self._catch_up(model, those, index_of(model), now_s=now_s)

    def store_is_new(self) -> None:
        """Another store answers: its log is read from its beginning. What is known stays."""
        self._positions.clear()

    async def _catch_up(
        self, model: str, members: Sequence[Member], index: PrefixIndex, *, now_s: float
    ) -> None:
        """Bring workers of other routers up to date: their snapshots, then the log behind them."""
        fresh = set()
        for member in members:
            offer = member.offer
            data = await self._store.snapshot(model, offer.worker_id, offer.incarnation)
            if self._tried[member.key] != (told := hash(data) or 1):
                self._tried[member.key] = told
                fresh.add(member.key)
                take_snapshot(index, member.key, data)
        if fresh:
            await read_log(self._store, model, index, after="", keys=fresh, now_s=now_s)

    async def _snapshot(self, member: Member, index: PrefixIndex) -> None:
        held, offer = index.snapshot(member.key), member.offer
        if held is not None:
            data = pack_snapshot(*held)
            await self._store.put_snapshot(offer.model, offer.worker_id, offer.incarnation, data)


def take_snapshot(index: PrefixIndex, key: str, data: bytes) -> None:
    """Restore one worker from its snapshot; empty data is none."""
    found = unpack_snapshot(data) if data else None
    if found is not None:
        index.restore(key, *found)
    elif data:
        index.counts.malformed += 1


async def read_log(
    store: Store,
    model: str,
    index: PrefixIndex,
    *,
    after: str,
    now_s: float,
    own: str = "",
    keys: Collection[str] | None = None,
) -> str:
    """Apply what was appended since `after`, page by page; returns the new position.

    Args:
        own: leave out what this router wrote. keys: of these workers only.
    """
    while entries := await store.read_kv(model, after):
        after = entries[-1].entry_id
        for entry in entries:
            mine = entry.origin == own
            if mine or (keys is not None and key_of(entry) not in keys):
                continue
            apply_entry(index, entry, now_s=now_s)
    return after


def key_of(entry: KvEntry) -> str:
    """Whose batch it is."""
    return seat_key(entry.worker_id, entry.incarnation)
