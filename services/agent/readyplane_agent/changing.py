"""What a living worker becomes when it is told: a standby that serves, a worker of the other stage.

Owns activation and flip, from the directive to the gate's verdict. Same process, same weights, same
engine; only the lease and the evidence are new. What fails on the way ends the worker with its
reason: whoever could not be proved must not serve.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from readyplane.core.errors import LostLease, ReadyplaneError, StaleEpoch
from readyplane.core.worker import Role
from readyplane.kit.clock import Clock
from readyplane_agent.lifecycle import STARTS, Event, State
from readyplane_agent.loop import Session
from readyplane_agent.starting import Start, Started

log = logging.getLogger("agent.change")


class Changing:
    """The changes of one worker; at most one at a time.

    Args:
        state, tell: of its lifecycle. end: ends the life with an event and a reason.
    """

    def __init__(
        self,
        *,
        start: Start,
        started: Started,
        session: Session,
        clock: Clock,
        state: Callable[[], State],
        tell: Callable[[Event], None],
        end: Callable[[Event, str], None],
    ) -> None:
        self._start, self._started, self._session = start, started, session
        self._clock, self._state, self._tell, self._end = clock, state, tell, end
        self._flip_to: Role | None = None
        self._turning = False
        self._activation: asyncio.Task[None] | None = None

    async def activate(self, why: str) -> None:
        """A standby is to serve; one that is told too late stands by again.

        One whose lease is lost on the way is told on under the next one, and proved whole: what was
        under way for the lost one ends (`forgotten`).
        """
        began_s = self._clock.monotonic_s()
        self._tell(Event.ACTIVATE_ASKED)
        activation = self._activation = asyncio.create_task(self._start.activate())
        try:
            await asyncio.wait({activation})
        finally:
            activation.cancel()
        if activation.cancelled():
            log.warning("activation: the lease was lost on the way; it is told on under the next")
            return
        try:
            activation.result()
        except (LostLease, StaleEpoch) as error:
            log.warning("activation: %s; the session decides", error)
        except ReadyplaneError as error:
            if self._state() is State.ACTIVATING:
                self._end(Event.ENGINE_DIED, f"it could not be activated: {error}")
            log.warning("activation: %s", error)  # else a lost lease came between: it rejoins
        else:
            await self.rest()
            took_s = self._clock.monotonic_s() - began_s
            log.info("%s %.3f s after it was told: %s", self._state(), took_s, why)

    async def rest(self) -> None:
        """A standby that is to wait asleep gives its device back."""
        if self._state() is State.STANDBY and self._start.waiting.sleeps:
            await self._start.waiting.fall_asleep(lambda: self._state() is State.STANDBY)
            self._session.poke()

    def flip(self, role: Role, why: str) -> None:
        """Drain this stage; `turn` follows when the router says that nothing is left of it."""
        log.info("draining to serve %s: %s", role, why)
        self._flip_to = role
        self._tell(Event.FLIP_ASKED)

    async def turn(self) -> bool:
        """The other stage, under a new epoch; False while it is on its way, or when it may not be."""
        role = self._flip_to
        if self._turning or role is None or self._state() is not State.FLIPPING:
            return False
        self._turning = True
        began_s, before = self._clock.monotonic_s(), self._started.role

        def other() -> None:
            self._started.role = role

        try:
            lease = await self._session.change(f"it becomes {role}", other)
            self._tell(Event.TURNED)
            await self._start.turn()
        except (LostLease, StaleEpoch) as error:
            if self._state() in STARTS:
                self._end(Event.FENCED_OFF, str(error))
            log.warning("flip: %s; the session decides", error)
            return False
        except ReadyplaneError as error:
            self._end(Event.ENGINE_DIED, f"it could not serve {role}: {error}")
            return False
        finally:
            self._flip_to, self._turning = None, False
        took_s = self._clock.monotonic_s() - began_s
        log.info("serves %s, not %s, epoch %d, %.3f s", role, before, lease.epoch, took_s)
        return True

    def forgotten(self) -> None:
        """The lease is another one: no flip is known any more, and no activation goes on under it."""
        self._flip_to = None
        if self._activation is not None:
            self._activation.cancel()

    async def ended(self) -> None:
        """Until nothing is under way any more that was begun under a lost lease."""
        if self._activation is not None and not self._activation.done():
            await asyncio.wait({self._activation})
