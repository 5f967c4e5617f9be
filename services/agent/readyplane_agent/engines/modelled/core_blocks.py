"""The KV pool: which blocks are in use, which idle ones still hold a prefix, who is evicted next.

Owns the accounting of blocks: cached blocks by their sequence hash with a count of users, and
private blocks (a tail, or generated tokens) as a number. A block without users stays findable until
its place is needed; the one released longest ago goes first. `core` decides who gets blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """`total` blocks. Invariant: `private + cached <= total`, and every user count is positive.

    Attributes:
        private: blocks without a hash. users: hash -> users of each cached block in use.
        evicted: hashes that left since the owner last emptied this list.
    """

    __slots__ = ("_idle", "evicted", "private", "total", "users")

    def __init__(self, total: int) -> None:
        self.total = total
        self.private = 0
        self.users: dict[int, int] = {}
        # A plain dict would walk over all its deleted entries to find the first one left.
        self._idle: OrderedDict[int, None] = OrderedDict()
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
        idle = self._idle
        short = count - (self.total - self.private - len(self.users) - len(idle))
        if short > 0:
            pop = idle.popitem
            self.evicted += [pop(last=False)[0] for _ in range(short)]
        self.private += count

    def publish(self, hashes: Sequence[int]) -> list[int]:
        """Turn private blocks into cached ones with one user.

        Returns:
            The hashes that are new; a block whose hash is cached already stays private.
        """
        users, idle = self.users, self._idle
        new: list[int] = []
        for value in hashes:
            if value not in users and value not in idle:
                users[value] = 1
                new.append(value)
        self.private -= len(new)
        return new

    def give_back(self, hashes: Sequence[int], private: int) -> None:
        """End the use of cached blocks (last one first, so that a prefix outlives its tail)."""
        users, idle = self.users, self._idle
        for value in reversed(hashes):
            count = users.pop(value) - 1
            if count:
                users[value] = count
            else:
                idle[value] = None
        self.private -= private

    def clear(self) -> list[int]:
        """Forget every idle block; returns their hashes."""
        gone = list(self._idle)
        self._idle.clear()
        return gone
