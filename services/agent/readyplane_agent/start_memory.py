"""The memory of one start: from the node's pool or new, checked for what it already holds.

Owns what happens to memory before the first source is asked: mapped, lent, looked through, faulted in,
each in the trace. What a pooled arena holds is verified as if it had just been read, and only what is
wrong or missing is loaded (tier L1).
"""

from __future__ import annotations

import asyncio
import logging

from readyplane.core.identity import Manifest
from readyplane.core.startup import SegmentName, WeightTier
from readyplane.kit.clock import Clock
from readyplane_agent.arena import Arena, arena_bytes, prefault
from readyplane_agent.cache import WeightCache
from readyplane_agent.in_place import verify_in_place
from readyplane_agent.mapped_memory import MappedMemory, mapped_arena
from readyplane_agent.pool import ArenaPool, PooledMemory
from readyplane_agent.settings import AgentSettings
from readyplane_agent.source_use import SourceUse
from readyplane_agent.trace import StartTrace

log = logging.getLogger("agent.start")

CHECK_THREADS = 2


async def arena_for(
    manifest: Manifest,
    s: AgentSettings,
    *,
    cache: WeightCache | None,
    owner: str,
    clock: Clock,
    trace: StartTrace,
) -> Arena:
    """The cache's files, mapped, where that is wanted and can be; else an arena in the node's pool.

    Without a pool, or when that is full, it is in memory of its own. Memory of several ranks is
    always its own: it holds parts, which another worker has no use for.

    Raises:
        Unavailable: the machine has not that much memory. IdentityMismatch, InvalidField: the
            artifact cannot be divided among `--tp` ranks, see `plan_group`.
    """
    if s.tp > 1:
        from readyplane_agent.group_arena import GroupArena  # numpy, which one rank does without
        from readyplane_agent.group_plan import plan_group

        if s.pool_dir is not None or s.weights_memory == "map":
            log.info("memory of %d ranks is new: neither of the pool nor mapped", s.tp)
        return GroupArena(manifest, await asyncio.to_thread(plan_group, manifest, tp=s.tp))
    if s.weights_memory == "map" and cache is not None:
        mapped = await mapped_arena(manifest, cache, node=s.node, clock=clock, trace=trace)
        if isinstance(mapped, Arena):
            return mapped
        log.info("the weights are read into memory, not mapped: %s", mapped)
    pool_dir, pool_bytes_max = s.pool_dir, s.pool_bytes_max
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
    if isinstance(arena.memory, MappedMemory) and arena.memory.use is not None:
        return (arena.memory.use,)
    if not isinstance(arena.memory, PooledMemory) or not arena.memory.held:
        return ()
    use = SourceUse(f"pool:{node}", WeightTier.L1_HOST)
    start_s = clock.monotonic_s()

    with trace.span(SegmentName.WEIGHT_READ) as span:
        await asyncio.to_thread(verify_in_place, arena, use, clock, threads_max=CHECK_THREADS)
        use.elapsed_s = clock.monotonic_s() - start_s
        wrong = len(arena.missing())
        span.detail = use.text() + (f", {wrong} chunks are not what they were" if wrong else "")
    return (use,)


async def fault_in(arena: Arena, trace: StartTrace) -> None:
    """Fault the arena's pages in ahead of the loader; a segment of its own."""
    with trace.span(SegmentName.ARENA_PREFAULT, follows=True) as span:
        largest = arena.memories[0][0]
        span.detail = largest.faulted.text
        await prefault(arena, stop=lambda: arena.complete)
        more = f", rank 0 of {arena.world}" if arena.world > 1 else ""
        span.detail = largest.faulted.text() + more
