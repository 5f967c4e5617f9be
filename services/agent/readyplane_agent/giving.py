"""A worker as a source of weights: announced from its first chunk on until it leaves.

Owns what the registry is told of this worker's own bytes (R8.4): while it loads, which chunks it has
verified; when it is complete, everything; when it drains, that newcomers go elsewhere. `transfer`
gives the bytes, `life` says when a stage begins. The node's cache is announced beside it.
"""

from __future__ import annotations

import asyncio
import logging

from readyplane.core.chunks import RANGES_MAX, ChunkRanges, ranges_of
from readyplane.core.errors import ReadyplaneError
from readyplane.core.startup import WeightTier
from readyplane.kit.clock import Clock
from readyplane.ports import Registry, Source
from readyplane_agent.arena import Arena
from readyplane_agent.cache import WeightCache
from readyplane_agent.chunk_order import VERIFIED
from readyplane_agent.loader import cache_source
from readyplane_agent.nixl_way import Ended, GivingWay, Transport
from readyplane_agent.settings import AgentSettings
from readyplane_agent.transfer import TransferServer

log = logging.getLogger("agent.giving")

TTL_S = 30.0
LOADING_EVERY_S = 1.0
READY_EVERY_S = 1.0


class Giving:
    """What this worker gives, as the registry knows it.

    Args:
        registry: None without one: then nothing is announced. transfer: the door of the bytes.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        incarnation: str,
        registry: Registry | None,
        transfer: TransferServer,
        cache: WeightCache | None,
        clock: Clock,
    ) -> None:
        self._s, self._incarnation, self._registry = settings, incarnation, registry
        self._transfer, self._cache, self._clock = transfer, cache, clock
        self._arena: Arena | None = None
        self._turn = asyncio.Event()
        self._withdrawn = False
        self._opening: asyncio.Future[None] | None = None

    async def begin(self, arena: Arena) -> None:
        """Give this arena's chunks as they are verified; whoever plans after this knows of it."""
        self._arena = arena
        if arena.whole_files:
            self._transfer.offer(arena)
            arena.tell_whole = self._announce
            self._open_nixl(arena)
        await self._announce()

    def _open_nixl(self, arena: Arena) -> None:
        """Another way for the bytes, while all else goes on; without it they go over TCP."""
        transport = Transport(self._s.transport, self._s.nixl_python)
        if transport.wanted and self._s.transfer_readers_max > 0:
            self._opening = asyncio.ensure_future(self._opened_nixl(arena, transport))

    async def _opened_nixl(self, arena: Arena, transport: Transport) -> None:
        name = f"give:{self._incarnation}"
        try:
            way = await asyncio.to_thread(GivingWay, arena, transport=transport, name=name)
        except Ended as error:
            level = logging.WARNING if transport.wish == "nixl" else logging.INFO
            log.log(level, "weights are given over TCP, not NIXL: %s", error)
            return
        if self._withdrawn or arena is not self._arena:
            way.close()
        else:
            self._transfer.nixl = way

    def poke(self) -> None:
        """A stage has begun (complete, draining): tell it now."""
        self._turn.set()

    async def keep(self) -> None:
        """Announce again and again, until the withdrawal."""
        while not self._withdrawn:
            ttl_s = TTL_S if self._arena is None else await self._announce()
            loads = self._arena is not None and not self._arena.complete
            every_s = LOADING_EVERY_S if loads else max(READY_EVERY_S, ttl_s / 3)
            waits = {
                asyncio.ensure_future(self._clock.sleep(min(every_s, ttl_s / 3))),
                asyncio.ensure_future(self._turn.wait()),
            }
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            self._turn.clear()

    async def withdraw(self, why: str) -> None:
        """Take our own bytes back; the node's cache stays where it is."""
        if self._registry is None or self._withdrawn:
            return
        self._withdrawn = True
        self._turn.set()
        if self._arena is not None and self._arena.whole_files:
            await self._registry.withdraw_source(self._source_id, reason=why)

    @property
    def _source_id(self) -> str:
        return f"peer:{self._s.worker_id}:{self._incarnation}"

    def _sources(self, arena: Arena) -> list[Source]:
        digest, complete = arena.manifest.digest, arena.complete
        own = [
            Source(
                source_id=self._source_id,
                digest=digest,
                tier=WeightTier.L1_HOST,
                url=f"{self._transfer.url}/v1/chunks/{digest}",
                worker_id=self._s.worker_id,
                incarnation=self._incarnation,
                node=self._s.node,
                readers_max=max(1, self._s.transfer_readers_max),
                bandwidth_bytes_per_s=self._s.transfer_bytes_per_s,
                partial=not complete,
                held=() if complete else held(arena),
                slo_share=self._transfer.slo_share,
                draining=self._transfer.draining,
            )
        ]
        found = own if arena.whole_files else []  # parts of ranks are no files to read from
        if complete and self._cache is not None and self._cache.holds(arena.manifest):
            found.append(cache_source(self._cache, digest, self._s.node))
        return found

    async def _announce(self) -> float:
        """Announce what we can give; returns the shortest ttl in seconds."""
        ttl_s = TTL_S
        if self._arena is None or self._registry is None:
            return ttl_s
        for source in self._sources(self._arena):
            if source.worker_id and (self._withdrawn or self._s.transfer_readers_max == 0):
                continue
            try:
                ttl_s = min(ttl_s, await self._registry.announce_source(source))
            except ReadyplaneError as error:
                log.warning("source %s not announced: %s", source.source_id, error)
        return ttl_s


def held(arena: Arena) -> ChunkRanges:
    """The verified chunks, or the largest runs of them where there are too many to tell."""
    progress = bytes(arena.progress)
    runs = ranges_of(n for n, state in enumerate(progress) if state == VERIFIED)
    if len(runs) <= RANGES_MAX:
        return runs
    return tuple(sorted(sorted(runs, key=lambda r: r[0] - r[1])[:RANGES_MAX]))
