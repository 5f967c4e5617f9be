"""The production router with an ear on it: what the planner is told, and what is checked and noted.

Owns nothing of the router's work: every call goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from readyplane.core.work import RequestShape
from readyplane.core.worker import Lease, Worker, WorkerOffer
from readyplane.ports import Pair, RouterSignals
from readyplane_lab.simulator.invariants import Epochs, pair_is_ready
from readyplane_lab.simulator.telemetry import Telemetry
from readyplane_router.service import RouterService


class SimRouter(RouterService):
    """`RouterService` on virtual time.

    Args:
        telemetry: the way of the signals to the planner. on_drain: told the id of each worker that
            is to drain, for good or to serve the other stage. Others: as `RouterService`.
    """

    def __init__(
        self,
        *,
        telemetry: Telemetry,
        on_drain: Callable[[str], None],
        **parts: Any,
    ) -> None:
        super().__init__(**parts)
        self._telemetry = telemetry
        self._on_drain = on_drain
        self._lease_epochs = Epochs("lease epoch of a worker")

    async def register(self, offer: WorkerOffer) -> Lease:
        """See the port."""
        lease = await super().register(offer)
        self._lease_epochs.lease(lease)
        return lease

    async def route(
        self,
        shape: RequestShape,
        *,
        replaces: str = "",
        avoid: Sequence[str] = (),
        explain: bool = False,
        dry_run: bool = False,
        chosen: Callable[[Pair], None] | None = None,
    ) -> Pair:
        """See the port."""
        pair = await super().route(
            shape, replaces=replaces, avoid=avoid, explain=explain, dry_run=dry_run, chosen=chosen
        )
        pair_is_ready(pair, self.roster.members)
        return pair

    async def drain(self, worker_id: str, **how: Any) -> Worker:
        """See the port."""
        worker = await super().drain(worker_id, **how)
        self._on_drain(worker_id)
        return worker

    async def flip(self, worker_id: str, **how: Any) -> Worker:
        """See the port."""
        worker = await super().flip(worker_id, **how)
        if worker.told:
            self._on_drain(worker_id)
        return worker

    async def signals(self, model: str = "", *, leader_epoch: int = 0) -> RouterSignals:
        """See the port; asked by the planner alone."""
        found = await super().signals(model, leader_epoch=leader_epoch)
        return self._telemetry.passed(found)
