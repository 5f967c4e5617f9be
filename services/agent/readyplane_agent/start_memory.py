"""The memory of one start: from the node's pool or new, checked for what it already holds.

Owns what happens to memory before the first source is asked: lent, looked through, faulted in, each
in the trace. What a pooled arena holds is verified as if it had just been read, and only what is
wrong or missing is loaded (tier L1).
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from readyplane.core.identity import Manifest, chunk_hash
from readyplane.core.startup import SegmentName, WeightTier
from readyplane.kit.clock import Clock
from readyplane_agent.arena import Arena, arena_bytes, prefault
from readyplane_agent.pool import ArenaPool, PooledMemory
from readyplane_agent.source_use import SourceUse
from readyplane_agent.trace import StartTrace

log = logging.getLogger("agent.start")

CHECK_THREADS = 2


async def arena_for(
    manifest: Manifest, *, pool_dir: Path | None, pool_bytes_max: int, owner: str
) -> Arena:
    """An arena in the node's pool; in memory of its own without a pool or when that is full.

    Raises:
        Unavailable: the machine has not that much memory.
    """
    if pool_dir is None:
        return Arena(manifest)
    pool = ArenaPool(pool_dir, bytes_max=pool_bytes_max)
    size = arena_bytes(manifest)
    memory = await asyncio.to_thread(pool.lend, size, content=manifest.digest, owner=owner)
    if memory is None:
        log.warning("the arena pool has no room for %d B: memory outside of it is used", size)
    return Arena(manifest, memory)


async def take_held(
    arena: Arena, *, node: str, clock: Clock, trace: StartTrace
) -> tuple[SourceUse, ...]:
    """Verify what the memory already holds; the account of it, empty when it is new."""
    if not isinstance(arena.memory, PooledMemory) or not arena.memory.held:
        return ()
    use = SourceUse(f"pool:{node}", WeightTier.L1_HOST)
    start_s = clock.monotonic_s()

    def check(chunk: tuple[str, int]) -> None:
        path, index = chunk
        entry = arena.entry(path)
        assert entry is not None
        with arena.window(path, index) as window:
            right = chunk_hash(window) == entry.chunks[index]
            size = len(window)
        if right:
            arena.mark(path, index)
            use.done(size, clock.monotonic_s())

    def check_all() -> None:
        with ThreadPoolExecutor(CHECK_THREADS, thread_name_prefix="held") as threads:
            list(threads.map(check, arena.missing()))

    with trace.span(SegmentName.WEIGHT_READ) as span:
        await asyncio.to_thread(check_all)
        use.elapsed_s = clock.monotonic_s() - start_s
        wrong = len(arena.missing())
        span.detail = use.text() + (f", {wrong} chunks are not what they were" if wrong else "")
    return (use,)


async def fault_in(arena: Arena, trace: StartTrace) -> None:
    """Fault the arena's pages in ahead of the loader; a segment of its own."""
    with trace.span(SegmentName.ARENA_PREFAULT, follows=True) as span:
        span.detail = arena.memory.faulted.text
        await prefault(arena, stop=lambda: arena.complete)
        span.detail = arena.memory.faulted.text()
