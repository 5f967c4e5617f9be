"""KV events between routers: packed batches in a model's log, and snapshots.

Owns the packed form and the rule of catching up: the router that holds a worker's session writes,
the others read the log, and take a snapshot where they missed something.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from readyplane_router.pair import seat_key
from readyplane_router.prefix import PrefixIndex
from readyplane_router.store import KvEntry, Store

_encode = msgspec.msgpack.Encoder().encode
_batch = msgspec.msgpack.Decoder(tuple[int, list[tuple[str, list[int]]]])
_snapshot = msgspec.msgpack.Decoder(tuple[int, list[int]])


def pack_batch(sequence: int, events: Iterable[tuple[str, Sequence[int]]]) -> bytes:
    """One batch as bytes."""
    return _encode((sequence, [(kind, list(hashes)) for kind, hashes in events]))


def unpack_batch(data: bytes) -> tuple[int, list[tuple[str, list[int]]]] | None:
    """Bytes as (sequence, events); None when they are no batch."""
    try:
        return _batch.decode(data)
    except msgspec.DecodeError:
        return None


def pack_snapshot(sequence: int, blocks: Sequence[int]) -> bytes:
    """All blocks of one incarnation as bytes."""
    return _encode((sequence, blocks))


def apply_entry(index: PrefixIndex, entry: KvEntry, *, now_s: float) -> bool:
    """Apply another router's batch; False when it is garbled or did not fit."""
    found = unpack_batch(entry.packed)
    if found is None:
        index.counts.malformed += 1
        return False
    key = seat_key(entry.worker_id, entry.incarnation)
    return index.apply(key, found[0], found[1], now_s=now_s)


async def read_log(
    store: Store, model: str, index: PrefixIndex, *, after: str, own: str, now_s: float
) -> str:
    """Apply what other routers appended since `after`; returns the new position."""
    for entry in await store.read_kv(model, after):
        after = entry.entry_id
        if entry.origin != own:
            apply_entry(index, entry, now_s=now_s)
    return after


async def catch_up(
    store: Store,
    model: str,
    index: PrefixIndex,
    *,
    worker_id: str,
    incarnation: str,
    now_s: float,
) -> None:
    """Bring one worker of another router up to date: its snapshot, then the log behind it."""
    data = await store.snapshot(model, worker_id, incarnation)
    if not data:
        return
    try:
        sequence, blocks = _snapshot.decode(data)
    except msgspec.DecodeError:
        index.counts.malformed += 1
        return
    key = seat_key(worker_id, incarnation)
    index.restore(key, sequence, blocks)
    for entry in await store.read_kv(model, ""):
        if entry.worker_id == worker_id and entry.incarnation == incarnation:
            apply_entry(index, entry, now_s=now_s)
