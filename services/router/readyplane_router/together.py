"""This router's signals to the others that share its store, and theirs to this one.

Owns the way of each router's word through the store, every round, while there are several; merging
is `pooling`'s. A word is worth `TTL_ROUNDS` rounds; whose is older is not heard, and that is said.
Who ends in order says a last word, which is heard for as long as it is taken to live.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from readyplane.core.errors import Unavailable
from readyplane.core.worker import Fleet
from readyplane.kit.clock import Clock
from readyplane.ports import ModelSignals
from readyplane_router.answers import model_signals
from readyplane_router.desk import Desk
from readyplane_router.link import Link
from readyplane_router.policy import RouterPolicy
from readyplane_router.pooling import Others, Told
from readyplane_router.signal_store import SignalStore

TTL_ROUNDS = 3
"""One word that was lost, or came late, does no harm."""
LAST_ROUNDS = 2
"""So long one that has ended is taken to live: the others hear its last word within a round."""
NAMED_MAX = 4
FORM = 1
"""Of what is packed. Another form is not read: its router is not heard."""

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Told).decode


def unpack(data: bytes) -> Told | None:
    """Bytes as a router's word; None when they are none, or of another form."""
    try:
        told = _decode(data)
    except (msgspec.DecodeError, ValueError):
        return None
    return told if told.form == FORM else None


class Together:
    """This router's word to the others, and theirs to this one."""

    def __init__(
        self,
        store: SignalStore,
        link: Link,
        clock: Clock,
        policy: RouterPolicy,
        desks: Mapping[str, Desk],
        own: str,
    ) -> None:
        """`own` is this router's incarnation; `desks` is the service's."""
        self._store, self._link, self._clock, self._desks = store, link, clock, desks
        self._own = own
        self._ttl_s = TTL_ROUNDS * policy.tick_s
        self._others = Others(self._ttl_s)
        self._living: tuple[str, ...] = ()
        self._said: tuple[str, ...] = ()

    async def round(self, *, began_s: float) -> None:
        """Tell the others and hear them; nothing while this router is alone. Raises Unavailable."""
        if not self._store.shared or self._link.routers < 2:
            self._living = ()
            return
        await self._tell(began_s, ttl_s=self._ttl_s)
        kept = await self._store.signals()
        now_s = self._clock.monotonic_s()
        self._living = tuple(sorted(router_id for router_id in kept if router_id != self._own))
        for router_id in self._living:
            value = kept[router_id]
            told = unpack(value[0]) if value is not None else None
            if value is not None and told is not None:
                told_s = now_s - max(0.0, self._ttl_s - value[1])
                self._others.hear(router_id, told, told_s=told_s, now_s=now_s, began_s=began_s)
        self._say(now_s)

    async def end(self, *, began_s: float) -> None:
        """This router ends: its last word, and that it does not live for long any more.

        Without that it would be missed, as one is that was killed. A store that is away is let be.
        """
        if not self._store.shared:
            return
        alone = self._link.routers < 2
        try:
            if not alone:  # it stays fresh for as long as this router is counted
                await self._tell(began_s, ttl_s=2 * self._ttl_s)
            last_s = 0.0 if alone else LAST_ROUNDS * self._ttl_s / TTL_ROUNDS
            await self._store.attend(self._own, ttl_s=last_s)
        except Unavailable as error:
            log.warning("the others are not told of this end", extra={"error": str(error)})

    async def _tell(self, began_s: float, *, ttl_s: float) -> None:
        now_s = self._clock.monotonic_s()
        models = tuple([model_signals(desk, now_s) for desk in self._desks.values()])
        packed = _encode(Told(FORM, now_s - began_s, models))
        await self._store.put_signals(self._own, packed, ttl_s=ttl_s)

    def merged(
        self, own: Mapping[str, ModelSignals], *, now_s: float, model: str = ""
    ) -> Mapping[str, ModelSignals]:
        """This router's signals with those of all others; see `pooling`."""
        return self._others.merged(own, now_s=now_s, model=model)

    def missing(self, now_s: float) -> int:
        """How many other routers live and are not heard: their part is not known."""
        heard = len(self._others.fresh(now_s).keys() & set(self._living))
        return max(0, self._link.routers - 1 - heard)

    def noted(self, fleet: Fleet, *, now_s: float) -> Fleet:
        """The fleet as it is told beside the signals: that some are missing is said with it."""
        count = self.missing(now_s)
        if not count:
            return fleet
        why = f"signals of {count} of {self._link.routers} routers are not heard"
        if names := self._unheard(now_s):
            why += f": {', '.join(names[:NAMED_MAX])}{', …' if len(names) > NAMED_MAX else ''}"
        return replace(fleet, degraded="; ".join(filter(None, (fleet.degraded, why))))

    def _unheard(self, now_s: float) -> tuple[str, ...]:
        fresh = self._others.fresh(now_s)
        return tuple(router_id for router_id in self._living if router_id not in fresh)

    def _say(self, now_s: float) -> None:
        unheard = self._unheard(now_s)
        if unheard != self._said:
            self._said = unheard
            if unheard:
                log.warning("signals of other routers are not heard", extra={"routers": unheard})
            else:
                log.info("signals of all routers are heard")
