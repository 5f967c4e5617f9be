"""What keeps bytes from being collected, and the two steps of taking them away: port and memory twin.

Owns the promises of collection (B119, B120, B124): bytes that a manifest names, that an upload
holds, or that were needed a moment ago are never marked; what is marked stays `evicting` until its
bytes are really gone; whoever comes to need marked bytes again takes the mark away, or finds them
gone and brings them anew. Handed to `collecting`; `postgres_keeping` keeps the same promises, and
one contract suite holds both to them.

The order that makes it safe: an uploader holds first and asks what is stored afterwards. A mark is
set only while nobody adds a reference, and bytes are deleted only under their mark, which a holder
has to take away first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from readyplane.core.errors import InvalidField, ReadyplaneError
from readyplane.kit.clock import Clock
from readyplane_registry.retention import ManifestFacts
from readyplane_registry.store import MemoryCatalog

HELD_MAX = 200_000
"""Most blobs that one upload holds."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """Bytes that are being taken away, and why they are still here."""

    sha256: str
    size_bytes: int
    attempts: int = 0
    last_error: str = ""


Delete = Callable[[str], Awaitable[int]]
"""Deletes a blob and returns the bytes that it occupied; 0 when it was gone."""


class KeepingStore(Protocol):
    """Holds of uploads, uses of manifests, and marks of what is being evicted."""

    async def hold(self, upload_id: str, sha256: Sequence[str], *, ttl_s: float) -> None:
        """Hold these, and all that the upload holds already, for `ttl_s`; marks on them go.

        Waits for a deletion that is under way. Raises InvalidField over `HELD_MAX`.
        """
        ...

    async def release(self, upload_id: str) -> None:
        """End the upload's hold; unknown ones are ended already."""
        ...

    async def note_uses(self, digests: Sequence[str], *, now_s: float) -> None:
        """A worker needs these manifests now."""
        ...

    async def facts(self) -> list[ManifestFacts]:
        """What is known of every manifest that is not retired, oldest first."""
        ...

    async def mark(
        self, stored: Mapping[str, int], *, now_s: float, grace_s: float
    ) -> tuple[str, ...]:
        """Mark those that nothing keeps as evicting, and say which; sizes by sha256.

        A manifest keeps its bytes unless it was retired over `grace_s` ago and not used since.
        """
        ...

    async def unkept(
        self, stored: Sequence[str], *, now_s: float, grace_s: float
    ) -> tuple[str, ...]:
        """Those that `mark` would mark now, sorted."""
        ...

    async def evicting(self, *, limit: int = 10_000) -> list[Eviction]:
        """What is marked, oldest first."""
        ...

    async def evict(self, sha256: str, delete: Delete) -> int | None:
        """Delete under the mark, and confirm; the bytes freed, None when somebody holds it again.

        When the deletion fails the mark stays, with the error, and the error is raised.
        """
        ...


class MemoryKeeping:
    """The twin of `PostgresKeeping`.

    Args:
        catalog: whose manifests name the bytes.
        clock: judges when a hold ends.
    """

    def __init__(self, catalog: MemoryCatalog, clock: Clock) -> None:
        self._catalog, self._clock = catalog, clock
        self._holds: dict[str, tuple[set[str], float]] = {}
        self._uses: dict[str, float] = {}
        self._marks: dict[str, Eviction] = {}
        self._deleting: dict[str, object] = {}

    async def hold(self, upload_id: str, sha256: Sequence[str], *, ttl_s: float) -> None:
        """See `KeepingStore`."""
        held = self._holds.get(upload_id, (set(), 0.0))[0] | set(sha256)
        if len(held) > HELD_MAX:
            raise held_too_much(upload_id, len(held))
        self._holds[upload_id] = (held, self._clock.monotonic_s() + ttl_s)
        while any(name in self._deleting for name in sha256):
            await self._clock.sleep(0.01)
        for name in sha256:
            self._marks.pop(name, None)

    async def release(self, upload_id: str) -> None:
        """See `KeepingStore`."""
        self._holds.pop(upload_id, None)

    async def note_uses(self, digests: Sequence[str], *, now_s: float) -> None:
        """See `KeepingStore`."""
        for digest in digests:
            self._uses[digest] = max(now_s, self._uses.get(digest, now_s))

    async def facts(self) -> list[ManifestFacts]:
        """See `KeepingStore`."""
        left: dict[str, float] = {}
        tags: dict[str, list[str]] = {}
        for name, history in sorted(self._catalog.moves().items()):
            tags.setdefault(history[-1].digest, []).append(name)
            for before, after in pairwise(history):
                left[before.digest] = max(after.created_s, left.get(before.digest, 0.0))
        return [
            ManifestFacts(
                digest=record.digest,
                model=record.model,
                kind=record.kind,
                sequence=record.sequence,
                created_s=record.created_s,
                used_s=self._uses.get(record.digest),
                left_s=left.get(record.digest),
                tags=tuple(tags.get(record.digest, ())),
            )
            for record in self._catalog.records()
            if not self._catalog.retired(record.digest)
        ]

    async def mark(
        self, stored: Mapping[str, int], *, now_s: float, grace_s: float
    ) -> tuple[str, ...]:
        """See `KeepingStore`."""
        found = await self.unkept(list(stored), now_s=now_s, grace_s=grace_s)
        for name in found:
            self._marks[name] = Eviction(name, stored[name])
        return found

    async def unkept(
        self, stored: Sequence[str], *, now_s: float, grace_s: float
    ) -> tuple[str, ...]:
        """See `KeepingStore`."""
        kept = {name for name in stored if self._held(name)} | set(self._marks)
        for record in self._catalog.records():
            trail = await self._catalog.trail(record.digest)
            retired = [e.created_s for e in trail.events if e.event == "retired"]
            since = max([*retired[-1:], self._uses.get(record.digest, 0.0)], default=0.0)
            if not trail.retired or since > now_s - grace_s:
                kept |= {entry.sha256 for entry in record.manifest.files}
        return tuple(sorted(set(stored) - kept))

    async def evicting(self, *, limit: int = 10_000) -> list[Eviction]:
        """See `KeepingStore`."""
        return list(self._marks.values())[:limit]

    async def evict(self, sha256: str, delete: Delete) -> int | None:
        """See `KeepingStore`."""
        mark = self._marks.get(sha256)
        if mark is None or sha256 in self._deleting:
            return None
        if self._held(sha256):
            del self._marks[sha256]
            return None
        self._deleting[sha256] = mark
        try:
            freed = await delete(sha256)
        except (ReadyplaneError, OSError) as error:
            told = str(error)[:500]
            self._marks[sha256] = replace(mark, attempts=mark.attempts + 1, last_error=told)
            raise
        else:
            self._marks.pop(sha256, None)
            return freed
        finally:
            del self._deleting[sha256]

    def _held(self, sha256: str) -> bool:
        now = self._clock.monotonic_s()
        for upload_id in [u for u, (_held, ends) in self._holds.items() if ends <= now]:
            del self._holds[upload_id]
        return any(sha256 in held for held, _ends in self._holds.values())


def held_too_much(upload_id: str, count: int) -> InvalidField:
    """The error for an upload that holds more than one may."""
    return InvalidField(f"upload {upload_id}", count, f"hold {HELD_MAX} blobs at most")
