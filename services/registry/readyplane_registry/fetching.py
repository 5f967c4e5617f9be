"""Who may read whose bytes now: the live half of the registry's use-cases.

Owns announcing, planning a fetch, readers' places and their reports. The order of sources and the
verdict on a report are those of `sources`, the promises those of `live`. Handed to `service`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from readyplane.core.chunks import ChunkRanges, ChunkTable, common
from readyplane.core.errors import (
    IdentityMismatch,
    InvalidField,
    NotFound,
    Overloaded,
    StaleEpoch,
    Unavailable,
)
from readyplane.core.identity import Manifest, check_digest
from readyplane.core.startup import NO_BYTES, NOT_WHOLE, WeightTier
from readyplane.kit.clock import Clock
from readyplane.ports import (
    FetchPlan,
    Source,
    StartNode,
    StartPlacement,
    Transfer,
)
from readyplane_registry import placement, rates, reports, sources
from readyplane_registry.blobs import Blobs
from readyplane_registry.live import (
    BarRecord,
    LiveSource,
    LiveStore,
    MemoryLive,
    Place,
    Report,
)
from readyplane_registry.offers import (
    Known,
    check_name,
    check_nodes,
    check_source,
    ranked_source,
    start_choice,
)
from readyplane_registry.rates import SourcePolicy
from readyplane_registry.sources import Candidate, Target
from readyplane_registry.storage_asked import StorageAsked

log = logging.getLogger(__name__)


class Tally(Protocol):
    """What the service counts; names and labels are those of the metrics (`metrics`)."""

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        ...


class NoTally:
    """Counts nothing."""

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """See `Tally`."""


@dataclass(frozen=True, slots=True)
class RegistryPolicy:
    """Bounds of what is alive.

    Attributes:
        source_ttl_s: an announcement counts this long unless repeated.
        transfer_ttl_s: a reader's place counts this long unless renewed.
        storage_readers_max: readers' places at the registry's own byte store.
        storage_tier: L4 for an object store, L3 for a mount that all nodes have.
        storage_asked_every_s: how long a plan believes that the byte store has an artifact whole;
            0: each plan asks.
        ranking: how sources are ranked and judged.
    """

    source_ttl_s: float = 15.0
    transfer_ttl_s: float = 15.0
    storage_readers_max: int = 8
    storage_tier: WeightTier = WeightTier.L4_OBJECT
    storage_asked_every_s: float = 0.0
    ranking: SourcePolicy = rates.DEFAULT_POLICY


class Fetching:
    """Sources and transfers; see `RegistryService` for the arguments.

    Args:
        manifest_of: one manifest by digest; raises NotFound.
        doubt: called with a digest when a reader got wrong bytes from the byte store.
    """

    def __init__(
        self,
        *,
        manifest_of: Callable[[str], Awaitable[Manifest]],
        live: LiveStore,
        blobs: Blobs,
        clock: Clock,
        make_id: Callable[[], str],
        storage_url: Callable[[], str],
        name: str,
        policy: RegistryPolicy,
        tally: Tally,
        doubt: Callable[[str], None],
    ) -> None:
        self._manifest_of, self._live = manifest_of, live
        self._make_id, self._storage_url = make_id, storage_url
        self._policy, self._tally, self._doubt = policy, tally, doubt
        self._storage_asked = StorageAsked(blobs, clock, believed_s=policy.storage_asked_every_s)
        self._storage_id = sources.STORAGE_PREFIX + name
        # Readers of storage are bounded here when the live store is away.
        self._alone = MemoryLive(clock, weight=policy.ranking.weight)

    async def announce(self, source: Source) -> float:
        """Announce or refresh; returns the ttl in seconds.

        Raises:
            InvalidField: a field is wrong. NotFound: no such manifest.
            StaleEpoch: a later life of this source has announced itself.
        """
        check_source(source)
        await self._manifest_of(source.digest)
        await self._live.announce(replace(source, readers=0), ttl_s=self._policy.source_ttl_s)
        return self._policy.source_ttl_s

    async def withdraw(self, source_id: str, *, reason: str = "") -> None:
        """Take a source back at once; its readers lose their places at their next renewal."""
        check_name("source_id", source_id)
        if await self._live.withdraw(source_id):
            log.info("source withdrawn", extra={"source": source_id, "why": reason[:200]})

    async def plan(
        self,
        digest: str,
        *,
        worker_id: str,
        incarnation: str,
        node: str,
        missing: ChunkRanges = (),
        rack: str = "",
        layout_digest: str = "",
    ) -> FetchPlan:
        """Sources for one target, best first. Raises NotFound, InvalidField."""
        manifest = await self._manifest_of(digest)
        table = ChunkTable(manifest)
        wanted = common(missing, table.whole) if missing else table.whole
        if missing and not wanted:
            raise InvalidField("missing", missing[:3], f"name chunks below {table.total}")
        size_bytes = table.size_bytes(wanted)
        known = await self._known(manifest)
        ranking = sources.rank(
            known.candidates(table, wanted),
            target=Target(
                worker_id,
                incarnation,
                node,
                rack,
                layout_digest,
                min(manifest.chunk_bytes, size_bytes),
            ),
            size_bytes=size_bytes,
            tiers=known.tiers,
            policy=self._policy.ranking,
        )
        return FetchPlan(
            tuple(ranked_source(r, digest, wanted) for r in ranking.sources),
            known.excluded + ranking.excluded,
            ranking.retry_after_s,
        )

    async def place_start(
        self, digest: str, *, nodes: Sequence[StartNode], starts: int = 1, layout_digest: str = ""
    ) -> StartPlacement:
        """Where to start next, over (node, source). Raises NotFound, InvalidField."""
        check_nodes(nodes, starts)
        manifest = await self._manifest_of(digest)
        table = ChunkTable(manifest)
        known = await self._known(manifest)
        found = placement.place(
            nodes,
            known.candidates(table, table.whole),
            starts=starts,
            size_bytes=manifest.size_bytes,
            chunk_bytes=min(manifest.chunk_bytes, manifest.size_bytes),
            layout_digest=layout_digest,
            tiers=known.tiers,
            policy=self._policy.ranking,
        )
        return StartPlacement(
            tuple(start_choice(start, digest) for start in found.starts),
            tuple(start_choice(start, digest) for start in found.alternatives),
            known.excluded + found.excluded,
        )

    async def _known(self, manifest: Manifest) -> Known:
        """What is known of the sources of an artifact now."""
        excluded: list[str] = []
        live: list[LiveSource] = []
        tiers: Mapping[WeightTier, rates.Bandwidth] = {}
        # Readers first: a plan that knows of a newer reader, and not yet whom others may read
        # behind, would send two to one place.
        try:
            readers = await self._live.readers(self._storage_id)
            live = await self._live.sources(manifest.digest)
            tiers = await self._live.tiers()
        except Unavailable as error:
            readers = await self._alone.readers(self._storage_id)
            self._tally.count("degraded", what="plan")
            excluded.append(f"peers: not known now, {error}")
        storage = await self._storage(manifest, tiers, readers)
        if isinstance(storage, str):
            excluded.append(f"{self._storage_id}: {storage}")
            return Known(tuple(live), None, tiers, tuple(excluded))
        return Known(tuple(live), storage, tiers, tuple(excluded))

    async def sources_of(self, digest: str) -> list[LiveSource]:
        """Sources of an artifact as they are now, the barred ones with the reason."""
        check_digest(digest)
        return await self._live.sources(digest)

    async def bars(self) -> list[BarRecord]:
        """Why sources were not offered lately, newest first."""
        return await self._live.bars()

    async def _storage(
        self, manifest: Manifest, tiers: Mapping[WeightTier, rates.Bandwidth], readers: int
    ) -> Candidate | str:
        """The registry's own bytes as a source, or why they are none."""
        url = self._storage_url()
        if not url:
            return NO_BYTES
        try:
            missing = await self._storage_asked.missing(manifest)
        except Unavailable as error:
            return str(error)
        if missing:
            return f"{NOT_WHOLE}: {missing}"
        return Candidate(
            source_id=self._storage_id,
            tier=self._policy.storage_tier,
            url=f"{url}/{manifest.digest}",
            storage=True,
            measured=tiers.get(self._policy.storage_tier, rates.UNMEASURED),
            readers=readers,
            readers_max=self._policy.storage_readers_max,
        )

    # ------------------------------------------------------------------------------- transfers

    async def acquire(
        self,
        source_id: str,
        digest: str,
        *,
        worker_id: str,
        incarnation: str,
        request_id: str,
        source_incarnation: str = "",
        layout_digest: str = "",
        readers_seen: int | None = None,
    ) -> Transfer:
        """Reserve a reader's place, or renew it with the same request_id.

        Raises:
            Overloaded: the source is full, barred, leaves, or busier than planned;
                `retry_after_s` says when to try or plan again.
            NotFound: the source is gone, or holds another artifact.
            StaleEpoch, IdentityMismatch: it is another life, or another layout, than expected.
        """
        if readers_seen is not None and readers_seen < 0:
            raise InvalidField("readers_seen", readers_seen, "give a number from 0, or none")
        for field, value in (
            ("source_id", source_id),
            ("worker_id", worker_id),
            ("incarnation", incarnation),
            ("request_id", request_id),
        ):
            check_name(field, value)
        manifest = await self._manifest_of(digest)
        storage = sources.is_storage(source_id)
        if storage and source_id != self._storage_id:
            raise NotFound("source", source_id, "plan the fetch anew")
        place = Place(
            source_id=source_id,
            digest=manifest.digest,
            worker_id=worker_id,
            incarnation=incarnation,
            request_id=request_id,
            transfer_id=self._make_id(),
            ttl_s=self._policy.transfer_ttl_s,
            readers_max=self._policy.storage_readers_max if storage else None,
            tier=self._policy.storage_tier if storage else WeightTier.UNKNOWN,
            source_incarnation="" if storage else source_incarnation,
            layout_digest="" if storage else layout_digest,
            readers_seen=readers_seen,
        )
        try:
            return await self._acquire(place)
        except Unavailable:
            if not storage:
                raise
            # Storage is the last fallback also without the live store, within a bound of its own.
            self._tally.count("degraded", what="transfer")
            return await self._alone.acquire(place)

    async def _acquire(self, place: Place) -> Transfer:
        """Take the place; who is turned away is counted by the reason."""
        try:
            return await self._live.acquire(place)
        except (Overloaded, StaleEpoch, IdentityMismatch, NotFound) as error:
            self._tally.count("places_refused", why=type(error).__name__)
            raise

    async def release(
        self, transfer_id: str, *, transferred_bytes: int, elapsed_s: float, failure: str = ""
    ) -> bool:
        """Give the place back; True when the source was quarantined for lying.

        A place that is not known (any more) is no error: there is nothing to give back. It is
        counted as `unknown`.

        Raises:
            InvalidField: bytes or seconds are negative or not finite.
        """
        check_name("transfer_id", transfer_id)
        if not 0 <= transferred_bytes < 2**63:
            raise InvalidField("transferred_bytes", transferred_bytes, "use a number from 0")
        if not (math.isfinite(elapsed_s) and elapsed_s >= 0):
            raise InvalidField("elapsed_s", elapsed_s, "use finite seconds from 0")
        live = self._alone if await self._alone.transfer(transfer_id) else self._live
        record = await live.transfer(transfer_id)
        if record is None:
            self._tally.count("transfers", tier="unknown", outcome="unknown")
            return False
        verdict = reports.judge(
            failure,
            storage=sources.is_storage(record.source_id),
            accused_before=record.accused_before,
            policy=self._policy.ranking,
        )
        report = Report(
            transferred_bytes=transferred_bytes,
            elapsed_s=elapsed_s,
            bar_s=verdict.bar_s,
            reason=verdict.reason,
            accuse=verdict.outcome in {"corrupt", "disbelieved"},
            learn_rate=verdict.outcome not in {"corrupt", "disbelieved"},
        )
        released = await live.release(transfer_id, report)
        if released is None or not released.first:
            return verdict.quarantine and released is not None and released.barred
        tier = str(record.tier)
        outcome = verdict.outcome if released.held else f"late_{verdict.outcome}"
        self._tally.count("transfers", tier=tier, outcome=outcome)
        self._tally.count("transferred_bytes", float(transferred_bytes), tier=tier)
        if verdict.outcome == "corrupt" and sources.is_storage(record.source_id):
            self._storage_asked.doubt(record.digest)
            self._doubt(record.digest)
        if released.barred:
            self._tally.count("bars", tier=tier, outcome=verdict.outcome)
        quarantined = verdict.quarantine and released.barred
        if quarantined:
            self._tally.count("quarantines", tier=tier)
            log.warning(
                "source quarantined", extra={"source": record.source_id, "why": verdict.reason}
            )
        elif failure:
            log.warning("transfer failed", extra={"source": record.source_id, "why": failure[:200]})
        return quarantined

    async def counts(self) -> tuple[int, int]:
        """(live sources, readers' places taken) now, for the gauges."""
        return await self._live.count()
