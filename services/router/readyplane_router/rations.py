"""Orders of admission between the planner, this router and the others.

Owns the way of an order: to the store, to this router's desk, and from the store to the desks of the
others, with their next round of housekeeping. The store forgets it when its time is over; while the store is away each router keeps
what it knows, for as long as the order lasts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from readyplane.core.errors import Unavailable
from readyplane.core.ration import Ration
from readyplane.kit.clock import Clock
from readyplane_router.desk import Desk
from readyplane_router.link import Link
from readyplane_router.ration_store import RationStore
from readyplane_router.rationing import check_ration

ENDED_S = 30.0
"""An end is kept for so long, so that every router hears of it."""

log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Ration).decode


class Rations:
    """The way of orders, for all models of one router."""

    def __init__(
        self, store: RationStore, link: Link, clock: Clock, desks: Mapping[str, Desk]
    ) -> None:
        """`desks` is the service's own."""
        self._store, self._link, self._clock, self._desks = store, link, clock, desks

    async def give(self, desk: Desk, order: Ration) -> Ration | None:
        """Follow an order and tell the others; returns what is in force.

        Raises:
            InvalidField: the order.
        """
        check_ration(order)
        if self._store.shared and self._link.answering:
            ttl_s = order.ttl_s if order.admit_share < 1.0 else ENDED_S
            try:
                await self._store.put_ration(desk.model, _encode(order), ttl_s=ttl_s)
            except Unavailable as error:
                self._link.failed(error)
        now_s = self._clock.monotonic_s()
        desk.rationing.take(order, now_s=now_s)
        return desk.rationing.order(now_s=now_s)

    async def hear(self) -> None:
        """What other routers were told. Raises Unavailable.

        The store has the newest order, also of those that were given here. One that it does not have
        is kept: it was not told, or it has just run out there and does so here.
        """
        if not self._store.shared or self._link.routers < 2:
            return
        for model, desk in list(self._desks.items()):
            kept = await self._store.ration(model)
            if kept is None:
                continue
            try:
                order = replace(_decode(kept[0]), ttl_s=kept[1])
            except msgspec.DecodeError:  # of another version: it is over soon by itself
                log.warning("an order of admission cannot be read", extra={"model": model})
                continue
            desk.rationing.take(order, now_s=self._clock.monotonic_s())
