"""The KV pool: which blocks are in use, which idle ones still hold a prefix, who is evicted next.

Owns the accounting of blocks: cached blocks by their sequence hash with a count of users, and
private blocks (a tail, or generated tokens) as a number. A block without users stays findable until
its place is needed; the one released longest ago goes first. Cached blocks are kept in runs: a
prompt costs by its cuts, not by its blocks. `core` decides who gets blocks.
"""

from __future__ import annotations

from collections import deque

from readyplane.core.runs import Run, Runs

STALE_ENTRIES_MAX = 4096
_NEW = -1


class _Run(Run):
    """`users`: how many; `stamp`: of the release after which it had none."""

    __slots__ = ("stamp", "users")

    def __init__(self, hashes: tuple[int, ...]) -> None:
        super().__init__(hashes)
        self.users = 0
        self.stamp = _NEW


class _Release:
    """Blocks that had no user any more at one time; the last of the first `left` goes next."""

    __slots__ = ("hashes", "left", "stamp")

    def __init__(self, stamp: int, hashes: tuple[int, ...]) -> None:
        self.stamp, self.hashes, self.left = stamp, hashes, len(hashes)


class BlockPool:
    """`total` blocks. Invariant: `private + cached <= total`, and no user count is negative.

    Attributes:
        private: blocks without a hash. shared: cached blocks in use. idle: blocks without users
            that still hold a prefix.
        evicted: hashes that left since the owner last emptied this list.
    """

    __slots__ = (
        "_entries",
        "_released",
        "_runs",
        "_stamp",
        "evicted",
        "idle",
        "private",
        "shared",
        "total",
    )

    def __init__(self, total: int) -> None:
        self.total = total
        self.private = 0
        self.shared = 0
        self.idle = 0
        self._runs: Runs[_Run] = Runs(_Run, _parted)
        # Releases in order. Blocks of a run that has another stamp, or users, have been used since:
        # they are passed over.
        self._released: deque[_Release] = deque()
        self._entries = 0
        self._stamp = 0
        self.evicted: list[int] = []

    @property
    def used(self) -> int:
        """Blocks that somebody uses."""
        return self.private + self.shared

    @property
    def available(self) -> int:
        """Blocks that can be taken now, idle ones included."""
        return self.total - self.private - self.shared

    def match(self, hashes: tuple[int, ...], most: int) -> int:
        """How many leading blocks (at most `most`) are cached."""
        found = self._runs.leading(hashes)
        return min(most, sum([count for _, count in found])) if found else 0

    def idle_among(self, hashes: tuple[int, ...]) -> int:
        """How many of these cached blocks have no user (using them makes them unavailable)."""
        return sum(count for run, count in self._runs.leading(hashes) if not run.users)

    def share(self, hashes: tuple[int, ...]) -> None:
        """Use cached blocks."""
        for run in self._runs.known_of(hashes):
            if not run.users:
                self.idle -= len(run.hashes)
                self.shared += len(run.hashes)
            run.users += 1

    def take(self, count: int) -> None:
        """Take `count` private blocks, evicting idle ones where nothing is free.

        The caller has checked `available`.
        """
        short = count - (self.total - self.private - self.shared - self.idle)
        if short > 0:
            self._evict(short)
        self.private += count

    def _evict(self, count: int) -> None:
        """Evict the `count` idle blocks that were released longest ago."""
        self.idle -= count
        where = self._runs.where
        while count > 0:
            release = self._released[0]
            if not release.left:
                self._released.popleft()
                continue
            run = where.get(release.hashes[release.left - 1])
            if run is None or run.users or run.stamp != release.stamp:
                release.left -= 1
                self._entries -= 1
                continue
            size = len(run.hashes)
            if size > count:
                gone = self._runs.shorten(run, count)
            else:
                gone = run.hashes
                self._runs.drop(run)
            count -= len(gone)
            release.left -= len(gone)
            self._entries -= len(gone)
            self.evicted += gone[::-1]

    def _retire(self, hashes: tuple[int, ...]) -> None:
        """These blocks have no user since stamp `_stamp`; the last of them will go first."""
        self._released.append(_Release(self._stamp, hashes))
        self._entries += len(hashes)
        if self._entries <= 2 * self.idle + STALE_ENTRIES_MAX:
            return
        for release in self._released:
            release.hashes = tuple(self._still_idle(release))
            release.left = len(release.hashes)
        self._released = deque(release for release in self._released if release.left)
        self._entries = self.idle

    def _still_idle(self, release: _Release) -> list[int]:
        idle, where = [], self._runs.where
        for value in release.hashes[: release.left]:
            run = where.get(value)
            if run is not None and not run.users and run.stamp == release.stamp:
                idle.append(value)
        return idle

    def publish(self, hashes: tuple[int, ...]) -> tuple[int, ...]:
        """Turn private blocks into cached ones with one user.

        Returns:
            The hashes that are new; a block whose hash is cached already stays private.
        """
        new: tuple[int, ...] = ()
        for run in self._runs.all_of(hashes):
            if not run.users and run.stamp == _NEW:
                run.users = 1
                new += run.hashes
        self.private -= len(new)
        self.shared += len(new)
        return new

    def give_back(self, hashes: tuple[int, ...], private: int) -> None:
        """End the use of cached blocks (last one first, so that a prefix outlives its tail)."""
        self.private -= private
        if not hashes:
            return
        self._stamp += 1
        over: tuple[int, ...] = ()
        for run in self._runs.known_of(hashes):
            run.users -= 1
            if not run.users:
                run.stamp = self._stamp
                over += run.hashes
        self.idle += len(over)
        self.shared -= len(over)
        self._retire(over)

    def clear(self) -> list[int]:
        """Forget every idle block; returns their hashes."""
        gone: list[int] = []
        for run in {id(run): run for run in self._runs.where.values()}.values():
            if not run.users:
                gone += run.hashes
                self._runs.drop(run)
        self._released.clear()
        self._entries = self.idle = 0
        return gone


def _parted(run: _Run, new: _Run, later: bool) -> None:
    """A run was cut: both parts have its users."""
    del later
    new.users, new.stamp = run.users, run.stamp
