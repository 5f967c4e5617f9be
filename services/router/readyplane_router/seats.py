"""Seats and reservations of one model: what is promised on which worker, compared and taken.

Owns the rule that `store.lua` repeats for Redis: all sides of a reservation or none, epoch equal,
seat open, sequences and blocks free; whatever is counted is counted back exactly once. Pure: `now_s`
is the store's clock. Hands `Seats` to the store's memory twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

SWEEP_MAX = 1_000
ALL_SIDES = -1


@dataclass(frozen=True, slots=True)
class Use:
    """Amounts promised on one seat: sequences, KV blocks, prefill microseconds and tokens."""

    sequences: int = 0
    blocks: int = 0
    work_us: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Side:
    """What is taken on one seat."""

    worker_id: str
    epoch: int
    use: Use


@dataclass(frozen=True, slots=True)
class Take:
    """A reservation: all sides or none, for `ttl_s` unless extended.

    Attributes:
        payload: text given back when the same id is taken again.
    """

    reservation_id: str
    sides: tuple[Side, ...]
    payload: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Taken:
    """Taken (or held already), or `refused` says why; `used` is each side's seat afterwards."""

    payload: str = ""
    repeated: bool = False
    refused: str = ""
    used: tuple[Use, ...] = ()


PUT_BACK, INCOMPLETE, TWIN = "put_back", "incomplete", "twin"
"""Answers to putting a reservation back: counted on all sides; a seat is not there (yet), ask again;
another router has placed the same request on other workers, and that stands."""


@dataclass(slots=True, eq=False)
class Seat:
    """Capacity and use of one worker's life; what was counted here is counted back here only."""

    epoch: int
    is_open: bool
    sequences: int
    blocks: int
    used: Use = Use()


@dataclass(slots=True)
class Reservation:
    """Sides that are still counted, and where; None where not (any more)."""

    sides: list[tuple[Side, Seat] | None]
    payload: str
    expires_s: float


def plus(one: Use, other: Use) -> Use:
    """Sum."""
    return Use(
        one.sequences + other.sequences,
        one.blocks + other.blocks,
        one.work_us + other.work_us,
        one.tokens + other.tokens,
    )


def less(one: Use, other: Use) -> Use:
    """Difference; never below zero."""
    sequences, blocks = one.sequences - other.sequences, one.blocks - other.blocks
    work_us, tokens = one.work_us - other.work_us, one.tokens - other.tokens
    if sequences < 0 or blocks < 0 or work_us < 0 or tokens < 0:
        return Use(max(0, sequences), max(0, blocks), max(0, work_us), max(0, tokens))
    return Use(sequences, blocks, work_us, tokens)


@dataclass(slots=True)
class Seats:
    """All of one model."""

    seats: dict[str, Seat] = field(default_factory=dict)
    reservations: dict[str, Reservation] = field(default_factory=dict)

    def seat(
        self, worker_id: str, epoch: int, *, is_open: bool, sequences: int, blocks: int
    ) -> bool:
        """Set capacity; a new epoch starts with nothing used. False for an older epoch."""
        had = self.seats.get(worker_id)
        if had is not None and had.epoch > epoch:
            return False
        if had is None or had.epoch != epoch:
            self.seats[worker_id] = Seat(epoch, is_open, sequences, blocks)
        else:
            had.is_open, had.sequences, had.blocks = is_open, sequences, blocks
        return True

    def shut(self, worker_id: str) -> None:
        """Take nothing more there."""
        seat = self.seats.get(worker_id)
        if seat is not None:
            seat.is_open = False

    def take(self, take: Take, *, now_s: float) -> Taken:
        """Reserve on all sides or none."""
        had = self.reservations.get(take.reservation_id)
        if had is not None:
            return Taken(had.payload, repeated=True)
        for side in take.sides:
            why = _refusal(self.seats.get(side.worker_id), side)
            if why:
                return Taken(refused=f"{side.worker_id}: {why}", used=self._used(take.sides))
        self._keep(take, now_s)
        return Taken(take.payload, used=self._used(take.sides))

    def put_back(self, take: Take, *, now_s: float) -> str:
        """Make a reservation what its router holds, compared by nobody; see `PUT_BACK`.

        Done twice it changes nothing. A side whose seat is not there is not counted, so that its
        release cannot take away from others what was never added.
        """
        had = self.reservations.get(take.reservation_id)
        if had is not None:
            if had.payload != take.payload:
                return TWIN
            for counted in had.sides:
                self._uncount(counted)
        return PUT_BACK if None not in self._keep(take, now_s) else INCOMPLETE

    def release(self, items: Sequence[tuple[str, int]]) -> int:
        """Give (reservation id, side or ALL_SIDES) back; returns how many were not known."""
        return sum([not self._release(rid, side) for rid, side in items])

    def grow(self, reservation_id: str, side: int, blocks: int) -> bool:
        """Add KV blocks that a reservation has outgrown; never refused."""
        had = self.reservations.get(reservation_id)
        part = had.sides[side] if had is not None and side < len(had.sides) else None
        if had is None or part is None:
            return False
        more = Use(blocks=blocks)
        had.sides[side] = replace(part[0], use=plus(part[0].use, more)), part[1]
        part[1].used = plus(part[1].used, more)
        return True

    def extend(self, reservation_ids: Sequence[str], *, until_s: float) -> None:
        """Let reservations live on."""
        for reservation_id in reservation_ids:
            found = self.reservations.get(reservation_id)
            if found is not None:
                found.expires_s = until_s

    def missing(self, reservation_ids: Sequence[str]) -> list[str]:
        """Those that are not there."""
        return [rid for rid in reservation_ids if rid not in self.reservations]

    def sweep(self, *, now_s: float) -> list[str]:
        """Release reservations that have run out."""
        over = [rid for rid, r in self.reservations.items() if r.expires_s <= now_s][:SWEEP_MAX]
        for reservation_id in over:
            self._release(reservation_id, ALL_SIDES)
        return over

    def usage(self) -> dict[str, Use]:
        """What is promised on each seat."""
        return {worker_id: seat.used for worker_id, seat in self.seats.items()}

    def _used(self, sides: Sequence[Side]) -> tuple[Use, ...]:
        found = [self.seats.get(side.worker_id) for side in sides]
        return tuple([Use() if seat is None else seat.used for seat in found])

    def _keep(self, take: Take, now_s: float) -> Sequence[tuple[Side, Seat] | None]:
        """Count every side whose seat is there, and remember which."""
        sides: list[tuple[Side, Seat] | None] = []
        for side in take.sides:
            seat = self.seats.get(side.worker_id)
            if seat is None or seat.epoch != side.epoch:
                sides.append(None)
                continue
            seat.used = plus(seat.used, side.use)
            sides.append((side, seat))
        self.reservations[take.reservation_id] = Reservation(
            sides, take.payload, now_s + take.ttl_s
        )
        return sides

    @staticmethod
    def _uncount(counted: tuple[Side, Seat] | None) -> None:
        if counted is not None:
            side, seat = counted
            seat.used = less(seat.used, side.use)

    def _release(self, reservation_id: str, which: int) -> bool:
        had = self.reservations.get(reservation_id)
        if had is None:
            return False
        for index, counted in enumerate(had.sides):
            if which in (ALL_SIDES, index):
                had.sides[index] = None
                self._uncount(counted)
        if which == ALL_SIDES or not any(had.sides):
            del self.reservations[reservation_id]
        return True


def _refusal(seat: Seat | None, side: Side) -> str:
    if seat is None:
        return "no seat"
    if seat.epoch != side.epoch:
        return f"epoch {seat.epoch}, wanted {side.epoch}"
    if not seat.is_open:
        return "shut"
    if seat.used.sequences + side.use.sequences > seat.sequences:
        return "no free sequence"
    if seat.used.blocks + side.use.blocks > seat.blocks:
        return "no free blocks"
    return ""
