"""The bytes of compiled code between a node and the registry: fetched verified, published once.

Owns packing what an engine compiled, its manifest, and the upload. A key's tag is set by
compare-and-set: compiling twice gives different bytes under one key, so the first artifact that is
named is the one that everybody uses. Implements `compile_cache.Bytes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from mmap import ACCESS_READ, mmap
from pathlib import Path
from urllib.parse import urlsplit

from readyplane.core.compile_key import ABSENT, CompileKey
from readyplane.core.errors import (
    BytesMissing,
    Conflict,
    InvalidField,
    NotFound,
    Refused,
    Unavailable,
)
from readyplane.core.identity import (
    CHUNK_BYTES_DEFAULT,
    ArtifactKind,
    FileEntry,
    Manifest,
    chunk_hash,
)
from readyplane.kit.clock import Clock
from readyplane.ports import FetchPlan, Registry
from readyplane_agent.arena import Arena
from readyplane_agent.compile_archive import ARCHIVE, ARCHIVE_BYTES_MAX, INDEX, LAYOUT, Index, pack
from readyplane_agent.compile_cache import tag_of
from readyplane_agent.compile_store import CompileStore
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.loader import Loader
from readyplane_agent.reading import Reader
from readyplane_agent.trace import StartTrace

log = logging.getLogger("agent.compile")

PUBLISH_TRIES = 2

FETCH_LIMIT_S = 100.0
UPLOAD_LIMIT_S = 120.0
STAGING_BYTES = 32 * 2**20
BLOBS = "/v1/blobs/"


def upload_url(plan: FetchPlan, digest: str) -> str:
    """Where the registry takes bytes, as its own storage among the sources of an artifact tells.

    `http://HOST:PORT/v1/blobs/sha256`; empty when no such source is in the plan.
    """
    for ranked in plan.sources:
        url = ranked.source.url
        if not ranked.source.worker_id and url.endswith(BLOBS + digest):
            return url.removesuffix(digest) + "sha256"
    return ""


class CompileBytes:
    """`compile_cache.Bytes` over the loader and the registry's HTTP door.

    Args:
        store: the node's. registry, clock, reader, token: as for weights.
        upload: where the registry takes bytes (`upload_url`); empty: nowhere.
        vouch: raises Refused for what this worker's own trust policy does not let in.
    """

    def __init__(
        self,
        store: CompileStore,
        *,
        registry: Registry,
        clock: Clock,
        reader: Reader,
        upload: str,
        vouch: Callable[[Manifest], Awaitable[str]],
        token: str = "",
    ) -> None:
        self._store, self._registry, self._clock = store, registry, clock
        self._reader, self._upload, self._token = reader, upload, token
        self._vouch = vouch

    async def fetch(self, manifest: Manifest) -> dict[str, bytes]:
        """See `compile_cache.Bytes`."""
        await self._vouch(manifest)
        plan = await self._registry.plan_fetch(
            manifest.digest,
            worker_id=self._reader.worker_id,
            incarnation=self._reader.incarnation,
            node=self._reader.node,
        )
        arena = Arena(manifest)
        # Its own trace: what is read here are no weights, and the caller times it as a whole.
        trace = StartTrace(self._clock, process_start_s=self._clock.monotonic_s())
        loader = Loader(
            arena,
            registry=self._registry,
            clock=self._clock,
            reader=self._reader,
            trace=trace,
            staging_bytes=max(STAGING_BYTES, manifest.chunk_bytes),
            limit_s=FETCH_LIMIT_S,
            token=self._token,
        )
        try:
            await loader.run(plan.sources)
            return {entry.path: bytes(arena.view(entry.path)) for entry in manifest.files}
        finally:
            loader.stop()
            arena.close()

    async def publish(self, spec: EngineSpec, key: CompileKey, about: Manifest) -> tuple[str, str]:
        """See `compile_cache.Bytes`.

        Raises:
            InvalidField: there is nothing to publish. Unavailable: the registry or the disk is not
            there, or a file changed meanwhile. Refused: the registry does not want it.
        """
        if spec.compile_cache_dir is None or not spec.compile_cache_dir.is_dir():
            raise InvalidField(
                "compile cache", str(spec.compile_cache_dir), "let the engine fill it"
            )
        archive = spec.work_dir / ARCHIVE
        archive.unlink(missing_ok=True)
        index = await asyncio.to_thread(pack, spec.compile_cache_dir, archive, factors=key.factors)
        try:
            await asyncio.to_thread(self._install, archive, index, key)
            return await self._send(archive, index, key, about)
        finally:
            archive.unlink(missing_ok=True)

    def _install(self, archive: Path, index: Index, key: CompileKey) -> None:
        size = archive.stat().st_size
        if size > ARCHIVE_BYTES_MAX:
            raise InvalidField("compile cache", f"{size} B", f"stay below {ARCHIVE_BYTES_MAX}")
        with archive.open("rb") as file:
            packed = mmap(file.fileno(), 0, access=ACCESS_READ)
            try:
                self._store.install(packed, index, wanted=key.factors)
            finally:
                with contextlib.suppress(BufferError):  # an error still holds a view of it
                    packed.close()

    async def _send(
        self, archive: Path, index: Index, key: CompileKey, about: Manifest
    ) -> tuple[str, str]:
        known = await self.named(tag_of(key), ArtifactKind.COMPILE)
        if known:
            return "known", known
        table = archive.with_name(INDEX)
        table.write_bytes(index.document())
        manifest = await asyncio.to_thread(manifest_of, archive, table, key, about)
        return await self.offer(tag_of(key), manifest, {ARCHIVE: archive, INDEX: table})

    async def named(self, tag: str, kind: ArtifactKind) -> str:
        """Digest of what a tag points at and was not withdrawn; empty without."""
        try:
            return (await self._registry.resolve(tag, kind=str(kind))).digest
        except NotFound:
            return ""

    async def offer(
        self, tag: str, manifest: Manifest, paths: Mapping[str, Path]
    ) -> tuple[str, str]:
        """Upload, publish and name by compare-and-set: (`published`, `known` or `node_only`, digest).

        Raises:
            Unavailable: the registry is not there. Refused: it does not want the artifact.
        """
        if not self._upload:
            return "node_only", ""
        digest = await self._published(manifest, paths)
        try:
            await self._registry.set_tag(tag, digest)
        except Conflict as error:
            known = await self.named(tag, manifest.kind)
            if known:
                return "known", known
            # What it points at was withdrawn: ours takes its place.
            await self._registry.set_tag(tag, digest, expected_digest=str(error.found))
        return "published", digest

    async def _published(self, manifest: Manifest, paths: Mapping[str, Path]) -> str:
        """Upload and publish; what was stored before and had rotted is sent once more."""
        for attempt in range(1, PUBLISH_TRIES + 1):
            for entry in manifest.files:
                await asyncio.to_thread(put, self._upload, entry, paths[entry.path], self._token)
            try:
                digest, _ = await self._registry.publish_manifest(manifest.document())
            except BytesMissing as error:
                if attempt == PUBLISH_TRIES:
                    raise
                log.warning("%s: sent again", error)
            else:
                return digest
        raise AssertionError(PUBLISH_TRIES)


def manifest_of(archive: Path, index: Path, key: CompileKey, about: Manifest) -> Manifest:
    """The manifest of packed code. Blocking: it hashes the files."""
    factors = key.factors
    files = (file_entry(ARCHIVE, archive), file_entry(INDEX, index))
    return keyed_manifest(ArtifactKind.COMPILE, LAYOUT, files, factors, about)


def keyed_manifest(
    kind: ArtifactKind,
    layout: str,
    files: tuple[FileEntry, ...],
    factors: Mapping[str, str],
    about: Manifest,
) -> Manifest:
    """The manifest of an artifact that holds for one key only, about one model's weights."""
    capability = factors["capability"]
    return Manifest(
        kind=kind,
        model=about.model,
        files=files,
        quantisation=about.quantisation,
        layout=layout,
        loader_version=f"{factors['engine']}/{_version(factors['engine_version'])}",
        tp=about.tp,
        pp=about.pp,
        ep=about.ep,
        capability="cpu" if capability == ABSENT else capability,
        key=dict(factors),
    )


def _version(text: str) -> str:
    found = "".join(c if c.isalnum() or c in "._+-" else "-" for c in text.rpartition("=")[2])
    return found.strip("._+-") or "unversioned"


def file_entry(name: str, path: Path) -> FileEntry:
    """A manifest's line about a file. Blocking: it is hashed."""
    digest, chunks, size = hashlib.sha256(), [], 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES_DEFAULT):
            digest.update(piece)
            chunks.append(chunk_hash(piece))
            size += len(piece)
    return FileEntry(name, size, f"sha256:{digest.hexdigest()}", tuple(chunks), "other")


def put(url: str, entry: FileEntry, path: Path, token: str) -> None:
    """Send one file to the registry's byte store. Blocking.

    Raises:
        Unavailable: it does not answer. Refused: it does not take the file.
    """
    import http.client  # not part of a start (R6)

    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise Refused("upload of compiled code", [f"{url!r} is no http address"])
    connection = http.client.HTTPConnection(
        parts.hostname, parts.port or 80, timeout=UPLOAD_LIMIT_S
    )
    headers = {"Content-Length": str(entry.size_bytes)}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        with path.open("rb") as body:
            target = f"{parts.path}/{entry.sha256.removeprefix('sha256:')}"
            connection.request("PUT", target, body=body, headers=headers)
            answer = connection.getresponse()
            text = answer.read(1000).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(
            f"{parts.netloc} does not take bytes ({error})", "see the registry"
        ) from None
    finally:
        connection.close()
    if answer.status >= 500:
        raise Unavailable(f"{parts.netloc} answered {answer.status}: {text}", "see the registry")
    if answer.status >= 400:
        raise Refused("upload of compiled code", [f"{answer.status}: {text}"])
