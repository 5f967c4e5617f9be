"""What may be published, what it is called, and which artifact meets a need. Pure.

Owns the rules that a manifest must keep beyond its shape (`publishable`), the names of tags, and
the choice of one artifact among candidates with the differing fields named. Handed to the service,
which does the storing. Shapes and digests are those of `readyplane.core.identity`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from readyplane.core.compile_key import NOTHING, key_digest
from readyplane.core.errors import InvalidField, Refused, UnknownField
from readyplane.core.identity import (
    ArtifactKind,
    FieldDifference,
    FileEntry,
    Manifest,
    canonical,
    check_digest,
    parse,
)
from readyplane.core.resolution import CANDIDATES_SHOWN_MAX, Candidate, Resolution
from readyplane.core.text import check_text
from readyplane_registry.kinds import kind_faults

MANIFEST_BYTES_MAX = 64 * 1024 * 1024
NAME_CHARS_MAX = 200
PURPOSES = ("weights", "config", "tokenizer", "other")
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
KEY_DIGEST = "key_digest"
NEED_FIELDS = (
    "kind",
    "model",
    "quantisation",
    "layout",
    "loader_version",
    "capability",
    "chunk_bytes",
    "tokenizer_digest",
    KEY_DIGEST,
    "parallel.tp",
    "parallel.pp",
    "parallel.ep",
)


def read_document(document: object) -> tuple[Manifest, bytes]:
    """A manifest and the canonical bytes that are stored for it.

    The manifest is read back from its canonical form, so that what is stored, served and hashed
    is one thing: two names that only differ in their Unicode form are found here.

    Raises:
        InvalidField: a field is wrong; it is named with its value.
        Refused: the fields are right, but such an artifact could never be served.
    """
    data = canonical(Manifest.from_document(document).document(), where="manifest")
    if len(data) > MANIFEST_BYTES_MAX:
        raise InvalidField("manifest", f"{len(data)} bytes", f"stay below {MANIFEST_BYTES_MAX}")
    manifest = Manifest.from_document(parse(data, where="manifest"))
    reasons = publishable(manifest)
    if reasons:
        raise Refused(f"manifest of {manifest.model!r}", reasons, "correct it and publish again")
    return manifest, data


def parse_document(text: str | bytes) -> object:
    """JSON text of a manifest as a value, strictly.

    Raises:
        InvalidField: too long, not JSON, duplicate keys, a number that is not finite, or half a
            character.
    """
    if len(text) > MANIFEST_BYTES_MAX:
        raise InvalidField("manifest", f"{len(text)} bytes", f"stay below {MANIFEST_BYTES_MAX}")
    document: object = parse(text, where="manifest")
    check_text(document)
    return document


def object_document(text: str | bytes) -> dict[str, Any]:
    """JSON text as an object, strictly. Raises InvalidField as `parse_document` does."""
    document = parse_document(text)
    if not isinstance(document, dict):
        raise InvalidField("manifest", document, "send a JSON object")
    return document


def publishable(manifest: Manifest) -> tuple[str, ...]:
    """Every reason why this artifact could never be served; empty when it may be published."""
    return (*_name_faults(manifest), *_file_faults(manifest.files), *kind_faults(manifest))


def _name_faults(manifest: Manifest) -> Iterable[str]:
    name = manifest.model
    if len(name) > NAME_CHARS_MAX or not name.isprintable() or name != name.strip():
        yield f"model: {name[:40]!r} must be printable, without outer blanks, {NAME_CHARS_MAX} long"
    if is_digest(name):
        yield f"model: {name!r} looks like a digest; give it a name"


def _file_faults(files: Sequence[FileEntry]) -> Iterable[str]:
    for entry in files:
        if entry.purpose not in PURPOSES:
            yield f"files[{entry.path}].purpose: {entry.purpose!r} is none of {', '.join(PURPOSES)}"
        if len(entry.path) > 1024:
            yield f"files[{entry.path[:40]}…].path: longer than 1024 characters"
    paths = {entry.path for entry in files}
    for entry in files:
        parts = entry.path.split("/")
        above = ["/".join(parts[:n]) for n in range(1, len(parts))]
        yield from (
            f"files[{entry.path}].path: {folder} is a file and a folder"
            for folder in above
            if folder in paths
        )


def is_digest(reference: str) -> bool:
    """True for a text that claims to be a digest, well formed or not."""
    return reference.startswith("sha256:")


def check_reference(reference: str) -> str:
    """A digest, tag or model name that may be asked for.

    Raises:
        InvalidField: empty, too long, not printable, or a malformed digest.
    """
    if is_digest(reference):
        return check_digest(reference, where="reference")
    if not reference or len(reference) > NAME_CHARS_MAX or not reference.isprintable():
        raise InvalidField("reference", reference, "give a digest, a tag or a model name")
    return reference


def check_tag_name(name: str) -> str:
    """Return the name if a tag may have it.

    Raises:
        InvalidField: not 1 to 128 of letters, digits and `._:/-`, beginning with a letter or
            digit; or like a digest; or with an empty or `..` part.
    """
    parts = name.split("/")
    if not TAG.fullmatch(name) or is_digest(name) or set(parts) & {"", ".", ".."}:
        raise InvalidField(
            "tag",
            name,
            "use 1 to 128 letters, digits and . _ : / -, beginning with a letter or digit",
        )
    return name


def check_kind(kind: str, *, optional: bool = False) -> str:
    """Return the kind if there is such a one (or, when `optional`, none was given).

    Raises:
        InvalidField: any other text.
    """
    if kind in set(ArtifactKind) or (optional and not kind):
        return kind
    raise InvalidField("kind", kind, "write one of " + ", ".join(ArtifactKind))


def need_value(manifest: Manifest, name: str) -> str | None:
    """What a manifest says for one field of a need, as text; None when it says nothing.

    Raises:
        UnknownField: no manifest has such a field.
    """
    first, _, rest = name.partition(".")
    if first in {"config", "key"} and rest:
        found: Any = (manifest.config if first == "config" else manifest.key).get(rest)
        if found is None or isinstance(found, str):
            return found
        return canonical(found, where=name).decode()
    if name in {"tp", "pp", "ep"}:
        name = f"parallel.{name}"
    if name not in NEED_FIELDS:
        remedy = f"use {', '.join(NEED_FIELDS)}, config.NAME or key.NAME"
        raise UnknownField(f"need.{name}", name, remedy)
    if name == KEY_DIGEST:
        return key_digest(manifest.key)
    return str(getattr(manifest, name.rpartition(".")[2]))


def differing(manifest: Manifest, need: Mapping[str, str]) -> tuple[FieldDifference, ...]:
    """The fields of the need that the manifest does not meet: left is needed, right is found.

    A need for a `key_digest` is one for the whole key: fields that only the manifest has differ
    as well, and are named instead of the two digests.
    """
    found = {name: need_value(manifest, name) for name in need}
    fields = [
        FieldDifference(name, wanted, NOTHING if found[name] is None else str(found[name]))
        for name, wanted in sorted(need.items())
        if found[name] != wanted
    ]
    if any(f.field == KEY_DIGEST for f in fields):
        more = [
            FieldDifference(f"key.{name}", NOTHING, value)
            for name, value in sorted(manifest.key.items())
            if f"key.{name}" not in need
        ]
        named = [f for f in fields if f.field != KEY_DIGEST] + more
        fields = named if any(f.field.startswith("key.") for f in named) else fields
    return tuple(fields)


def choose(
    candidates: Sequence[Manifest],
    *,
    need: Mapping[str, str],
    shown_max: int = CANDIDATES_SHOWN_MAX,
) -> Resolution:
    """The first candidate that meets every field of the need; candidates come newest first."""
    misses: list[tuple[int, int, Candidate]] = []
    for place, manifest in enumerate(candidates):
        fields = differing(manifest, need)
        if not fields:
            return Resolution(manifest)
        misses.append((len(fields), place, Candidate(manifest.digest, fields)))
    misses.sort(key=lambda miss: miss[:2])
    shown = tuple(candidate for _count, _place, candidate in misses[:shown_max])
    return Resolution(None, shown, len(misses) - len(shown))
