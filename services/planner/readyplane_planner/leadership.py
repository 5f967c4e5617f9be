"""Which of several planners acts: a lease with a fencing number (B145, B146).

Owns the port and its memory twin; `redis` implements the same port. The number comes from the
journal, so that it never goes back even when the lease store comes back empty; the actuator refuses
orders of an older one. Whoever cannot renew stops acting, whatever it believes. Each change of who
leads is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger(__name__)

LIFE = "/"
"""Between the address and the life in a holder's name."""


class LeaseStore(Protocol):
    """A named lease that one holder has at a time; release and renewal are conditional."""

    async def take(self, name: str, holder: str, ttl_s: float) -> bool:
        """Take or renew. True when `holder` holds it now, for `ttl_s`."""
        ...

    async def give_up(self, name: str, holder: str) -> bool:
        """Release if `holder` still holds it; another's lease is left alone."""
        ...

    async def holder(self, name: str) -> str:
        """Who holds it; empty when nobody does."""
        ...

    async def left_s(self, name: str) -> float:
        """How long the holder still has it unless it renews; 0 when nobody holds it."""
        ...


class MemoryLeaseStore:
    """The twin, judged by the clock it is handed."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._leases: dict[str, tuple[str, float]] = {}

    async def take(self, name: str, holder: str, ttl_s: float) -> bool:
        """See LeaseStore."""
        if await self.holder(name) not in {"", holder}:
            return False
        self._leases[name] = (holder, self._now_s() + ttl_s)
        return True

    async def give_up(self, name: str, holder: str) -> bool:
        """See LeaseStore."""
        if await self.holder(name) != holder:
            return False
        del self._leases[name]
        return True

    async def holder(self, name: str) -> str:
        """See LeaseStore."""
        found = self._leases.get(name)
        return found[0] if found is not None and found[1] > self._now_s() else ""

    async def left_s(self, name: str) -> float:
        """See LeaseStore."""
        found = self._leases.get(name)
        return max(0.0, found[1] - self._now_s()) if found is not None else 0.0


def named(address: str, life: str) -> str:
    """A holder's name: where it is reached (`host:port`), and which process life it is.

    Whoever stands by sends people there; two lives at one address are still two holders.
    """
    return f"{address}{LIFE}{life}"


def address_of(holder: str) -> str:
    """Where the holder of that name is reached; the name itself where it carries no address."""
    return holder.rpartition(LIFE)[0] or holder


class Leadership:
    """One planner's view of its own right to act.

    Attributes:
        epoch: fencing number, 0 while not leading. holder: its name in the lease, see `named`.
        other: who leads instead; empty where nobody is known to.
    """

    def __init__(
        self,
        store: LeaseStore,
        *,
        name: str,
        holder: str,
        ttl_s: float,
        now_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._name = name
        self.holder = holder
        self._ttl_s = ttl_s
        self._now_s = now_s
        self._until_s = 0.0
        self._logged = ""
        self._other_until_s = 0.0
        self.epoch = 0
        self.other = ""

    def document(self) -> dict[str, Any]:
        """Who leads, for people: `at` is where that planner is reached, null where nobody leads.

        Nobody leads either while a life before this one still holds the lease (`former_life`).
        """
        who = self.holder if self.leading else "" if self.former_life else self.other
        return {
            "here": self.leading,
            "at": address_of(who) or None,
            "epoch": self.epoch,
            "former_life": self.former_life,
        }

    @property
    def former_life(self) -> bool:
        """Whether the lease is held from where this planner itself is reached.

        Its process was started again before the lease of the one before ran out. The lease is not
        taken for that: an address is no identity, and others may be reached by the same name.
        """
        mine = self.holder.rpartition(LIFE)[0]
        return bool(mine) and self.other != self.holder and address_of(self.other) == mine

    def standing_by(self) -> str:
        """Why it does not act, in words."""
        if self.former_life:
            left_s = max(0.0, self._other_until_s - self._now_s())
            return (
                f"standing by; the life before this one, at {address_of(self.other)} as well,"
                f" holds the lease for up to {left_s:.0f} s more"
            )
        return f"standing by; {address_of(self.other) or 'nobody yet'} leads"

    @property
    def leading(self) -> bool:
        """Whether it may act now; judged by its own clock from before the last renewal was sent."""
        return self.epoch > 0 and self._now_s() < self._until_s

    async def renew(self, next_epoch: Callable[[], object]) -> bool:
        """Take or renew; a new term asks `next_epoch` (awaitable) for its number."""
        asked_s = self._now_s()
        held = await self._store.take(self._name, self.holder, self._ttl_s)
        if not held:
            self.epoch, self._until_s = 0, 0.0
            self.other = await self._store.holder(self._name)
            self._other_until_s = self._now_s() + await self._store.left_s(self._name)
            if self.former_life:
                self._log(f"waiting for the lease of the life before, of {self._ttl_s:.0f} s")
            else:
                self._log(
                    f"following {address_of(self.other)}" if self.other else "following nobody yet"
                )
            return False
        if not self.leading:
            number = next_epoch()
            self.epoch = int(await number)  # type: ignore[misc]
        self.other = ""
        self._until_s = asked_s + self._ttl_s
        self._log(f"leading under number {self.epoch}")
        return True

    def depose(self) -> None:
        """Somebody has obeyed a newer leader: stop at once, whatever the lease store says."""
        if self.epoch:
            self._log("no longer leading: a newer leader is obeyed")
        self.epoch, self._until_s = 0, 0.0

    def lose(self) -> None:
        """The store does not answer: nothing more is done once the lease has run out."""
        if not self.leading:
            if self.epoch:
                self._log("no longer leading: the lease has run out")
            self.epoch = 0

    async def resign(self) -> None:
        """Give the lease up, so that another need not wait for its end."""
        if self.epoch:
            self._log("no longer leading: it ends")
        self.epoch, self._until_s = 0, 0.0
        await self._store.give_up(self._name, self.holder)

    def _log(self, state: str) -> None:
        """Tell of a change, once."""
        if state != self._logged:
            self._logged = state
            log.info("%s: %s", self._name, state, extra={"holder": self.holder})
