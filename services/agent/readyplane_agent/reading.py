"""Reading from one source of a load, under a reader's place that the registry grants (R8.4, R22.3).

Owns the lease of a transfer: taken before the first byte, renewed while reading, given back with a
report. Hands `loader` what the source did; the chunks themselves go through `pipeline`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from readyplane.core.errors import (
    IdentityMismatch,
    NoPair,
    NotFound,
    ReadyplaneError,
    StaleEpoch,
    Unavailable,
)
from readyplane.core.startup import SegmentName, WeightTier
from readyplane.kit.clock import Clock
from readyplane.ports import Registry, Source
from readyplane_agent.arena import Arena
from readyplane_agent.cache import WeightCache
from readyplane_agent.engines.layout import layout_digest
from readyplane_agent.fanout import Fanout, Side
from readyplane_agent.files import FileReader
from readyplane_agent.pipeline import Pipeline
from readyplane_agent.ranges import Fault, HttpReader, RangeReader
from readyplane_agent.source_use import Fetched, SourceUse
from readyplane_agent.trace import StartTrace

log = logging.getLogger("agent.loader")

LOCAL_TIERS = (WeightTier.L2_NVME, WeightTier.L3_RACK)
GIVE_BACK_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads: sent to the registry with each transfer."""

    worker_id: str
    incarnation: str
    node: str


class Reading:
    """All sources of one load, each used on its own or together with others.

    Args:
        arena: filled through `pipeline`. fanout: who gives which chunk, where several sources are
            read from at once. fetched: gets the account of every use. stop: ends the load.
        Others as of `Loader`.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        registry: Registry,
        clock: Clock,
        reader: Reader,
        trace: StartTrace,
        cache: WeightCache | None,
        token: str,
        pipeline: Pipeline,
        fanout: Fanout,
        fetched: Fetched,
        stop: threading.Event,
    ) -> None:
        self._arena, self._registry, self._clock = arena, registry, clock
        self._reader, self._trace, self._cache, self._token = reader, trace, cache, token
        self._pipeline, self._fanout, self._fetched, self._stop = pipeline, fanout, fetched, stop
        self._layout = layout_digest(arena.manifest)
        self._giving_back: set[asyncio.Task[None]] = set()

    async def use(
        self, source: Source, gone: threading.Event, *, connections: int = 0
    ) -> SourceUse:
        """Read from a source until it has no more to give, fails, or `gone` is set."""
        use = SourceUse(source.source_id, source.tier)
        self._fetched.uses.append(use)
        local = source.tier in LOCAL_TIERS
        name = SegmentName.WEIGHT_READ if local else SegmentName.WEIGHT_TRANSFER
        start_s = self._clock.monotonic_s()
        with self._trace.span(name) as span:
            span.detail = lambda: use.text(self._clock.monotonic_s(), start_s)
            try:
                await self._leased(source, use, gone, connections)
            finally:
                use.elapsed_s = self._clock.monotonic_s() - start_s
                span.detail = use.text()
        if use.fault is not None:
            log.warning("source %s failed: %s", source.source_id, use.fault)
        return use

    async def settle(self) -> None:
        """Wait until every place has been given back, for a bounded time."""
        if self._giving_back:
            await asyncio.wait(set(self._giving_back), timeout=GIVE_BACK_LIMIT_S)

    async def _leased(
        self, source: Source, use: SourceUse, gone: threading.Event, connections: int
    ) -> None:
        """Read under a reader's place; the node's own cache needs none."""
        if source.tier is WeightTier.L2_NVME:
            await self._read(source, use, gone, None, 0)
            return
        try:
            transfer_id, ttl_s = await self._acquire(source, use)
        except NoPair as error:
            use.fault = Fault("busy", str(error))
            return
        except IdentityMismatch as error:
            use.fault = Fault("unfit", str(error))
            return
        except (NotFound, StaleEpoch, Unavailable) as error:
            use.fault = Fault("dead", str(error))
            return
        side: Side | None = None
        if not source.url.startswith("file:"):
            side = self._fanout.join(
                source.source_id,
                gone=gone,
                whole=not source.partial,
                storage=not source.worker_id,
            )
        renewing = asyncio.create_task(self._keep(source, use, ttl_s, gone, side))
        start_s = self._clock.monotonic_s()
        try:
            await self._read(source, use, gone, side, connections)
        finally:
            renewing.cancel()
            self._fanout.leave(source.source_id)
        took_s = self._clock.monotonic_s() - start_s
        giving = asyncio.create_task(self._give_back(source, use, transfer_id, took_s))
        self._giving_back.add(giving)
        giving.add_done_callback(self._giving_back.discard)

    async def _acquire(self, source: Source, use: SourceUse) -> tuple[str, float]:
        me = self._reader
        got = await self._registry.acquire_transfer(
            source.source_id,
            self._arena.manifest.digest,
            worker_id=me.worker_id,
            incarnation=me.incarnation,
            request_id=f"{me.incarnation}:{source.source_id}:{self._fetched.uses.index(use)}",
            source_incarnation=source.incarnation,
            # Of many that planned at once one gets the place, the others read behind it.
            readers_seen=source.readers if source.worker_id else None,
        )
        return got.transfer_id, got.ttl_s

    async def _keep(
        self,
        source: Source,
        use: SourceUse,
        ttl_s: float,
        gone: threading.Event,
        side: Side | None,
    ) -> None:
        """Renew the reader's place; a source that no longer grants it is left (B148).

        One that drains has taken itself back, and lets us finish within its own bound.
        """
        while True:
            await self._clock.sleep(ttl_s / 3)
            try:
                await self._acquire(source, use)
            except (NotFound, StaleEpoch):
                if side is None or not side.draining:
                    gone.set()
                    return
            except ReadyplaneError as error:
                log.warning("transfer from %s not renewed: %s", source.source_id, error)

    async def _give_back(
        self, source: Source, use: SourceUse, transfer_id: str, took_s: float
    ) -> None:
        try:
            await self._registry.release_transfer(
                transfer_id,
                transferred_bytes=use.bytes_read,
                elapsed_s=took_s,
                failure=_told(use.fault),
            )
        except ReadyplaneError as error:
            log.warning("transfer from %s not given back: %s", source.source_id, error)

    async def _read(
        self,
        source: Source,
        use: SourceUse,
        gone: threading.Event,
        side: Side | None,
        connections: int,
    ) -> None:
        await self._pipeline.fill(
            lambda: self._open(source),
            use,
            gone=gone,
            stop=self._stop,
            todo=side,
            connections=connections,
        )

    def _open(self, source: Source) -> RangeReader:
        if source.tier is WeightTier.L2_NVME and self._cache is not None:
            return FileReader(self._cache.locate)
        parts = urlsplit(source.url)
        if parts.scheme == "file":
            folder = Path(unquote(parts.path))
            return FileReader(lambda entry: folder / entry.path)
        return HttpReader(
            source.url,
            clock=self._clock,
            incarnation=source.incarnation,
            layout=self._layout,
            token=self._token,
        )


def _told(fault: Fault | None) -> str:
    """The registry knows dead, slow and corrupt."""
    if fault is None:
        return ""
    return str(Fault("slow" if fault.kind == "busy" else fault.kind, fault.detail))
