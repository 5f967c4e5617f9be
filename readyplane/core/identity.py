"""Identity is content: canonical documents, their digests, and the differing fields of two.

Owns the canonical form, the manifest of an artifact and the KV format of a worker. A digest is
`sha256:` followed by 64 hex digits, over the canonical form; nothing is truncated, lower-cased or
dropped. Paths in a manifest are relative POSIX paths, so that a digest does not depend on where
something is installed.
"""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import pairwise
from typing import Any

import xxhash

from readyplane.core.errors import InvalidField

CHUNK_BYTES_DEFAULT = 8 * 1024 * 1024
CHUNK_BYTES_MAX = 256 * 1024 * 1024
DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


class ArtifactKind(StrEnum):
    """The four kinds of artifact (R10, R12, R16)."""

    WEIGHTS = "weights"
    COMPILE = "compile"
    ENGINE = "engine"
    KV_PROFILE = "kv_profile"


def canonical(value: object, *, where: str = "document") -> bytes:
    """Canonical UTF-8 form of a JSON value: equal meaning gives equal bytes.

    Keys are sorted by code point; text is NFC; integers are exact; a float with an integral value
    is written as that integer (1.0 and 1 are one number), other floats as their shortest repr.

    Raises:
        InvalidField: NaN, infinity, a non-text key, or a type that JSON does not have.
    """
    return _canonical(value, where).encode()


def _canonical(value: object, where: str) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(unicodedata.normalize("NFC", value), ensure_ascii=False)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidField(where, value, "use a finite number")
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, Mapping):
        pairs: dict[str, str] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidField(where, key, "use text as key")
            name = unicodedata.normalize("NFC", key)
            if name in pairs:
                raise InvalidField(where, key, "remove the duplicate key")
            pairs[name] = _canonical(item, f"{where}.{name}")
        body = ",".join(
            f"{json.dumps(name, ensure_ascii=False)}:{pairs[name]}" for name in sorted(pairs)
        )
        return "{" + body + "}"
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return (
            "[" + ",".join(_canonical(item, f"{where}[{i}]") for i, item in enumerate(value)) + "]"
        )
    raise InvalidField(where, value, "use null, true, false, a number, text, a list or an object")


def parse(data: bytes | str, *, where: str = "document") -> Any:
    """Parse JSON strictly: duplicate keys, NaN and infinities are refused.

    Raises:
        InvalidField: not JSON, or JSON with a duplicate key or a non-finite number.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, item in items:
            if key in out:
                raise InvalidField(f"{where}.{key}", item, "remove the duplicate key")
            out[key] = item
        return out

    def constant(text: str) -> float:
        raise InvalidField(where, text, "use a finite number")

    try:
        return json.loads(data, object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise InvalidField(where, str(data[:60]), f"send valid JSON ({error})") from error


def digest_of(value: object) -> str:
    """`sha256:<64 hex>` over the canonical form."""
    return "sha256:" + hashlib.sha256(canonical(value)).hexdigest()


def digest_of_bytes(data: bytes | bytearray | memoryview) -> str:
    """`sha256:<64 hex>` over raw bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def check_digest(digest: str, *, where: str = "digest") -> str:
    """Return the digest if it is well formed.

    Raises:
        InvalidField: anything but `sha256:` and 64 lower-case hex digits.
    """
    body = digest.removeprefix("sha256:")
    if not digest.startswith("sha256:") or len(body) != 64 or set(body) - set("0123456789abcdef"):
        raise InvalidField(where, digest, "write sha256: followed by 64 lower-case hex digits")
    return digest


def chunk_hash(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128 of one chunk as 32 hex digits: the check of the hot path."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of an artifact.

    Attributes:
        path: relative POSIX path inside the artifact.
        size_bytes: exact length.
        sha256: `sha256:<64 hex>` of the whole content.
        chunks: xxh3-128 of each chunk of `Manifest.chunk_bytes` (the last may be shorter).
        purpose: `weights`, `config`, `tokenizer` or `other`.
    """

    path: str
    size_bytes: int
    sha256: str
    chunks: tuple[str, ...]
    purpose: str = "weights"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: where its bytes lie and which ranks own it (empty = every rank)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset_bytes: int
    size_bytes: int
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Canary:
    """A question with a known answer, recorded when the artifact was published."""

    prompt_token_ids: tuple[int, ...]
    golden_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """An immutable description of an artifact; its digest is the artifact's identity (R10.1).

    Attributes:
        kind: what it is.
        model: model name that requests use.
        files: every file, sorted by path.
        tensors: every tensor, sorted by name (weights only).
        chunk_bytes: chunk size of the chunk tables.
        quantisation: format name, `none` for plain weights.
        layout: weight layout/packing and its version, for example `safetensors/1`.
        loader_version: loader/runtime version that the layout needs.
        tp, pp, ep: tensor-, pipeline-, expert-parallel sizes the artifact is placed for.
        capability: GPU capability where it matters, else empty.
        config: model facts the router and engine need (`max_model_len`, `vocab_size`,
            `eos_token_id`, ...).
        canary: the known answer (weights only).
        key: the key of a compile artifact or KV profile, field by field (R12.1, R16.1).
    """

    kind: ArtifactKind
    model: str
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...] = ()
    chunk_bytes: int = CHUNK_BYTES_DEFAULT
    quantisation: str = "none"
    layout: str = "safetensors/1"
    loader_version: str = "1"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    capability: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    canary: Canary | None = None
    key: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Identity: `sha256:<64 hex>` of the canonical document."""
        return digest_of(self.document())

    @property
    def size_bytes(self) -> int:
        """Total bytes of all files."""
        return sum(entry.size_bytes for entry in self.files)

    @property
    def tokenizer_digest(self) -> str:
        """Digest over the tokenizer files, or empty when the artifact has none."""
        found = [[f.path, f.sha256] for f in self.files if f.purpose == "tokenizer"]
        return digest_of(found) if found else ""

    def document(self) -> dict[str, Any]:
        """The JSON document that is stored, signed and hashed."""
        return {
            "schema": "readyplane/manifest/1",
            "kind": str(self.kind),
            "model": self.model,
            "files": [_plain(entry) for entry in self.files],
            "tensors": [_plain(entry) for entry in self.tensors],
            "chunk_bytes": self.chunk_bytes,
            "quantisation": self.quantisation,
            "layout": self.layout,
            "loader_version": self.loader_version,
            "parallel": {"tp": self.tp, "pp": self.pp, "ep": self.ep},
            "capability": self.capability,
            "config": dict(self.config),
            "canary": _plain(self.canary) if self.canary else None,
            "key": dict(self.key),
        }

    @classmethod
    def from_document(cls, document: object) -> Manifest:
        """Build and validate.

        Raises:
            InvalidField: names the field, the value and what to write instead.
        """
        return _read_manifest(document)


def _plain(entry: Any) -> dict[str, Any]:
    return {
        f.name: list(v) if isinstance(v := getattr(entry, f.name), tuple) else v
        for f in fields(entry)
    }


def _read_manifest(document: object) -> Manifest:
    where = "manifest"
    doc = _object(document, where)
    known = set(Manifest(ArtifactKind.WEIGHTS, "", ()).document())
    for name in sorted(set(doc) - known):
        raise InvalidField(f"{where}.{name}", doc[name], "remove the unknown field")
    for name in ("schema", "kind", "model", "files"):
        if name not in doc:
            raise InvalidField(f"{where}.{name}", None, "give this field")
    if doc["schema"] != "readyplane/manifest/1":
        raise InvalidField(f"{where}.schema", doc["schema"], "write readyplane/manifest/1")
    try:
        kind = ArtifactKind(doc["kind"])
    except ValueError:
        raise InvalidField(
            f"{where}.kind", doc["kind"], "write one of " + ", ".join(ArtifactKind)
        ) from None
    model = _text(doc["model"], f"{where}.model")
    chunk_bytes = _whole(
        doc.get("chunk_bytes", CHUNK_BYTES_DEFAULT), f"{where}.chunk_bytes", 4096, CHUNK_BYTES_MAX
    )
    files = tuple(
        _read_file(item, f"{where}.files[{i}]", chunk_bytes)
        for i, item in enumerate(_list(doc["files"], f"{where}.files"))
    )
    if not files:
        raise InvalidField(f"{where}.files", [], "list at least one file")
    _distinct([f.path for f in files], f"{where}.files[].path")
    by_path = {f.path: f for f in files}
    tensors = tuple(
        _read_tensor(item, f"{where}.tensors[{i}]", by_path)
        for i, item in enumerate(_list(doc.get("tensors", []), f"{where}.tensors"))
    )
    _distinct([t.name for t in tensors], f"{where}.tensors[].name")
    _no_overlap(tensors, where)
    if kind is ArtifactKind.WEIGHTS and not tensors:
        raise InvalidField(f"{where}.tensors", [], "list every tensor of the weights")
    parallel = _object(doc.get("parallel", {}), f"{where}.parallel")
    sizes = {
        name: _whole(parallel.get(name, 1), f"{where}.parallel.{name}", 1, 4096)
        for name in ("tp", "pp", "ep")
    }
    canary = doc.get("canary")
    return Manifest(
        kind=kind,
        model=model,
        files=tuple(sorted(files, key=lambda f: f.path)),
        tensors=tuple(sorted(tensors, key=lambda t: t.name)),
        chunk_bytes=chunk_bytes,
        quantisation=_text(doc.get("quantisation", "none"), f"{where}.quantisation"),
        layout=_text(doc.get("layout", "safetensors/1"), f"{where}.layout"),
        loader_version=_text(doc.get("loader_version", "1"), f"{where}.loader_version"),
        tp=sizes["tp"],
        pp=sizes["pp"],
        ep=sizes["ep"],
        capability=str(doc.get("capability", "")),
        config=_object(doc.get("config", {}), f"{where}.config"),
        canary=None if canary is None else _read_canary(canary, f"{where}.canary"),
        key={
            name: _text(value, f"{where}.key.{name}")
            for name, value in _object(doc.get("key", {}), f"{where}.key").items()
        },
    )


def _read_file(item: object, where: str, chunk_bytes: int) -> FileEntry:
    doc = _object(item, where)
    path = _text(doc.get("path"), f"{where}.path")
    parts = path.split("/")
    if path.startswith("/") or "\\" in path or "\0" in path or set(parts) & {"", ".", ".."}:
        raise InvalidField(
            f"{where}.path", path, "use a relative POSIX path without empty, '.' or '..' parts"
        )
    size = _whole(doc.get("size_bytes"), f"{where}.size_bytes", 0, 2**50)
    chunks = tuple(str(c) for c in _list(doc.get("chunks"), f"{where}.chunks"))
    wanted = -(-size // chunk_bytes)
    if len(chunks) != wanted:
        raise InvalidField(
            f"{where}.chunks", len(chunks), f"give {wanted} chunk hashes for {size} bytes"
        )
    for i, chunk in enumerate(chunks):
        if len(chunk) != 32 or set(chunk) - set("0123456789abcdef"):
            raise InvalidField(f"{where}.chunks[{i}]", chunk, "write 32 lower-case hex digits")
    return FileEntry(
        path=path,
        size_bytes=size,
        sha256=check_digest(str(doc.get("sha256")), where=f"{where}.sha256"),
        chunks=chunks,
        purpose=_text(doc.get("purpose", "weights"), f"{where}.purpose"),
    )


def _read_tensor(item: object, where: str, files: Mapping[str, FileEntry]) -> TensorEntry:
    doc = _object(item, where)
    name = _text(doc.get("name"), f"{where}.name")
    dtype = _text(doc.get("dtype"), f"{where}.dtype")
    if dtype not in DTYPE_BYTES:
        raise InvalidField(f"{where}.dtype", dtype, "write one of " + ", ".join(DTYPE_BYTES))
    shape = tuple(
        _whole(n, f"{where}.shape", 0, 2**40) for n in _list(doc.get("shape"), f"{where}.shape")
    )
    file = _text(doc.get("file"), f"{where}.file")
    if file not in files:
        raise InvalidField(f"{where}.file", file, "name a file of this manifest")
    offset = _whole(doc.get("offset_bytes"), f"{where}.offset_bytes", 0, 2**50)
    size = _whole(doc.get("size_bytes"), f"{where}.size_bytes", 0, 2**50)
    wanted = math.prod(shape) * DTYPE_BYTES[dtype]
    if size != wanted:
        raise InvalidField(
            f"{where}.size_bytes", size, f"write {wanted} for shape {list(shape)} of {dtype}"
        )
    if offset + size > files[file].size_bytes:
        raise InvalidField(
            f"{where}.offset_bytes",
            offset,
            f"keep the tensor inside {file} ({files[file].size_bytes} bytes)",
        )
    ranks = tuple(
        _whole(n, f"{where}.ranks", 0, 65535) for n in _list(doc.get("ranks", []), f"{where}.ranks")
    )
    return TensorEntry(name, dtype, shape, file, offset, size, ranks)


def _read_canary(item: object, where: str) -> Canary:
    doc = _object(item, where)

    def tokens(name: str) -> tuple[int, ...]:
        found = _list(doc.get(name), f"{where}.{name}")
        if not found:
            raise InvalidField(f"{where}.{name}", found, "list at least one token id")
        return tuple(_whole(t, f"{where}.{name}", 0, 2**31) for t in found)

    return Canary(tokens("prompt_token_ids"), tokens("golden_token_ids"))


def _no_overlap(tensors: Sequence[TensorEntry], where: str) -> None:
    ordered = sorted((t for t in tensors if t.size_bytes), key=lambda t: (t.file, t.offset_bytes))
    for before, after in pairwise(ordered):
        if before.file == after.file and before.offset_bytes + before.size_bytes > (
            after.offset_bytes
        ):
            raise InvalidField(
                f"{where}.tensors",
                f"{before.name} and {after.name}",
                f"give tensors of {before.file} ranges that do not overlap",
            )


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidField(where, value, "use an object")
    return dict(value)


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise InvalidField(where, value, "use a list")
    return list(value)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidField(where, value, "use a non-empty text")
    return value


def _whole(value: object, where: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidField(where, value, f"use a whole number from {low} to {high}")
    return value


def _distinct(names: Sequence[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidField(where, name, "list each name once")
        seen.add(name)


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field in which two identities differ."""

    field: str
    left: str
    right: str

    def __str__(self) -> str:
        """`field: left != right`."""
        return f"{self.field}: {self.left} != {self.right}"


@dataclass(frozen=True, slots=True)
class KvFormat:
    """What two workers must share before KV may pass between them (R20.2).

    Attributes:
        model_digest: digest of the weights manifest both serve.
        dtype: KV element type, for example `fp8_e4m3`.
        block_size: tokens per KV block as the connector sees it.
        layout: KV layout name (`HND`, `NHD`, ...).
        tp: tensor-parallel size (unequal sizes need a converter, which is not assumed).
        positions: position scheme, for example `rope/500000`.
        connector: KV connector and its protocol version, for example `nixl/1`.
        hash_scheme: block-hash scheme of the prefix cache events.
        engine_version: engine name and version whose KV the two exchange.
    """

    model_digest: str
    dtype: str = "fp8_e4m3"
    block_size: int = 16
    layout: str = "HND"
    tp: int = 1
    positions: str = "rope"
    connector: str = "nixl/1"
    hash_scheme: str = "xxh3-1337"
    engine_version: str = "modelled/1"


def compatible(left: KvFormat, right: KvFormat) -> tuple[FieldDifference, ...]:
    """The differing fields of two KV formats; empty means that they may be paired."""
    return tuple(
        FieldDifference(f.name, str(a), str(b))
        for f in fields(KvFormat)
        if (a := getattr(left, f.name)) != (b := getattr(right, f.name))
    )
