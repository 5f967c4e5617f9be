"""What the store keeps of an order of admission: one for each model, for its time.

Owns that part of the store's port and its memory twin; `rations` writes and reads it.
"""

from __future__ import annotations

from typing import Protocol

from readyplane.kit.clock import Clock


class RationStore(Protocol):
    """One order of each model, kept for its time. Raises Unavailable."""

    shared: bool

    async def put_ration(self, model: str, packed: bytes, *, ttl_s: float) -> None:
        """Keep it, in the place of the one before."""
        ...

    async def ration(self, model: str) -> tuple[bytes, float] | None:
        """What is kept, and for how many seconds it still is."""
        ...


class MemoryRations:
    """The twin in memory: a part of the memory store."""

    def __init__(self, clock: Clock) -> None:
        """Empty."""
        self._rations: dict[str, tuple[bytes, float]] = {}
        self._ration_clock = clock

    async def put_ration(self, model: str, packed: bytes, *, ttl_s: float) -> None:
        self._rations[model] = packed, self._ration_clock.monotonic_s() + ttl_s

    async def ration(self, model: str) -> tuple[bytes, float] | None:
        packed, until_s = self._rations.get(model, (b"", 0.0))
        left_s = until_s - self._ration_clock.monotonic_s()
        return (packed, left_s) if left_s > 0.0 else None
