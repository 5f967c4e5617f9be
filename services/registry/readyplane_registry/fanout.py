"""Starters that read behind starters: who waits for whom, and when each will have everything. Pure.

Owns the arithmetic of a chain (R8.4). With equal egress caps a chain is what serves N starters in
about the time of one: each passes a chunk on as soon as it has verified it, so the k-th is complete
`k` chunks after the first, while a star would share one source between N and take N times as long.
Handed to `sources`, which ranks a source that still loads by this prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Loading(Protocol):
    """What is needed of a source; `sources.Candidate` has it."""

    @property
    def source_id(self) -> str: ...
    @property
    def worker_id(self) -> str: ...
    @property
    def partial(self) -> bool: ...
    @property
    def lacks_bytes(self) -> int: ...
    @property
    def readers(self) -> int: ...
    @property
    def reads_from(self) -> tuple[str, ...]: ...


L = TypeVar("L", bound=Loading)


@dataclass(frozen=True, slots=True)
class Above:
    """Where a source that still loads gets its bytes: the names upwards, and when it has all."""

    names: tuple[str, ...]
    complete_in_s: float


class Chain(Generic[L]):
    """The sources of one artifact and who reads from whom.

    Args:
        rate_of: bytes/s that a source can give in all.
        chunk_bytes: the piece that is passed on as a whole.
        behind_max: a longer chain is not extended.
    """

    def __init__(
        self,
        sources: Iterable[L],
        *,
        rate_of: Callable[[L], float],
        chunk_bytes: int,
        behind_max: int,
    ) -> None:
        self._known = {source.source_id: source for source in sources}
        self._rate_of, self._chunk_bytes, self._behind_max = rate_of, chunk_bytes, behind_max

    def workers_above(self, source: L) -> frozenset[str]:
        """Every worker from whom this source gets bytes, directly or behind others."""
        found: set[str] = set()
        seen: set[str] = set()
        ahead = list(source.reads_from)
        while ahead:
            name = ahead.pop()
            if name in seen or (above := self._known.get(name)) is None:
                continue
            seen.add(name)
            found.add(above.worker_id)
            ahead += above.reads_from
        return frozenset(found - {""})

    def above(self, source: L) -> Above | str:
        """How a source that still loads gets to its end; or why nobody can say."""
        path: list[L] = [source]
        while path[-1].partial and path[-1].lacks_bytes > 0:
            parents = [self._known[n] for n in path[-1].reads_from if n in self._known]
            if not parents:
                who = "it" if len(path) == 1 else path[-1].source_id
                return f"{who} still loads, and from whom is not known"
            # The one that gives most; a reader of several has all at least as soon.
            parent = max(parents, key=lambda p: (self._share(p), p.source_id))
            if parent in path:
                return "it and its sources wait for one another"
            path.append(parent)
            if len(path) - 1 > self._behind_max:
                return f"{self._behind_max} starters read behind one another already"
        complete_in_s = 0.0
        for parent, child in zip(reversed(path[1:]), reversed(path[:-1]), strict=True):
            share = self._share(parent)
            complete_in_s = max(
                child.lacks_bytes / share, complete_in_s + self._chunk_bytes / share
            )
        return Above(tuple(p.source_id for p in path[1:]), complete_in_s)

    def _share(self, parent: L) -> float:
        """Bytes/s that one of its readers gets now."""
        return self._rate_of(parent) / max(1, parent.readers)
