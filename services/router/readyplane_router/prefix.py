"""Which worker holds which KV prefix: reference counts per incarnation and an index over all.

Owns the mirror of the workers' prefix caches, fed by their KV events and, for a short while, by
what the router itself has just sent (speculative entries, or all there is for a worker that
publishes no events). Hands `matched` to the pairing brain. Keys are incarnations, never names: an
end is one call that costs O(own blocks).

The index keeps blocks in runs (`readyplane.core.runs`), each with a bit mask of slots; a prefix
match walks the runs of a prompt and drops a slot at its first missing block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from readyplane.core.runs import Run, Runs

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


class _Run(Run):
    """`mask`: bits of those who hold it or are guessed to."""

    __slots__ = ("mask",)

    def __init__(self, hashes: tuple[int, ...]) -> None:
        super().__init__(hashes)
        self.mask = 0


class _Kept:
    """Runs of one holder, each with a value; blocks are numbered in the order in which they came."""

    __slots__ = ("blocks", "in_order", "next", "runs")

    def __init__(self) -> None:
        self.runs: dict[_Run, tuple[float, int]] = {}  # value, number of the first block
        self.blocks = 0
        self.next = 0
        self.in_order = True  # whether the dict is

    def put(self, run: _Run, value: float) -> None:
        """A run that is not there, as the youngest."""
        size = len(run.hashes)
        self.runs[run] = (value, self.next)
        self.next += size
        self.blocks += size

    def pop(self, run: _Run) -> bool:
        """Whether it was there."""
        if self.runs.pop(run, None) is None:
            return False
        self.blocks -= len(run.hashes)
        return True

    def part(self, run: _Run, new: _Run, later: bool) -> None:
        """`new` was a part of `run`."""
        had = self.runs.get(run)
        if had is None:
            return
        value, first = had
        if later:
            self.runs[new] = (value, first + len(run.hashes))
        else:
            self.runs[new] = had
            self.runs[run] = (value, first + len(new.hashes))
        self.in_order = False

    def sort(self) -> dict[_Run, tuple[float, int]]:
        """The runs, oldest first."""
        if not self.in_order:
            self.runs = dict(sorted(self.runs.items(), key=lambda item: item[1][1]))
            self.in_order = True
        return self.runs


@dataclass(slots=True)
class _Holder:
    key: str
    bit: int
    blocks_max: int
    held: _Kept = field(default_factory=_Kept)  # how many times
    guessed: _Kept = field(default_factory=_Kept)  # until when
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
        self._runs: Runs[_Run] = Runs(_Run, self._parted)
        self._short: deque[tuple[float, _Holder, tuple[int, ...]]] = deque()
        self._long: deque[tuple[float, _Holder, tuple[int, ...]]] = deque()
        self._free_bits: list[int] = []
        self._trusted = 0

    def __len__(self) -> int:
        """Distinct blocks known or guessed."""
        return len(self._runs.where)

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
        mask, depth = self._trusted, 0
        for run, count in self._runs.leading(tuple(hashes)):
            here = mask & run.mask
            if here != mask:
                if depth:
                    self._name(mask & ~here, depth, found)
                mask = here
                if not mask:
                    return found
            depth += count
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
        blocks = tuple(hashes)
        runs = self._runs.all_of(blocks)
        if len(runs) > 1 and len(set(blocks)) != len(blocks):
            runs = list(dict.fromkeys(runs))
        guessed = holder.guessed
        for run in runs:
            guessed.pop(run)  # to the end: the oldest is dropped first
            guessed.put(run, until)
            run.mask |= holder.bit
        self._bound(holder, guessed)
        queue.append((until, holder, blocks))

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
        return holder.held.blocks if holder else 0

    def snapshot(self, key: str) -> tuple[int, tuple[int, ...]] | None:
        """(last sequence, blocks with repetition) to hand to another router; None if not sure."""
        holder = self._holders.get(key)
        if holder is None or holder.applied is None or holder.suspect_since_s is not None:
            return None
        blocks = [
            value
            for run, (count, _first) in holder.held.sort().items()
            for value in run.hashes
            for _ in range(int(count))
        ]
        return holder.applied, tuple(blocks)

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
        held = holder.held
        for run in self._runs.all_of(tuple(blocks)):
            had = held.runs.get(run)
            if had is None:
                held.put(run, 1)
                run.mask |= holder.bit
            else:
                held.runs[run] = (had[0] + 1, had[1])
        self._bound(holder, held)

    def _bound(self, holder: _Holder, kept: _Kept) -> None:
        """Forget a holder's oldest blocks beyond its bound."""
        over = kept.blocks - holder.blocks_max
        if over <= 0:
            return
        self.counts.overflow += over
        while over > 0:
            run = next(iter(kept.sort()))
            if len(run.hashes) > over:
                run = self._runs.split(run, over)[0]
            over -= len(run.hashes)
            kept.pop(run)
            self._unmark(holder, run)

    def _remove(self, holder: _Holder, hashes: Sequence[int]) -> None:
        held = holder.held
        blocks = tuple(hashes)
        if len(blocks) > 1 and self._backwards(blocks):
            blocks = blocks[::-1]
        unknown = len(blocks)
        for run in self._runs.known_of(blocks):
            had = held.runs.get(run)
            if had is None:
                continue
            unknown -= len(run.hashes)
            if had[0] > 1:
                held.runs[run] = (had[0] - 1, had[1])
            else:
                held.pop(run)
                self._unmark(holder, run)
        self.counts.unknown_removed += unknown

    def _backwards(self, blocks: tuple[int, ...]) -> bool:
        """Engines forget the last block of a prompt first: their order cuts runs into blocks."""
        run = self._runs.where.get(blocks[0])
        if run is None or blocks[1] not in run.hashes:
            return False
        return run.hashes.index(blocks[0]) > run.hashes.index(blocks[1])

    def _clear(self, holder: _Holder) -> None:
        runs = holder.held.runs | holder.guessed.runs
        holder.held, holder.guessed = _Kept(), _Kept()
        for run in runs:
            self._unmark(holder, run)

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
        for run in self._runs.known_of(hashes):
            had = guessed.runs.get(run)
            if had is not None and had[0] <= now_s:
                guessed.pop(run)
                self._unmark(holder, run)

    def _unmark(self, holder: _Holder, run: _Run) -> None:
        """Clear the holder's bit of a run that it neither holds nor is guessed to hold."""
        if run in holder.held.runs or run in holder.guessed.runs:
            return
        run.mask &= ~holder.bit
        if not run.mask:
            self._runs.drop(run)

    def _parted(self, run: _Run, new: _Run, later: bool) -> None:
        """A run was cut: whoever has it has both parts."""
        mask = new.mask = run.mask
        while mask:
            bit = mask & -mask
            holder = self._by_bit[bit]
            holder.held.part(run, new, later)
            holder.guessed.part(run, new, later)
            mask ^= bit

    def _name(self, mask: int, depth: int, found: dict[str, int]) -> None:
        while mask:
            bit = mask & -mask
            found[self._by_bit[bit].key] = depth
            mask ^= bit
