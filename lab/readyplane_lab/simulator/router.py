"""The production router with an ear on it: what the planner is shown, and what is noted of it.

Owns nothing of the router's work: every call goes through. A convertible decode worker is shown to
the planner as the decode worker that it was ordered as.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from readyplane.core.worker import Fleet, Role, Worker
from readyplane.ports import RouterSignals
from readyplane_router.service import RouterService


class SimRouter(RouterService):
    """`RouterService` on virtual time.

    Args:
        on_drain: told the id of each worker that is to drain. Others: as `RouterService`.
    """

    def __init__(self, *, on_drain: Callable[[str], None], **parts: Any) -> None:
        super().__init__(**parts)
        self._on_drain = on_drain

    async def drain(self, worker_id: str, **how: Any) -> Worker:
        """See the port."""
        worker = await super().drain(worker_id, **how)
        self._on_drain(worker_id)
        return worker

    async def signals(self, model: str = "") -> RouterSignals:
        """See the port; asked by the planner alone."""
        found = await super().signals(model)
        return replace(found, fleet=_as_ordered(found.fleet))


def _as_ordered(fleet: Fleet) -> Fleet:
    both = {i: w for i, w in fleet.workers.items() if w.role is Role.BOTH}
    if not both:
        return fleet
    shown = {i: replace(w, offer=replace(w.offer, role=Role.DECODE)) for i, w in both.items()}
    return replace(fleet, workers={**fleet.workers, **shown})
