"""Collection: needless manifests are retired, needless bytes are taken away in two steps.

Owns the order of steps and what is counted. Who needs what is `retention`'s to say, what keeps
bytes is `keeping`'s; a byte store gives and takes through `ByteRemoval`. Run by `artifact gc`, and
by nobody on its own.

A live store that cannot be asked ends a collection before it begins: not known is not unneeded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from readyplane.core.errors import Conflict, InvalidField, ReadyplaneError, Refused
from readyplane.core.resolution import withdrawn_tag
from readyplane.kit.clock import Clock
from readyplane_registry.fetching import NoTally, Tally
from readyplane_registry.keeping import KeepingStore
from readyplane_registry.live import LiveStore
from readyplane_registry.retention import OF_MACHINES, Kept, RetentionPolicy, retention
from readyplane_registry.store import CatalogStore

log = logging.getLogger(__name__)
SHOWN_MAX = 1000
USE_EVERY_S = 60.0
USES_MAX = 10_000
HOLD_NAMES_MAX = 10_000
UPLOAD_ID_CHARS_MAX = 200


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """Bytes in a byte store; `age_s` since they came."""

    sha256: str
    size_bytes: int
    age_s: float


class ByteRemoval(Protocol):
    """What a byte store must do to be collected."""

    async def stored(self) -> Sequence[StoredBlob]:
        """Every blob that is stored."""
        ...

    async def remove(self, sha256: str) -> int:
        """Delete a blob; the bytes that it took, 0 when it was gone. Raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class Failed:
    """Bytes that could not be deleted yet; they stay `evicting` and are tried again."""

    sha256: str
    why: str


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did, or would do.

    Attributes:
        dry_run: nothing was changed.
        retired: manifests that nobody needed.
        kept: the others, each with its reason.
        evicted: blobs whose bytes are gone (dry run: would go).
        rescued: blobs that somebody came to need while they were being taken away.
        freed_bytes: that the store holds less.
        failed: blobs that are still there, and why.
    """

    dry_run: bool
    retired: tuple[str, ...] = ()
    kept: tuple[Kept, ...] = ()
    evicted: tuple[str, ...] = ()
    rescued: tuple[str, ...] = ()
    freed_bytes: int = 0
    failed: tuple[Failed, ...] = ()


@dataclass(slots=True)
class _Swept:
    evicted: list[str] = field(default_factory=list)
    rescued: list[str] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    freed_bytes: int = 0


class Collecting:
    """Holds of uploads, uses by workers, retirement and collection.

    Args:
        removal: None: this registry stores no bytes of its own.
        hold_ttl_s: an upload's hold counts this long unless repeated.
    """

    def __init__(
        self,
        *,
        store: CatalogStore,
        keeping: KeepingStore,
        live: LiveStore,
        removal: ByteRemoval | None,
        clock: Clock,
        policy: RetentionPolicy | None = None,
        hold_ttl_s: float = 900.0,
        tally: Tally | None = None,
    ) -> None:
        self._store, self._keeping, self._live = store, keeping, live
        self._removal, self._clock = removal, clock
        self._policy, self._hold_ttl_s = policy or RetentionPolicy(), hold_ttl_s
        self._tally = tally or NoTally()
        self._used_s: dict[str, float] = {}
        self._noting: set[asyncio.Task[None]] = set()
        self._collecting = False

    # ------------------------------------------------------------------------- holds and uses

    async def hold_upload(
        self, upload_id: str, sha256: Sequence[str], *, release: bool = False
    ) -> float:
        """Hold bytes that are about to be published, or end it; returns the ttl in seconds.

        Raises:
            InvalidField: no name, or too many blobs.
        """
        if not 0 < len(upload_id) <= UPLOAD_ID_CHARS_MAX or not upload_id.isprintable():
            raise InvalidField("upload_id", upload_id, "give 1 to 200 printable characters")
        if release:
            await self._keeping.release(upload_id)
            return 0.0
        if len(sha256) > HOLD_NAMES_MAX:
            remedy = f"hold {HOLD_NAMES_MAX} in one call, and the rest in further ones"
            raise InvalidField("sha256", len(sha256), remedy)
        await self._keeping.hold(upload_id, sha256, ttl_s=self._hold_ttl_s)
        return self._hold_ttl_s

    @asynccontextmanager
    async def holding(self, upload_id: str, sha256: Sequence[str]) -> AsyncIterator[None]:
        """Hold bytes while a manifest that names them is checked and stored."""
        for begin in range(0, len(sha256), HOLD_NAMES_MAX):
            await self.hold_upload(upload_id, sha256[begin : begin + HOLD_NAMES_MAX])
        try:
            yield
        finally:
            await self.hold_upload(upload_id, (), release=True)

    def note_use(self, digest: str) -> None:
        """A worker needs this manifest now; told to the store once in `USE_EVERY_S` at most.

        Beside the answer to the worker: no start waits for what only collection reads. Bytes
        outlive their last use by a grace that is never shorter than `USE_EVERY_S`.
        """
        now_s = self._clock.monotonic_s()
        if self._used_s.get(digest, -USE_EVERY_S) + USE_EVERY_S > now_s:
            return
        if len(self._used_s) >= USES_MAX:
            self._used_s.clear()
        self._used_s[digest] = now_s
        task = asyncio.get_running_loop().create_task(self._noted(digest, self._clock.wall_s()))
        self._noting.add(task)
        task.add_done_callback(self._noting.discard)

    async def _noted(self, digest: str, used_s: float) -> None:
        try:
            await self._keeping.note_uses([digest], now_s=used_s)
        except ReadyplaneError as error:  # the next renewal of the reader tells it again
            self._used_s.pop(digest, None)
            self._tally.count("degraded", what="use")
            log.warning("use not noted", extra={"digest": digest, "why": str(error)})

    # ----------------------------------------------------------------------------- retirement

    async def retire(self, digest: str, *, reason: str = "") -> bool:
        """Hide a manifest: nobody resolves to it any more; its identity is never another's.

        False when it was retired before.

        Raises:
            NotFound: no such manifest. Refused: a tag points at it, or a worker holds its bytes.
        """
        holders = await self._holders(digest)
        if holders:
            what = f"retirement of {digest}"
            remedy = "drain these workers first; a node's cache is offered by its agents alone"
            raise Refused(what, holders[:5], remedy)
        detail = {"reason": reason[:500] or "asked for"}
        retired = await self._store.put_event(digest, "retired", detail, now_s=self._clock.wall_s())
        if retired:
            log.info("manifest retired", extra={"digest": digest, "why": detail["reason"]})
        return retired

    async def _holders(self, digest: str) -> list[str]:
        return [
            f"source {held.source.source_id} holds it"
            for held in await self._live.sources(digest)
            if held.expires_in_s > 0
        ]

    # ----------------------------------------------------------------------------- collection

    async def collect(self, *, dry_run: bool = False) -> Collected:
        """Retire what nobody needs, then take away what nothing keeps.

        Raises:
            Conflict: this registry is collecting already.
            Unavailable: a store cannot be asked; then nothing more is taken away.
        """
        if self._collecting:
            remedy = "wait until it has ended"
            raise Conflict("collection", "none under way", "one under way", remedy)
        self._collecting = True
        try:
            return await self._collect(dry_run=dry_run)
        finally:
            self._collecting = False

    async def _collect(self, *, dry_run: bool) -> Collected:
        await self._live.count()
        await asyncio.gather(*self._noting)
        now_s = self._clock.wall_s()
        found = retention(await self._keeping.facts(), now_s=now_s, policy=self._policy)
        retired: list[str] = []
        kept = list(found.kept)
        for digest in found.needless:
            holders = await self._holders(digest)
            if holders:
                kept.append(Kept(digest, holders[0]))
            elif dry_run or await self._retire_needless(digest, kept):
                retired.append(digest)
        swept = _Swept()
        if self._removal is not None:
            if dry_run:
                await self._foresee(self._removal, swept, now_s)
            else:
                await self._sweep(self._removal, swept, now_s)
        return Collected(
            dry_run=dry_run,
            retired=tuple(retired),
            kept=tuple(kept[:SHOWN_MAX]),
            evicted=tuple(swept.evicted),
            rescued=tuple(swept.rescued),
            freed_bytes=swept.freed_bytes,
            failed=tuple(swept.failed[:SHOWN_MAX]),
        )

    async def _retire_needless(self, digest: str, kept: list[Kept]) -> bool:
        """False when a tag came to point at it meanwhile. Tags of agents are taken away first."""
        try:
            for name in (await self._store.tags_of([digest])).get(digest, ()):
                if name.startswith(OF_MACHINES) and name != withdrawn_tag(digest):
                    await self._store.remove_tag(
                        name, expected_digest=digest, force=False, now_s=self._clock.wall_s()
                    )
            detail = {"reason": "collected: nothing needs it"}
            return await self._store.put_event(
                digest, "retired", detail, now_s=self._clock.wall_s()
            )
        except Refused as refusal:
            kept.append(Kept(digest, refusal.reasons[0]))
            return False
        except Conflict:
            kept.append(Kept(digest, "its tag moved just now"))
            return False

    async def _candidates(self, removal: ByteRemoval) -> dict[str, int]:
        """Blobs that are old enough to be no upload that a manifest is still to follow."""
        return {
            blob.sha256: blob.size_bytes
            for blob in await removal.stored()
            if blob.age_s >= self._policy.grace_s
        }

    async def _foresee(self, removal: ByteRemoval, swept: _Swept, now_s: float) -> None:
        sizes = await self._candidates(removal)
        names = await self._keeping.unkept(list(sizes), now_s=now_s, grace_s=self._policy.grace_s)
        swept.evicted.extend(names)
        swept.freed_bytes = sum(sizes[name] for name in names)
        swept.failed.extend(
            Failed(e.sha256, f"evicting, {e.attempts} attempts: {e.last_error}")
            for e in await self._keeping.evicting()
        )

    async def _sweep(self, removal: ByteRemoval, swept: _Swept, now_s: float) -> None:
        """Mark, delete, confirm; what an earlier collection left marked is tried again."""
        await self._keeping.mark(
            await self._candidates(removal), now_s=now_s, grace_s=self._policy.grace_s
        )
        for eviction in await self._keeping.evicting():
            try:
                freed = await self._keeping.evict(eviction.sha256, removal.remove)
            except (ReadyplaneError, OSError) as error:
                swept.failed.append(Failed(eviction.sha256, str(error)[:500]))
                self._tally.count("evictions", outcome="failed")
                log.warning(
                    "bytes not deleted, they stay evicting",
                    extra={"sha256": eviction.sha256, "why": str(error)[:200]},
                )
                continue
            if freed is None:
                swept.rescued.append(eviction.sha256)
                self._tally.count("evictions", outcome="rescued")
                continue
            swept.evicted.append(eviction.sha256)
            swept.freed_bytes += freed
            self._tally.count("evictions", outcome="evicted")
            self._tally.count("evicted_bytes", float(freed))
