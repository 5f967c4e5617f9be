"""The members of one router by id, the fleet as others see it, and who watches it change.

Owns the version, which only grows: its upper part is an epoch, so that it grows across restarts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from readyplane.core.worker import Fleet, WorkerState
from readyplane_router.lease import Standing
from readyplane_router.members import Member

EPOCH_VERSIONS = 1 << 24


class Roster:
    """All members. `standing` is asked how the router stands to its store."""

    def __init__(self) -> None:
        """Empty."""
        self.members: dict[str, Member] = {}
        self.standing: Callable[[], Standing] = lambda: Standing.FRESH
        self._version = 0
        self._changed = asyncio.Event()

    def begin(self, epoch: int) -> None:
        """Start counting versions above those of any earlier life."""
        self._version = max(self._version, epoch * EPOCH_VERSIONS)
        self.bump()

    def bump(self) -> None:
        """Something that others should see has changed."""
        self._version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def fleet(self, model: str = "") -> Fleet:
        """The members as frozen values."""
        standing = self.standing()
        return Fleet(
            self._version,
            {
                worker_id: member.view()
                for worker_id, member in self.members.items()
                if model in ("", member.offer.model)
            },
            "" if standing is Standing.FRESH else f"the store is away ({standing})",
        )

    async def watch(self, model: str = "") -> AsyncGenerator[Fleet]:
        """The fleet now and after every change of a state; versions may be skipped."""
        seen = -1
        while True:
            changed = self._changed
            if seen != self._version:
                seen = self._version
                yield self.fleet(model)
            else:
                await changed.wait()

    def serves(self, model: str) -> bool:
        """Whether any living worker has this model."""
        return any(
            m.offer.model == model and m.state is not WorkerState.GONE
            for m in self.members.values()
        )
