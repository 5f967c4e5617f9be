"""GPU-seconds from allocation to release, each booked once: boot, standby, idle, serve, drain.

Owns what is paid for and what for. A ready worker serves while its engine holds a request and is
idle otherwise; whatever it does after it was told to drain is drain. Only what falls into the
billed window counts. The parts are booked as they happen, so that they can be checked against the
lives of the workers, which know nothing of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from enum import StrEnum
from math import inf

from readyplane.kit.clock import Clock


class Part(StrEnum):
    """What a GPU was held for."""

    BOOT = "boot"
    STANDBY = "standby"
    IDLE = "idle"
    SERVE = "serve"
    DRAIN = "drain"


class Ledger:
    """The books of one run. `window` in virtual seconds is set when the first request arrives."""

    def __init__(self, clock: Clock) -> None:
        self.window = (-inf, inf)
        self._clock = clock
        self._open: dict[Account, None] = {}
        self._closed: defaultdict[tuple[str, Part], float] = defaultdict(float)

    def open(self, pool: str, gpus: int) -> Account:
        """A new allocation, booting from now on."""
        account = Account(self, pool, gpus, self._clock)
        self._open[account] = None
        return account

    def close(self, account: Account) -> None:
        """It was given back: its sums are kept, it is not."""
        del self._open[account]
        self._add(account, self._closed)

    def bill(self, from_s: float, to_s: float) -> None:
        """Only that window counts, which begins now; what was booked before does not."""
        self.window = (from_s, to_s)
        self._closed.clear()
        for account in self._open:
            account.begin()

    def clipped_s(self, from_s: float, to_s: float) -> float:
        """Seconds of a span that fall into the window."""
        return max(0.0, min(to_s, self.window[1]) - max(from_s, self.window[0]))

    def booked(self) -> dict[tuple[str, Part], float]:
        """GPU-seconds by pool and part, up to now."""
        total = defaultdict(float, self._closed)
        for account in self._open:
            self._add(account, total)
        return dict(sorted(total.items()))

    def _add(self, account: Account, total: defaultdict[tuple[str, Part], float]) -> None:
        for part, seconds in account.parts():
            total[account.pool, part] += account.gpus * seconds

    def total(self) -> float:
        """All GPU-seconds up to now."""
        return sum(self.booked().values())


class Account:
    """The books of one allocation; seconds on the virtual clock.

    Attributes:
        waits: from when to when it stood by, however often the ledger was cleared meanwhile.
    """

    def __init__(self, ledger: Ledger, pool: str, gpus: int, clock: Clock) -> None:
        self.pool = pool
        self.gpus = gpus
        self._ledger = ledger
        self._clock = clock
        self._seconds = dict.fromkeys(Part, 0.0)
        self._part: Part | None = Part.BOOT
        self._since_s = clock.monotonic_s()
        self._stood_s: float | None = None
        self._waited: tuple[tuple[float, float], ...] = ()

    def become(self, part: Part) -> None:
        """From now on it is held for something else."""
        self._settle()
        self._waited, self._stood_s = self.waits, None
        if part is Part.STANDBY:
            self._stood_s = self._since_s
        self._part = part

    @property
    def waits(self) -> tuple[tuple[float, float], ...]:
        if self._stood_s is None:
            return self._waited
        return (*self._waited, (self._stood_s, self._clock.monotonic_s()))

    def busy(self, from_s: float, to_s: float) -> None:
        """Its engine held requests all that time, which is over."""
        if self._part is Part.IDLE:
            self._settle()
            served_s = self._ledger.clipped_s(from_s, to_s)
            self._seconds[Part.SERVE] += served_s
            self._seconds[Part.IDLE] -= served_s

    def close(self) -> None:
        """It was given back."""
        self._settle()
        self._waited, self._stood_s = self.waits, None
        self._part = None
        self._ledger.close(self)

    def begin(self) -> None:
        """Nothing that was before now counts."""
        self._seconds = dict.fromkeys(Part, 0.0)
        self._since_s = self._clock.monotonic_s()

    def parts(self) -> Iterator[tuple[Part, float]]:
        """Seconds of each part up to now; what an engine does right now is told when it is done."""
        self._settle()
        yield from self._seconds.items()

    def _settle(self) -> None:
        now_s = self._clock.monotonic_s()
        if self._part is not None:
            self._seconds[self._part] += self._ledger.clipped_s(self._since_s, now_s)
        self._since_s = now_s
