"""Who may read whose bytes now: the live half of the registry's use-cases.

Owns announcing, planning a fetch, readers' places and their reports. The order of sources and the
verdict on a report are those of `sources`, the promises those of `live`. Handed to `service`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol
from urllib.parse import urlsplit

from readyplane.core.errors import InvalidField, NotFound, Unavailable
from readyplane.core.identity import Manifest, check_digest
from readyplane.core.startup import WeightTier
from readyplane.kit.clock import Clock
from readyplane.ports import FetchPlan, RankedSource, Source, Transfer
from readyplane_registry import sources
from readyplane_registry.blobs import Blobs
from readyplane_registry.live import LiveSource, LiveStore, MemoryLive, Place, Report
from readyplane_registry.sources import Candidate, SourcePolicy, Target

log = logging.getLogger(__name__)
NAME_CHARS_MAX = 200


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
        ranking: how sources are ranked and judged.
    """

    source_ttl_s: float = 15.0
    transfer_ttl_s: float = 15.0
    storage_readers_max: int = 8
    ranking: SourcePolicy = sources.DEFAULT_POLICY


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
        self._manifest_of, self._live, self._blobs = manifest_of, live, blobs
        self._make_id, self._storage_url = make_id, storage_url
        self._policy, self._tally, self._doubt = policy, tally, doubt
        self._storage_id = sources.STORAGE_PREFIX + name
        # Readers of storage are bounded here when the live store is away.
        self._alone = MemoryLive(clock, weight=policy.ranking.weight)

    async def announce(self, source: Source) -> float:
        """Announce or refresh; returns the ttl in seconds.

        Raises:
            InvalidField: a field is wrong. NotFound: no such manifest.
            StaleEpoch: a later life of this source has announced itself.
        """
        _check_source(source)
        await self._manifest_of(source.digest)
        await self._live.announce(replace(source, readers=0), ttl_s=self._policy.source_ttl_s)
        return self._policy.source_ttl_s

    async def withdraw(self, source_id: str, *, reason: str = "") -> None:
        """Take a source back at once; its readers lose their places at their next renewal."""
        _check_name("source_id", source_id)
        if await self._live.withdraw(source_id):
            log.info("source withdrawn", extra={"source": source_id, "why": reason[:200]})

    async def plan(self, digest: str, *, worker_id: str, incarnation: str, node: str) -> FetchPlan:
        """Sources for one target, best first. Raises NotFound, InvalidField."""
        manifest = await self._manifest_of(digest)
        excluded: list[str] = []
        candidates: list[Candidate] = []
        tiers: Mapping[WeightTier, sources.Bandwidth] = {}
        try:
            candidates += [_candidate(held) for held in await self._live.sources(digest)]
            tiers = await self._live.tiers()
        except Unavailable as error:
            self._tally.count("degraded", what="plan")
            excluded.append(f"peers: not known now, {error}")
        storage = await self._storage(manifest, tiers)
        if isinstance(storage, str):
            excluded.append(f"{self._storage_id}: {storage}")
        else:
            candidates.append(storage)
        ranking = sources.rank(
            candidates,
            target=Target(worker_id, incarnation, node),
            size_bytes=manifest.size_bytes,
            tiers=tiers,
            policy=self._policy.ranking,
        )
        return FetchPlan(
            tuple(RankedSource(_source(r, digest), r.predicted_s, r.why) for r in ranking.sources),
            tuple(excluded) + ranking.excluded,
        )

    async def _storage(
        self, manifest: Manifest, tiers: Mapping[WeightTier, sources.Bandwidth]
    ) -> Candidate | str:
        """The registry's own bytes as a source, or why they are none."""
        url = self._storage_url()
        if not url:
            return "this registry serves no bytes"
        missing = await self._blobs.missing(manifest.files)
        if missing:
            return f"its bytes are not whole: {missing[0]}"
        try:
            readers = await self._live.readers(self._storage_id)
        except Unavailable:
            readers = await self._alone.readers(self._storage_id)
        return Candidate(
            source_id=self._storage_id,
            tier=WeightTier.L4_OBJECT,
            url=f"{url}/{manifest.digest}",
            storage=True,
            measured=tiers.get(WeightTier.L4_OBJECT, sources.UNMEASURED),
            readers=readers,
            readers_max=self._policy.storage_readers_max,
        )

    # ------------------------------------------------------------------------------- transfers

    async def acquire(
        self, source_id: str, digest: str, *, worker_id: str, incarnation: str, request_id: str
    ) -> Transfer:
        """Reserve a reader's place, or renew it with the same request_id.

        Raises:
            Overloaded: the source is full or barred; `retry_after_s` says for how long.
            NotFound: the source is gone, or holds another artifact.
        """
        for field, value in (
            ("source_id", source_id),
            ("worker_id", worker_id),
            ("incarnation", incarnation),
            ("request_id", request_id),
        ):
            _check_name(field, value)
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
            tier=WeightTier.L4_OBJECT if storage else WeightTier.UNKNOWN,
        )
        try:
            return await self._live.acquire(place)
        except Unavailable:
            if not storage:
                raise
            # Storage is the last fallback also without the live store, within a bound of its own.
            self._tally.count("degraded", what="transfer")
            return await self._alone.acquire(place)

    async def release(
        self, transfer_id: str, *, transferred_bytes: int, elapsed_s: float, failure: str = ""
    ) -> bool:
        """Give the place back; True when the source was quarantined for lying.

        A place that is not known (any more) is no error: there is nothing to give back. It is
        counted as `unknown`.

        Raises:
            InvalidField: bytes or seconds are negative or not finite.
        """
        _check_name("transfer_id", transfer_id)
        if not 0 <= transferred_bytes < 2**63:
            raise InvalidField("transferred_bytes", transferred_bytes, "use a number from 0")
        if not (math.isfinite(elapsed_s) and elapsed_s >= 0):
            raise InvalidField("elapsed_s", elapsed_s, "use finite seconds from 0")
        live = self._alone if await self._alone.transfer(transfer_id) else self._live
        record = await live.transfer(transfer_id)
        if record is None:
            self._tally.count("transfers", tier="unknown", outcome="unknown")
            return False
        verdict = sources.judge(
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
            self._doubt(record.digest)
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


def _check_name(field: str, value: str) -> None:
    if not 0 < len(value) <= NAME_CHARS_MAX or not value.isprintable() or "|" in value:
        raise InvalidField(field, value, "give 1 to 200 printable characters without |")


def _check_source(source: Source) -> None:
    _check_name("source.source_id", source.source_id)
    if sources.is_storage(source.source_id):
        raise InvalidField("source.source_id", source.source_id, "leave storage: to the registry")
    check_digest(source.digest, where="source.digest")
    if source.tier is WeightTier.UNKNOWN:
        raise InvalidField("source.tier", str(source.tier), "name the tier, L0 to L4")
    for field, text in (
        ("incarnation", source.incarnation),
        ("worker_id", source.worker_id),
        ("node", source.node),
    ):
        if text:
            _check_name(f"source.{field}", text)
    parts = urlsplit(source.url)
    secret = parts.username or parts.password or parts.query or parts.fragment
    known = parts.scheme in {"http", "https"} and parts.hostname
    if secret or not (known or (parts.scheme == "file" and parts.path.startswith("/"))):
        raise InvalidField(
            "source.url",
            source.url.partition("?")[0].rpartition("@")[2],
            "give http://HOST:PORT/PATH or file:///FOLDER, without credentials or query",
        )
    if not 1 <= source.readers_max <= 1024:
        raise InvalidField("source.readers_max", source.readers_max, "use 1 to 1024")
    rate = source.bandwidth_bytes_per_s
    if not (math.isfinite(rate) and rate >= 0):
        raise InvalidField("source.bandwidth_bytes_per_s", rate, "use a finite number from 0")


def _candidate(held: LiveSource) -> Candidate:
    source = held.source
    return Candidate(
        source_id=source.source_id,
        tier=source.tier,
        url=source.url,
        worker_id=source.worker_id,
        incarnation=source.incarnation,
        node=source.node,
        announced_bytes_per_s=source.bandwidth_bytes_per_s,
        measured=held.measured,
        readers=held.readers,
        readers_max=source.readers_max,
        announced_ago_s=held.announced_ago_s,
        expires_in_s=held.expires_in_s,
        barred=held.barred,
        barred_for_s=held.barred_for_s,
    )


def _source(ranked: sources.Ranked, digest: str) -> Source:
    candidate = ranked.candidate
    return Source(
        source_id=candidate.source_id,
        digest=digest,
        tier=candidate.tier,
        url=candidate.url,
        worker_id=candidate.worker_id,
        incarnation=candidate.incarnation,
        node=candidate.node,
        bandwidth_bytes_per_s=ranked.bandwidth_bytes_per_s,
        readers=candidate.readers,
        readers_max=candidate.readers_max,
    )
