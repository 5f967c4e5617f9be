"""KV events of a vLLM-style engine, turned into our hash scheme.

Owns the decoding of both forms (positional and tagged maps), the re-hashing of token ids, and what
to do about gaps. Engine hashes serve as opaque keys for parents and removals only. Engines store
and remove the same block several times (B101): only the first and the last of these are told on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from readyplane.core.work import HASH_SEED, hash_seed, pack_tokens
from readyplane.ports import KvEvent, KvEventBatch

REPLAY_LIMIT_S = 5.0
QUEUE_BATCHES_MAX = 100_000

_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_POSITIONS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": (*_STORED, "lora_name", "extra_keys"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


def read_batch(payload: bytes) -> list[dict[str, Any]]:
    """Events of one payload as maps with a `type`; batch and events may each have either form.

    Raises:
        ValueError: not such a payload.
    """
    try:
        doc = msgspec.msgpack.decode(payload)
        events = doc["events"] if isinstance(doc, dict) else doc[1]
        return [_as_map(event) for event in events]
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from error


def _as_map(event: Any) -> dict[str, Any]:
    if isinstance(event, dict):
        return event
    kind = str(event[0])
    names = _POSITIONS.get(kind, ())
    return {"type": kind, **dict(zip(names, event[1:], strict=False))}


def _key(value: Any) -> int | bytes:
    """An engine's block hash as a key: i64 and u64 are one, bytes stay opaque."""
    return value & 0xFFFFFFFFFFFFFFFF if isinstance(value, int) else bytes(value)


@dataclass(slots=True)
class HashTranslator:
    """Engine hashes to ours, with what is known of one engine life.

    Attributes:
        held: engine hash -> (our hash, how often it is stored). unknown_total: events that could
            not be placed (parent never seen, other medium, unknown type).
    """

    held: dict[int | bytes, tuple[int, int]] = field(default_factory=dict)
    ours: dict[int, int] = field(default_factory=dict)
    unknown_total: int = 0

    def translate(self, event: Mapping[str, Any]) -> KvEvent | None:
        """One event in our words, None when it changes nothing for us."""
        kind = event.get("type")
        if kind == "AllBlocksCleared":
            self.held.clear()
            self.ours.clear()
            return KvEvent("cleared")
        if kind == "BlockRemoved":
            return self._removed(event)
        if kind == "BlockStored":
            return self._stored(event)
        self.unknown_total += 1
        return None

    def _stored(self, event: Mapping[str, Any]) -> KvEvent | None:
        keys = [_key(h) for h in event.get("block_hashes") or ()]
        tokens, size = event.get("token_ids") or (), int(event.get("block_size") or 0)
        parent = event.get("parent_block_hash")
        before: int | None = None
        if parent is not None:
            known = self.held.get(_key(parent))
            if known is None:
                self.unknown_total += 1
                return None
            before = known[0]
        if size < 1 or len(tokens) < size * len(keys) or event.get("medium") not in (None, "GPU"):
            self.unknown_total += 1
            return None
        seed = hash_seed(
            lora=str(event.get("lora_name") or ""), cache_salt=str(event.get("cache_salt") or "")
        )
        packed = pack_tokens(tokens)
        new: list[int] = []
        for i, key in enumerate(keys):
            local = xxhash.xxh3_64_intdigest(packed[4 * size * i : 4 * size * (i + 1)], seed=seed)
            before = local if before is None else _chain(before, local)
            if self._count(key, before):
                new.append(before)
        return KvEvent("stored", tuple(new)) if new else None

    def _count(self, key: int | bytes, value: int) -> bool:
        """Note one more copy; True when it is the first of this content."""
        known = self.held.get(key)
        self.held[key] = (value, 1 if known is None else known[1] + 1)
        self.ours[value] = self.ours.get(value, 0) + 1
        return self.ours[value] == 1

    def _removed(self, event: Mapping[str, Any]) -> KvEvent | None:
        gone: list[int] = []
        if event.get("medium") not in (None, "GPU"):
            return None
        for key in (_key(h) for h in event.get("block_hashes") or ()):
            known = self.held.pop(key, None)
            if known is None:
                continue  # one absent block must not stop the rest (B103)
            value, copies = known
            if copies > 1:
                self.held[key] = (value, copies - 1)
            left = self.ours[value] - 1
            if left:
                self.ours[value] = left
            else:
                del self.ours[value]
                gone.append(value)
        return KvEvent("removed", tuple(gone)) if gone else None


def _chain(parent: int, local: int) -> int:
    both = parent.to_bytes(8, "little") + local.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(both, seed=HASH_SEED)


class KvEventReader:
    """Follows one engine's event stream and keeps our own gapless numbering.

    Args:
        endpoint, replay_endpoint: ZMQ addresses (`tcp://host:port`); no replay when empty.
        topic: prefix to subscribe to. on_loss: called with the reason when events were lost.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        *,
        topic: str = "",
        on_loss: Callable[[str], None] | None = None,
    ) -> None:
        self._endpoint, self._replay_endpoint, self._topic = endpoint, replay_endpoint, topic
        self._on_loss = on_loss
        self._translator = HashTranslator()
        self._next: int | None = None  # sequence that the engine sends next
        self._sent = 0
        self.losses_total = 0

    @property
    def unknown_total(self) -> int:
        """Events that could not be placed."""
        return self._translator.unknown_total

    async def follow(self) -> AsyncIterator[KvEventBatch]:
        """Batches from the engine's first event on (as far as its replay reaches)."""
        import zmq.asyncio

        context = zmq.asyncio.Context()
        live = context.socket(zmq.SUB)
        try:
            live.set_hwm(QUEUE_BATCHES_MAX)
            live.connect(self._endpoint)
            live.setsockopt_string(zmq.SUBSCRIBE, self._topic)
            for batch in await self._catch_up(context, 0):
                yield batch
            while True:
                frames = await live.recv_multipart()
                if len(frames) < 2 or len(frames[-2]) != 8:
                    continue
                sequence = int.from_bytes(frames[-2], "big")
                if self._next is not None and sequence < self._next:
                    if sequence:  # seen already, by the replay that began before it
                        continue
                    yield self._lost("the engine began anew")
                elif self._next is not None and sequence > self._next:
                    for batch in await self._catch_up(context, self._next):
                        yield batch
                    if sequence < self._next:
                        continue
                    if sequence > self._next:
                        yield self._lost(f"batches {self._next} to {sequence - 1} are gone")
                elif self._next is None and sequence > 0:
                    yield self._lost(f"the first {sequence} batches were missed")
                if (taken := self._take(sequence, frames[-1])) is not None:
                    yield taken
        finally:
            live.close(linger=0)
            context.destroy(linger=0)

    async def _catch_up(self, context: Any, first: int) -> list[KvEventBatch]:
        """Ask for everything from `first` on; what came, in order, a loss in front if need be."""
        import asyncio

        import zmq

        if not self._replay_endpoint:
            return []
        out: list[KvEventBatch] = []
        socket = context.socket(zmq.DEALER)
        try:
            socket.set_hwm(0)
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            async with asyncio.timeout(REPLAY_LIMIT_S):
                while True:
                    frames = await socket.recv_multipart()
                    sequence = int.from_bytes(frames[-2], "big", signed=True)
                    if sequence < 0:
                        break
                    expected = first if self._next is None else self._next
                    if sequence > expected:
                        out.append(self._lost(f"batches {expected} to {sequence - 1} are gone"))
                    if sequence >= expected and (batch := self._take(sequence, frames[-1])):
                        out.append(batch)
        except TimeoutError:
            pass  # the caller compares sequences and says what is missing
        finally:
            socket.close(linger=0)
        return out

    def _take(self, sequence: int, payload: bytes) -> KvEventBatch | None:
        self._next = sequence + 1
        try:
            events = read_batch(payload)
        except ValueError as error:
            return self._lost(str(error))
        ours = [e for event in events if (e := self._translator.translate(event)) is not None]
        return self._batch(ours) if ours else None

    def _lost(self, why: str) -> KvEventBatch:
        """Forget everything: nobody may believe in blocks that may be gone (B93)."""
        self.losses_total += 1
        if self._on_loss is not None:
            self._on_loss(why)
        self._translator.held.clear()
        self._translator.ours.clear()
        return self._batch([KvEvent("cleared")])

    def _batch(self, events: Sequence[KvEvent]) -> KvEventBatch:
        self._sent += 1
        return KvEventBatch(self._sent, tuple(events))
