"""A folder of model files as a published artifact: read, hash, upload, publish, sign, tag.

Owns the order of steps, and that a publication that was broken off is taken up where it ended.
`checkpoint` says what the folder holds, `safetensors` reads the headers, the registry judges the
manifest. Handed to the command line and to the demo, with bytes going straight into a local store
(`FileBlobs`) or over HTTP (`RemoteBlobs`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from readyplane.core.errors import (
    BytesMissing,
    Conflict,
    InvalidField,
    ReadyplaneError,
    Unavailable,
)
from readyplane.core.identity import (
    CHUNK_BYTES_DEFAULT,
    ArtifactKind,
    Canary,
    FileEntry,
    Manifest,
    Scales,
    TensorEntry,
)
from readyplane.kit.auth import token_headers
from readyplane.ports import Registry, Tag
from readyplane.wire import error_from_document
from readyplane_registry.blob_files import hash_file, tensors_in
from readyplane_registry.catalog import read_document
from readyplane_registry.checkpoint import (
    CONFIG,
    Checkpoint,
    Origin,
    check_facts,
    check_index,
    check_told,
    json_file,
    model_facts,
    purpose_of,
    read_checkpoint,
)
from readyplane_registry.quantised import quantisation_of, scales_of

UPLOAD_BYTES = 1024 * 1024
UPLOADS_MAX = 2
SILENT_S_MAX = 120.0
"""A registry says before that what its byte store does not do (`STORE_SILENT_S_MAX` there)."""

HOLD_NAMES_MAX = 5_000


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a publication is; bytes are of all files together.

    Attributes:
        phase: `hash`, `ask` (which files the byte store holds already; `done_bytes` are those it has
            answered for), `upload` (of what it does not hold) or `check` (the registry looks at its
            stored bytes before it takes the name; nothing is known to be done).
        file: that is read, asked for or sent; empty for all.
    """

    phase: str
    file: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What a manifest says beside its files; see `readyplane.core.identity.Manifest`.

    Attributes:
        config: adds to, and wins over, what the folder's config.json tells.
        canary: the known answer, or a function that works it out from the manifest without one.
        quantisation: empty: what config.json says, `none` when it says nothing.
        scales: None: what config.json and the tensors' names say.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    canary: Canary | Callable[[Manifest], Canary] | None = None
    quantisation: str = ""
    scales: Scales | None = None
    layout: str = "safetensors/1"
    loader_version: str = "1"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    capability: str = ""
    chunk_bytes: int = CHUNK_BYTES_DEFAULT


@dataclass(frozen=True, slots=True)
class Published:
    """The artifact as it now is in the registry.

    Attributes:
        uploaded_bytes: that were not there yet.
        skipped: files that were left out.
        origin: where the bytes came from, as recorded beside the manifest.
        signed_by: id of the key that signed it now, or before; empty: none was given.
    """

    digest: str
    created: bool
    manifest: Manifest
    uploaded_bytes: int
    tag: Tag | None = None
    skipped: tuple[str, ...] = ()
    origin: Origin = field(default_factory=Origin)
    signed_by: str = ""


class Signer(Protocol):
    """Who signs: `readyplane.kit.signing.SigningKey`."""

    public_key: bytes
    key_id: str

    def envelope(self, digest: str) -> str:
        """A signature of a manifest's digest, as DSSE envelope."""
        ...


class ByteSink(Protocol):
    """Where bytes go: `FileBlobs` or `RemoteBlobs`."""

    async def has(self, sha256: str, size_bytes: int) -> bool:
        """True when the blob is there in its full length."""
        ...

    async def put_file(
        self, sha256: str, path: Path, *, progress: Callable[[int], None] | None = None
    ) -> bool:
        """Bring a file in. Raises InvalidField when its content is not what the digest says."""
        ...


async def publish_directory(
    directory: Path,
    *,
    model: str,
    registry: Registry,
    sink: ByteSink,
    facts: Facts | None = None,
    tag: str = "",
    revision: str = "",
    signer: Signer | None = None,
    follow_links: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Published:
    """Publish a folder of safetensors files, and point a tag at it when one is given.

    Bytes first, then the manifest, its origin and signature, then the tag: what is broken off
    leaves no name behind, and is taken up again by the same call. A tag is moved from where it
    points when the call begins. A mutable revision is resolved once, before anything is read.

    Raises:
        InvalidField: a file, header or field is wrong; it is named.
        IdentityMismatch: the folder mixes revisions, or holds other bytes than the hub promised.
        Refused: the registry would not take it; the reasons are listed. When it found stored bytes
            wrong, they were uploaded again, once.
        Conflict: somebody moved the tag meanwhile.
    """
    before = ""
    if tag:
        before = next((t.digest for t in await registry.list_tags() if t.name == tag), "")
    checkpoint = await asyncio.to_thread(
        read_checkpoint, directory, revision=revision, follow_links=follow_links
    )
    manifest = await asyncio.to_thread(
        manifest_of, checkpoint, model=model, facts=facts or Facts(), progress=progress
    )
    await asyncio.to_thread(read_document, manifest.document())  # not after all bytes were sent
    paths = {name: path for name, (path, _size) in checkpoint.files.items()}
    async with _held(registry, manifest):
        uploaded = await _upload(manifest, paths, sink, progress)
        _tell(progress, Progress("check", "", 0, manifest.size_bytes))
        try:
            digest, created = await registry.publish_manifest(manifest.document())
        except BytesMissing:  # what was stored before had rotted, and was taken out just now
            uploaded += await _upload(manifest, paths, sink, progress)
            _tell(progress, Progress("check", "", 0, manifest.size_bytes))
            digest, created = await registry.publish_manifest(manifest.document())
    if checkpoint.origin.fields():
        await registry.record_origin(digest, checkpoint.origin.fields())
    if signer is not None:
        envelope = signer.envelope(digest)
        await registry.sign_manifest(digest, public_key=signer.public_key, envelope=envelope)
    pointed = await _pointed(registry, tag, digest, before) if tag else None
    return Published(
        digest=digest,
        created=created,
        manifest=manifest,
        uploaded_bytes=uploaded,
        tag=pointed,
        skipped=checkpoint.skipped,
        origin=checkpoint.origin,
        signed_by="" if signer is None else signer.key_id,
    )


async def _pointed(registry: Registry, tag: str, digest: str, before: str) -> Tag:
    """Move the tag; who comes second hears that only the tag is missing."""
    try:
        return await registry.set_tag(tag, digest, expected_digest=before)
    except Conflict as error:
        raise Conflict(
            f"tag {tag}",
            error.expected,
            error.found,
            f"somebody moved it meanwhile; the artifact is published as {digest}, only the tag "
            "does not point at it: look which one it should be, and set it",
        ) from error


@asynccontextmanager
async def _held(registry: Registry, manifest: Manifest) -> AsyncIterator[None]:
    """The artifact's bytes, there or on their way, are not collected meanwhile (B119).

    Held before it is asked what is stored: what is stored then stays. When the hold cannot be
    renewed the publication goes on: the registry checks the bytes again before it stores the name.
    """
    names = sorted({entry.sha256 for entry in manifest.files})
    upload_id = f"{manifest.digest}/{os.urandom(8).hex()}"

    async def hold() -> float:
        ttl_s = 0.0
        for begin in range(0, len(names), HOLD_NAMES_MAX):
            ttl_s = await registry.hold_upload(upload_id, names[begin : begin + HOLD_NAMES_MAX])
        return ttl_s

    async def renew(ttl_s: float) -> None:
        while ttl_s > 0:
            await asyncio.sleep(ttl_s / 3)
            with contextlib.suppress(ReadyplaneError):
                await registry.hold_upload(upload_id, ())

    renewing = asyncio.create_task(renew(await hold()))
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        with contextlib.suppress(ReadyplaneError):  # it ends by itself
            await registry.hold_upload(upload_id, (), release=True)


async def _upload(
    manifest: Manifest,
    paths: Mapping[str, Path],
    sink: ByteSink,
    progress: Callable[[Progress], None] | None,
) -> int:
    wanted = await _wanted(manifest, sink, progress)
    total = sum(entry.size_bytes for entry in wanted.values())
    done = 0
    gate = asyncio.Semaphore(UPLOADS_MAX)

    async def bring(entry: FileEntry) -> None:
        def moved(count: int) -> None:
            nonlocal done
            done += count
            _tell(progress, Progress("upload", entry.path, done, total))

        async with gate:
            try:
                try:
                    await sink.put_file(entry.sha256, paths[entry.path], progress=moved)
                except BytesMissing:  # a part of it stood in its place, and is gone now
                    await sink.put_file(entry.sha256, paths[entry.path], progress=moved)
            except InvalidField as error:
                remedy = "the file changed while it was published; publish again"
                raise InvalidField(str(paths[entry.path]), entry.sha256, remedy) from error

    tasks = [asyncio.create_task(bring(entry)) for entry in wanted.values()]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return total


async def _wanted(
    manifest: Manifest, sink: ByteSink, progress: Callable[[Progress], None] | None
) -> dict[str, FileEntry]:
    """Files that the sink does not hold, by digest; told of before each question is asked."""
    wanted: dict[str, FileEntry] = {}
    answered = 0
    for entry in manifest.files:
        _tell(progress, Progress("ask", entry.path, answered, manifest.size_bytes))
        if not await sink.has(entry.sha256, entry.size_bytes):
            wanted[entry.sha256] = entry
        answered += entry.size_bytes
    return wanted


def _tell(progress: Callable[[Progress], None] | None, step: Progress) -> None:
    if progress is not None:
        progress(step)


def build_manifest(
    directory: Path,
    *,
    model: str,
    facts: Facts | None = None,
    follow_links: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Manifest, dict[str, Path], tuple[str, ...]]:
    """(manifest, where each of its files lies, files left out): every byte read once. Blocking.

    Raises:
        InvalidField: names the file (and tensor) that is wrong.
    """
    checkpoint = read_checkpoint(directory, follow_links=follow_links)
    manifest = manifest_of(checkpoint, model=model, facts=facts or Facts(), progress=progress)
    paths = {name: path for name, (path, _size) in checkpoint.files.items()}
    return manifest, paths, checkpoint.skipped


def manifest_of(
    checkpoint: Checkpoint,
    *,
    model: str,
    facts: Facts,
    progress: Callable[[Progress], None] | None = None,
) -> Manifest:
    """The manifest of a checkpoint: all headers first, then every byte, read once. Blocking.

    Raises:
        InvalidField, IdentityMismatch: names the file (and tensor) that is wrong.
    """
    total = sum(size for _path, size in checkpoint.files.values())
    tensors: list[TensorEntry] = []
    for name, (path, _size) in sorted(checkpoint.files.items()):
        if name.endswith(".safetensors"):
            with _opened(path) as descriptor:
                size = os.fstat(descriptor).st_size
                tensors.extend(tensors_in(descriptor, size_bytes=size, file=name))
    check_index(checkpoint, tensors)
    paths = {name: path for name, (path, _size) in checkpoint.files.items()}
    config = json_file(paths[CONFIG], CONFIG) if CONFIG in paths else {}
    check_facts(config, facts.config)
    quantisation = facts.quantisation or quantisation_of(config)
    scales = facts.scales or scales_of(quantisation, config, tensors)
    entries: list[FileEntry] = []
    done = 0
    for name, path in sorted(paths.items()):

        def read(count: int, name: str = name) -> None:
            nonlocal done
            done += count
            _tell(progress, Progress("hash", name, done, total))

        with _opened(path) as descriptor:
            size, sha256, chunks = hash_file(
                descriptor, chunk_bytes=facts.chunk_bytes, progress=read
            )
        entries.append(FileEntry(name, size, sha256, chunks, purpose_of(name)))
    check_told(checkpoint, entries)
    manifest = Manifest(
        kind=ArtifactKind.WEIGHTS,
        model=model,
        files=tuple(entries),
        tensors=tuple(tensors),
        chunk_bytes=facts.chunk_bytes,
        quantisation=quantisation,
        layout=facts.layout,
        loader_version=facts.loader_version,
        tp=facts.tp,
        pp=facts.pp,
        ep=facts.ep,
        capability=facts.capability,
        config={**model_facts(config), **facts.config},
        scales=scales,
    )
    manifest = Manifest.from_document(manifest.document())
    canary = facts.canary(manifest) if callable(facts.canary) else facts.canary
    if canary is None:
        return manifest
    told = {name: list(tokens) for name, tokens in asdict(canary).items()}
    known = dict(manifest.config)
    if "canary_ends" not in known and canary.golden_token_ids[-1] in _eos_of(known):
        known["canary_ends"] = True
    return Manifest.from_document({**manifest.document(), "config": known, "canary": told})


def _eos_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end an answer; models have one or a list of them."""
    told = config.get("eos_token_id")
    return tuple(told) if isinstance(told, list | tuple) else () if told is None else (told,)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise InvalidField(str(path), error.strerror, "give files that can be read") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class RemoteBlobs:
    """A registry's byte store over HTTP.

    Args:
        http: `http://host:port` of the registry.
        token: shared token, empty for none.
    """

    def __init__(self, http: str, *, token: str = "") -> None:
        self._url = http.rstrip("/") + "/v1/blobs/sha256/"
        self._headers = token_headers(token)

    async def has(self, sha256: str, size_bytes: int) -> bool:
        """See `ByteSink`."""
        async with self._asking("HEAD", sha256, None) as answer:
            length = int(answer.headers.get("content-length", -1))
            return bool(answer.status == 200 and length == size_bytes)

    async def put_file(
        self, sha256: str, path: Path, *, progress: Callable[[int], None] | None = None
    ) -> bool:
        """See `ByteSink`."""

        async def pieces() -> AsyncIterator[bytes]:
            with path.open("rb") as source:
                while piece := await asyncio.to_thread(source.read, UPLOAD_BYTES):
                    yield piece
                    if progress is not None:
                        progress(len(piece))

        async with self._asking("PUT", sha256, pieces()) as answer:
            body = await answer.json(content_type=None)
            if answer.status >= 400:
                raise error_from_document(body)
            return bool(answer.status == 201)

    @asynccontextmanager
    async def _asking(self, method: str, sha256: str, data: Any) -> AsyncIterator[Any]:
        import aiohttp

        limits = aiohttp.ClientTimeout(total=None, connect=10.0, sock_read=SILENT_S_MAX)
        url = self._url + sha256.removeprefix("sha256:")
        try:
            async with (
                aiohttp.ClientSession(timeout=limits, headers=self._headers) as session,
                session.request(method, url, data=data) as answer,
            ):
                yield answer
        except aiohttp.SocketTimeoutError as error:
            raise Unavailable(
                f"registry at {self._url} has been silent for {SILENT_S_MAX:.0f} s over {sha256}",
                "look whether its byte store hangs (--blob-store), and whether it runs itself",
            ) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(
                f"registry at {self._url} does not answer ({type(error).__name__})",
                "check its address and that it runs",
            ) from error
