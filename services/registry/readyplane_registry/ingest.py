"""A folder of model files as a published artifact: read, hash, upload, publish, tag.

Owns which files belong to an artifact and what is said of them; `safetensors` reads the headers,
the registry judges the manifest. Handed to the command line and to the demo, with bytes going
straight into a local store (`FileBlobs`) or over HTTP (`RemoteBlobs`).
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from readyplane.core.errors import InvalidField, Unavailable
from readyplane.core.identity import (
    CHUNK_BYTES_DEFAULT,
    ArtifactKind,
    Canary,
    FileEntry,
    Manifest,
    TensorEntry,
    parse,
)
from readyplane.kit.auth import token_headers
from readyplane.ports import Registry, Tag
from readyplane.wire import error_from_document
from readyplane_registry.blob_files import hash_file, tensors_in

PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.json",
    "chat_template.jinja",
}
CONFIG_BYTES_MAX = 16 * 1024 * 1024
UPLOAD_BYTES = 1024 * 1024
UPLOADS_MAX = 2
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a publication is: `phase` is hash or upload, bytes are of all files together."""

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
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    canary: Canary | Callable[[Manifest], Canary] | None = None
    quantisation: str = "none"
    layout: str = "safetensors/1"
    loader_version: str = "1"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    capability: str = ""
    chunk_bytes: int = CHUNK_BYTES_DEFAULT


@dataclass(frozen=True, slots=True)
class Published:
    """The artifact as it now is in the registry; `skipped` are files that were left out."""

    digest: str
    created: bool
    manifest: Manifest
    uploaded_bytes: int
    tag: Tag | None = None
    skipped: tuple[str, ...] = ()


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
    follow_links: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Published:
    """Publish a folder of safetensors files, and point a tag at it when one is given.

    Bytes first, then the manifest, then the tag: what is broken off leaves no name behind, and is
    taken up again by the same call. A tag is moved from where it points when the call begins.

    Raises:
        InvalidField: a file, header or field is wrong; it is named.
        Refused: the registry would not take it; the reasons are listed.
        Conflict: somebody moved the tag meanwhile.
    """
    before = ""
    if tag:
        before = next((t.digest for t in await registry.list_tags() if t.name == tag), "")
    manifest, paths, skipped = await asyncio.to_thread(
        build_manifest,
        directory,
        model=model,
        facts=facts or Facts(),
        follow_links=follow_links,
        progress=progress,
    )
    uploaded = await _upload(manifest, paths, sink, progress)
    digest, created = await registry.publish_manifest(manifest.document())
    pointed = await registry.set_tag(tag, digest, expected_digest=before) if tag else None
    return Published(digest, created, manifest, uploaded, pointed, skipped)


async def _upload(
    manifest: Manifest,
    paths: Mapping[str, Path],
    sink: ByteSink,
    progress: Callable[[Progress], None] | None,
) -> int:
    wanted = {f.sha256: f for f in manifest.files if not await sink.has(f.sha256, f.size_bytes)}
    total = sum(entry.size_bytes for entry in wanted.values())
    done = 0
    gate = asyncio.Semaphore(UPLOADS_MAX)

    async def bring(entry: FileEntry) -> None:
        def moved(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(Progress("upload", entry.path, done, total))

        async with gate:
            try:
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
    facts = facts or Facts()
    found, skipped = _scan(directory, follow_links=follow_links)
    total = sum(size for _path, size in found.values())
    entries: list[FileEntry] = []
    tensors: list[TensorEntry] = []
    done = 0
    for name, (path, _size) in sorted(found.items()):

        def read(count: int, name: str = name) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(Progress("hash", name, done, total))

        entry, inside = _read_file(name, path, facts.chunk_bytes, follow_links, read)
        entries.append(entry)
        tensors.extend(inside)
    paths = {name: path for name, (path, _size) in found.items()}
    _check_tensors(directory, tensors, paths)
    document = {
        "schema": "readyplane/manifest/1",
        "kind": str(ArtifactKind.WEIGHTS),
        "model": model,
        "files": [_entry(entry) for entry in entries],
        "tensors": [_entry(tensor) for tensor in tensors],
        "chunk_bytes": facts.chunk_bytes,
        "quantisation": facts.quantisation,
        "layout": facts.layout,
        "loader_version": facts.loader_version,
        "parallel": {"tp": facts.tp, "pp": facts.pp, "ep": facts.ep},
        "capability": facts.capability,
        "config": {**_model_facts(paths.get("config.json")), **facts.config},
    }
    manifest = Manifest.from_document(document)
    canary = facts.canary(manifest) if callable(facts.canary) else facts.canary
    if canary is not None:
        manifest = Manifest.from_document({**document, "canary": _entry(canary)})
    return manifest, paths, skipped


def _entry(value: Any) -> dict[str, Any]:
    names = type(value).__slots__
    found = {name: getattr(value, name) for name in names}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}


def _scan(
    directory: Path, *, follow_links: bool
) -> tuple[dict[str, tuple[Path, int]], tuple[str, ...]]:
    """Every file of the folder by its relative name; hidden ones are left out and told."""
    if not directory.is_dir():
        raise InvalidField("directory", str(directory), "give a folder of safetensors files")
    found: dict[str, tuple[Path, int]] = {}
    skipped: list[str] = []
    for folder, folders, names in os.walk(directory, followlinks=follow_links):
        here = Path(folder)
        for name in sorted(folders):
            path = here / name
            if name.startswith("."):
                skipped.append(path.relative_to(directory).as_posix() + "/")
            elif path.is_symlink() and not follow_links:
                _refuse_link(path)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = here / name
            relative = path.relative_to(directory).as_posix()
            if name.startswith("."):
                skipped.append(relative)
                continue
            if path.is_symlink() and not follow_links:
                _refuse_link(path)
            facts = path.stat()
            if not stat.S_ISREG(facts.st_mode):
                raise InvalidField(str(path), stat.filemode(facts.st_mode), "give regular files")
            if path.suffix in PICKLES:
                remedy = "loading a pickle runs code; convert it to safetensors, or move it away"
                raise InvalidField(str(path), path.suffix, remedy)
            found[relative] = (path, facts.st_size)
    if not any(name.endswith(".safetensors") for name in found):
        raise InvalidField("directory", str(directory), "give a folder with .safetensors files")
    return found, tuple(skipped)


def _refuse_link(path: Path) -> None:
    remedy = "a link may point anywhere: copy the file, or allow links (follow_links)"
    raise InvalidField(str(path), "symbolic link", remedy)


def _purpose(name: str) -> str:
    last = name.rpartition("/")[2]
    if name.endswith(".safetensors"):
        return "weights"
    if last in TOKENIZER_FILES:
        return "tokenizer"
    return "config" if last.endswith(".json") else "other"


def _read_file(
    name: str,
    path: Path,
    chunk_bytes: int,
    follow_links: bool,
    progress: Callable[[int], None],
) -> tuple[FileEntry, tuple[TensorEntry, ...]]:
    flags = os.O_RDONLY | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise InvalidField(str(path), error.strerror, "give files that can be read") from error
    try:
        size = os.fstat(descriptor).st_size
        inside: tuple[TensorEntry, ...] = ()
        if name.endswith(".safetensors"):
            inside = tensors_in(descriptor, size_bytes=size, file=name)
        size, sha256, chunks = hash_file(descriptor, chunk_bytes=chunk_bytes, progress=progress)
    finally:
        os.close(descriptor)
    return FileEntry(name, size, sha256, chunks, _purpose(name)), inside


def _check_tensors(directory: Path, tensors: list[TensorEntry], paths: Mapping[str, Path]) -> None:
    """Each tensor lies in one file, and an index says the same as the files do."""
    where: dict[str, str] = {}
    for tensor in tensors:
        other = where.setdefault(tensor.name, tensor.file)
        if other != tensor.file:
            raise InvalidField(
                f"{tensor.file}: tensor {tensor.name!r}", other, "keep each tensor in one file"
            )
    if INDEX not in paths:
        return
    listed = _json_file(paths[INDEX]).get("weight_map")
    if not isinstance(listed, dict):
        raise InvalidField(f"{INDEX}: weight_map", listed, "map each tensor to its file")
    for name in sorted(set(listed) | set(where)):
        if listed.get(name) != where.get(name):
            raise InvalidField(
                f"{INDEX}: tensor {name!r}",
                listed.get(name),
                f"the files of {directory.name} say {where.get(name)}; download them again",
            )


def _json_file(path: Path) -> dict[str, Any]:
    if path.stat().st_size > CONFIG_BYTES_MAX:
        raise InvalidField(str(path), path.stat().st_size, f"stay below {CONFIG_BYTES_MAX} bytes")
    found = parse(path.read_bytes(), where=path.name)
    if not isinstance(found, dict):
        raise InvalidField(path.name, found, "hold a JSON object")
    return found


def _model_facts(config: Path | None) -> dict[str, Any]:
    """What a model's own config.json tells that router, engine and canary need."""
    if config is None:
        return {}
    outer = _json_file(config)
    inner = outer.get("text_config")
    told = {**outer, **inner} if isinstance(inner, dict) else outer
    names = {
        "max_model_len": ("max_model_len", "max_position_embeddings", "n_positions"),
        "vocab_size": ("vocab_size",),
        "eos_token_id": ("eos_token_id",),
    }
    return {
        name: value
        for name, sources in names.items()
        if (value := next((told[s] for s in sources if told.get(s) is not None), None)) is not None
    }


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

        limits = aiohttp.ClientTimeout(total=None, connect=10.0, sock_read=120.0)
        url = self._url + sha256.removeprefix("sha256:")
        try:
            async with (
                aiohttp.ClientSession(timeout=limits, headers=self._headers) as session,
                session.request(method, url, data=data) as answer,
            ):
                yield answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(
                f"registry at {self._url} does not answer ({type(error).__name__})",
                "check its address and that it runs",
            ) from error
