"""The event stream of a vLLM-style engine (vLLM, SGLang) over ZMQ.

Owns following it without a hole: duplicates, gaps, replays, and an engine that began anew. What may
be missing is said as a clearing, so that nobody believes in blocks that may be gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from readyplane.core.kv import KvEvent, KvEventBatch
from readyplane_agent.engines.kv_translate import HashTranslator, read_batch

REPLAY_LIMIT_S = 5.0
QUEUE_BATCHES_MAX = 100_000
LOOK_EVERY_MS = 500
HELD_BLOCKS_MAX = 4_000_000


class KvEventReader:
    """Follows one engine's event stream and keeps our own gapless numbering.

    Args:
        endpoint, replay_endpoint: ZMQ addresses (`tcp://host:port`); no replay when empty.
        topic: prefix to subscribe to, which replayed messages that name one must have, too (B98).
        on_loss: called with the reason when events were lost.
        block_size: of the worker; blocks of another size are left out. 0: any.
        slept: set by whoever sees that the engine has gone to sleep. Its cache is empty then, and it
            may never say so (B92).
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        *,
        topic: str = "",
        on_loss: Callable[[str], None] | None = None,
        block_size: int = 0,
        slept: asyncio.Event | None = None,
    ) -> None:
        self._endpoint, self._replay_endpoint, self._topic = endpoint, replay_endpoint, topic
        self._on_loss = on_loss
        self._slept = slept
        self._translator = HashTranslator(block_size)
        self._next: int | None = None  # sequence that the engine sends next
        self._live: tuple[int, int] | None = None  # the last live message: sequence, hash of it
        self._sent = 0
        self.losses_total = 0
        self.rejected_total = 0

    @property
    def unknown_total(self) -> int:
        """Events that could not be placed."""
        return self._translator.unknown_total

    async def follow(self) -> AsyncIterator[KvEventBatch]:
        """Batches from the engine's first event on (as far as its replay reaches)."""
        import zmq.asyncio

        context = zmq.asyncio.Context()
        live = context.socket(zmq.SUB)
        try:
            live.set_hwm(QUEUE_BATCHES_MAX)
            live.connect(self._endpoint)
            live.setsockopt_string(zmq.SUBSCRIBE, self._topic)
            for batch in await self._catch_up(context, 0):
                yield batch
            while True:
                if self._slept is not None and self._slept.is_set():
                    self._slept.clear()
                    yield self._lost("the engine sleeps")
                if not await live.poll(LOOK_EVERY_MS):
                    continue
                for batch in await self._heard(context, await live.recv_multipart()):
                    yield batch
        finally:
            live.close(linger=0)
            context.destroy(linger=0)

    async def _heard(self, context: Any, frames: Sequence[bytes]) -> list[KvEventBatch]:
        """What follows from one live message: nothing, its events, or a loss and what was missed."""
        if len(frames) < 2 or len(frames[-2]) != 8:
            self.rejected_total += 1
            return []
        sequence = int.from_bytes(frames[-2], "big")
        before, self._live = self._live, (sequence, hash(frames[-1]))
        if before == self._live:
            return []  # delivered twice (B101)
        out: list[KvEventBatch] = []
        if self._next is not None and sequence < self._next:
            # A publisher's numbers only grow (B99). Lower ones are of another life, unless a
            # replay that began before them has brought them already.
            if sequence and (before is None or sequence > before[0]):
                return []
            out.append(self._lost("the engine began anew"))
            self._next = 0
        if sequence > (self._next or 0):
            out += await self._catch_up(context, self._next or 0)
            expected = self._next or 0
            if sequence < expected:
                return out
            if sequence > expected:
                out.append(self._lost(f"batches {expected} to {sequence - 1} are gone"))
        if (taken := self._take(sequence, frames[-1])) is not None:
            out.append(taken)
        return out

    async def _catch_up(self, context: Any, first: int) -> list[KvEventBatch]:
        """Ask for everything from `first` on; what came, in order, a loss in front if need be."""
        import zmq

        if not self._replay_endpoint:
            return []
        out: list[KvEventBatch] = []
        socket = context.socket(zmq.DEALER)
        try:
            socket.set_hwm(0)
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            async with asyncio.timeout(REPLAY_LIMIT_S):
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) < 2 or len(frames[-2]) != 8:
                        self.rejected_total += 1
                        continue
                    sequence = int.from_bytes(frames[-2], "big", signed=True)
                    if sequence < 0:
                        break
                    if len(frames) > 3 and not frames[-3].startswith(self._topic.encode()):
                        self.rejected_total += 1  # of another worker or model
                        continue
                    expected = first if self._next is None else self._next
                    if sequence > expected:
                        out.append(self._lost(f"batches {expected} to {sequence - 1} are gone"))
                    if sequence >= expected and (batch := self._take(sequence, frames[-1])):
                        out.append(batch)
        except TimeoutError:
            pass  # the caller compares sequences and says what is missing
        finally:
            socket.close(linger=0)
        return out

    def _take(self, sequence: int, payload: bytes) -> KvEventBatch | None:
        self._next = sequence + 1
        try:
            events = read_batch(payload)
        except ValueError as error:
            return self._lost(str(error))
        ours = [e for event in events if (e := self._translator.translate(event)) is not None]
        if self._translator.held_blocks > HELD_BLOCKS_MAX:  # it never tells of removals (B104)
            return self._lost(f"it holds more than {HELD_BLOCKS_MAX} blocks by its own word")
        return self._batch(ours) if ours else None

    def _lost(self, why: str) -> KvEventBatch:
        """Forget everything: nobody may believe in blocks that may be gone (B93)."""
        self.losses_total += 1
        if self._on_loss is not None:
            self._on_loss(why)
        self._translator.clear()
        return self._batch([KvEvent("cleared")])

    def _batch(self, events: Sequence[KvEvent]) -> KvEventBatch:
        self._sent += 1
        return KvEventBatch(self._sent, tuple(events))
