"""KV events of a vLLM-style engine (vLLM, SGLang) in our words and our hash scheme.

Owns the decoding of both forms (positional and tagged maps) and the re-hashing of token ids. Engine hashes serve as opaque keys for parents and removals only. Engines store
and remove the same block several times (B101): only the first and the last of these are told on.
What cannot be placed for sure is counted and left out: a block that is believed in wrongly costs a
prefill, and one of another tenant more (B96).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from readyplane.core.errors import InvalidField
from readyplane.core.kv import CPU, DISK, GPU, KvEvent
from readyplane.core.work import HASH_SEED, hash_seed, pack_tokens

TIERS: Mapping[str | None, str] = {
    medium: tier
    for tier, media in (
        (GPU, (None, "", "GPU", "HBM", "DEVICE")),
        (CPU, ("CPU", "CPU_PINNED", "CPU_TIER1", "CPU_TIER2", "HOST", "DRAM")),
        (DISK, ("DISK", "SSD", "NVME", "FS")),
    )
    for medium in media
}
"""Where a `medium` is. What others share (EXTERNAL, object stores) is no worker's own: left out."""

_TAIL = ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_POSITIONS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": (*_STORED, "lora_name", "extra_keys", "block_mm_infos", *_TAIL),
    "BlockRemoved": ("block_hashes", "medium", *_TAIL),
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
    if not isinstance(event, list) or not event:
        return {"type": "garbled"}  # one event that is none harms no other (B105)
    kind = str(event[0])
    names = _POSITIONS.get(kind, ())
    return {"type": kind, **dict(zip(names, event[1:], strict=False))}


def _key(value: Any) -> int | bytes:
    """An engine's block hash as a key: i64 and u64 are one, bytes stay opaque."""
    return value & 0xFFFFFFFFFFFFFFFF if isinstance(value, int) else bytes(value)


@dataclass(slots=True)
class _Held:
    """Blocks of one tier.

    Attributes:
        keys: engine hash -> (our hash, how often it is stored). ours: our hash -> copies in all.
    """

    keys: dict[int | bytes, tuple[int, int]] = field(default_factory=dict)
    ours: dict[int, int] = field(default_factory=dict)

    def count(self, key: int | bytes, value: int) -> bool:
        """Note one more copy; True when it is the first of this content."""
        known = self.keys.get(key)
        self.keys[key] = (value, 1 if known is None else known[1] + 1)
        self.ours[value] = self.ours.get(value, 0) + 1
        return self.ours[value] == 1

    def remove(self, key: int | bytes) -> int | None:
        """Note one copy less; our hash when it was the last of this content."""
        known = self.keys.pop(key, None)
        if known is None:
            return None  # one absent block must not stop the rest (B103)
        value, copies = known
        if copies > 1:
            self.keys[key] = (value, copies - 1)
        left = self.ours[value] - 1
        if left:
            self.ours[value] = left
            return None
        del self.ours[value]
        return value


@dataclass(slots=True)
class HashTranslator:
    """Engine hashes to ours, with what is known of one engine life.

    Attributes:
        block_size: of the worker; blocks of another size are never found and so left out. 0: any.
        tiers: what each holds. seeds: of our hashes that begin with another seed than the common
            one, for an engine names adapter and salt with a prompt's first blocks only.
        unknown_total: events that could not be placed (parent never seen, other medium, unknown
            type, other size, adapter without a name, content that is not all tokens).
    """

    block_size: int = 0
    tiers: dict[str, _Held] = field(default_factory=lambda: {t: _Held() for t in (GPU, CPU, DISK)})
    seeds: dict[int, int] = field(default_factory=dict)
    unknown_total: int = 0

    def clear(self) -> None:
        """Nothing is held any more."""
        for held in self.tiers.values():
            held.keys.clear()
            held.ours.clear()
        self.seeds.clear()

    @property
    def held_blocks(self) -> int:
        """Engine hashes that are kept, of all tiers."""
        return sum(len(held.keys) for held in self.tiers.values())

    def translate(self, event: Mapping[str, Any]) -> KvEvent | None:
        """One event in our words, None when it changes nothing for us."""
        kind = event.get("type")
        try:
            if kind == "AllBlocksCleared":
                self.clear()
                return KvEvent("cleared")
            if kind == "BlockRemoved":
                return self._removed(event)
            if kind == "BlockStored":
                return self._stored(event)
        except (TypeError, ValueError, AttributeError, InvalidField):
            pass  # fields of other types than they have: never anything destructive (B105)
        self.unknown_total += 1
        return None

    def _tier(self, event: Mapping[str, Any]) -> str | None:
        """Where it is about; None for a place, or a cache group, that says nothing of prefixes."""
        medium = event.get("medium")
        tier = TIERS.get(medium.upper() if isinstance(medium, str) else medium)
        return tier if event.get("group_idx") in (None, 0) else None

    def _stored(self, event: Mapping[str, Any]) -> KvEvent | None:
        keys = [_key(h) for h in event.get("block_hashes") or ()]
        tokens, size = event.get("token_ids") or (), int(event.get("block_size") or 0)
        tier = self._tier(event)
        if tier is None or not keys:
            self.unknown_total += 1
            return None
        if not tokens:  # moved to another tier: content that was told of before
            return self._moved(keys, tier)
        parent = event.get("parent_block_hash")
        before: int | None = None
        if parent is not None:
            before = self._ours(_key(parent))
            if before is None or _key(parent) in keys:
                self.unknown_total += 1
                return None
        seed = self._seed(event, before)
        wrong_size = size < 1 or (self.block_size and size != self.block_size)
        if seed is None or wrong_size or len(tokens) < size * len(keys):
            self.unknown_total += 1
            return None
        return self._hashed(keys, pack_tokens(tokens), size, seed, before, tier)

    def _hashed(
        self,
        keys: list[int | bytes],
        packed: bytes,
        size: int,
        seed: int,
        before: int | None,
        tier: str,
    ) -> KvEvent | None:
        held = self.tiers[tier]
        new: list[int] = []
        parent = before
        for i, key in enumerate(keys):
            local = xxhash.xxh3_64_intdigest(packed[4 * size * i : 4 * size * (i + 1)], seed=seed)
            value = local if before is None else _chain(before, local)
            if held.count(key, value):
                if not new:
                    parent = before
                new.append(value)
                if seed != HASH_SEED:
                    self.seeds[value] = seed
            before = value
        return KvEvent("stored", tuple(new), parent, tier) if new else None

    def _moved(self, keys: Sequence[int | bytes], tier: str) -> KvEvent | None:
        """Content without its tokens: known from another tier, or never."""
        held, new = self.tiers[tier], []
        for key in keys:
            value = self._ours(key)
            if value is None:
                self.unknown_total += 1
            elif held.count(key, value):
                new.append(value)
        return KvEvent("stored", tuple(new), None, tier) if new else None

    def _ours(self, key: int | bytes) -> int | None:
        """Our hash of an engine's, wherever it lies."""
        for held in self.tiers.values():
            known = held.keys.get(key)
            if known is not None:
                return known[0]
        return None

    def _seed(self, event: Mapping[str, Any], before: int | None) -> int | None:
        """Seed of these blocks; None when they are not told apart by tokens, adapter and salt.

        vLLM puts the salt into the extra keys of a prompt's first block, and what other content
        (images) there is into those of its blocks.
        """
        lora, number = event.get("lora_name") or "", event.get("lora_id")
        if not lora and isinstance(number, str):
            lora = number
        if not lora and number:
            return None  # an adapter whose name is not told
        salt = str(event.get("cache_salt") or "")
        extra = [
            [x for x in more or () if x not in (lora, salt)]
            for more in event.get("extra_keys") or ()
        ]
        images = event.get("block_mm_infos")
        if isinstance(images, list) and any(images):
            return None
        if before is None and not salt and extra and len(extra[0]) == 1:
            salt = extra[0].pop() if isinstance(extra[0][0], str) else ""
        if any(extra):
            return None
        if before is not None and before in self.seeds:
            return self.seeds[before]
        return hash_seed(lora=str(lora), cache_salt=salt)

    def _removed(self, event: Mapping[str, Any]) -> KvEvent | None:
        tier = self._tier(event)
        if tier is None:
            return None
        held = self.tiers[tier]
        gone = []
        for key in event.get("block_hashes") or ():
            value = held.remove(_key(key))
            if value is not None:
                gone.append(value)
                if not any(value in other.ours for other in self.tiers.values()):
                    self.seeds.pop(value, None)
        return KvEvent("removed", tuple(gone), None, tier) if gone else None


def _chain(parent: int, local: int) -> int:
    both = parent.to_bytes(8, "little") + local.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(both, seed=HASH_SEED)
