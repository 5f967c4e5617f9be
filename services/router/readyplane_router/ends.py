"""How requests end that do not finish: every arrival has exactly one end (pure).

Owns the count of aborts by reason, and requests that have lost their pair: a leg failed, a worker
went, nobody spoke of them. Their gateway may pair them anew or tell what became of them; until it
does, or `LOST_WAIT_S` have passed, they are open. So, at any moment,
`arrivals = finished + refused + aborted + open`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LOST_WAIT_S = 10.0
LOST_REQUESTS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Lost:
    """A request without a pair."""

    reason: str
    isl: int
    since_s: float


@dataclass(slots=True)
class Ends:
    """Aborts by reason, and what may still become one (oldest first)."""

    aborts: dict[str, int] = field(default_factory=dict)
    lost: dict[str, Lost] = field(default_factory=dict)

    def abort(self, reason: str) -> None:
        """Count one abort."""
        self.aborts[reason] = self.aborts.get(reason, 0) + 1

    def lose(self, reservation_id: str, reason: str, isl: int, *, now_s: float) -> int:
        """A pair is lost; the wait begins. Returns how many were given up to stay bounded."""
        self.lost.pop(reservation_id, None)
        self.lost[reservation_id] = Lost(reason, isl, now_s)
        given_up = 0
        while len(self.lost) > LOST_REQUESTS_MAX:
            self._give_up(next(iter(self.lost)))
            given_up += 1
        return given_up

    def found(self, reservation_id: str) -> Lost | None:
        """It is paired anew, or its end was told; None when it was not lost."""
        return self.lost.pop(reservation_id, None)

    def settle(self, *, now_s: float) -> int:
        """Give up what nobody has spoken of for `LOST_WAIT_S`; returns how many."""
        over = []
        for reservation_id, lost in self.lost.items():
            if now_s - lost.since_s <= LOST_WAIT_S:
                break
            over.append(reservation_id)
        for reservation_id in over:
            self._give_up(reservation_id)
        return len(over)

    def _give_up(self, reservation_id: str) -> None:
        self.abort(self.lost.pop(reservation_id).reason)
