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
from functools import partial
from typing import Protocol

from readyplane.core.errors import InvalidField, ReadyplaneError
from readyplane.core.identity import FileEntry, chunk_hash
from readyplane.kit.clock import Clock
from readyplane_agent.arena import Arena
from readyplane_agent.cache import WeightCache
from readyplane_agent.files import FileReader
from readyplane_agent.ranges import Fault, RangeReader
from readyplane_agent.settings import WrongSetting
from readyplane_agent.source_use import SourceUse

STALL_S = 120.0
STALL_CHECK_S = 1.0
TURN_S = 0.1
LEFT = Fault("busy", "left before it was asked")


class Todo(Protocol):
    """The chunks that one source is to give, told one by one; threads ask side by side."""

    def take(self, reader: RangeReader) -> tuple[str, int] | None:
        """The next chunk, waiting for one if need be; None when this source has no more to do."""
        ...

    def done(self, chunk: tuple[str, int], fault: Fault | None) -> bool:
        """A chunk that was taken is verified, or came to nothing; True when to ask on."""
        ...

    def beside(self, chunk: tuple[str, int]) -> bool:
        """Whether another source brings this chunk too: its place may not be written yet."""
        ...

    def claim(self, chunk: tuple[str, int]) -> bool:
        """The bytes of such a chunk are right: whether its place may be written now."""
        ...

    def short(self, chunk: tuple[str, int]) -> bool:
        """A chunk that was taken waits for room in the byte budget; False to let go of it."""
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

    def beside(self, chunk: tuple[str, int]) -> bool:  # noqa: ARG002 - there is no other source
        """See `Todo`."""
        return False

    def claim(self, chunk: tuple[str, int]) -> bool:  # noqa: ARG002
        """See `Todo`."""
        return False

    def short(self, chunk: tuple[str, int]) -> bool:  # noqa: ARG002
        """See `Todo`: the chunks before this one are its own, and come."""
        return True


def staging_share(
    staging_bytes: int, *, node_bytes: int, node_processes: int, chunk_bytes: int
) -> int:
    """The budget of one process, so that all of a node together stay within theirs (B131).

    Args:
        staging_bytes: what one may have at most. node_bytes: what all may have together.
        node_processes: how many load at once: workers or ranks. chunk_bytes: of the artifact.

    Raises:
        WrongSetting: a share has no room for one chunk.
    """
    share = node_bytes // node_processes
    if staging_bytes < chunk_bytes:
        remedy = f"give at least one chunk of this artifact, {chunk_bytes} bytes"
        raise WrongSetting("--staging-bytes", staging_bytes, remedy)
    if share < chunk_bytes:
        raise WrongSetting(
            "--staging-node-bytes",
            node_bytes,
            f"give {node_processes} processes at least one chunk each, for this artifact "
            f"{node_processes * chunk_bytes} bytes",
        )
    return min(staging_bytes, share)


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

    def take(
        self, size: int, *, stop: threading.Event, short: Callable[[], bool] | None = None
    ) -> bool:
        """Wait for `size` bytes; False when `stop` was set first, or `short` said so at a turn."""
        while not self._took(size):
            if stop.is_set() or (short is not None and not short()):
                return False
        return True

    def _took(self, size: int) -> bool:
        """Take it now or within a turn."""
        with self._freed:
            if not self._freed.wait_for(lambda: self._used + size <= self.limit_bytes, TURN_S):
                return False
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
        stall_s: a local source of which nothing has come for so long is left, saying where.

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
        stall_s: float = STALL_S,
    ) -> None:
        chunk = min(arena.manifest.chunk_bytes, arena.manifest.size_bytes)
        if chunk > staging_bytes:
            raise InvalidField(
                "--staging-bytes", staging_bytes, f"give at least one chunk, {chunk} bytes"
            )
        self._arena, self._clock, self._cache = arena, clock, cache
        self._connections, self._stall_s = connections, stall_s
        self._doing: dict[int, tuple[str, float]] = {}
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
            await self._watched(work, use, local=_local(readers))
        except ReadyplaneError as error:
            use.fault = Fault("dead", str(error))
        finally:
            gone.set()
            await self._ended(readers, work, use, stop)
            pool.shutdown(wait=False)

    async def _watched(
        self, work: Sequence[asyncio.Future[None]], use: SourceUse, *, local: bool
    ) -> None:
        """Wait for all threads; of a local source not beyond the time in which nothing moves.

        Sources over the network have limits of their own, and may be told to pause.
        """
        pending = set(work)
        while pending:
            done, pending = await asyncio.wait(
                pending,
                timeout=min(STALL_CHECK_S, self._stall_s) if local else None,
                return_when=asyncio.FIRST_EXCEPTION,
            )
            for each in done:
                each.result()
            stalled = self._stalled() if local else ""
            if pending and stalled:
                use.fault = Fault("slow", stalled)
                return

    def _stalled(self) -> str:
        """What has been going on for too long, empty when something moves."""
        doing = list(self._doing.values())
        now_s = self._clock.monotonic_s()
        if not doing or any(now_s - since_s < self._stall_s for _, since_s in doing):
            return ""
        what, since_s = min(doing, key=lambda item: item[1])
        return f"{what} for {now_s - since_s:.0f} s"

    async def _ended(
        self,
        readers: Sequence[RangeReader],
        work: Sequence[asyncio.Future[None]],
        use: SourceUse,
        stop: threading.Event,
    ) -> None:
        """All threads have let go of the arena, or the whole load ends.

        A read that hangs in the kernel cannot be taken back: it may still write to its chunk, so
        no other source may fill this arena.
        """
        for reader in readers:
            if not isinstance(reader, FileReader):
                reader.close()  # wakes a thread that receives
        pending: set[asyncio.Future[None]] = set()
        if work:
            _, pending = await asyncio.wait(
                work, timeout=self._stall_s if _local(readers) else None
            )
        if pending:
            stop.set()
            return
        for reader in readers:
            if isinstance(reader, FileReader):
                use.ways.add(reader.ways)
                reader.close()

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
            won = True
            try:
                if self.budget.take(size, stop=gone, short=partial(todo.short, chunk)):
                    try:
                        if gone.is_set():
                            pass  # a source that is left gets no room that was waited for
                        elif todo.beside(chunk):
                            fault, won = self._beside(reader, todo, use, chunk)
                        else:
                            fault = self._chunk(reader, *chunk, start)
                    finally:
                        self.budget.give(size)
            finally:
                on = todo.done(chunk, fault)
            if fault is None:
                if won:
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
        here = threading.get_ident()
        self._doing[here] = (f"reading {path}[{index}]", self._clock.monotonic_s())
        try:
            found = _read_hashed(reader, entry, start, window)
            fault = found if isinstance(found, Fault) else None
            if fault is None and found != entry.chunks[index]:
                fault = Fault("corrupt", f"{path}: chunk {index} is not what the manifest says")
        finally:
            del self._doing[here]
            window.release()
        if fault is None:
            self._arena.mark(path, index)
            return None
        self._arena.drop(path, index)
        if fault.kind == "corrupt" and isinstance(reader, FileReader) and self._cache is not None:
            self._cache.discard(entry)
        return fault

    def _beside(
        self, reader: RangeReader, todo: Todo, use: SourceUse, chunk: tuple[str, int]
    ) -> tuple[Fault | None, bool]:
        """Bring a chunk beside another source; (fault, whether these bytes are the ones placed).

        They are read to memory of their own, which the budget covers, and hashed again in place.
        """
        path, index = chunk
        entry = self._arena.entry(path)
        assert entry is not None
        start, size = self._arena.span(path, index)
        found = _read_hashed(reader, entry, start, memory := memoryview(bytearray(size)))
        if isinstance(found, Fault):
            return found, False
        wrong = Fault("corrupt", f"{path}: chunk {index} is not what the manifest says")
        if found != entry.chunks[index]:
            return wrong, False
        use.again_bytes += size
        if not todo.claim(chunk):
            return None, False
        with self._arena.window(path, index) as window:
            window[:] = memory
            placed = chunk_hash(window)
        if placed != entry.chunks[index]:
            self._arena.drop(path, index)
            return wrong, False
        self._arena.mark(path, index)
        return None, True


def _local(readers: Sequence[RangeReader]) -> bool:
    return bool(readers) and isinstance(readers[0], FileReader)


def _read_hashed(
    reader: RangeReader, entry: FileEntry, start: int, into: memoryview
) -> Fault | str:
    """Fill `into`; returns the xxh3-128 of what lies there now, never of what was meant to."""
    if isinstance(reader, FileReader):
        return reader.read_hashed(entry, start, into)
    return reader.read_into(entry, start, into) or chunk_hash(into)
