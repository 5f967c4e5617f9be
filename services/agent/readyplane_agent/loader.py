"""Weights into the arena: streaming, verified chunk by chunk, within a byte budget (R10.3, R11).

Owns the order of sources of one load, their leases and the rounds; `pipeline` brings the chunks of
one source into the arena. A source that is dead, slow, busy or lying leads to the next one, which
is asked for the missing chunks only. Hands the filled arena to the engine, `transfer` and `cache`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from readyplane.core.errors import (
    IdentityMismatch,
    NoPair,
    NotFound,
    ReadyplaneError,
    Unavailable,
)
from readyplane.core.startup import SegmentName, WeightTier
from readyplane.kit.clock import Clock
from readyplane.ports import RankedSource, Registry, Source
from readyplane_agent.arena import Arena
from readyplane_agent.cache import WeightCache
from readyplane_agent.files import FileReader
from readyplane_agent.pipeline import Pipeline
from readyplane_agent.ranges import Fault, HttpReader, RangeReader
from readyplane_agent.source_use import Fetched, SourceUse
from readyplane_agent.trace import StartTrace

log = logging.getLogger("agent.loader")

# A source that was dead or busy may be asked again in a later round; a lying one never.
ROUNDS_MAX = 20
ROUND_WAIT_S = 0.25
ROUND_WAIT_MAX_S = 5.0
LOCAL_TIERS = (WeightTier.L2_NVME, WeightTier.L3_RACK)
GIVE_BACK_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads: sent to the registry with each transfer."""

    worker_id: str
    incarnation: str
    node: str


class Loader:
    """One load of one manifest.

    Args:
        arena: filled and marked here. registry: plans and transfer leases. clock: time.
        reader: who we are. trace: gets a segment per source. cache: node's cache, None without.
        staging_bytes: budget of unverified bytes. connections: to one source at once.
        limit_s: give up after this long. token: bearer token for HTTP sources.

    Raises:
        InvalidField: a chunk does not fit in the budget.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        registry: Registry,
        clock: Clock,
        reader: Reader,
        trace: StartTrace,
        cache: WeightCache | None = None,
        staging_bytes: int = 64 * 2**20,
        connections: int = 4,
        limit_s: float = 1800.0,
        token: str = "",
    ) -> None:
        self._arena, self._registry, self._clock = arena, registry, clock
        self._reader, self._trace, self._cache = reader, trace, cache
        self._limit_s, self._token = limit_s, token
        self._pipeline = Pipeline(
            arena, clock=clock, staging_bytes=staging_bytes, connections=connections, cache=cache
        )
        self._stop = threading.Event()
        self._lying: set[str] = set()
        self._giving_back: list[asyncio.Task[None]] = []
        self.budget = self._pipeline.budget
        self.fetched = Fetched()

    def stop(self) -> None:
        """Let reading threads end after their chunk; the load then raises Unavailable."""
        self._stop.set()

    async def run(self, plan: Sequence[RankedSource]) -> Fetched:
        """Fill the arena from the planned sources, planning anew when all of them failed.

        Raises:
            Unavailable: no source could give every chunk; what each of them did is in the text.
            IdentityMismatch: every source that answered gave other bytes than the manifest says.
        """
        try:
            return await self._run(plan)
        finally:
            if self._giving_back:
                await asyncio.wait(set(self._giving_back), timeout=GIVE_BACK_LIMIT_S)

    async def _run(self, plan: Sequence[RankedSource]) -> Fetched:
        start_s = self._clock.monotonic_s()
        sources = self._ordered(plan)
        for attempt in range(ROUNDS_MAX):
            for source in sources:
                if self._arena.complete or self._stop.is_set():
                    break
                await self._use(source)
            if self._arena.complete:
                self.fetched.elapsed_s = self._clock.monotonic_s() - start_s
                self.fetched.staging_peak_bytes = self.budget.peak_bytes
                return self.fetched
            wait_s = min(ROUND_WAIT_MAX_S, ROUND_WAIT_S * 2**attempt)
            elapsed_s = self._clock.monotonic_s() - start_s
            if self._stop.is_set() or elapsed_s + wait_s > self._limit_s:
                break
            if sources and all(s.source_id in self._lying for s in sources):
                break
            await self._clock.sleep(wait_s)
            sources = self._ordered(await self._plan())
        raise self._given_up()

    def _given_up(self) -> ReadyplaneError:
        left = len(self._arena.missing())
        reasons = self.fetched.faults[-8:] or ("no source holds this artifact",)
        if self._lying and all(
            use.source_id in self._lying for use in self.fetched.uses if use.fault is not None
        ):
            return IdentityMismatch(
                "weights", reasons, f"publish the artifact again; {left} chunks are not verified"
            )
        return Unavailable(
            f"{left} chunks of {self._arena.manifest.digest} could not be fetched: "
            + "; ".join(reasons),
            "check the registry's byte store and the network to it",
        )

    async def _plan(self) -> tuple[RankedSource, ...]:
        me = self._reader
        try:
            found = await self._registry.plan_fetch(
                self._arena.manifest.digest,
                worker_id=me.worker_id,
                incarnation=me.incarnation,
                node=me.node,
            )
        except (Unavailable, NoPair) as error:
            log.warning("planning again failed: %s", error)
            return ()
        return found.sources

    def _ordered(self, plan: Sequence[RankedSource]) -> list[Source]:
        """Planned order without ourselves and without liars; the node's own files join it."""
        me = self._reader
        sources = [
            ranked.source
            for ranked in plan
            if not (ranked.source.worker_id and ranked.source.worker_id == me.worker_id)
        ]
        cached = self._cache is not None and self._cache.holds(self._arena.manifest)
        here = [s for s in sources if s.tier is WeightTier.L2_NVME and s.node == me.node]
        sources = [s for s in sources if s.tier is not WeightTier.L2_NVME or (cached and s in here)]
        if cached and not here and self._cache is not None:
            # Not announced (nobody of this node lives any more): bytes that are here already cost
            # no peer and no network anything, so they come first.
            own = cache_source(self._cache, self._arena.manifest.digest, me.node)
            sources.insert(0, own)
        return [s for s in sources if s.source_id not in self._lying]

    async def _use(self, source: Source) -> None:
        use = SourceUse(source.source_id, source.tier)
        self.fetched.uses.append(use)
        local = source.tier in LOCAL_TIERS
        name = SegmentName.WEIGHT_READ if local else SegmentName.WEIGHT_TRANSFER
        start_s = self._clock.monotonic_s()
        with self._trace.span(name) as span:
            span.detail = lambda: use.text(self._clock.monotonic_s(), start_s)
            try:
                await self._leased(source, use)
            finally:
                use.elapsed_s = self._clock.monotonic_s() - start_s
                span.detail = use.text()
        fault = use.fault
        if fault is not None:
            log.warning("source %s failed: %s", source.source_id, fault)
            if fault.kind == "corrupt":
                self._lying.add(source.source_id)

    async def _leased(self, source: Source, use: SourceUse) -> None:
        """Read under a reader's place; the node's own cache needs none."""
        gone = threading.Event()
        if source.tier is WeightTier.L2_NVME:
            await self._read(source, use, gone)
            return
        try:
            transfer_id, ttl_s = await self._acquire(source)
        except NoPair as error:
            use.fault = Fault("busy", str(error))
            return
        except (NotFound, Unavailable) as error:
            use.fault = Fault("dead", str(error))
            return
        renewing = asyncio.create_task(self._keep(source, ttl_s, gone))
        start_s = self._clock.monotonic_s()
        try:
            await self._read(source, use, gone)
        finally:
            renewing.cancel()
        took_s = self._clock.monotonic_s() - start_s
        self._giving_back.append(
            asyncio.create_task(self._give_back(source, use, transfer_id, took_s))
        )

    async def _acquire(self, source: Source) -> tuple[str, float]:
        me = self._reader
        got = await self._registry.acquire_transfer(
            source.source_id,
            self._arena.manifest.digest,
            worker_id=me.worker_id,
            incarnation=me.incarnation,
            request_id=f"{me.incarnation}:{source.source_id}:{len(self.fetched.uses)}",
        )
        return got.transfer_id, got.ttl_s

    async def _keep(self, source: Source, ttl_s: float, gone: threading.Event) -> None:
        """Renew the reader's place; a source that no longer grants it is left (B148)."""
        while True:
            await self._clock.sleep(ttl_s / 3)
            try:
                await self._acquire(source)
            except NotFound:
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

    async def _read(self, source: Source, use: SourceUse, gone: threading.Event) -> None:
        """All missing chunks from one source, until the first fault."""
        await self._pipeline.fill(lambda: self._open(source), use, gone=gone, stop=self._stop)

    def _open(self, source: Source) -> RangeReader:
        if source.tier is WeightTier.L2_NVME and self._cache is not None:
            return FileReader(self._cache.locate)
        parts = urlsplit(source.url)
        if parts.scheme == "file":
            folder = Path(unquote(parts.path))
            return FileReader(lambda entry: folder / entry.path)
        return HttpReader(
            source.url, clock=self._clock, incarnation=source.incarnation, token=self._token
        )


def cache_source(cache: WeightCache, digest: str, node: str) -> Source:
    """The node's cache as a source of an artifact."""
    return Source(
        source_id=f"cache:{node}:{digest.removeprefix('sha256:')[:16]}",
        digest=digest,
        tier=WeightTier.L2_NVME,
        url=f"file://{node}{cache.folder}",
        node=node,
        readers_max=64,
    )


def _told(fault: Fault | None) -> str:
    """The registry knows dead, slow and corrupt."""
    if fault is None:
        return ""
    return str(Fault("slow" if fault.kind == "busy" else fault.kind, fault.detail))
