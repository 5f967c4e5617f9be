"""Where manifests and tags are kept: the port, and its memory twin for tests and the simulator.

Owns the promises of the catalogue's store: a manifest never changes and never goes, what is said of
it later (signatures, origins, retirement) is only added, a tag moves by compare-and-set and keeps
its history. Handed to the service; `postgres` keeps the same promises,
and one contract suite holds both to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from readyplane.core.errors import Conflict, NotFound, Refused
from readyplane.core.identity import Manifest, parse
from readyplane.core.resolution import withdrawn_tag
from readyplane.core.trust import SIGNATURES_MAX, ManifestEvent, Signature, Trail
from readyplane.ports import Tag


@dataclass(frozen=True, slots=True)
class ManifestRecord:
    """One stored manifest: a line about it, and (when asked for) its canonical document.

    Attributes:
        sequence: place in the order of publication, 1 for the first; given by the store.
        created_s: wall clock of the registry that stored it, seconds since the epoch.
        document: canonical bytes whose sha256 is the digest; empty in lists.
    """

    digest: str
    kind: str
    model: str
    size_bytes: int
    file_count: int
    tensor_count: int
    created_s: float
    sequence: int = 0
    document: bytes = b""

    @property
    def manifest(self) -> Manifest:
        """The manifest itself."""
        return Manifest.from_document(parse(self.document, where="manifest"))


def record_of(manifest: Manifest, document: bytes, *, now_s: float) -> ManifestRecord:
    """The record of a manifest that is about to be stored."""
    return ManifestRecord(
        digest=manifest.digest,
        kind=str(manifest.kind),
        model=manifest.model,
        size_bytes=manifest.size_bytes,
        file_count=len(manifest.files),
        tensor_count=len(manifest.tensors),
        created_s=now_s,
        document=document,
    )


class CatalogStore(Protocol):
    """Manifests by digest, and tags with their history."""

    async def put_manifest(self, record: ManifestRecord) -> tuple[ManifestRecord, bool]:
        """Store it, or find it stored: (the record as stored, True when this call stored it).

        Of many identical calls exactly one gets True, and all get the same record (B113). One that
        was retired is restored: the same content is the same artifact.
        """
        ...

    async def put_signature(self, digest: str, signature: Signature, *, now_s: float) -> bool:
        """Store it; False when this key had signed it before.

        Raises:
            NotFound: no such manifest. Refused: it has `SIGNATURES_MAX` already.
        """
        ...

    async def put_event(
        self, digest: str, event: str, detail: Mapping[str, str], *, now_s: float
    ) -> bool:
        """Append an event; False when it says what the last one of its kind says.

        A manifest that a tag points at is not retired, but for the tag that says it is withdrawn;
        what is not retired is not restored.

        Raises:
            NotFound: no such manifest. Refused: a tag points at what is to be retired.
        """
        ...

    async def trail(self, digest: str) -> Trail:
        """Signatures by key, and events oldest first; empty for an unknown manifest."""
        ...

    async def get_manifest(self, digest: str) -> ManifestRecord | None:
        """The record with its document."""
        ...

    async def get_manifests(self, digests: Sequence[str]) -> dict[str, ManifestRecord]:
        """The records with their documents; those that are not known are left out."""
        ...

    async def list_manifests(
        self, *, model: str = "", kind: str = "", limit: int = 1000, before: int = 0
    ) -> list[ManifestRecord]:
        """Newest first, without documents and retired ones; `before` continues below a sequence."""
        ...

    async def set_tag(
        self, name: str, digest: str, *, expected_digest: str, force: bool, now_s: float
    ) -> Tag:
        """Point the tag at a stored digest, if it points where the caller believes.

        Empty `expected_digest` means that the tag must not exist yet. A tag that points there
        already is returned as it is.

        Raises:
            Conflict: the tag points elsewhere. NotFound: no such manifest. Refused: it is retired.
        """
        ...

    async def remove_tag(
        self, name: str, *, expected_digest: str, force: bool, now_s: float
    ) -> Tag:
        """Let the tag point nowhere, if it points where the caller believes; its history stays.

        The answer has an empty digest, and so has the history's newest line. A tag that points
        nowhere already is returned as it is; set again, its versions go on.

        Raises:
            Conflict: the tag points elsewhere. NotFound: there was never such a tag.
        """
        ...

    async def get_tag(self, name: str) -> Tag | None:
        """Where the tag points now; None when it never was or points nowhere."""
        ...

    async def list_tags(self) -> list[Tag]:
        """Every tag as it points now, the latest change first."""
        ...

    async def tag_history(self, name: str) -> list[Tag]:
        """Every place the tag has pointed at, newest first; an empty digest is nowhere."""
        ...

    async def tags_of(self, digests: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Names that point at each of these digests now, sorted; digests without are left out."""
        ...


def tag_conflict(name: str, expected_digest: str, found: str) -> Conflict:
    """The error of a writer that came second."""
    return Conflict(
        f"tag {name!r}",
        expected_digest or "no such tag",
        found or "no such tag",
        "read the tag again and repeat with what it points at now, or force it",
    )


def unknown_tag(name: str) -> NotFound:
    """The error for a tag that never was."""
    return NotFound("tag", name, "list the tags there are")


def holding(digest: str, tags: Sequence[str]) -> tuple[str, ...]:
    """Of the tags that point at a manifest, those that speak against retiring it."""
    return tuple(name for name in tags if name != withdrawn_tag(digest))


def unknown_manifest(digest: str) -> NotFound:
    """The error for a digest that was never published here."""
    return NotFound("manifest", digest, "publish it first, or list what there is")


def says_something(trail: Trail, event: str, detail: Mapping[str, str]) -> bool:
    """Whether an event is news beside what was said before."""
    if event == "origin":
        return bool(detail) and dict(trail.origin) != dict(detail)
    return trail.retired != (event == "retired")


def retired_manifest(what: str, digest: str) -> Refused:
    """The error for a name that is to point at what was retired."""
    return Refused(what, [f"{digest} is retired"], "publish its bytes again, which restores it")


def tagged_manifest(digest: str, tags: Sequence[str]) -> Refused:
    """The error for a retirement of what a name points at."""
    what = f"retirement of {digest}"
    return Refused(what, [f"tag {name} points at it" for name in tags[:5]], "move the tags first")


def too_many_signatures(digest: str) -> Refused:
    """The error for a signature too many."""
    reason = f"it has {SIGNATURES_MAX} signatures, the most that are kept"
    return Refused(f"signature of {digest}", [reason], "sign with a key that has signed it before")


class MemoryCatalog:
    """The twin of `PostgresCatalog`; each call runs without a break, so it is atomic."""

    def __init__(self) -> None:
        self._manifests: dict[str, ManifestRecord] = {}
        self._signatures: dict[str, dict[str, Signature]] = {}
        self._events: dict[str, list[ManifestEvent]] = {}
        self._history: dict[str, list[Tag]] = {}
        self._changes: list[str] = []

    async def put_manifest(self, record: ManifestRecord) -> tuple[ManifestRecord, bool]:
        """See `CatalogStore`."""
        held = self._manifests.get(record.digest)
        if held is not None:
            await self.put_event(record.digest, "restored", {}, now_s=record.created_s)
            return held, False
        stored = replace(record, sequence=len(self._manifests) + 1)
        self._manifests[record.digest] = stored
        return stored, True

    async def put_signature(self, digest: str, signature: Signature, *, now_s: float) -> bool:
        """See `CatalogStore`."""
        if digest not in self._manifests:
            raise unknown_manifest(digest)
        held = self._signatures.setdefault(digest, {})
        if signature.key_id in held:
            return False
        if len(held) >= SIGNATURES_MAX:
            raise too_many_signatures(digest)
        held[signature.key_id] = replace(signature, created_s=now_s)
        return True

    async def put_event(
        self, digest: str, event: str, detail: Mapping[str, str], *, now_s: float
    ) -> bool:
        """See `CatalogStore`."""
        if digest not in self._manifests:
            raise unknown_manifest(digest)
        trail = await self.trail(digest)
        tags = holding(digest, (await self.tags_of([digest])).get(digest, ()))
        if event == "retired" and tags:
            raise tagged_manifest(digest, tags)
        if not says_something(trail, event, detail):
            return False
        self._events.setdefault(digest, []).append(ManifestEvent(event, dict(detail), now_s))
        return True

    async def trail(self, digest: str) -> Trail:
        """See `CatalogStore`."""
        signed = self._signatures.get(digest, {})
        return Trail(
            tuple(signed[name] for name in sorted(signed)), tuple(self._events.get(digest, ()))
        )

    async def get_manifest(self, digest: str) -> ManifestRecord | None:
        """See `CatalogStore`."""
        return self._manifests.get(digest)

    async def get_manifests(self, digests: Sequence[str]) -> dict[str, ManifestRecord]:
        """See `CatalogStore`."""
        return {d: self._manifests[d] for d in digests if d in self._manifests}

    def retired(self, digest: str) -> bool:
        """True for a manifest that is hidden."""
        return Trail(events=tuple(self._events.get(digest, ()))).retired

    def records(self) -> list[ManifestRecord]:
        """Every manifest, retired ones as well; for the twin of what collects."""
        return list(self._manifests.values())

    def moves(self) -> dict[str, list[Tag]]:
        """Where each tag has pointed, oldest first; for the twin of what collects."""
        return self._history

    async def list_manifests(
        self, *, model: str = "", kind: str = "", limit: int = 1000, before: int = 0
    ) -> list[ManifestRecord]:
        """See `CatalogStore`."""
        found = [
            replace(record, document=b"")
            for record in reversed(self._manifests.values())
            if model in {"", record.model}
            and kind in {"", record.kind}
            and not self.retired(record.digest)
            and (not before or record.sequence < before)
        ]
        return found[:limit]

    async def set_tag(
        self, name: str, digest: str, *, expected_digest: str, force: bool, now_s: float
    ) -> Tag:
        """See `CatalogStore`."""
        if digest not in self._manifests:
            raise unknown_manifest(digest)
        history = self._history.get(name, [])
        found = history[-1].digest if history else ""
        if history and found == digest:
            return history[-1]
        if not force and found != expected_digest:
            raise tag_conflict(name, expected_digest, found)
        if self.retired(digest):
            raise retired_manifest(f"tag {name!r}", digest)
        tag = Tag(name, digest, len(history) + 1, now_s)
        self._history[name] = [*history, tag]
        self._changes = [*(n for n in self._changes if n != name), name]
        return tag

    async def remove_tag(
        self, name: str, *, expected_digest: str, force: bool, now_s: float
    ) -> Tag:
        """See `CatalogStore`."""
        history = self._history.get(name)
        if not history:
            raise unknown_tag(name)
        found = history[-1].digest
        if not found:
            return history[-1]
        if not force and found != expected_digest:
            raise tag_conflict(name, expected_digest, found)
        tag = Tag(name, "", len(history) + 1, now_s)
        self._history[name] = [*history, tag]
        self._changes = [n for n in self._changes if n != name]
        return tag

    async def get_tag(self, name: str) -> Tag | None:
        """See `CatalogStore`."""
        history = self._history.get(name)
        return history[-1] if history and history[-1].digest else None

    async def list_tags(self) -> list[Tag]:
        """See `CatalogStore`."""
        return [self._history[name][-1] for name in reversed(self._changes)]

    async def tag_history(self, name: str) -> list[Tag]:
        """See `CatalogStore`."""
        return list(reversed(self._history.get(name, [])))

    async def tags_of(self, digests: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """See `CatalogStore`."""
        wanted = set(digests)
        found: dict[str, list[str]] = {}
        for name, history in sorted(self._history.items()):
            if history[-1].digest in wanted:
                found.setdefault(history[-1].digest, []).append(name)
        return {digest: tuple(names) for digest, names in found.items()}
