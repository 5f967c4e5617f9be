"""Block hashes in runs: a table of blocks that costs by how prompts are cut, not by their blocks.

Owns which run a block belongs to. The blocks of a prompt come, are found and go mostly together, so
whoever keeps something of each block (who holds it, how many use it) keeps it of a run and has a
run cut where its blocks part. Any hashes may be given, in any order: nothing rests on their being
chained, except speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar


class Run:
    """Blocks of which the same is known, in order. Subclasses add what that is."""

    __slots__ = ("hashes",)

    def __init__(self, hashes: tuple[int, ...]) -> None:
        self.hashes = hashes


AnyRun = TypeVar("AnyRun", bound=Run)


class Runs(Generic[AnyRun]):
    """Every known block is in exactly one run.

    Args:
        make: a run of which nothing is known yet.
        part: told after a cut, with the run that was there and the new one: the new one becomes
            like it. The flag says whether the new one holds the later blocks.
    """

    __slots__ = ("_make", "_part", "where")

    def __init__(
        self,
        make: Callable[[tuple[int, ...]], AnyRun],
        part: Callable[[AnyRun, AnyRun, bool], None],
    ) -> None:
        """Empty."""
        self.where: dict[int, AnyRun] = {}
        self._make = make
        self._part = part

    def leading(self, hashes: tuple[int, ...]) -> list[tuple[AnyRun, int]]:
        """The runs that the first blocks are in, with how many of them, up to an unknown block."""
        out: list[tuple[AnyRun, int]] = []
        if not hashes:
            return out
        at, where = 0, self.where
        run = where.get(hashes[0])
        while run is not None:
            own = run.hashes
            if own is hashes:
                return [(run, len(own))]
            place = 0 if own[0] == hashes[at] else own.index(hashes[at])
            count = _alike(own, place, hashes, at)
            out.append((run, count))
            at += count
            run = where.get(hashes[at]) if at < len(hashes) else None
        return out

    def all_of(self, hashes: tuple[int, ...]) -> list[AnyRun]:
        """Runs that make up exactly these blocks; those not known before are new.

        A block that is given twice has its run in there twice.
        """
        if not hashes:
            return []
        where = self.where
        run = where.get(hashes[0])
        if run is not None:
            return [run] if run.hashes == hashes else self._cut(hashes, add=True)
        run = self._make(hashes)
        for at, value in enumerate(hashes):
            if value in where:  # known before, or given twice
                for back in hashes[:at]:
                    del where[back]
                return self._cut(hashes, add=True)
            where[value] = run
        return [run]

    def known_of(self, hashes: tuple[int, ...]) -> list[AnyRun]:
        """Runs that make up exactly those of these blocks that are known."""
        if not hashes:
            return []
        run = self.where.get(hashes[0])
        if run is not None and run.hashes == hashes:
            return [run]
        return self._cut(hashes, add=False)

    def drop(self, run: AnyRun) -> None:
        """Know its blocks no more."""
        where = self.where
        for value in run.hashes:
            del where[value]

    def shorten(self, run: AnyRun, count: int) -> tuple[int, ...]:
        """Know its last `count` blocks no more, but at least one that stays; returns them."""
        gone = run.hashes[-count:]
        run.hashes = run.hashes[:-count]
        where = self.where
        for value in gone:
            del where[value]
        return gone

    def split(self, run: AnyRun, at: int) -> tuple[AnyRun, AnyRun]:
        """Cut a run before its block `at`; returns both parts, one of them the run itself."""
        head, tail = run.hashes[:at], run.hashes[at:]
        later = len(tail) <= len(head)  # the new one is the smaller: its blocks are looked at
        run.hashes, other = (head, tail) if later else (tail, head)
        new = self._add(other)
        self._part(run, new, later)
        return (run, new) if later else (new, run)

    def _add(self, hashes: tuple[int, ...]) -> AnyRun:
        run, where = self._make(hashes), self.where
        for value in hashes:
            where[value] = run
        return run

    def _cut(self, hashes: tuple[int, ...], *, add: bool) -> list[AnyRun]:
        where = self.where
        out: list[AnyRun] = []
        at, end = 0, len(hashes)
        while at < end:
            run = where.get(hashes[at])
            if run is None:
                to = at + 1
                if add:
                    seen = {hashes[at]}
                    while to < end and hashes[to] not in where and hashes[to] not in seen:
                        seen.add(hashes[to])
                        to += 1
                    out.append(self._add(hashes[at:to]))
                at = to
                continue
            if run.hashes[0] != hashes[at]:
                run = self.split(run, run.hashes.index(hashes[at]))[1]
            count = _alike(run.hashes, 0, hashes, at)
            if count < len(run.hashes):
                run = self.split(run, count)[0]
            out.append(run)
            at += count
        if len(set(hashes)) == end:
            return out
        out, at = [], 0  # a run may have been cut after it was put there
        while at < end:
            run = where.get(hashes[at])
            if run is not None:
                out.append(run)
            at += 1 if run is None else len(run.hashes)
        return out


def _alike(own: tuple[int, ...], place: int, hashes: tuple[int, ...], at: int) -> int:
    """How many blocks of `own` from `place` are those of `hashes` from `at`."""
    most = min(len(own) - place, len(hashes) - at)
    if own[place : place + most] == hashes[at : at + most]:
        return most
    count = 1
    while own[place + count] == hashes[at + count]:
        count += 1
    return count
