"""A worker that drains: whether its engine holds nothing for anybody any more, and when time is up.

Owns the deadline of a drain, the look at the engine, and telling the router of a drain that it did
not order. `life` says when to look and hands out that it has drained; `transfer` gives meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from readyplane.core.errors import ReadyplaneError
from readyplane.kit.clock import Clock
from readyplane.ports import Router
from readyplane_agent.engines.port import EnginePort
from readyplane_agent.lifecycle import Event
from readyplane_agent.loop import Session
from readyplane_agent.settings import AgentSettings
from readyplane_agent.transfer import TransferServer

log = logging.getLogger("agent.drain")

IDLE_ASKED_S_MAX = 1.0


class Draining:
    """The drain of one worker, which ends in its leaving or in another stage.

    Args:
        transfer: what gives its weights. end: ends the life with an event and a reason.

    Attributes:
        drained: nothing is left of this drain. until_s: agent's clock; when who is to leave does.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        router: Router,
        engine: EnginePort,
        session: Session,
        transfer: TransferServer,
        clock: Clock,
        end: Callable[[Event, str], None],
    ) -> None:
        self._s, self._router, self._engine = settings, router, engine
        self._session, self._transfer = session, transfer
        self._clock, self._end = clock, end
        self.drained = False
        self.until_s: float | None = None

    def begin(self, deadline_s: float, why: str) -> None:
        """It is to leave, after `deadline_s` seconds at the latest."""
        log.info("draining for at most %.0f s: %s", deadline_s, why)
        self.until_s = self._clock.monotonic_s() + deadline_s

    async def look(self, *, leaves: bool) -> None:
        """Whether it has drained by now; ends the life of who `leaves` when time is up.

        A router that heard of it says when to leave; one that is away for a whole lease need not.
        """
        now_s = self._clock.monotonic_s()
        given = not leaves or not self._transfer.in_use  # who only flips goes on giving
        if not self.drained and await self._is_idle() and given:
            self.drained = True
            log.info("drained: the engine holds nothing for anybody")
            self._session.poke()
        if not leaves:
            return
        contact_s, lease = self._session.contact_s, self._session.lease
        assert lease is not None
        if self.drained and contact_s is not None and now_s - contact_s > lease.ttl_s:
            # Nobody can send work to a worker whose lease has run out; nothing is left to wait for.
            why = "drained, and the router has been away for a whole lease"
            self._end(Event.LEAVE_ASKED, why)
        elif self.until_s is not None and now_s > self.until_s:
            self._end(Event.LEAVE_ASKED, "the drain's deadline has passed")

    async def tell_router(self) -> None:
        """The router must stop sending work before we wait for an idle engine (B62)."""
        try:
            await self._router.drain(
                self._s.worker_id,
                epoch=self._session.epoch,
                reason="the agent was asked to end",
                deadline_s=self._s.drain_deadline_s,
                scale_decision_id=self._s.scale_decision_id,
            )
        except ReadyplaneError as error:
            log.warning("the router does not know of the drain: %s", error)

    async def _is_idle(self) -> bool:
        """An engine that hangs is not known to be idle, and holds up no deadline of a drain."""
        try:
            async with asyncio.timeout(IDLE_ASKED_S_MAX):
                return await self._engine.is_idle()
        except TimeoutError:
            return False
