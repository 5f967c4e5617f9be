"""What the store keeps of routers' signals: one packed value of each router that lives, for its time.

Owns that part of the store's port and its memory twin; `together` writes and reads it.
"""

from __future__ import annotations

from typing import Protocol

from readyplane.kit.clock import Clock

Kept = dict[str, tuple[bytes, float] | None]


class SignalStore(Protocol):
    """The last word of each router that lives. Raises Unavailable."""

    shared: bool

    async def attend(self, router_id: str, *, ttl_s: float) -> int:
        """Say that this router lives, for so long; returns how many do. 0 s: it has ended."""
        ...

    async def put_signals(self, router_id: str, packed: bytes, *, ttl_s: float) -> None:
        """Keep it, in the place of the one before."""
        ...

    async def signals(self) -> Kept:
        """Of every router that lives what is kept and for how many seconds it still is.

        None: it told nothing, or its value has run out.
        """
        ...


class MemorySignals:
    """The twin in memory: a part of the memory store."""

    def __init__(self, clock: Clock) -> None:
        """Empty."""
        self._routers: dict[str, float] = {}  # by id: the end of its word that it lives
        self._signals: dict[str, tuple[bytes, float]] = {}
        self._signal_clock = clock

    async def attend(self, router_id: str, *, ttl_s: float) -> int:
        """See SignalStore."""
        now_s = self._signal_clock.monotonic_s()
        self._routers[router_id] = now_s + ttl_s
        self._routers = {k: until for k, until in self._routers.items() if until > now_s}
        self._signals = {k: v for k, v in self._signals.items() if v[1] > now_s}
        return len(self._routers)

    async def put_signals(self, router_id: str, packed: bytes, *, ttl_s: float) -> None:
        self._signals[router_id] = packed, self._signal_clock.monotonic_s() + ttl_s

    async def signals(self) -> Kept:
        now_s = self._signal_clock.monotonic_s()
        out: Kept = {}
        for router_id, until_s in self._routers.items():
            if until_s > now_s:
                packed, ends_s = self._signals.get(router_id, (b"", 0.0))
                out[router_id] = (packed, ends_s - now_s) if ends_s > now_s else None
        return out
