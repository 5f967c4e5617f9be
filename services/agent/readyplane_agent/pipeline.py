"""Read, verify, place, release: the chunks of one source, within a byte budget (R11).

Owns the threads and the budget of bytes that are not verified yet. Every chunk goes straight to
its final address, counts against the budget until its xxh3-128 is that of the manifest, and is
marked only then. Hands verified chunks to the arena and their account to `SourceUse`; which source
comes when is for `loader`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from readyplane.core.errors import InvalidField, ReadyplaneError
from readyplane.core.identity import FileEntry, chunk_hash
from readyplane.kit.clock import Clock
from readyplane_agent.arena import Arena
from readyplane_agent.cache import WeightCache
from readyplane_agent.files import FileReader
from readyplane_agent.ranges import Fault, RangeReader
from readyplane_agent.source_use import SourceUse

LEFT = Fault("busy", "left before it was asked")


class Todo(Protocol):
    """The chunks that one source is to give, told one by one; threads ask side by side."""

    def take(self, reader: RangeReader) -> tuple[str, int] | None:
        """The next chunk, waiting for one if need be; None when this source has no more to do."""
        ...

    def done(self, chunk: tuple[str, int], fault: Fault | None) -> bool:
        """A chunk that was taken is verified, or came to nothing; True when to ask on."""
        ...


class InOrder:
    """`Todo` of a source that holds everything and is read from alone: one after another."""

    def __init__(self, chunks: Sequence[tuple[str, int]]) -> None:
        self._left = deque(chunks)

    def take(self, reader: RangeReader) -> tuple[str, int] | None:  # noqa: ARG002 - all are alike
        """See `Todo`."""
        try:
            return self._left.popleft()
        except IndexError:
            return None

    def done(self, chunk: tuple[str, int], fault: Fault | None) -> bool:  # noqa: ARG002
        """See `Todo`."""
        return fault is None


class StagingBudget:
    """Bytes that were asked for and are not verified yet; a reader waits for its share.

    Args:
        limit_bytes: never exceeded. `peak_bytes` says how far it went.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._used = 0
        self._freed = threading.Condition()

    def take(self, size: int, *, stop: threading.Event) -> bool:
        """Wait for `size` bytes; False when `stop` was set first."""
        with self._freed:
            while self._used + size > self.limit_bytes:
                if stop.is_set():
                    return False
                self._freed.wait(0.1)
            self._used += size
            self.peak_bytes = max(self.peak_bytes, self._used)
            return True

    def give(self, size: int) -> None:
        """Bytes were verified, or thrown away."""
        with self._freed:
            self._used -= size
            self._freed.notify_all()


class Pipeline:
    """The way of all chunks of one load into its arena; sources take turns.

    Args:
        arena: filled and marked here. clock: time. staging_bytes: budget of unverified bytes.
        connections: to one source at once. cache: node's cache, from which a file is taken out
            that is not what its name says.

    Raises:
        InvalidField: a chunk does not fit in the budget.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        clock: Clock,
        staging_bytes: int,
        connections: int,
        cache: WeightCache | None = None,
    ) -> None:
        chunk = min(arena.manifest.chunk_bytes, arena.manifest.size_bytes)
        if chunk > staging_bytes:
            raise InvalidField(
                "--staging-bytes", staging_bytes, f"give at least one chunk, {chunk} bytes"
            )
        self._arena, self._clock, self._cache = arena, clock, cache
        self._connections = connections
        self.budget = StagingBudget(staging_bytes)

    async def fill(
        self,
        open_reader: Callable[[], RangeReader],
        use: SourceUse,
        *,
        gone: threading.Event,
        stop: threading.Event,
        todo: Todo | None = None,
        connections: int = 0,
    ) -> None:
        """Missing chunks from one source, over several connections, until the first fault.

        Args:
            todo: which chunks; None for all that are missing, in order.
            connections: of these at most so many, 0 for as many as were set.
            open_reader: makes one connection. use: gets what was read, and the fault.
            gone: set by the caller to leave this source, and here when it is done with.
            stop: set when the whole load is to end.
        """
        missing = self._arena.missing()
        asked = todo or InOrder(missing)
        loop = asyncio.get_running_loop()
        readers: list[RangeReader] = []
        pool = ThreadPoolExecutor(max(1, len(missing)), thread_name_prefix="load")
        work: list[asyncio.Future[None]] = []
        try:
            if missing:
                readers.append(open_reader())
                count = self._count(readers[0], missing, connections)
                readers += [open_reader() for _ in range(count - 1)]
            work = [
                loop.run_in_executor(pool, self._drain, reader, asked, use, gone, stop)
                for reader in readers
            ]
            await asyncio.gather(*work)
        except ReadyplaneError as error:
            use.fault = Fault("dead", str(error))
        finally:
            gone.set()
            for reader in readers:
                if not isinstance(reader, FileReader):
                    reader.close()  # wakes a thread that receives
            if work:
                await asyncio.wait(work)
            for reader in readers:
                if isinstance(reader, FileReader):
                    use.ways.add(reader.ways)
                    reader.close()
            pool.shutdown(wait=False)

    def _count(
        self, reader: RangeReader, missing: Sequence[tuple[str, int]], connections: int
    ) -> int:
        """How many threads read side by side: a disk wants more asked of it than a cache."""
        most = min(connections or self._connections, self._connections)
        if isinstance(reader, FileReader) and not connections:
            entries = (self._arena.entry(path) for path in dict(missing))
            most = reader.lanes([entry for entry in entries if entry is not None])
        return min(most, len(missing))

    def _drain(
        self,
        reader: RangeReader,
        todo: Todo,
        use: SourceUse,
        gone: threading.Event,
        stop: threading.Event,
    ) -> None:
        """One thread: chunk after chunk until none is left or somebody met a fault."""
        while not (gone.is_set() or stop.is_set()):
            chunk = todo.take(reader)
            if chunk is None:
                return
            start, size = self._arena.span(*chunk)
            fault: Fault | None = LEFT
            try:
                if self.budget.take(size, stop=gone):
                    try:
                        fault = self._chunk(reader, *chunk, start)
                    finally:
                        self.budget.give(size)
            finally:
                on = todo.done(chunk, fault)
            if fault is None:
                use.done(size, self._clock.monotonic_s())
            elif not on:
                if use.fault is None and not gone.is_set():
                    use.fault = fault
                gone.set()
                return

    def _chunk(self, reader: RangeReader, path: str, index: int, start: int) -> Fault | None:
        entry = self._arena.entry(path)
        assert entry is not None
        self._arena.prefault_chunk(path, index)
        window = self._arena.window(path, index)
        try:
            found = _read_hashed(reader, entry, start, window)
            fault = found if isinstance(found, Fault) else None
            if fault is None and found != entry.chunks[index]:
                fault = Fault("corrupt", f"{path}: chunk {index} is not what the manifest says")
        finally:
            window.release()
        if fault is None:
            self._arena.mark(path, index)
            return None
        self._arena.drop(path, index)
        if fault.kind == "corrupt" and isinstance(reader, FileReader) and self._cache is not None:
            self._cache.discard(entry)
        return fault


def _read_hashed(
    reader: RangeReader, entry: FileEntry, start: int, into: memoryview
) -> Fault | str:
    """Fill `into`; returns the xxh3-128 of what lies there now, never of what was meant to."""
    if isinstance(reader, FileReader):
        return reader.read_hashed(entry, start, into)
    return reader.read_into(entry, start, into) or chunk_hash(into)
