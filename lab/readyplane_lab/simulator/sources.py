"""Who gives the weights to whom on virtual time: the node's disk, peers, the object store.

Owns the links that starts share. The object store has one bandwidth for all its readers, and every
ready worker is a peer that gives to a bounded number of readers: a second start is faster than a
first, and ten at once fan out instead of queueing at one source. Weights come in marks, each
verified on arrival: when a source dies or is found to lie, the next one goes on at the first mark
that is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from readyplane.core.startup import WeightTier
from readyplane.kit.clock import Clock
from readyplane_lab.simulator.startup import StartUpModel

MARKS = 8


class WeightSources:
    """Attributes:
    counts: `peers_gone` (under a reader), `lies` (marks that did not verify), `resumed` (transfers that went on
        elsewhere), and `marks.TIER` by the tier that gave them.
    on_death: told of a worker that dies while it gives.
    """

    def __init__(self, model: StartUpModel, *, clock: Clock) -> None:
        self.on_death: Callable[[str], None] = lambda _worker_id: None
        self.counts: Counter[str] = Counter()
        self._model = model
        self._clock = clock
        self._store_readers = 0
        self._peers: dict[str, int] = {}
        self._dies = 0
        self._lies = 0
        self._liars: set[str] = set()

    def add_peer(self, worker_id: str) -> None:
        """A ready worker gives its weights from now on."""
        self._peers.setdefault(worker_id, 0)

    def remove_peer(self, worker_id: str) -> None:
        """It gives no more; readers under way go on elsewhere."""
        self._peers.pop(worker_id, None)

    def next_dies(self) -> None:
        """The next peer that is half-way through giving dies."""
        self._dies += 1

    def next_lies(self) -> None:
        """The next peer that gives turns out to give wrong bytes half-way."""
        self._lies += 1

    async def fetch(self, *, cached: bool = False, alone: bool = False) -> WeightTier:
        """Move the weights of one start; returns the tier that gave the last byte.

        Args:
            cached: the node holds them. alone: from the store as if nobody else read there, for
                starts that are to have happened some time before.
        """
        done, tier = 0, WeightTier.UNKNOWN
        if alone and not cached:
            await self._marks(MARKS, self._model.store_bytes_per_s)
            return WeightTier.L4_OBJECT
        while done < MARKS:
            begun_at = done
            peer = None if cached else self._free_peer()
            if cached:
                tier, done = WeightTier.L2_NVME, await self._from_disk(done)
            elif peer is not None:
                tier, done = WeightTier.L1_HOST, await self._from_peer(peer, done)
            else:
                tier, done = WeightTier.L4_OBJECT, await self._from_store(done)
            self.counts[f"marks.{tier}"] += done - begun_at
            self.counts["resumed"] += done < MARKS
        return tier

    async def _from_disk(self, done: int) -> int:
        await self._marks(MARKS - done, self._model.disk_bytes_per_s)
        return MARKS

    async def _from_store(self, done: int) -> int:
        self._store_readers += 1
        try:
            while done < MARKS:
                await self._marks(1, self._model.store_bytes_per_s / self._store_readers)
                done += 1
        finally:
            self._store_readers -= 1
        return done

    async def _from_peer(self, peer: str, done: int) -> int:
        """Marks as long as the peer gives true ones; returns how many there are then."""
        self._peers[peer] += 1
        try:
            while done < MARKS:
                await self._marks(1, self._model.peer_bytes_per_s / self._peers.get(peer, 1))
                if peer in self._liars or self._begins_to_lie(peer, done):
                    self.counts["lies"] += 1
                    self.remove_peer(peer)
                    break
                if peer not in self._peers:  # its last mark never came
                    self.counts["peers_gone"] += 1
                    break
                done += 1
                if self._dies and 2 * done >= MARKS:
                    self._dies -= 1
                    self.on_death(peer)
        finally:
            if peer in self._peers:
                self._peers[peer] -= 1
        return done

    def _begins_to_lie(self, peer: str, done: int) -> bool:
        if not self._lies or 2 * done < MARKS:
            return False
        self._lies -= 1
        self._liars.add(peer)
        return True

    def _free_peer(self) -> str | None:
        most = self._model.peer_readers_max
        free = [(n, w) for w, n in self._peers.items() if n < most and w not in self._liars]
        return min(free)[1] if free else None

    async def _marks(self, count: int, bytes_per_s: float) -> None:
        await self._clock.sleep(count * self._model.weight_bytes / MARKS / bytes_per_s)


__all__ = ["WeightSources"]
