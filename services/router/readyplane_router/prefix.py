"""Which worker holds which KV prefix: reference counts per incarnation and an index over all.

Owns the mirror of the workers' prefix caches, fed by their KV events and, for a short while, by
what the router itself has just sent (speculative entries, or all there is for a worker that
publishes no events). Hands `matched` to the pairing brain. Keys are incarnations, never names: an
end is one call that costs O(own blocks).

The index maps a sequence hash to a bit mask of slots; a prefix match walks the prompt's chained
hashes and drops a slot at its first missing block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import filterfalse, islice, repeat
from typing import Any

FIRST_SEQUENCES = (0, 1)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the index.

    Attributes:
        speculative_ttl_s: how long a routed prompt counts as stored while its events are on the way.
        approximate_ttl_s: the same for a worker that publishes no events.
        replay_wait_s: how long a replay is waited for before a suspect's entries are dropped.
        silent_after_s: a worker without one event this long after it was routed to counts as
            publishing none.
    """

    speculative_ttl_s: float = 2.0
    approximate_ttl_s: float = 60.0
    replay_wait_s: float = 10.0
    silent_after_s: float = 10.0


@dataclass(slots=True)
class Counts:
    """What went wrong with events, for the metrics."""

    gaps: int = 0
    duplicates: int = 0
    malformed: int = 0
    unknown_removed: int = 0
    overflow: int = 0
    rebuilt: int = 0


@dataclass(slots=True)
class _Holder:
    key: str
    bit: int
    blocks_max: int
    held: dict[int, int] = field(default_factory=dict)
    guessed: dict[int, float] = field(default_factory=dict)
    applied: int | None = None  # last sequence applied
    seen: int | None = None  # highest sequence seen
    suspect_since_s: float | None = None
    first_guess_s: float | None = None
    alive: bool = True


class PrefixIndex:
    """Blocks of all workers of one model."""

    def __init__(self, limits: Limits | None = None) -> None:
        """Empty."""
        self.limits = limits or Limits()
        self.counts = Counts()
        self._holders: dict[str, _Holder] = {}
        self._by_bit: dict[int, _Holder] = {}
        self._masks: dict[int, int] = {}  # held or guessed
        self._short: deque[tuple[float, _Holder, tuple[int, ...]]] = deque()
        self._long: deque[tuple[float, _Holder, tuple[int, ...]]] = deque()
        self._free_bits: list[int] = []
        self._trusted = 0

    def __len__(self) -> int:
        """Distinct blocks known or guessed."""
        return len(self._masks)

    def add(self, key: str, *, blocks_max: int) -> None:
        """Know an incarnation; at most `blocks_max` of its blocks are kept. Idempotent.

        A smaller bound than before takes its place.
        """
        known = self._holders.get(key)
        if known is not None:
            known.blocks_max = max(1, min(known.blocks_max, blocks_max))
            return
        position = self._free_bits.pop() if self._free_bits else len(self._holders)
        holder = _Holder(key, 1 << position, max(1, blocks_max))
        self._holders[key] = holder
        self._by_bit[holder.bit] = holder
        self._trusted |= holder.bit

    def drop(self, key: str) -> None:
        """Forget an incarnation: O(own blocks)."""
        holder = self._holders.pop(key, None)
        if holder is None:
            return
        self._clear(holder)
        holder.alive = False
        del self._by_bit[holder.bit]
        self._trusted &= ~holder.bit
        self._free_bits.append(holder.bit.bit_length() - 1)

    def matched(self, hashes: Sequence[int], *, now_s: float) -> dict[str, int]:
        """Blocks of the prompt's prefix that each worker holds; absent means none.

        A suspect worker is credited with nothing (field report B93).
        """
        self._forget(now_s)
        found: dict[str, int] = {}
        mask = self._trusted
        masks = self._masks
        depth = 0
        if not hashes or not mask & masks.get(hashes[0], 0):
            return found
        known = list(map(masks.get, hashes, repeat(0)))
        if known.count(known[0]) == len(known):
            self._name(mask & known[0], len(known), found)
            return found
        for at in known:
            here = mask & at
            if here != mask:
                if depth:
                    self._name(mask & ~here, depth, found)
                mask = here
                if not mask:
                    return found
            depth += 1
        if depth:
            self._name(mask, depth, found)
        return found

    def guess(self, key: str, hashes: Sequence[int], *, now_s: float) -> None:
        """Count a routed prompt as stored on the worker that was chosen, for a while."""
        holder = self._holders.get(key)
        if holder is None or not hashes:
            return
        if holder.first_guess_s is None:
            holder.first_guess_s = now_s
        silent = self.publishes_nothing(key, now_s=now_s)
        lasting = self.limits.approximate_ttl_s if silent else self.limits.speculative_ttl_s
        queue = self._long if silent else self._short
        until = now_s + lasting
        guessed = holder.guessed
        if guessed.keys().isdisjoint(hashes):
            self._mark(holder.bit, hashes)
        else:
            self._mark(holder.bit, list(filterfalse(guessed.__contains__, hashes)))
            # To the end: the oldest is dropped first.
            _drain(map(guessed.pop, hashes, repeat(None)))
        guessed.update(dict.fromkeys(hashes, until))
        over = len(guessed) - holder.blocks_max
        if over > 0:
            oldest = list(islice(guessed, over))
            _drain(map(guessed.__delitem__, oldest))
            self._unmark(holder, oldest)
            self.counts.overflow += over
        queue.append((until, holder, tuple(dict.fromkeys(hashes))))

    def apply(
        self,
        key: str,
        sequence: int,
        events: Iterable[tuple[str, Sequence[int]]],
        *,
        now_s: float,
    ) -> bool:
        """One batch of a worker's events; True when it was applied.

        Batches count up by one. A batch seen before changes nothing. A gap makes the worker
        suspect: nothing is credited and `suspects` names it, until either the missing batches come
        in order, or a batch that starts with `cleared` states everything anew, or
        `replay_wait_s` has passed: then what is known is dropped and rebuilt from what comes.
        """
        holder = self._holders.get(key)
        if holder is None:
            return False
        batch = list(events)
        anew = bool(batch) and batch[0][0] == "cleared"
        expected = None if holder.applied is None else holder.applied + 1
        holder.seen = sequence if holder.seen is None else max(holder.seen, sequence)
        if not anew:
            if expected is None:
                fits = sequence in FIRST_SEQUENCES
            elif sequence < expected:
                self.counts.duplicates += 1
                return False
            else:
                fits = sequence == expected
            if not fits and not self._given_up(holder, now_s):
                self._suspect(holder, now_s)
                return False
            if not fits:
                self._clear(holder)
                self.counts.rebuilt += 1
                holder.seen = sequence
        else:
            if expected is not None and sequence < expected and sequence not in FIRST_SEQUENCES:
                self.counts.duplicates += 1
                return False
            holder.seen = sequence
        holder.applied = sequence
        self._apply(holder, batch)
        if holder.suspect_since_s is not None and holder.seen <= sequence:
            holder.suspect_since_s = None
            self._trusted |= holder.bit
        return True

    def suspects(self) -> tuple[str, ...]:
        """Workers whose events have a gap: they must replay."""
        return tuple(k for k, h in self._holders.items() if h.suspect_since_s is not None)

    def is_suspect(self, key: str) -> bool:
        """Whether this worker must replay."""
        holder = self._holders.get(key)
        return holder is not None and holder.suspect_since_s is not None

    def unheard(self, key: str) -> bool:
        """Whether no batch of this worker has been applied yet."""
        holder = self._holders.get(key)
        return holder is not None and holder.applied is None

    def publishes_nothing(self, key: str, *, now_s: float) -> bool:
        """Routed to for `silent_after_s` and never one event: only guesses are known (B102)."""
        holder = self._holders.get(key)
        if holder is None or holder.seen is not None or holder.first_guess_s is None:
            return False
        return now_s - holder.first_guess_s >= self.limits.silent_after_s

    def blocks_of(self, key: str) -> int:
        """Distinct blocks known from events of one worker."""
        holder = self._holders.get(key)
        return len(holder.held) if holder else 0

    def snapshot(self, key: str) -> tuple[int, tuple[int, ...]] | None:
        """(last sequence, blocks with repetition) to hand to another router; None if not sure."""
        holder = self._holders.get(key)
        if holder is None or holder.applied is None or holder.suspect_since_s is not None:
            return None
        return holder.applied, tuple(h for h, count in holder.held.items() for _ in range(count))

    def restore(self, key: str, sequence: int, blocks: Iterable[int]) -> None:
        """Take a snapshot over, unless something newer is known."""
        holder = self._holders.get(key)
        if holder is None or (holder.applied is not None and holder.applied >= sequence):
            return
        self._clear(holder)
        holder.applied = sequence
        holder.seen = sequence if holder.seen is None else max(holder.seen, sequence)
        self._store(holder, blocks)
        if holder.suspect_since_s is not None and holder.seen <= sequence:
            holder.suspect_since_s = None
            self._trusted |= holder.bit

    def _apply(self, holder: _Holder, batch: Sequence[tuple[str, Sequence[int]]]) -> None:
        for kind, hashes in batch:
            if kind == "stored":
                self._store(holder, hashes)
            elif kind == "removed":
                self._remove(holder, hashes)
            elif kind == "cleared":
                self._clear(holder)
            else:  # never turned into something destructive (B105)
                self.counts.malformed += 1

    def _store(self, holder: _Holder, blocks: Iterable[int]) -> None:
        hashes = blocks if isinstance(blocks, tuple) else tuple(blocks)
        held = holder.held
        fresh = dict.fromkeys(hashes, 1)
        if len(fresh) == len(hashes) and held.keys().isdisjoint(fresh):
            held.update(fresh)
            self._mark(holder.bit, hashes)
        else:
            new = [value for value in fresh if value not in held]
            for value in hashes:
                held[value] = held.get(value, 0) + 1
            self._mark(holder.bit, new)
        over = len(held) - holder.blocks_max
        if over > 0:
            oldest = list(islice(held, over))
            _drain(map(held.__delitem__, oldest))
            self._unmark(holder, oldest)
            self.counts.overflow += over

    def _remove(self, holder: _Holder, hashes: Sequence[int]) -> None:
        held = holder.held
        counts = list(map(held.get, hashes))
        if counts.count(1) == len(counts) == len(set(hashes)):
            _drain(map(held.__delitem__, hashes))
            self._unmark(holder, hashes)
            return
        for value in hashes:
            count = held.get(value)
            if count is None:
                self.counts.unknown_removed += 1
            elif count > 1:
                held[value] = count - 1
            else:
                del held[value]
                self._unmark(holder, (value,))

    def _clear(self, holder: _Holder) -> None:
        held, guessed = holder.held, holder.guessed
        holder.held, holder.guessed = {}, {}
        self._unmark(holder, list(held | guessed))

    def _suspect(self, holder: _Holder, now_s: float) -> None:
        if holder.suspect_since_s is None:
            holder.suspect_since_s = now_s
            self._trusted &= ~holder.bit
            self.counts.gaps += 1

    def _given_up(self, holder: _Holder, now_s: float) -> bool:
        since = holder.suspect_since_s
        return since is not None and now_s - since >= self.limits.replay_wait_s

    def _forget(self, now_s: float) -> None:
        for queue in (self._short, self._long):
            while queue and queue[0][0] <= now_s:
                _until, holder, hashes = queue.popleft()
                if holder.alive:
                    self._unguess(holder, hashes, now_s)

    def _unguess(self, holder: _Holder, hashes: tuple[int, ...], now_s: float) -> None:
        """Forget guesses that have run out, unless they were made anew meanwhile."""
        guessed = holder.guessed
        ends = list(map(guessed.get, hashes))
        over: Sequence[int] = hashes
        if ends.count(ends[0]) == len(ends):
            if ends[0] is None or ends[0] > now_s:
                return
        else:
            pairs = zip(hashes, ends, strict=True)
            over = [value for value, end in pairs if end is not None and end <= now_s]
        _drain(map(guessed.__delitem__, over))
        self._unmark(holder, over)

    def _mark(self, bit: int, hashes: Sequence[int]) -> None:
        """Set a holder's bit of blocks; mostly all of them have the same mask, which is quick."""
        masks = self._masks
        before = list(map(masks.get, hashes))
        if not before:
            return
        had = before[0]
        if before.count(had) == len(before):
            if had is None or not had & bit:
                masks.update(dict.fromkeys(hashes, (had or 0) | bit))
            return
        for value, mask in zip(hashes, before, strict=True):
            masks[value] = (mask or 0) | bit

    def _unmark(self, holder: _Holder, hashes: Sequence[int]) -> None:
        """Clear the holder's bit of blocks that it neither holds nor is guessed to hold."""
        for other in (holder.held, holder.guessed):
            if not other.keys().isdisjoint(hashes):
                hashes = [value for value in hashes if value not in other]
        masks, bit = self._masks, holder.bit
        before = list(map(masks.get, hashes))
        if before.count(bit) == len(before):
            _drain(map(masks.__delitem__, hashes))
            return
        for value, mask in zip(hashes, before, strict=True):
            left = (mask or 0) & ~bit
            if left:
                masks[value] = left
            else:
                masks.pop(value, None)

    def _name(self, mask: int, depth: int, found: dict[str, int]) -> None:
        while mask:
            bit = mask & -mask
            found[self._by_bit[bit].key] = depth
            mask ^= bit


def _drain(steps: Iterator[Any]) -> None:
    """Take every step of an iterator that is there for what it does."""
    deque(steps, maxlen=0)
