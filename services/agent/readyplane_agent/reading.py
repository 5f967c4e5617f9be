"""Reading from one source of a load, under a reader's place that the registry grants (R8.4, R22.3).

Owns the lease of a transfer: taken before the first byte, renewed while reading, given back with a
report. Hands `loader` what the source did; the chunks themselves go through `pipeline`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
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
from readyplane_agent.nixl_reader import NixlReader, SharedWay
from readyplane_agent.nixl_way import Transport
from readyplane_agent.pipeline import Pipeline
from readyplane_agent.ranges import Fault, HttpReader, RangeReader
from readyplane_agent.source_use import Fetched, SourceUse
from readyplane_agent.trace import Span, StartTrace

log = logging.getLogger("agent.loader")

LOCAL_TIERS = (WeightTier.L2_NVME, WeightTier.L3_RACK)
GIVE_BACK_LIMIT_S = 5.0
VAIN_SEGMENTS_MAX = 32


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads: sent to the registry with each transfer."""

    worker_id: str
    incarnation: str
    node: str


@dataclass(frozen=True, slots=True)
class Place:
    """A reader's place at a source; the same `request_id` renews it.

    `bytes_per_s` is how fast to read at most, so that serving is not harmed; 0 for no bound.
    """

    request_id: str
    transfer_id: str
    ttl_s: float
    bytes_per_s: float


class Reading:
    """All sources of one load, each used on its own or together with others.

    Args:
        arena: filled through `pipeline`. fanout: who gives which chunk, where several sources are
            read from at once. fetched: gets the account of every use. stop: ends the load. transport: TCP or NIXL.
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
        transport: Transport,
    ) -> None:
        self._transport = transport
        self._arena, self._registry, self._clock = arena, registry, clock
        self._reader, self._trace, self._cache, self._token = reader, trace, cache, token
        self._pipeline, self._fanout, self._fetched, self._stop = pipeline, fanout, fetched, stop
        self._layout = layout_digest(arena.manifest)
        self._giving_back: set[asyncio.Task[None]] = set()
        self._numbers = count()
        self._vain: deque[Span] = deque()  # segments in which nothing came

    async def use(
        self, source: Source, gone: threading.Event, *, connections: int = 0
    ) -> SourceUse:
        """Read from a source until it has no more to give, fails, or `gone` is set."""
        use = SourceUse(source.source_id, source.tier)
        place = None
        if source.tier is not WeightTier.L2_NVME:  # the node's own cache needs no place
            place = await self._place(source, use)
        self._fetched.add(use)
        if use.fault is None:
            await self._timed(source, use, place, gone, connections)
        if use.fault is not None:
            level = logging.INFO if use.fault.kind == "busy" else logging.WARNING
            log.log(level, "source %s: %s", source.source_id, use.fault)
        return use

    async def settle(self) -> None:
        """Wait until every place has been given back, for a bounded time."""
        if self._giving_back:
            await asyncio.wait(set(self._giving_back), timeout=GIVE_BACK_LIMIT_S)

    async def _place(self, source: Source, use: SourceUse) -> Place | None:
        """A reader's place at the source, None with `use.fault` set when there is none."""
        request_id = f"{self._reader.incarnation}:{source.source_id}:{next(self._numbers)}"
        try:
            return await self._acquire(source, request_id)
        except NoPair as error:
            use.fault, use.turned_away = Fault("busy", str(error)), True
        except IdentityMismatch as error:
            use.fault = Fault("unfit", str(error))
        except (NotFound, StaleEpoch, Unavailable) as error:
            use.fault = Fault("dead", str(error))
        return None

    async def _timed(
        self,
        source: Source,
        use: SourceUse,
        place: Place | None,
        gone: threading.Event,
        connections: int,
    ) -> None:
        """One segment of the start's trace, with what came from where (B125)."""
        local = source.tier in LOCAL_TIERS
        name = SegmentName.WEIGHT_READ if local else SegmentName.WEIGHT_TRANSFER
        start_s = self._clock.monotonic_s()
        with self._trace.span(name) as span:
            span.detail = lambda: use.text(self._clock.monotonic_s(), start_s)
            try:
                await self._leased(source, use, place, gone, connections)
            finally:
                use.elapsed_s = self._clock.monotonic_s() - start_s
                span.detail = use.text()
        if not use.bytes_read:
            self._vain.append(span)
            if len(self._vain) > VAIN_SEGMENTS_MAX:
                self._trace.forget(self._vain.popleft())

    async def _leased(
        self,
        source: Source,
        use: SourceUse,
        place: Place | None,
        gone: threading.Event,
        connections: int,
    ) -> None:
        """Read, keeping the place until the end, and give it back then."""
        if place is None:
            await self._read(source, use, gone, None, 0)
            return
        side: Side | None = None
        if not source.url.startswith("file:"):
            side = self._fanout.join(
                source.source_id,
                gone=gone,
                whole=not source.partial,
                storage=not source.worker_id,
            )
            side.bytes_per_s = place.bytes_per_s
        renewing = asyncio.create_task(self._keep(source, place, gone, side))
        start_s = self._clock.monotonic_s()
        try:
            await self._read(source, use, gone, side, connections)
        finally:
            renewing.cancel()
            self._fanout.leave(source.source_id)
        if side is not None and side.hung and use.fault is None:
            use.fault = Fault("slow", side.hung)
        if side is not None and side.lost and use.fault is None:
            use.fault = Fault("dead", "it does not say any more what it holds")
        took_s = self._clock.monotonic_s() - start_s
        giving = asyncio.create_task(self._give_back(source, use, place.transfer_id, took_s))
        self._giving_back.add(giving)
        giving.add_done_callback(self._giving_back.discard)

    async def _acquire(self, source: Source, request_id: str) -> Place:
        me = self._reader
        got = await self._registry.acquire_transfer(
            source.source_id,
            self._arena.manifest.digest,
            worker_id=me.worker_id,
            incarnation=me.incarnation,
            request_id=request_id,
            source_incarnation=source.incarnation,
            # Of many that planned at once one gets the place, also at the store, and the others
            # read behind it. A folder of this machine is nobody's link.
            readers_seen=None if source.url.startswith("file:") else source.readers,
        )
        return Place(request_id, got.transfer_id, got.ttl_s, got.bytes_per_s)

    async def _keep(
        self, source: Source, place: Place, gone: threading.Event, side: Side | None
    ) -> None:
        """Renew the reader's place; a source that no longer grants it is left (B148).

        One that drains may have taken itself back, and lets us finish within its own bound.
        """
        while True:
            await self._clock.sleep(place.ttl_s / 3)
            try:
                again = await self._acquire(source, place.request_id)
                if side is not None:
                    side.bytes_per_s = again.bytes_per_s
            except (NotFound, StaleEpoch):
                if side is None or not side.draining:
                    gone.set()
                    return
            except ReadyplaneError as error:
                log.warning("transfer from %s not renewed: %s", source.source_id, error)

    async def _give_back(
        self, source: Source, use: SourceUse, transfer_id: str, took_s: float
    ) -> None:
        tell, arena = self._arena.tell_whole, self._arena
        if tell is not None and arena.complete:
            arena.tell_whole = None
            await tell()
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
        way = self._way(source)
        await self._pipeline.fill(
            lambda: self._open(source, way),
            use,
            gone=gone,
            stop=self._stop,
            todo=side,
            connections=connections,
        )
        if way is not None:
            way.close()
            use.way = way.text()

    def _way(self, source: Source) -> SharedWay | None:
        """NIXL to a peer, where it is wished and can be had; stores know only HTTP."""
        if not (self._transport.wanted and source.worker_id and source.url.startswith("http:")):
            return None
        name = f"read:{self._reader.incarnation}:{next(self._numbers)}"
        return SharedWay(self._arena, transport=self._transport, name=name)

    def _open(self, source: Source, way: SharedWay | None) -> RangeReader:
        if source.tier is WeightTier.L2_NVME and self._cache is not None:
            return FileReader(self._cache.locate)
        parts = urlsplit(source.url)
        if parts.scheme == "file":
            folder = Path(unquote(parts.path))
            return FileReader(lambda entry: folder / entry.path)
        more: dict[str, Any] = {
            "clock": self._clock,
            "incarnation": source.incarnation,
            "layout": self._layout,
            "token": self._token,
            "reader": self._reader.incarnation,
        }
        if way is not None:
            return NixlReader(source.url, way=way, **more)
        return HttpReader(source.url, **more)


def _told(fault: Fault | None) -> str:
    """The registry knows dead, slow and corrupt."""
    if fault is None:
        return ""
    return str(Fault("slow" if fault.kind == "busy" else fault.kind, fault.detail))
