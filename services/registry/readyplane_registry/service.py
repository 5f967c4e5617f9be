"""The registry's use-cases: `readyplane.ports.Registry` over its stores.

Owns the order of steps and what is counted; the rules are those of `catalog`, the promises those
of `store`; what is alive is left to `fetching`. Handed to `rpc` and `api`, and run as it is by the simulator.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from readyplane.core.chunks import ChunkRanges
from readyplane.core.errors import (
    BytesMissing,
    Conflict,
    IdentityMismatch,
    InvalidField,
    NotFound,
    ReadyplaneError,
    Refused,
    Unsupported,
)
from readyplane.core.identity import Manifest, check_digest
from readyplane.core.resolution import CANDIDATES_SHOWN_MAX, Resolution
from readyplane.core.trust import Trail, TrustPolicy, check_signature
from readyplane.kit.clock import Clock
from readyplane.kit.signing import verify_ed25519
from readyplane.ports import (
    FetchPlan,
    ManifestSummary,
    Source,
    StartNode,
    StartPlacement,
    Tag,
    Transfer,
)
from readyplane_registry import catalog
from readyplane_registry.blobs import Blobs, FileCheck
from readyplane_registry.collecting import Collected, Collecting
from readyplane_registry.fetching import Fetching, NoTally, RegistryPolicy, Tally
from readyplane_registry.live import BarRecord, LiveSource, LiveStore
from readyplane_registry.resolving import Resolving
from readyplane_registry.store import CatalogStore, ManifestRecord, record_of, unknown_manifest

log = logging.getLogger(__name__)
LIST_MAX = 1000
MANIFESTS_CACHED_MAX = 64
DOUBT_EVERY_S = 60.0
REASONS_MAX = 20
ORIGIN_FIELDS_MAX = 16
ORIGIN_CHARS_MAX = 500


@dataclass(frozen=True, slots=True)
class Verification:
    """What re-reading an artifact's stored bytes found, file by file."""

    digest: str
    files: tuple[FileCheck, ...]

    @property
    def ok(self) -> bool:
        """True when every file is here and is what the manifest says."""
        return not any(check.problem for check in self.files)


class RegistryService:
    """See `readyplane.ports.Registry`.

    Args:
        store: manifests and tags.
        live: sources, readers' places, bars.
        blobs: the byte store.
        clock: stamps records; expiries are judged by the live store's own clock.
        make_id: a fresh text for each transfer.
        storage_url: where this registry serves bytes, `{url}/{digest}/{path}`; empty: nowhere.
        name: of this registry's byte store among others.
        tally: what is counted.
        trust: who must have signed what is resolved to; asked each time.
        collecting: holds of uploads and collection; None: nothing is ever collected here.
    """

    def __init__(
        self,
        *,
        store: CatalogStore,
        live: LiveStore,
        blobs: Blobs,
        clock: Clock,
        make_id: Callable[[], str],
        storage_url: Callable[[], str] = lambda: "",
        name: str = "registry",
        policy: RegistryPolicy | None = None,
        tally: Tally | None = None,
        trust: Callable[[], TrustPolicy] = TrustPolicy,
        collecting: Collecting | None = None,
    ) -> None:
        self._store, self._live, self._blobs, self._clock = store, live, blobs, clock
        self._tally, self._collecting, self._make_id = tally or NoTally(), collecting, make_id
        self._resolving = Resolving(
            store=store,
            manifest_of=self.get_manifest,
            clock=clock,
            trust=trust,
            tally=self._tally,
        )
        self._fetching = Fetching(
            manifest_of=self.get_manifest,
            live=live,
            blobs=blobs,
            clock=clock,
            make_id=make_id,
            storage_url=storage_url,
            name=name,
            policy=policy or RegistryPolicy(),
            tally=self._tally,
            doubt=self._doubt,
        )
        self._cache: OrderedDict[str, tuple[Manifest, float]] = OrderedDict()
        self._doubted_s: dict[str, float] = {}
        self._verifying: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------ manifests

    async def publish_manifest(
        self, document: Mapping[str, Any], *, bytes_elsewhere: bool = False
    ) -> tuple[str, bool]:
        """Store a manifest; returns (digest, created). Idempotent by content.

        Raises:
            InvalidField: a field is wrong.
            Refused: it could never be served.
            BytesMissing: its bytes are not in the store, or were wrong and were taken out.
            IdentityMismatch: its bytes are not what it says of them.
        """
        try:
            manifest, data = catalog.read_document(document)
            record = record_of(manifest, data, now_s=self._clock.wall_s())
            known = await self._store.get_manifest(record.digest)
            if known is not None and bytes_elsewhere:
                self._tally.count("publishes", outcome="known")
                return record.digest, False
            stored, created = await self._put(record, manifest, bytes_elsewhere=bytes_elsewhere)
        except (InvalidField, Refused):
            self._tally.count("publishes", outcome="refused")
            raise
        self._tally.count("publishes", outcome="created" if created else "known")
        if created:
            log.info("published", extra={"digest": stored.digest, "model": stored.model})
        return stored.digest, created

    async def _put(
        self, record: ManifestRecord, manifest: Manifest, *, bytes_elsewhere: bool
    ) -> tuple[ManifestRecord, bool]:
        """Store a manifest whose bytes cannot be collected between the check and the row."""
        if bytes_elsewhere:
            return await self._store.put_manifest(record)
        if self._collecting is None:
            await self._check_bytes(manifest)
            return await self._store.put_manifest(record)
        names = [entry.sha256 for entry in manifest.files]
        async with self._collecting.holding(f"publish:{self._make_id()}", names):
            await self._check_bytes(manifest)
            return await self._store.put_manifest(record)

    async def _check_bytes(self, manifest: Manifest) -> None:
        """Bytes are there and are what the manifest says: read each time, for bytes rot (B117).

        A file whose content is not its name's is taken out of the store first, so that whoever
        publishes can bring it again.

        Raises:
            BytesMissing: they are not stored, or were wrong and are not stored any more.
            IdentityMismatch: they are those of their names, but the manifest says other things.
        """
        what = f"manifest of {manifest.model!r}"
        missing = await self._blobs.missing(manifest.files)
        if missing:
            remedy = "upload them with PUT /v1/blobs/sha256/HEX first, or say bytes_elsewhere"
            raise BytesMissing(what, _bounded(missing), remedy)
        if not _faults(await self._blobs.inspect(manifest, content=False)):
            return
        wrong = _faults(await self._blobs.inspect(manifest, content=True))
        for fault in wrong:
            log.error("stored bytes are wrong", extra={"digest": manifest.digest, "why": fault})
        if await self._blobs.missing(manifest.files):
            raise BytesMissing(what, _bounded(wrong), "upload them again and publish again")
        if wrong:
            remedy = "build the manifest from the bytes that are stored"
            raise IdentityMismatch(what, _bounded(wrong), remedy)

    async def get_manifest(self, digest: str) -> Manifest:
        """One manifest. Raises NotFound, InvalidField."""
        return (await self.dated_manifest(digest))[0]

    async def dated_manifest(self, digest: str) -> tuple[Manifest, float]:
        """A manifest and when it was published (wall clock, s). Raises NotFound, InvalidField.

        What never changes is cached without asking again.
        """
        check_digest(digest)
        held = self._cache.get(digest)
        if held is not None:
            self._cache.move_to_end(digest)
            return held
        record = await self._store.get_manifest(digest)
        if record is None:
            raise unknown_manifest(digest)
        found = record.manifest, record.created_s
        self._cache[digest] = found
        if len(self._cache) > MANIFESTS_CACHED_MAX:
            self._cache.popitem(last=False)
        return found

    async def list_manifests(self, *, model: str = "", kind: str = "") -> list[ManifestSummary]:
        """Newest first, `LIST_MAX` at most; `list_page` continues."""
        return (await self.list_page(model=model, kind=kind))[0]

    async def list_page(
        self, *, model: str = "", kind: str = "", limit: int = LIST_MAX, before: str = ""
    ) -> tuple[list[ManifestSummary], str]:
        """A page, newest first, and the mark to continue after it (empty at the end).

        Raises:
            InvalidField: kind, limit or mark is wrong.
        """
        catalog.check_kind(kind, optional=True)
        if model:
            catalog.check_reference(model)
        if not 0 < limit <= LIST_MAX:
            raise InvalidField("page_size", limit, f"use 1 to {LIST_MAX}")
        if before and not (before.isascii() and before.isdigit() and len(before) < 19):
            raise InvalidField("page_token", before, "use the token of the page before")
        records = await self._store.list_manifests(
            model=model, kind=kind, limit=limit, before=int(before or 0)
        )
        tags = await self._store.tags_of([record.digest for record in records])
        rest = str(records[-1].sequence) if len(records) == limit else ""
        return [_summary(r, tags.get(r.digest, ())) for r in records], rest

    async def verify(self, digest: str) -> Verification:
        """Read every stored byte of an artifact again and compare it with the manifest.

        A file whose content is not its name's is taken out of the byte store, so that it is
        neither served nor taken for present. Raises NotFound, InvalidField.
        """
        manifest = await self.get_manifest(digest)
        found = Verification(digest, await self._blobs.inspect(manifest, content=True))
        self._tally.count("verifications", outcome="ok" if found.ok else "corrupt")
        for check in found.files:
            if check.problem:
                log.error(
                    "stored bytes are wrong", extra={"path": check.path, "why": check.problem}
                )
        return found

    def _doubt(self, digest: str) -> None:
        """A reader got wrong bytes from the store: look at home, beside the answer to the reader.

        At most once in `DOUBT_EVERY_S` for an artifact, so that no reader can keep the disk busy.
        """
        now_s = self._clock.monotonic_s()
        recent = {d: s for d, s in self._doubted_s.items() if s + DOUBT_EVERY_S > now_s}
        self._doubted_s = recent
        if digest in recent:
            return
        recent[digest] = now_s

        async def look() -> None:
            try:
                await self.verify(digest)
            except ReadyplaneError as error:
                log.error("doubted bytes could not be read again", extra={"why": str(error)})

        task = asyncio.get_running_loop().create_task(look())
        self._verifying.add(task)
        task.add_done_callback(self._verifying.discard)

    # ------------------------------------------------------------------------------------ tags

    async def set_tag(
        self, name: str, digest: str, *, expected_digest: str = "", force: bool = False
    ) -> Tag:
        """Compare-and-set. Raises Conflict when another digest is found, NotFound, InvalidField."""
        catalog.check_tag_name(name)
        check_digest(digest)
        if expected_digest:
            check_digest(expected_digest, where="expected_digest")
        try:
            return await self._store.set_tag(
                name,
                digest,
                expected_digest=expected_digest,
                force=force,
                now_s=self._clock.wall_s(),
            )
        except Conflict:
            self._tally.count("conflicts", what="tag")
            raise

    async def remove_tag(self, name: str, *, expected_digest: str = "", force: bool = False) -> Tag:
        """Take a tag away by compare-and-set; its history stays. Raises Conflict, NotFound."""
        catalog.check_tag_name(name)
        if expected_digest:
            check_digest(expected_digest, where="expected_digest")
        try:
            return await self._store.remove_tag(
                name, expected_digest=expected_digest, force=force, now_s=self._clock.wall_s()
            )
        except Conflict:
            self._tally.count("conflicts", what="tag")
            raise

    async def list_tags(self, name: str = "") -> list[Tag]:
        """Current tags, or the history of one, newest first. Raises NotFound for an unknown one."""
        if not name:
            return await self._store.list_tags()
        history = await self._store.tag_history(catalog.check_tag_name(name))
        if not history:
            raise NotFound("tag", name, "list the tags there are")
        return history

    async def resolve(
        self, reference: str, *, kind: str = "weights", need: Mapping[str, str] | None = None
    ) -> Manifest:
        """By digest, tag or model name, in this order; of a model, the newest that meets the need.

        Raises:
            NotFound: nothing has that name.
            IdentityMismatch: every candidate differs from the need; the fields are named.
            InvalidField: reference, kind or a field of the need is wrong.
        """
        return await self._resolving.resolve(reference, kind=kind, need=need or {})

    async def resolve_need(
        self,
        reference: str,
        *,
        kind: str,
        need: Mapping[str, str],
        candidates_max: int = CANDIDATES_SHOWN_MAX,
    ) -> Resolution:
        """See `Resolving.resolve_need`."""
        return await self._resolving.resolve_need(
            reference, kind=kind, need=need, candidates_max=candidates_max
        )

    # ----------------------------------------------------------- what is said of a manifest later

    async def sign_manifest(self, digest: str, *, public_key: bytes, envelope: str) -> bool:
        """Store a signature that verifies; False when this key had signed it before.

        Raises:
            InvalidField: it is another digest's, or does not verify. NotFound: no such manifest.
            Refused: the manifest has as many signatures as are kept.
        """
        signature = check_signature(check_digest(digest), public_key, envelope, verify_ed25519)
        created = await self._store.put_signature(digest, signature, now_s=self._clock.wall_s())
        if created:
            self._tally.count("signatures")
            log.info("signed", extra={"digest": digest, "key": signature.key_id})
        return created

    async def record_origin(self, digest: str, origin: Mapping[str, str]) -> None:
        """Note beside it where an artifact's bytes came from. Raises InvalidField, NotFound."""
        check_digest(digest)
        if len(origin) > ORIGIN_FIELDS_MAX:
            raise InvalidField("origin", len(origin), f"give {ORIGIN_FIELDS_MAX} fields at most")
        for name, value in origin.items():
            for text in (name, value):
                if not 0 < len(text) <= ORIGIN_CHARS_MAX or not text.isprintable():
                    remedy = f"give 1 to {ORIGIN_CHARS_MAX} printable characters"
                    raise InvalidField(f"origin.{name[:40]}", text, remedy)
        await self._store.put_event(digest, "origin", origin, now_s=self._clock.wall_s())

    async def trail(self, digest: str) -> Trail:
        """What was said of a manifest since it was published. Raises InvalidField, NotFound."""
        await self.get_manifest(digest)
        return await self._store.trail(digest)

    async def hold_upload(
        self, upload_id: str, sha256: Sequence[str], *, release: bool = False
    ) -> float:
        """See `Collecting.hold_upload`; 0 where nothing is ever collected."""
        if self._collecting is None:
            return 0.0
        for name in sha256:
            check_digest(name, where="sha256")
        return await self._collecting.hold_upload(upload_id, sha256, release=release)

    async def retire(self, digest: str, *, reason: str = "") -> bool:
        """See `Collecting.retire`."""
        check_digest(digest)
        return await self._collection().retire(digest, reason=reason)

    async def collect(self, *, dry_run: bool = False) -> Collected:
        """See `Collecting.collect`."""
        return await self._collection().collect(dry_run=dry_run)

    def _collection(self) -> Collecting:
        if self._collecting is None:
            raise Unsupported("collection", "ask a registry that stores bytes")
        return self._collecting

    def _note_use(self, digest: str) -> None:
        if self._collecting is not None:
            self._collecting.note_use(digest)

    # ------------------------------------------------------------------- sources and transfers

    async def announce_source(self, source: Source) -> float:
        """See `Fetching.announce`."""
        return await self._fetching.announce(source)

    async def withdraw_source(self, source_id: str, *, reason: str = "") -> None:
        """See `Fetching.withdraw`."""
        await self._fetching.withdraw(source_id, reason=reason)

    async def sources_of(self, digest: str) -> list[LiveSource]:
        """See `Fetching.sources_of`."""
        return await self._fetching.sources_of(digest)

    async def bars(self) -> list[BarRecord]:
        """See `Fetching.bars`."""
        return await self._fetching.bars()

    async def plan_fetch(
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
        """See `Fetching.plan`."""
        self._note_use(digest)
        return await self._fetching.plan(
            digest,
            worker_id=worker_id,
            incarnation=incarnation,
            node=node,
            missing=missing,
            rack=rack,
            layout_digest=layout_digest,
        )

    async def place_start(
        self, digest: str, *, nodes: Sequence[StartNode], starts: int = 1, layout_digest: str = ""
    ) -> StartPlacement:
        """See `Fetching.place_start`."""
        return await self._fetching.place_start(
            digest, nodes=nodes, starts=starts, layout_digest=layout_digest
        )

    async def acquire_transfer(
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
        """See `Fetching.acquire`."""
        self._note_use(digest)
        return await self._fetching.acquire(
            source_id,
            digest,
            worker_id=worker_id,
            incarnation=incarnation,
            request_id=request_id,
            source_incarnation=source_incarnation,
            layout_digest=layout_digest,
            readers_seen=readers_seen,
        )

    async def release_transfer(
        self, transfer_id: str, *, transferred_bytes: int, elapsed_s: float, failure: str = ""
    ) -> bool:
        """See `Fetching.release`."""
        return await self._fetching.release(
            transfer_id,
            transferred_bytes=transferred_bytes,
            elapsed_s=elapsed_s,
            failure=failure,
        )

    async def counts(self) -> tuple[int, int]:
        """(live sources, readers' places taken) now, for the gauges."""
        return await self._live.count()


def _faults(checks: Sequence[FileCheck]) -> list[str]:
    return [f"{check.path}: {check.problem}" for check in checks if check.problem]


def _bounded(reasons: tuple[str, ...] | list[str]) -> list[str]:
    shown = list(reasons[:REASONS_MAX])
    return shown + (
        [f"and {len(reasons) - REASONS_MAX} more"] if len(reasons) > REASONS_MAX else []
    )


def _summary(record: ManifestRecord, tags: tuple[str, ...]) -> ManifestSummary:
    return ManifestSummary(
        digest=record.digest,
        kind=record.kind,
        model=record.model,
        size_bytes=record.size_bytes,
        file_count=record.file_count,
        tensor_count=record.tensor_count,
        created_s=record.created_s,
        tags=tags,
    )
