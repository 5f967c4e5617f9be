"""Generations of a pool: which one is current, when to add a surge worker, when to retire one.

Owns the narrow rule: old and new stand side by side, one surge worker at a time, and an old worker
goes only when the new one serves (R17.2). Hands decide the generation of new orders and the workers
to retire. Deeper gates (canary share, roll-back on SLO) grow here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Generation:
    """The artifact that new workers get, and its number; numbers only grow."""

    digest: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """A live worker as far as a roll-out cares."""

    worker_id: str
    digest: str
    number: int
    ready: bool
    attached: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What the roll-out asks for now: extra workers above the target, and who may go."""

    surge: int = 0
    retire: tuple[str, ...] = ()
    old: int = 0


def advance(before: Generation, digest: str, seen: Iterable[tuple[str, int]]) -> Generation:
    """The generation of `digest`, given (digest, number) of everything alive.

    A planner that just began takes over the number under which the digest already runs.
    """
    if not digest or digest == before.digest:
        return before
    pairs = list(seen)
    if not before.digest:
        running = [number for found, number in pairs if found == digest]
        if running:
            return Generation(digest, max(running))
    top = max((number for _digest, number in pairs), default=0)
    return Generation(digest, max(before.number, top) + 1)


def step(
    members: Iterable[Member], *, current: Generation, target: int, draining: int, surge_max: int
) -> Step:
    """Surge while old workers serve; retire one when all who should serve are ready."""
    live = list(members)
    old = [m for m in live if m.digest and m.digest != current.digest and not m.attached]
    if not current.digest or not old:
        return Step()
    ready = [m for m in live if m.ready]
    starting = len(live) - len(ready)
    if draining or starting:
        return Step(surge=max(0, min(surge_max, len(live) - target)), old=len(old))
    if len(ready) > target:
        leaving = sorted((m for m in old if m.ready), key=lambda m: (m.number, m.worker_id))
        return Step(surge=0, retire=tuple(m.worker_id for m in leaving[:1]), old=len(old))
    return Step(surge=surge_max, old=len(old))
