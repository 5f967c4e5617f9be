"""The KV pool: which blocks are in use, which idle ones still hold a prefix, who is evicted next.

Owns the accounting of blocks: cached blocks by their sequence hash with a count of users, and
private blocks (a tail, or generated tokens) as a number. A block without users stays findable until
its place is needed; the one released longest ago goes first. `core` decides who gets blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat

STALE_ENTRIES_MAX = 4096


class BlockPool:
    """`total` blocks. Invariant: `private + cached <= total`, and every user count is positive.

    Attributes:
        private: blocks without a hash. users: hash -> users of each cached block in use.
        evicted: hashes that left since the owner last emptied this list.
    """

    __slots__ = ("_entries", "_idle", "_released", "_stamp", "evicted", "private", "total", "users")

    def __init__(self, total: int) -> None:
        self.total = total
        self.private = 0
        self.users: dict[int, int] = {}
        # Idle hashes with the stamp of their release, longest ago first, and the releases in order:
        # the dict alone would walk over all its deleted entries to find the first one left. An
        # entry of a release whose stamp is not the hash's has been used since: it is passed over.
        self._idle: dict[int, int] = {}
        self._released: deque[tuple[int, list[int]]] = deque()
        self._entries = 0
        self._stamp = 0
        self.evicted: list[int] = []

    @property
    def used(self) -> int:
        """Blocks that somebody uses."""
        return self.private + len(self.users)

    @property
    def idle(self) -> int:
        """Blocks without users that still hold a prefix."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that can be taken now, idle ones included."""
        return self.total - self.private - len(self.users)

    def match(self, hashes: Sequence[int], most: int) -> int:
        """How many leading blocks (at most `most`) are cached."""
        users, idle = self.users, self._idle
        count = 0
        for value in hashes[:most]:
            if value not in users and value not in idle:
                break
            count += 1
        return count

    def idle_among(self, hashes: Sequence[int]) -> int:
        """How many of these cached blocks have no user (using them makes them unavailable)."""
        idle = self._idle
        return sum(1 for value in hashes if value in idle)

    def share(self, hashes: Sequence[int]) -> None:
        """Use cached blocks."""
        users, idle = self.users, self._idle
        for value in hashes:
            if value in users:
                users[value] += 1
            else:
                del idle[value]
                users[value] = 1

    def take(self, count: int) -> None:
        """Take `count` private blocks, evicting idle ones where nothing is free.

        The caller has checked `available`.
        """
        short = count - (self.total - self.private - len(self.users) - len(self._idle))
        if short > 0:
            self._evict(short)
        self.private += count

    def _evict(self, count: int) -> None:
        """Evict the `count` idle blocks that were released longest ago."""
        idle, released = self._idle, self._released
        while count > 0:
            stamp, hashes = released[0]  # the next to go stands last
            last = hashes[-count:]
            stamps = list(map(idle.get, last))
            gone = last
            if stamps.count(stamp) != len(stamps):
                gone = [value for value, at in zip(last, stamps, strict=True) if at == stamp]
            del hashes[-count:]
            if not hashes:
                released.popleft()
            self._entries -= len(last)
            gone.reverse()
            deque(map(idle.__delitem__, gone), maxlen=0)
            self.evicted += gone
            count -= len(gone)

    def _retire(self, hashes: list[int]) -> None:
        """These cached blocks have no user any more; the last of them will go first."""
        self._stamp += 1
        self._idle.update(dict.fromkeys(reversed(hashes), self._stamp))
        self._released.append((self._stamp, hashes))
        self._entries += len(hashes)
        if self._entries > 2 * len(self._idle) + STALE_ENTRIES_MAX:
            self._stamp += 1
            self._released = deque([(self._stamp, list(reversed(self._idle)))])
            self._idle = dict.fromkeys(self._idle, self._stamp)
            self._entries = len(self._idle)

    def publish(self, hashes: Sequence[int]) -> list[int]:
        """Turn private blocks into cached ones with one user.

        Returns:
            The hashes that are new; a block whose hash is cached already stays private.
        """
        users, idle = self.users, self._idle
        fresh = dict.fromkeys(hashes, 1)
        if not (users.keys().isdisjoint(fresh) and idle.keys().isdisjoint(fresh)):
            fresh = {v: 1 for v in fresh if v not in users and v not in idle}
        users.update(fresh)
        self.private -= len(fresh)
        return list(fresh)

    def give_back(self, hashes: Sequence[int], private: int) -> None:
        """End the use of cached blocks (last one first, so that a prefix outlives its tail)."""
        self.private -= private
        if not hashes:
            return
        users = self.users
        counts = list(map(users.pop, hashes, repeat(0)))
        if max(counts) == min(counts) == 1:  # nobody else uses any of them: no loop
            self._retire(list(hashes))
            return
        left: dict[int, int] = {}
        for value, count in zip(hashes, counts, strict=True):
            left[value] = left.get(value, count) - 1
        users.update({value: count for value, count in left.items() if count > 0})
        self._retire([value for value, count in left.items() if count <= 0])

    def clear(self) -> list[int]:
        """Forget every idle block; returns their hashes."""
        gone = list(self._idle)
        self._idle.clear()
        self._released.clear()
        self._entries = 0
        return gone
