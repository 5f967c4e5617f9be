"""The link to the store: whether it answers, since when, and what that allows.

Owns one fact for everybody in a router. While the store is away nobody is declared dead, service
goes on from what is known for a bounded time, and the first successful ping starts the way back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from readyplane.core.errors import Unavailable
from readyplane.kit.clock import Clock
from readyplane_router import lease
from readyplane_router.lease import Standing
from readyplane_router.policy import RouterPolicy

log = logging.getLogger(__name__)


class Link:
    """Whether the store answers, and without a break since `answering_since_s`.

    `routers`: how many share it, this one included.
    """

    def __init__(self, clock: Clock, policy: RouterPolicy, changed: Callable[[], None]) -> None:
        """Answering; `changed` is called when that changes."""
        self._clock, self._policy, self._changed = clock, policy, changed
        self._away_since_s: float | None = None
        self.answering_since_s = clock.monotonic_s()
        self.routers = 1
        self.absences = 0

    @property
    def answering(self) -> bool:
        """Whether the store answered last."""
        return self._away_since_s is None

    def standing(self) -> Standing:
        """Fresh, degraded, or cut off."""
        return lease.standing(
            away_since_s=self._away_since_s,
            now_s=self._clock.monotonic_s(),
            absence_max_s=self._policy.redis_absence_max_s,
        )

    def failed(self, error: Unavailable) -> None:
        """The store did not answer."""
        if self._away_since_s is None:
            self._away_since_s = self._clock.monotonic_s()
            self.absences += 1
            self._changed()
            log.warning("the store is away, serving degraded", extra={"error": str(error)})

    def refilling(self) -> None:
        """Another life of the store answers: serve from what is known here until it knows it too."""
        if self._away_since_s is None:
            self._away_since_s = self._clock.monotonic_s()

    def back(self) -> None:
        """The store answers (again) and has been told who is alive here."""
        if self._away_since_s is not None:
            log.warning("the store is back")
            self._changed()
        self._away_since_s = None
        self.answering_since_s = self._clock.monotonic_s()

    def doubt(self) -> None:
        """This router itself was away (stopped, starved): what it did not hear is its own fault."""
        self.answering_since_s = self._clock.monotonic_s()

    def may_judge_expiry(self) -> bool:
        """Whether leases may be declared expired now."""
        return lease.may_judge_expiry(
            away_since_s=self._away_since_s,
            answering_since_s=self.answering_since_s,
            now_s=self._clock.monotonic_s(),
            ttl_s=self._policy.lease_ttl_s,
        )

    def check_not_cut_off(self) -> None:
        """Refuse once the store has been away for too long.

        Raises:
            Unavailable: with when asking again makes sense.
        """
        if self.standing() is Standing.CUT_OFF:
            raise Unavailable(
                "the router has been without its store for longer than redis_absence_max_s "
                f"({self._policy.redis_absence_max_s} s)",
                "check that Redis runs; routing resumes as soon as it answers",
                2.0,
            )
