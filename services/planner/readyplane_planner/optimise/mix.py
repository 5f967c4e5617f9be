"""Which classes make up a pool: the cheapest workers to start, and the dearest to give up.

A pool's need is a real number of workers of its reference class; an offer says how many of those one
worker of another class is worth at the targets, and what it is expected to cost. Owns the search:
to CLOSE of the optimum, or the best found within NODES_MAX steps (the first descent is greedy by
cost, and every further one repairs its last workers). The same input gives the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

NODES_MAX = 800
"""Steps of the search: about 2 ms. A hundred or so prove the optimum of a pool of eight classes."""
CLOSE = 0.01
"""What could be better by less is not searched for: costs are not known that well."""
TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Offer:
    """Workers of one class as they could be started now.

    Attributes:
        rate: reference workers that one of them is worth; 0 where it cannot keep the targets.
        cost: expected cost of one start, see `start_cost`. gpus: of one worker.
        room: that may be started: what quota and back-off leave. owed: that must be, for its minimum.
    """

    worker_class: str
    rate: float
    cost: float
    gpus: int = 1
    room: int = 0
    owed: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """Workers of one class that a pool has.

    Attributes:
        rate: as of Offer. saving: what giving one up saves. spare: that may be given up, its
            minimum and those that belong to somebody else left aside.
    """

    worker_class: str
    rate: float
    saving: float
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Mix:
    """Classes with their numbers, the best first; `rate` is what they are worth together.

    Attributes:
        missing: reference workers that nothing on offer could make up. steps: of the search.
        proved: whether nothing better by more than CLOSE exists.
    """

    counts: tuple[tuple[str, int], ...] = ()
    rate: float = 0.0
    cost: float = 0.0
    missing: float = 0.0
    steps: int = 0
    proved: bool = True

    @property
    def count(self) -> int:
        """Workers."""
        return sum(n for _name, n in self.counts)

    def classes(self) -> tuple[str, ...]:
        """One name a worker."""
        return tuple(name for name, n in self.counts for _ in range(n))


def start_cost(
    *,
    price_per_s: float,
    ready_s: float,
    life_s: float,
    rate: float,
    in_time_s: float,
    missed_per_s: float,
) -> float:
    """What one start is expected to cost: held from its order to its end, and late where it is.

    Args:
        price_per_s: of one worker. ready_s: until it serves. life_s: it is expected to serve.
        rate: of Offer. in_time_s: it is needed in so many seconds.
        missed_per_s: cost of a reference worker missing for a second.
    """
    held = price_per_s * (ready_s + life_s)
    return held + missed_per_s * rate * max(0.0, ready_s - in_time_s)


def starts(need: float, offers: Sequence[Offer], *, room: int, gpus: int | None = None) -> Mix:
    """The cheapest starts that are worth `need` reference workers, else the most that can be had.

    Args:
        room: workers that may be started in all. gpus: that they may take, None for any number.
    """
    owed = [o for o in offers if o.owed > 0 and o.room > 0]
    first: list[tuple[str, int]] = []
    worth = spent = 0.0
    for offer in owed:
        count = min(offer.owed, offer.room, room, _fitting(gpus, offer.gpus))
        if count > 0:
            first.append((offer.worker_class, count))
            room -= count
            gpus = None if gpus is None else gpus - count * offer.gpus
            worth += count * offer.rate
            spent += count * offer.cost
    taken = dict(first)
    usable = [
        (o, o.room - taken.get(o.worker_class, 0))
        for o in offers
        if o.rate > TINY and o.room > taken.get(o.worker_class, 0)
    ]
    usable.sort(key=lambda pair: (pair[0].cost / pair[0].rate, -pair[0].rate, pair[0].worker_class))
    search = _Search(
        [o.rate for o, _room in usable],
        [o.cost for o, _room in usable],
        [o.gpus for o, _room in usable],
        [most for _o, most in usable],
    )
    found = _undominated([o for o, _room in usable], search.cover(need - worth, room, gpus))
    chosen = [(o.worker_class, n) for (o, _room), n in zip(usable, found, strict=True) if n]
    rate = worth + sum(o.rate * n for (o, _room), n in zip(usable, found, strict=True))
    cost = spent + sum(o.cost * n for (o, _room), n in zip(usable, found, strict=True))
    counts = _merged([*first, *chosen])
    return Mix(counts, rate, cost, max(0.0, need - rate), search.steps, search.steps < NODES_MAX)


def _undominated(offers: Sequence[Offer], counts: list[int]) -> list[int]:
    """No class is left where another has room that is worth as much, costs and takes no more."""
    counts = list(counts)
    for at, worse in enumerate(offers):
        for better, offer in enumerate(offers):
            if not counts[at] or not _dominates(offer, worse):
                continue
            moved = min(counts[at], offer.room - max(offer.owed, 0) - counts[better])
            if moved > 0:
                counts[at], counts[better] = counts[at] - moved, counts[better] + moved
    return counts


def _dominates(offer: Offer, other: Offer) -> bool:
    as_good = offer.rate >= other.rate and offer.cost <= other.cost and offer.gpus <= other.gpus
    return as_good and (offer.rate, offer.cost, offer.gpus) != (other.rate, other.cost, other.gpus)


def gives(surplus: float, held: Sequence[Held], *, most: int) -> Mix:
    """Whom to give up: what saves the most and is worth no more than `surplus` reference workers."""
    usable = [h for h in held if h.spare > 0 and h.saving > 0]
    usable.sort(key=lambda h: (-h.saving / max(h.rate, TINY), h.rate, h.worker_class))
    search = _Search(
        [h.rate for h in usable],
        [h.saving for h in usable],
        [1] * len(usable),
        [h.spare for h in usable],
    )
    found = search.pack(surplus, most)
    counts = tuple((h.worker_class, n) for h, n in zip(usable, found, strict=True) if n)
    rate = sum(h.rate * n for h, n in zip(usable, found, strict=True))
    saved = sum(h.saving * n for h, n in zip(usable, found, strict=True))
    return Mix(counts, rate, saved, 0.0, search.steps, search.steps < NODES_MAX)


def _fitting(gpus: int | None, each: int) -> int:
    return 1 << 30 if gpus is None else gpus // max(1, each)


def _merged(counts: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    total: dict[str, int] = {}
    for name, n in counts:
        total[name] = total.get(name, 0) + n
    return tuple(total.items())


@dataclass(slots=True)
class _Search:
    """Depth first over the classes in the order of their worth, many of the best one first.

    What is left is bounded by filling it up with fractions of workers of the classes to come.
    """

    rates: list[float]
    costs: list[float]
    gpus: list[int]
    most: list[int]
    steps: int = 0
    best: float = math.inf
    found: list[int] = field(default_factory=list)
    now: list[int] = field(default_factory=list)
    penalty: float = 0.0

    def cover(self, need: float, room: int, gpus: int | None) -> list[int]:
        """Numbers that cover `need` at least cost; short of it, as much of it as can be had."""
        self.now = [0] * len(self.rates)
        self.found = list(self.now)
        # Dearer than any worker: what can be covered is, and what cannot is left as small as can be.
        ratios = [c / r for c, r in zip(self.costs, self.rates, strict=True)]
        self.penalty = 1e3 * (max([*ratios, *self.costs], default=0.0) + 1.0)
        self.best = max(0.0, need) * self.penalty
        if need > TINY:
            self._cover(0, need, 0.0, room, math.inf if gpus is None else gpus)
        return self.found

    def _cover(self, at: int, need: float, cost: float, room: int, gpus: float) -> None:
        self.steps += 1
        total = cost + max(0.0, need) * self.penalty
        if total < self.best * (1.0 - 1e-12) - TINY:
            self.best, self.found = total, list(self.now)
        if need <= TINY or at == len(self.rates) or room <= 0 or self.steps >= NODES_MAX:
            return
        if cost + self._least(at, need) >= self.best * (1.0 - CLOSE) - TINY:
            return
        rate = self.rates[at]
        top = min(self.most[at], room, math.ceil(need / rate - TINY))
        if gpus < math.inf:
            top = min(top, int(gpus) // max(1, self.gpus[at]))
        for n in range(top, -1, -1):
            self.now[at] = n
            spent = cost + n * self.costs[at]
            self._cover(at + 1, need - n * rate, spent, room - n, gpus - n * self.gpus[at])
            if self.steps >= NODES_MAX:
                break
        self.now[at] = 0

    def _least(self, at: int, need: float) -> float:
        """No way of covering the rest costs less."""
        cost = 0.0
        for k in range(at, len(self.rates)):
            part = min(need, self.most[k] * self.rates[k])
            cost += part * self.costs[k] / self.rates[k]
            need -= part
            if need <= TINY:
                return cost
        return cost + need * self.penalty

    def pack(self, surplus: float, most: int) -> list[int]:
        """Numbers that save the most and are worth `surplus` at most."""
        self.now = [0] * len(self.rates)
        self.found = list(self.now)
        self.best = 0.0
        self._pack(0, surplus, 0.0, most)
        return self.found

    def _pack(self, at: int, surplus: float, saved: float, most: int) -> None:
        self.steps += 1
        if saved > self.best * (1.0 + 1e-12) + TINY:
            self.best, self.found = saved, list(self.now)
        if at == len(self.rates) or most <= 0 or self.steps >= NODES_MAX:
            return
        if saved + self._most(at, surplus) <= self.best * (1.0 + CLOSE) + TINY:
            return
        rate = self.rates[at]
        top = min(self.most[at], most)
        if rate > TINY:
            top = min(top, math.floor(surplus / rate + TINY))
        for n in range(top, -1, -1):
            self.now[at] = n
            self._pack(at + 1, surplus - n * rate, saved + n * self.costs[at], most - n)
            if self.steps >= NODES_MAX:
                break
        self.now[at] = 0

    def _most(self, at: int, surplus: float) -> float:
        """No way of giving up the rest saves more."""
        saved = 0.0
        for k in range(at, len(self.rates)):
            if self.rates[k] <= TINY:
                saved += self.most[k] * self.costs[k]
                continue
            part = min(surplus, self.most[k] * self.rates[k])
            saved += part * self.costs[k] / self.rates[k]
            surplus -= part
        return saved
