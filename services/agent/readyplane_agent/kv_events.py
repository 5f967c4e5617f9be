"""Prefix-cache events of the engine, on their way to the router with the lease renewals.

Owns this incarnation's numbering and a mirror of what the engine holds, so that everything can be
told again when the router asks (`replay_kv`), when a message may be lost, or when too much has
piled up. Hands batches to the session; adapters bring events in the router's hash scheme.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

from readyplane.core.kv import GPU, KvEvent, KvEventBatch

PENDING_BLOCKS_MAX = 50_000
REPLAY_BLOCKS_PER_EVENT = 4_096
HELD_BLOCKS_MAX = 4_000_000


class KvForwarder:
    """Mirror and queue of one engine life.

    Attributes:
        pending: set while something waits to be told. replays: how often all was told anew.
        dropped_total: blocks that were believed held for too long and given up (B104).
    """

    def __init__(
        self,
        *,
        pending_blocks_max: int = PENDING_BLOCKS_MAX,
        held_blocks_max: int = HELD_BLOCKS_MAX,
    ) -> None:
        self._max = pending_blocks_max
        self._held_max = held_blocks_max
        self._held: dict[str, dict[int, int | None]] = {GPU: {}}  # by tier: the block before each
        self._waiting: list[KvEvent] = []
        self._waiting_blocks = 0
        self._anew = False
        self._sequence = 0
        self.pending = asyncio.Event()
        self.replays = 0
        self.dropped_total = 0

    async def follow(self, events: AsyncIterator[KvEventBatch]) -> None:
        """Take the engine's events in until they end."""
        async for batch in events:
            for event in batch.events:
                self._take(event)

    def _take(self, event: KvEvent) -> None:
        if event.kind == "stored":
            self._stored(event)
        elif event.kind == "removed":
            held = self._held.get(event.tier, {})
            for block in event.block_hashes:
                held.pop(block, None)
        elif event.kind == "cleared":
            self._held = {GPU: {}}
        else:
            return
        self._tell(event)
        over = self.held_blocks - self._held_max
        if over > 0:
            self._give_up(over)
        self.pending.set()

    def _stored(self, event: KvEvent) -> None:
        held = self._held.setdefault(event.tier, {})
        before = event.parent_hash
        for block in event.block_hashes:
            held[block] = before
            before = block

    def _give_up(self, over: int) -> None:
        """Believe no more in what was stored longest ago: this engine tells of no removals."""
        tier, held = max(self._held.items(), key=lambda item: len(item[1]))
        oldest = [block for block, _ in zip(held, range(over), strict=False)]
        for block in oldest:
            del held[block]
        self.dropped_total += len(oldest)
        self._tell(KvEvent("removed", tuple(oldest), None, tier))

    def _tell(self, event: KvEvent) -> None:
        if self._anew:
            return
        last = self._waiting[-1] if self._waiting else None
        if last is not None and _goes_on(last, event):
            self._waiting[-1] = replace(last, block_hashes=last.block_hashes + event.block_hashes)
        else:
            self._waiting.append(event)
        self._waiting_blocks += len(event.block_hashes)
        if self._waiting_blocks > self._max:
            self.replay()

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
        """As they followed each other, so that the router keeps them so."""
        yield KvEvent("cleared")
        for tier, held in self._held.items():
            blocks: list[int] = []
            parent: int | None = None
            for block, before in held.items():
                if blocks and (before != blocks[-1] or len(blocks) >= REPLAY_BLOCKS_PER_EVENT):
                    yield KvEvent("stored", tuple(blocks), parent, tier)
                    blocks = []
                if not blocks:
                    parent = before
                blocks.append(block)
            if blocks:
                yield KvEvent("stored", tuple(blocks), parent, tier)

    @property
    def held_blocks(self) -> int:
        """Blocks the engine is believed to hold, on all tiers."""
        return sum(len(held) for held in self._held.values())


def _goes_on(last: KvEvent, event: KvEvent) -> bool:
    """Whether an event only continues the one before: engines tell of each step, of each block."""
    if last.kind != event.kind or last.tier != event.tier or not last.block_hashes:
        return False
    if len(last.block_hashes) >= REPLAY_BLOCKS_PER_EVENT:
        return False
    return event.kind == "removed" or (
        event.kind == "stored" and event.parent_hash == last.block_hashes[-1]
    )
