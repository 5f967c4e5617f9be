"""What is believed of each worker's prefix cache, by its numbered events and by what was routed.

Owns the mirror of the workers' prefix caches, fed by their KV events and, for a short while, by
what the router itself has just sent (speculative entries, or all there is for a worker that
publishes no events). Hands `matched` to the pairing brain. Keys are incarnations, never names: an
end is one call that costs O(own blocks).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from readyplane.core.kv import CPU, DISK, GPU, KvEvent
from readyplane_router.prefix.chains import Chains, Holder
from readyplane_router.prefix.tiers import TIERS, TierLoad

FIRST_SEQUENCES = (0, 1)
BEHIND_MAX = 3
LOWER_TIMES = 8
"""A tier below the GPU is believed to hold so many times what the GPU may."""
NAMES_MAX = 4_096
FEW = 6
"""Workers who are named one by one; the names of more are kept by their mask."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the index.

    Attributes:
        speculative_ttl_s: how long a routed prompt counts as stored while its events are on the way.
        approximate_ttl_s: the same for a worker that publishes no events.
        replay_wait_s: how long a replay is waited for before a suspect's entries are dropped.
        silent_after_s: a worker without one event this long after it was routed to counts as
            publishing none.
        cpu_bytes_per_s, cpu_setup_s, disk_bytes_per_s, disk_setup_s: how KV is loaded from there.
    """

    speculative_ttl_s: float = 2.0
    approximate_ttl_s: float = 60.0
    replay_wait_s: float = 10.0
    silent_after_s: float = 10.0
    cpu_bytes_per_s: float = 2e10
    cpu_setup_s: float = 0.001
    disk_bytes_per_s: float = 3e9
    disk_setup_s: float = 0.005

    def loads(self) -> dict[str, TierLoad]:
        """How KV is loaded from each tier but the GPU."""
        return {
            CPU: TierLoad(self.cpu_bytes_per_s, self.cpu_setup_s),
            DISK: TierLoad(self.disk_bytes_per_s, self.disk_setup_s),
        }


@dataclass(slots=True)
class Counts:
    """What went wrong with events, for the metrics."""

    gaps: int = 0
    duplicates: int = 0
    malformed: int = 0
    unknown_removed: int = 0
    overflow: int = 0
    rebuilt: int = 0
    restarted: int = 0


@dataclass(slots=True)
class _Worker:
    """One incarnation. `lower`: what it has on other tiers than its GPU."""

    key: str
    blocks_max: int
    has: Holder
    lower: dict[str, Holder] = field(default_factory=dict)
    applied: int | None = None  # last sequence applied
    seen: int | None = None  # highest sequence seen
    first: dict[int, int] = field(default_factory=dict)  # its first batches, as hashes
    behind: int = 0  # batches in a row that were numbered below `applied`
    suspect_since_s: float | None = None
    first_guess_s: float | None = None


class PrefixIndex:
    """Blocks of all workers of one model."""

    def __init__(self, limits: Limits | None = None) -> None:
        """Empty."""
        self.limits = limits or Limits()
        self.counts = Counts()
        self._workers: dict[str, _Worker] = {}
        self._keys = [""]  # by the length of the bit
        self._chains = Chains()
        self._free_bits: list[int] = []
        self._trusted = 0
        self._names: dict[int, tuple[str, ...]] = {}
        self._tiered: set[str] = set()  # who has something below its GPU

    def __len__(self) -> int:
        """Distinct blocks known or guessed."""
        return len(self._chains.where)

    def add(self, key: str, *, blocks_max: int) -> None:
        """Know an incarnation; at most `blocks_max` of its blocks are kept. Idempotent.

        A smaller bound than before takes its place.
        """
        known = self._workers.get(key)
        if known is not None:
            if blocks_max < known.blocks_max:
                known.blocks_max = max(1, blocks_max)
            return
        has = self._holder(key)
        self._workers[key] = _Worker(key, max(1, blocks_max), has)
        self._trusted |= has.bit

    def drop(self, key: str) -> None:
        """Forget an incarnation: O(own blocks)."""
        worker = self._workers.pop(key, None)
        if worker is None:
            return
        self._trusted &= ~worker.has.bit
        self._clear(worker)
        for has in (worker.has, *worker.lower.values()):
            del self._chains.by_bit[has.bit]
            self._free_bits.append(has.bit.bit_length() - 1)
        if worker.lower:
            self._tiered.discard(key)
        self._names.clear()

    def _holder(self, key: str) -> Holder:
        if not self._free_bits:
            self._free_bits.append(len(self._keys) - 1)
            self._keys.append("")
        position = self._free_bits.pop()
        self._keys[position + 1] = key
        holder = Holder(1 << position)
        self._chains.by_bit[holder.bit] = holder
        return holder

    def _clear(self, worker: _Worker) -> None:
        """Nothing is known of a worker, on any tier."""
        for has in (worker.has, *worker.lower.values()):
            self._chains.clear(has)

    def matched(self, hashes: Sequence[int], *, now_s: float) -> dict[str, int]:
        """Blocks of the prompt's prefix that each worker holds; absent means none.

        A suspect worker is credited with nothing (field report B93).
        """
        chains = self._chains
        due = chains.due
        if due and due[0][0] <= now_s:
            chains.forget(now_s)
        found: dict[str, int] = {}
        prompt = tuple(hashes)
        end = len(prompt)
        if not end:
            return found
        heads, mask, depth = chains.heads, self._trusted, 0
        while depth < end:
            chain = heads.get(prompt[depth]) or chains.where.get(prompt[depth])
            if chain is None:
                break
            count = chain.size
            if hash(prompt[depth : depth + count]) != chain.whole:
                chain, count = chains.found(chain, prompt, depth)
            here = mask & chain.full
            if here != mask:
                if chain.part is not None:
                    ended, more = self._partly(chain.part, mask, depth, count, found)
                    here |= more
                    mask ^= ended
                if depth:
                    self._name(mask ^ here, depth, found)
                mask = here
                if not mask:
                    return found
            depth += count
        if depth:
            self._name(mask, depth, found)
        return found

    def tiered(self, hashes: Sequence[int]) -> dict[str, list[tuple[str, int]]]:
        """Of those workers that have something below their GPU: (tier, blocks) of the prefix.

        In the order of the prompt; a block on several tiers counts for the nearest. Suspect workers
        and those without any of it are absent. Cheap where no engine tells of other tiers.
        """
        out: dict[str, list[tuple[str, int]]] = {}
        prompt = tuple(hashes)
        for key in self._tiered:
            worker = self._workers[key]
            if worker.suspect_since_s is None and (pieces := self._pieces(worker, prompt)):
                out[key] = pieces
        return out

    def _pieces(self, worker: _Worker, prompt: tuple[int, ...]) -> list[tuple[str, int]]:
        chains, depth = self._chains, 0
        pieces: list[tuple[str, int]] = []
        has = {GPU: worker.has, **worker.lower}
        while depth < len(prompt) and (chain := chains.where.get(prompt[depth])) is not None:
            chain, count = chains.found(chain, prompt, depth)
            here = 0
            for tier in TIERS:
                more = min(count, has[tier].has(chain) if tier in has else 0) - here
                if more > 0:
                    last = pieces[-1] if pieces else ("", 0)
                    if last[0] == tier:
                        pieces[-1] = tier, last[1] + more
                    else:
                        pieces.append((tier, more))
                    here += more
            depth += here
            if here < count:
                break
        return pieces

    def _partly(
        self, part: dict[int, int], mask: int, depth: int, count: int, found: dict[str, int]
    ) -> tuple[int, int]:
        """Bits of those whose prefix ends within a chain, which are named, and of those who go on."""
        ended = more = 0
        for bit, has in part.items():
            if not mask & bit:
                continue
            if has >= count:
                more |= bit
            else:
                found[self._keys[bit.bit_length()]] = depth + has
                ended |= bit
        return ended, more

    def _name(self, mask: int, depth: int, found: dict[str, int]) -> None:
        """Say of each worker of a mask how deep it goes."""
        if mask.bit_count() > FEW:
            found.update(dict.fromkeys(self._named(mask), depth))
            return
        keys = self._keys
        while mask:
            length = mask.bit_length()
            found[keys[length]] = depth
            mask ^= 1 << (length - 1)

    def guess(self, key: str, hashes: Sequence[int], *, now_s: float) -> None:
        """Count a routed prompt as stored on the worker that was chosen, for a while."""
        worker = self._workers.get(key)
        if worker is None or not hashes:
            return
        self._chains.forget(now_s)
        if worker.first_guess_s is None:
            worker.first_guess_s = now_s
        silent = self.publishes_nothing(key, now_s=now_s)
        lasting_s = self.limits.approximate_ttl_s if silent else self.limits.speculative_ttl_s
        self._chains.guess(worker.has, tuple(hashes), now_s + lasting_s)
        over = worker.has.guessed - worker.blocks_max
        if over > 0:
            self.counts.overflow += over
            self._chains.unguess(worker.has, over)

    def apply(
        self,
        key: str,
        sequence: int,
        events: Iterable[KvEvent],
        *,
        now_s: float,
        replayed: bool = False,
    ) -> bool:
        """One batch of a worker's events; True when it was applied.

        Batches count up by one. A batch seen before changes nothing, and so a replay that comes
        late brings nothing back. A gap makes the worker suspect: nothing is credited and `suspects`
        names it, until either the missing batches come in order, or a batch that starts with
        `cleared` states everything anew, or `replay_wait_s` has passed: then what is known is
        dropped and rebuilt from what comes. A numbering that begins anew is a new life: what was
        known is dropped.

        Args:
            replayed: from a log, in which old batches are no news. A session brings each once.
        """
        worker = self._workers.get(key)
        if worker is None:
            return False
        batch = tuple(events)
        anew = bool(batch) and batch[0].kind == "cleared"
        expected = None if worker.applied is None else worker.applied + 1
        if expected is not None and sequence < expected:
            if replayed or not self._begins_anew(worker, sequence, batch, now_s):
                self.counts.duplicates += 1
                self._behind(worker, sequence, now_s, replayed=replayed)
                return False
            self.counts.restarted += 1
            worker.first.clear()
            self._clear(worker)
            worker.seen = sequence
        elif anew:
            worker.seen = sequence
        else:
            worker.seen = sequence if worker.seen is None else max(worker.seen, sequence)
            fits = sequence in FIRST_SEQUENCES if expected is None else sequence == expected
            if not fits:
                if not self._given_up(worker, now_s):
                    self._suspect(worker, now_s)
                    return False
                self._clear(worker)
                self.counts.rebuilt += 1
                worker.seen = sequence
        worker.applied, worker.behind = sequence, 0
        if sequence in FIRST_SEQUENCES:
            worker.first[sequence] = hash(batch)
        self._apply(worker, batch)
        self._caught_up(worker)
        return True

    def purge(self, key: str) -> None:
        """It holds nothing any more, whatever it told: its engine went to sleep. Idempotent."""
        worker = self._workers.get(key)
        if worker is not None:
            self._clear(worker)

    def suspects(self) -> tuple[str, ...]:
        """Workers whose events have a gap: they must replay."""
        return tuple(k for k, w in self._workers.items() if w.suspect_since_s is not None)

    def is_suspect(self, key: str) -> bool:
        """Whether this worker must replay."""
        worker = self._workers.get(key)
        return worker is not None and worker.suspect_since_s is not None

    def unheard(self, key: str) -> bool:
        """Whether no batch of this worker has been applied yet."""
        worker = self._workers.get(key)
        return worker is not None and worker.applied is None

    def publishes_nothing(self, key: str, *, now_s: float) -> bool:
        """Routed to for `silent_after_s` and never one event: only guesses are known (B102)."""
        worker = self._workers.get(key)
        if worker is None or worker.seen is not None or worker.first_guess_s is None:
            return False
        return now_s - worker.first_guess_s >= self.limits.silent_after_s

    def silent(self, *, now_s: float) -> int:
        """How many workers publish nothing."""
        return sum(self.publishes_nothing(key, now_s=now_s) for key in self._workers)

    def blocks_of(self, key: str) -> int:
        """Distinct blocks known from events of one worker."""
        worker = self._workers.get(key)
        return worker.has.blocks if worker else 0

    def snapshot(self, key: str) -> tuple[int, list[tuple[str, tuple[int, ...]]]] | None:
        """(last sequence, blocks in chains by tier) to hand to another router; None if not sure.

        A block that is stored several times comes once more in a chain of its own.
        """
        worker = self._workers.get(key)
        if worker is None or worker.applied is None or worker.suspect_since_s is not None:
            return None
        chains = []
        for tier, has in ((GPU, worker.has), *worker.lower.items()):
            chains += [(tier, chain.hashes[:count]) for chain, count in has.held.items()]
            chains += [(tier, (value,)) for value, more in has.extra.items() for _ in range(more)]
        return worker.applied, chains

    def restore(
        self, key: str, sequence: int, chains: Iterable[tuple[str, tuple[int, ...]]]
    ) -> None:
        """Take a snapshot over, unless something newer is known."""
        worker = self._workers.get(key)
        if worker is None or (worker.applied is not None and worker.applied >= sequence):
            return
        self._clear(worker)
        worker.applied = sequence
        worker.first.clear()
        worker.seen = sequence if worker.seen is None else max(worker.seen, sequence)
        for tier, blocks in chains:
            has = worker.has if tier == GPU else self._below(worker, tier)
            if has is not None:
                self._chains.store(has, blocks, None)
                self._bound(worker, has)
        self._caught_up(worker)

    def _apply(self, worker: _Worker, batch: Sequence[KvEvent]) -> None:
        chains = self._chains
        for event in batch:
            has = worker.has if event.tier == GPU else self._below(worker, event.tier)
            if event.kind == "cleared":
                self._clear(worker)
            elif has is None:
                self.counts.malformed += 1
            elif event.kind == "stored":
                chains.store(has, event.block_hashes, event.parent_hash)
                self._bound(worker, has)
            elif event.kind == "removed":
                self.counts.unknown_removed += chains.remove(has, event.block_hashes)
            else:  # never turned into something destructive (B105)
                self.counts.malformed += 1

    def _below(self, worker: _Worker, tier: str) -> Holder | None:
        """What a worker has on a tier below its GPU; None when there is no such tier."""
        has = worker.lower.get(tier)
        if has is None and tier in TIERS:
            has = worker.lower[tier] = self._holder(worker.key)
            self._tiered.add(worker.key)
        return has

    def _bound(self, worker: _Worker, has: Holder) -> None:
        most = worker.blocks_max if has is worker.has else worker.blocks_max * LOWER_TIMES
        over = has.blocks - most
        if over > 0:
            self.counts.overflow += over
            self._chains.shorten(has, over)

    def _begins_anew(
        self, worker: _Worker, sequence: int, batch: tuple[KvEvent, ...], now_s: float
    ) -> bool:
        """Whether a batch numbered below is one of another numbering, and not an old one again."""
        if sequence == worker.applied:
            return False
        if worker.behind >= BEHIND_MAX:  # its first one was not seen
            anew = bool(batch) and batch[0].kind == "cleared"
            return anew or self._given_up(worker, now_s)
        return sequence in FIRST_SEQUENCES and hash(batch) != worker.first.get(sequence)

    def _behind(self, worker: _Worker, sequence: int, now_s: float, *, replayed: bool) -> None:
        """A session whose batches stay behind has begun anew, and its first one was not seen."""
        if replayed or sequence == worker.applied:
            return
        worker.behind += 1
        if worker.behind >= BEHIND_MAX:
            self._suspect(worker, now_s)

    def _suspect(self, worker: _Worker, now_s: float) -> None:
        if worker.suspect_since_s is None:
            worker.suspect_since_s = now_s
            self._trusted &= ~worker.has.bit
            self.counts.gaps += 1

    def _given_up(self, worker: _Worker, now_s: float) -> bool:
        since_s = worker.suspect_since_s
        return since_s is not None and now_s - since_s >= self.limits.replay_wait_s

    def _caught_up(self, worker: _Worker) -> None:
        """Trust a worker again of whom nothing is missing any more."""
        assert worker.seen is not None
        assert worker.applied is not None
        if worker.suspect_since_s is not None and worker.seen <= worker.applied:
            worker.suspect_since_s = None
            self._trusted |= worker.has.bit

    def _named(self, mask: int) -> tuple[str, ...]:
        """The keys of a mask; few masks are in use at a time, so they are kept."""
        names = self._names.get(mask)
        if names is None:
            if len(self._names) >= NAMES_MAX:
                self._names.clear()
            left, keys = mask, []
            while left:
                bit = left & -left
                keys.append(self._keys[bit.bit_length()])
                left ^= bit
            names = self._names[mask] = tuple(keys)
        return names
