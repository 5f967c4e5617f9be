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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from readyplane.core.errors import InvalidField, ReadyplaneError
from readyplane.core.identity import chunk_hash
from readyplane.kit.clock import Clock
from readyplane_agent.arena import Arena
from readyplane_agent.cache import WeightCache
from readyplane_agent.files import FileReader
from readyplane_agent.ranges import Fault, RangeReader
from readyplane_agent.source_use import SourceUse


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
    ) -> None:
        """All missing chunks from one source, over several connections, until the first fault.

        Args:
            open_reader: makes one connection. use: gets what was read, and the fault.
            gone: set by the caller to leave this source, and here when it is done with.
            stop: set when the whole load is to end.
        """
        todo = deque(self._arena.missing())
        count = min(self._connections, len(todo))
        loop = asyncio.get_running_loop()
        readers: list[RangeReader] = []
        pool = ThreadPoolExecutor(max(1, count), thread_name_prefix="load")
        work: list[asyncio.Future[None]] = []
        try:
            for _ in range(count):
                readers.append(open_reader())
            work = [
                loop.run_in_executor(pool, self._drain, reader, todo, use, gone, stop)
                for reader in readers
            ]
            await asyncio.gather(*work)
        except ReadyplaneError as error:
            use.fault = Fault("dead", str(error))
        finally:
            gone.set()
            for reader in readers:
                reader.close()
            if work:
                await asyncio.wait(work)
            pool.shutdown(wait=False)

    def _drain(
        self,
        reader: RangeReader,
        todo: deque[tuple[str, int]],
        use: SourceUse,
        gone: threading.Event,
        stop: threading.Event,
    ) -> None:
        """One thread: chunk after chunk until none is left or somebody met a fault."""
        while not (gone.is_set() or stop.is_set()):
            try:
                path, index = todo.popleft()
            except IndexError:
                return
            start, size = self._arena.span(path, index)
            if not self.budget.take(size, stop=gone):
                return
            try:
                fault = self._chunk(reader, path, index, start)
            finally:
                self.budget.give(size)
            if fault is None:
                use.done(size, self._clock.monotonic_s())
            else:
                if use.fault is None and not gone.is_set():
                    use.fault = fault
                gone.set()
                return

    def _chunk(self, reader: RangeReader, path: str, index: int, start: int) -> Fault | None:
        entry = self._arena.entry(path)
        assert entry is not None
        window = self._arena.window(path, index)
        try:
            fault = reader.read_into(entry, start, window)
            if fault is None and chunk_hash(window) != entry.chunks[index]:
                fault = Fault("corrupt", f"{path}: chunk {index} is not what the manifest says")
        finally:
            window.release()
        if fault is None:
            self._arena.mark(path, index)
        elif fault.kind == "corrupt" and isinstance(reader, FileReader) and self._cache is not None:
            self._cache.discard(entry)
        return fault
