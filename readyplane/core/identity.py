"""Identity is content: canonical documents, their digests, and the differing fields of two.

Owns the manifest of an artifact and the KV format of a worker. A digest is `sha256:` followed by 64
hex digits, over the canonical form (`canonical`); nothing is truncated, lower-cased or dropped.
Paths in a manifest are relative POSIX paths, so that a digest does not depend on where something is
installed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import pairwise
from typing import Any

import xxhash

from readyplane.core.canonical import (
    canonical,
    check_digest,
    control_in,
    digest_of,
    digest_of_bytes,
    nfc,
    parse,
)
from readyplane.core.errors import InvalidField

__all__ = [
    "NO_CONNECTOR",
    "ArtifactKind",
    "Canary",
    "FieldDifference",
    "FileEntry",
    "KvFormat",
    "Manifest",
    "Scales",
    "TensorEntry",
    "canonical",
    "check_digest",
    "chunk_hash",
    "compatible",
    "digest_of",
    "digest_of_bytes",
    "parse",
]
SCHEMA, SCHEMA_SCALED = "readyplane/manifest/1", "readyplane/manifest/2"
GRANULARITIES = ("tensor", "channel", "token", "group", "block")
ACTIVATIONS = ("none", "static", "dynamic")
CHUNK_BYTES_MIN = 4096
CHUNK_BYTES_DEFAULT = 8 * 1024 * 1024
CHUNK_BYTES_MAX = 256 * 1024 * 1024
SHAPE_DIMENSIONS_MAX = 32
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
        ranks: which ranks need it (empty = every rank); for what has no tensors, as an engine has.
    """

    path: str
    size_bytes: int
    sha256: str
    chunks: tuple[str, ...]
    purpose: str = "weights"
    ranks: tuple[int, ...] = ()


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


CANARY_REMEDY = (
    "record one with `readyplane artifact canary --engine-url URL --model NAME --out FILE` and publish "
    "it again with `--canary FILE`"
)
"""What to do about an artifact without a known answer."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A question with a known answer, recorded when the artifact was published."""

    prompt_token_ids: tuple[int, ...]
    golden_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scales:
    """How stored values become real ones: real = stored * scale (R10.1).

    Attributes:
        granularity: what one scale is for: `tensor`, `channel`, `token`, `group` or `block`.
        dtype: of the scales, as a safetensors name.
        group: elements that one scale covers: (128,) of a group, (128, 128) of a block, else ().
        activations: whether activations are quantised too: `none`, `static` or `dynamic`.
        tensors: names of the tensors that are scales, sorted; empty where the format carries them
            inside its own tensors.
    """

    granularity: str
    dtype: str
    group: tuple[int, ...] = ()
    activations: str = "none"
    tensors: tuple[str, ...] = ()


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
        scales: of quantised weights or a quantised engine, else None.
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
    scales: Scales | None = None
    _digest: str = field(default="", init=False, repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Identity: `sha256:<64 hex>` of the canonical document; worked out once."""
        if not self._digest:
            object.__setattr__(self, "_digest", digest_of(self.document()))
        return self._digest

    @property
    def size_bytes(self) -> int:
        """Total bytes of all files."""
        return sum(entry.size_bytes for entry in self.files)

    @property
    def tokenizer_digest(self) -> str:
        """Digest over the tokenizer files, or empty when the artifact has none."""
        found = [[f.path, f.sha256] for f in self.files if f.purpose == "tokenizer"]
        return digest_of(found) if found else ""

    @property
    def world(self) -> int:
        """Ranks that the artifact is placed for."""
        return self.tp * self.pp * self.ep

    @property
    def schema(self) -> str:
        """The oldest schema that can say it: what came later never changes an older identity."""
        later = self.scales is not None or any(entry.ranks for entry in self.files)
        return SCHEMA_SCALED if later else SCHEMA

    def document(self) -> dict[str, Any]:
        """The JSON document that is stored, signed and hashed."""
        scaled = self.schema == SCHEMA_SCALED
        files = [_plain(entry) for entry in self.files]
        if not scaled:
            for entry in files:
                del entry["ranks"]
        return {
            "schema": self.schema,
            "kind": str(self.kind),
            "model": self.model,
            "files": files,
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
            **({"scales": _plain(self.scales) if self.scales else None} if scaled else {}),
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
    _known(doc, (*Manifest(ArtifactKind.WEIGHTS, "", ()).document(), "scales"), where)
    for name in ("schema", "kind", "model", "files"):
        if name not in doc:
            raise InvalidField(f"{where}.{name}", None, "give this field")
    if doc["schema"] not in (SCHEMA, SCHEMA_SCALED):
        remedy = f"write {SCHEMA}, or {SCHEMA_SCALED} with scales or ranks of files"
        raise InvalidField(f"{where}.schema", doc["schema"], remedy)
    try:
        kind = ArtifactKind(doc["kind"])
    except ValueError:
        raise InvalidField(
            f"{where}.kind", doc["kind"], "write one of " + ", ".join(ArtifactKind)
        ) from None
    model = _text(doc["model"], f"{where}.model")
    chunk_bytes = _whole(
        doc.get("chunk_bytes", CHUNK_BYTES_DEFAULT),
        f"{where}.chunk_bytes",
        CHUNK_BYTES_MIN,
        CHUNK_BYTES_MAX,
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
    _known(parallel, ("tp", "pp", "ep"), f"{where}.parallel")
    sizes = {
        name: _whole(parallel.get(name, 1), f"{where}.parallel.{name}", 1, 4096)
        for name in ("tp", "pp", "ep")
    }
    canary, scales = doc.get("canary"), doc.get("scales")
    manifest = Manifest(
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
        capability=_text(doc.get("capability", ""), f"{where}.capability", empty=True),
        config=_read_config(doc.get("config", {}), f"{where}.config"),
        canary=None if canary is None else _read_canary(canary, f"{where}.canary"),
        key={
            _text(name, f"{where}.key"): _text(value, f"{where}.key.{name}")
            for name, value in _object(doc.get("key", {}), f"{where}.key").items()
        },
        scales=None if scales is None else _read_scales(scales, f"{where}.scales", tensors),
    )
    if manifest.schema != doc["schema"]:  # one meaning, one digest
        remedy = f"write {manifest.schema}: {SCHEMA_SCALED} is for scales and ranks of files"
        raise InvalidField(f"{where}.schema", doc["schema"], remedy)
    return manifest


def _read_file(item: object, where: str, chunk_bytes: int) -> FileEntry:
    doc = _object(item, where)
    _known(doc, FileEntry.__slots__, where)
    path = _text(doc.get("path"), f"{where}.path")
    parts = path.split("/")
    if path.startswith("/") or "\\" in path or "\0" in path or set(parts) & {"", ".", ".."}:
        raise InvalidField(
            f"{where}.path", path, "use a relative POSIX path without empty, '.' or '..' parts"
        )
    if control := control_in(path):
        raise InvalidField(f"{where}.path", path, f"leave the character {control} out")
    size = _whole(doc.get("size_bytes"), f"{where}.size_bytes", 0, 2**50)
    chunks = _list(doc.get("chunks"), f"{where}.chunks")
    wanted = -(-size // chunk_bytes)
    if len(chunks) != wanted:
        raise InvalidField(
            f"{where}.chunks", len(chunks), f"give {wanted} chunk hashes for {size} bytes"
        )
    for i, chunk in enumerate(chunks):
        if not isinstance(chunk, str) or len(chunk) != 32 or set(chunk) - set("0123456789abcdef"):
            raise InvalidField(f"{where}.chunks[{i}]", chunk, "write 32 lower-case hex digits")
    return FileEntry(
        path=path,
        size_bytes=size,
        sha256=check_digest(str(doc.get("sha256")), where=f"{where}.sha256"),
        chunks=tuple(chunks),
        purpose=_text(doc.get("purpose", "weights"), f"{where}.purpose"),
        ranks=_ranks(doc.get("ranks", []), f"{where}.ranks"),
    )


def _read_tensor(item: object, where: str, files: Mapping[str, FileEntry]) -> TensorEntry:
    doc = _object(item, where)
    _known(doc, TensorEntry.__slots__, where)
    name = _text(doc.get("name"), f"{where}.name")
    dtype = _dtype(doc.get("dtype"), f"{where}.dtype")
    shape = tuple(
        _whole(n, f"{where}.shape", 0, 2**40) for n in _list(doc.get("shape"), f"{where}.shape")
    )
    file = _text(doc.get("file"), f"{where}.file")
    if file not in files:
        raise InvalidField(f"{where}.file", file, "name a file of this manifest")
    offset = _whole(doc.get("offset_bytes"), f"{where}.offset_bytes", 0, 2**50)
    size = _whole(doc.get("size_bytes"), f"{where}.size_bytes", 0, 2**50)
    if len(shape) > SHAPE_DIMENSIONS_MAX:
        remedy = f"use at most {SHAPE_DIMENSIONS_MAX} numbers"
        raise InvalidField(f"{where}.shape", len(shape), remedy)
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
    ranks = _ranks(doc.get("ranks", []), f"{where}.ranks")
    return TensorEntry(name, dtype, shape, file, offset, size, ranks)


def _read_scales(item: object, where: str, tensors: Sequence[TensorEntry]) -> Scales:
    doc = _object(item, where)
    _known(doc, Scales.__slots__, where)
    granularity = _choice(doc.get("granularity"), f"{where}.granularity", GRANULARITIES)
    group = tuple(
        _whole(n, f"{where}.group", 1, 2**20) for n in _list(doc.get("group", []), f"{where}.group")
    )
    wanted = {"group": 1, "block": 2}.get(granularity, 0)
    if len(group) != wanted:
        remedy = f"give {wanted} numbers of elements for granularity {granularity}"
        raise InvalidField(f"{where}.group", list(group), remedy)
    names = [
        _text(name, f"{where}.tensors")
        for name in _list(doc.get("tensors", []), f"{where}.tensors")
    ]
    _distinct(names, f"{where}.tensors[]")
    known = {tensor.name for tensor in tensors}
    for name in names:
        if name not in known:
            raise InvalidField(f"{where}.tensors", name, "name tensors of this manifest")
    return Scales(
        granularity=granularity,
        dtype=_dtype(doc.get("dtype"), f"{where}.dtype"),
        group=group,
        activations=_choice(doc.get("activations", "none"), f"{where}.activations", ACTIVATIONS),
        tensors=tuple(sorted(names)),
    )


def _read_canary(item: object, where: str) -> Canary:
    doc = _object(item, where)
    _known(doc, Canary.__slots__, where)

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


def _text(value: object, where: str, *, empty: bool = False) -> str:
    """Text in form NFC: what is sorted and compared here is what the canonical form holds."""
    if not isinstance(value, str) or not (value or empty):
        raise InvalidField(where, value, "use text" if empty else "use a non-empty text")
    return nfc(_storable(value, where))


def _storable(text: str, where: str) -> str:
    """Text that every store can hold: some end a text at U+0000, some refuse it."""
    if "\0" in text:
        raise InvalidField(where, text, "leave the character U+0000 out")
    return text


def _read_config(value: object, where: str) -> dict[str, Any]:
    """Any JSON object; its texts are looked at wherever they stand."""
    doc = _object(value, where)
    left: list[tuple[str, Any]] = [(where, doc)]
    while left:
        at, item = left.pop()
        if isinstance(item, str):
            _storable(item, at)
        elif isinstance(item, Mapping):
            for name in item:
                _storable(str(name), f"{at}.{ascii(name)[1:-1]}")
            left.extend((f"{at}.{name}", inner) for name, inner in item.items())
        elif isinstance(item, list | tuple):
            left.extend((f"{at}[{i}]", inner) for i, inner in enumerate(item))
    return doc


def _choice(value: object, where: str, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise InvalidField(where, value, "write one of " + ", ".join(choices))
    return value


def _dtype(value: object, where: str) -> str:
    return _choice(value, where, tuple(DTYPE_BYTES))


def _ranks(value: object, where: str) -> tuple[int, ...]:
    return tuple(_whole(n, where, 0, 65535) for n in _list(value, where))


def _known(doc: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in sorted(set(doc) - set(names), key=str):
        raise InvalidField(f"{where}.{name}", doc[name], "remove the unknown field")


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


NO_CONNECTOR = frozenset({"", "none"})
"""`KvFormat.connector` of an engine that neither gives nor takes KV."""


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
