"""The hand of the planner: orders, drains and releases, each done once and its outcome told.

Owns the calls in flight and their bounds. A call never holds up a tick; a refused order is an
outcome with its reason, so that the brain can believe what is and try again later (B35).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Iterable
from dataclasses import dataclass, field

from readyplane.core.errors import NotFound, ReadyplaneError, Refused, Unavailable
from readyplane.core.startup import StartMode
from readyplane.ports import Actuator, Instance, Order, Router
from readyplane_planner.decide import ROLE_OF, Decision, Drain, Release, StartOrder
from readyplane_planner.signals import Refusal

log = logging.getLogger(__name__)

CALLS_MAX = 32
UNANSWERED_MAX = 256
ORDER_S_MAX = 15.0
CALL_S_MAX = 45.0
"""Longer than the grace of a release, which the call waits for."""
ADVISORY = "advisory: this planner has no actuator, it plans and orders nothing"


@dataclass(frozen=True, slots=True)
class Done:
    """One finished call: what (`ordered`, `refused`, `unanswered`, `draining`, `drain_failed`,
    `released`, ...), for which worker and decision, and the actuator's or router's words.
    """

    kind: str
    worker_id: str
    pool: str
    decision_id: str
    note: str = ""


@dataclass(slots=True)
class _Flight:
    tasks: dict[tuple[str, str], asyncio.Task[None]] = field(default_factory=dict)


class NoActuator:
    """The actuator of an advisory planner: it holds nothing and refuses every order (B35)."""

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        """Refused, with the reason."""
        del leader_epoch
        raise Refused(f"order of {order.worker_id}", [ADVISORY], "start it by hand")

    async def release(
        self, worker_id: str, *, grace_s: float = 10.0, reason: str = "", leader_epoch: int = 0
    ) -> Instance:
        """Refused, with the reason."""
        del grace_s, reason, leader_epoch
        raise Refused(f"release of {worker_id}", [ADVISORY], "stop it by hand")

    async def list_instances(self, *, model: str = "", leader_epoch: int = 0) -> list[Instance]:
        """None."""
        del model, leader_epoch
        return []


class Hand:
    """Carries decisions out; without an actuator it tells of each that it was not.

    Args:
        release_grace_s: how long a released worker may take to end by itself.
    """

    def __init__(
        self, router: Router, actuator: Actuator | None, *, model: str, release_grace_s: float
    ) -> None:
        self._router = router
        self._advisory = actuator is None
        self._actuator: Actuator = NoActuator() if actuator is None else actuator
        self._model = model
        self._grace_s = release_grace_s
        self._flight = _Flight()
        self._places = asyncio.Semaphore(CALLS_MAX)
        self._done: list[Done] = []
        self._unanswered: dict[str, tuple[StartOrder, str]] = {}

    def take(self, decision: Decision, *, leader_epoch: int) -> None:
        """Begin everything that a decision asks for; returns at once."""
        self.carry_out(
            decision.decision_id,
            decision.orders,
            decision.drains,
            decision.releases,
            leader_epoch=leader_epoch,
        )

    def carry_out(
        self,
        decision_id: str,
        orders: Iterable[StartOrder] = (),
        drains: Iterable[Drain] = (),
        releases: Iterable[Release] = (),
        *,
        leader_epoch: int,
    ) -> None:
        """Begin them in the name of a decision; a call in flight is not doubled."""
        for order in orders:
            work = self._order(order, decision_id, leader_epoch)
            self._begin("order", order.worker_id, work)
        for drain in drains:
            work = self._drain(drain, decision_id, leader_epoch)
            self._begin("drain", drain.worker_id, work)
        for release in releases:
            work = self._release(release, decision_id, leader_epoch)
            self._begin("release", release.worker_id, work)

    def repeat(self, open_orders: Container[str], *, leader_epoch: int) -> None:
        """Give orders again whose call nobody answered, as long as they are open.

        Whether one was taken is not known: the same worker id makes it one worker either way.
        """
        for worker_id, (order, decision_id) in list(self._unanswered.items()):
            del self._unanswered[worker_id]
            if worker_id in open_orders:
                self.carry_out(decision_id, (order,), leader_epoch=leader_epoch)

    @property
    def advisory(self) -> bool:
        """Whether it can act on nothing."""
        return self._advisory

    def collect(self) -> list[Done]:
        """What finished since the last call."""
        done, self._done = self._done, []
        return done

    async def aclose(self) -> None:
        """Wait for nothing: cancel what is in flight."""
        tasks = list(self._flight.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, what: str, worker_id: str, work: Callable[[], Awaitable[Done]]) -> None:
        key = (what, worker_id)
        if key in self._flight.tasks:
            return
        task = asyncio.get_running_loop().create_task(self._bounded(key, work))
        self._flight.tasks[key] = task

    async def _bounded(self, key: tuple[str, str], work: Callable[[], Awaitable[Done]]) -> None:
        try:
            async with self._places:
                self._done.append(await work())
        finally:
            self._flight.tasks.pop(key, None)

    def _order(
        self, order: StartOrder, decision_id: str, epoch: int
    ) -> Callable[[], Awaitable[Done]]:
        wanted = Order(
            worker_id=order.worker_id,
            role=ROLE_OF[order.pool],
            model=self._model,
            worker_class=order.worker_class,
            manifest_digest=order.manifest_digest,
            generation=order.generation,
            mode=StartMode(order.mode),
            scale_decision_id=decision_id,
            convertible_tpot_s=order.convertible_tpot_s,
            node_preference=order.nodes,
        )

        async def call() -> Done:
            try:
                async with asyncio.timeout(ORDER_S_MAX):
                    instance = await self._actuator.provision(wanted, leader_epoch=epoch)
            except (Unavailable, OSError, TimeoutError) as error:
                # Perhaps it was taken: no refusal, and so the same order again, not another one.
                self._unanswered[order.worker_id] = order, decision_id
                while len(self._unanswered) > UNANSWERED_MAX:
                    self._unanswered.pop(next(iter(self._unanswered)))
                note = str(error) or type(error).__name__
                return Done("unanswered", order.worker_id, order.pool, decision_id, note)
            return Done("ordered", order.worker_id, order.pool, decision_id, instance.node_note)

        return self._saying(call, "refused", order.worker_id, order.pool, decision_id)

    def _drain(self, drain: Drain, decision_id: str, epoch: int) -> Callable[[], Awaitable[Done]]:
        async def call() -> Done:
            if self._advisory:
                # Advice is taken as followed: the next one builds on it instead of repeating it.
                return Done("advised", drain.worker_id, drain.pool, decision_id, ADVISORY)
            await self._router.drain(
                drain.worker_id,
                epoch=drain.epoch,
                reason=f"scale-down: {drain.why}",
                deadline_s=drain.deadline_s,
                scale_decision_id=decision_id,
                leader_epoch=epoch,
            )
            return Done("draining", drain.worker_id, drain.pool, decision_id, drain.why)

        return self._saying(call, "drain_failed", drain.worker_id, drain.pool, decision_id)

    def _release(
        self, release: Release, decision_id: str, epoch: int
    ) -> Callable[[], Awaitable[Done]]:
        async def call() -> Done:
            try:
                await self._actuator.release(
                    release.worker_id,
                    grace_s=self._grace_s,
                    reason=release.why,
                    leader_epoch=epoch,
                )
            except NotFound:
                return Done("released", release.worker_id, release.pool, decision_id, "was gone")
            return Done("released", release.worker_id, release.pool, decision_id, release.why)

        return self._saying(call, "release_failed", release.worker_id, release.pool, decision_id)

    def _saying(
        self,
        call: Callable[[], Awaitable[Done]],
        failed: str,
        worker_id: str,
        pool: str,
        decision_id: str,
    ) -> Callable[[], Awaitable[Done]]:
        """The call with its failure as an outcome in words, within CALL_S_MAX."""

        async def said() -> Done:
            try:
                async with asyncio.timeout(CALL_S_MAX):
                    return await call()
            except (ReadyplaneError, OSError, TimeoutError) as error:
                note = str(error) or type(error).__name__
                log.warning(
                    "%s of %s",
                    failed,
                    worker_id,
                    extra={"scale_decision_id": decision_id, "why": note},
                )
                return Done(failed, worker_id, pool, decision_id, note)

        return said


def refusals(done: list[Done]) -> tuple[Refusal, ...]:
    """Orders and drains that were not taken, in the words of the brain."""
    kinds = {"refused", "drain_failed"}
    return tuple(Refusal(d.worker_id, d.pool, d.note) for d in done if d.kind in kinds)
