"""Fencing numbers that can never go back: the port and its memory twin.

Handed to the service, which stamps leases and published groups with them; in production they come
from a Postgres sequence (`readyplane_router.postgres`). A Redis that comes back empty or older
cannot turn them back, because they do not live there.
"""

from __future__ import annotations

from itertools import count
from typing import Protocol


class Epochs(Protocol):
    """Numbers that only grow."""

    async def next(self) -> int:
        """A number larger than every one given before, by anybody. Raises Unavailable."""
        ...


class MemoryEpochs:
    """The twin in memory; several services may share one."""

    def __init__(self, first: int = 1) -> None:
        """Start at `first`."""
        self._count = count(first)

    async def next(self) -> int:
        return next(self._count)
