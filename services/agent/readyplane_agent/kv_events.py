"""Prefix-cache events of the engine, on their way to the router with the lease renewals.

Owns this incarnation's numbering and a mirror of what the engine holds, so that everything can be
told again when the router asks (`replay_kv`), when a message may be lost, or when too much has
piled up. Hands batches to the session; adapters bring events in the router's hash scheme.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from readyplane.ports import KvEvent, KvEventBatch

PENDING_BLOCKS_MAX = 50_000
REPLAY_BLOCKS_PER_EVENT = 4_096


class KvForwarder:
    """Mirror and queue of one engine life.

    Attributes:
        pending: set while something waits to be told. replays: how often all was told anew.
    """

    def __init__(self, *, pending_blocks_max: int = PENDING_BLOCKS_MAX) -> None:
        self._max = pending_blocks_max
        self._held: dict[int, None] = {}
        self._waiting: list[KvEvent] = []
        self._waiting_blocks = 0
        self._anew = False
        self._sequence = 0
        self.pending = asyncio.Event()
        self.replays = 0

    async def follow(self, events: AsyncIterator[KvEventBatch]) -> None:
        """Take the engine's events in until they end."""
        async for batch in events:
            for event in batch.events:
                self._take(event)

    def _take(self, event: KvEvent) -> None:
        if event.kind == "stored":
            self._held.update(dict.fromkeys(event.block_hashes))
        elif event.kind == "removed":
            for block in event.block_hashes:
                self._held.pop(block, None)
        elif event.kind == "cleared":
            self._held.clear()
        else:
            return
        if not self._anew:
            self._waiting.append(event)
            self._waiting_blocks += len(event.block_hashes)
            if self._waiting_blocks > self._max:
                self.replay()
        self.pending.set()

    def replay(self) -> None:
        """Tell everything anew with the next batch: cleared, then all that is held."""
        self._anew = True
        self._waiting.clear()
        self._waiting_blocks = 0
        self.pending.set()

    def take(self) -> tuple[KvEventBatch, ...]:
        """What is to be told now, numbered; call `replay` if it may not have arrived."""
        self.pending.clear()
        if self._anew:
            self._anew = False
            self.replays += 1
            events: Iterable[KvEvent] = self._everything()
        else:
            events = self._waiting
        batch = tuple(events)
        self._waiting = []
        self._waiting_blocks = 0
        if not batch:
            return ()
        self._sequence += 1
        return (KvEventBatch(self._sequence, batch),)

    def _everything(self) -> Iterable[KvEvent]:
        yield KvEvent("cleared")
        blocks = list(self._held)
        for start in range(0, len(blocks), REPLAY_BLOCKS_PER_EVENT):
            yield KvEvent("stored", tuple(blocks[start : start + REPLAY_BLOCKS_PER_EVENT]))

    @property
    def held_blocks(self) -> int:
        """Blocks the engine is believed to hold."""
        return len(self._held)
