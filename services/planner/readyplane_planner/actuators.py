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
from readyplane.core.ration import Ration
from readyplane.core.startup import StartMode
from readyplane.core.worker import Holds, Role, Worker, WorkerState
from readyplane.ports import Actuator, Instance, Order, Router
from readyplane_planner.decide import (
    ROLE_OF,
    Activation,
    Decision,
    Drain,
    Flip,
    Memory,
    Release,
    StartOrder,
    fast,
)
from readyplane_planner.signals import Observation, Refusal

log = logging.getLogger(__name__)

CALLS_MAX = 32
UNANSWERED_MAX = 256
ORDER_S_MAX = 15.0
RATION_WHY_MAX = 400
CALL_S_MAX = 45.0
"""Longer than the grace of a release, which the call waits for."""
ADVISORY = "advisory: this planner has no actuator, it plans and orders nothing"
AGAIN = "told again"
ADVISED = "advisory: by policy.advisory this planner plans and orders nothing"


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

    def __init__(self, why: str = ADVISORY) -> None:
        self._why = why

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        """Refused, with the reason."""
        del leader_epoch
        raise Refused(f"order of {order.worker_id}", [self._why], "start it by hand")

    async def release(
        self, worker_id: str, *, grace_s: float = 10.0, reason: str = "", leader_epoch: int = 0
    ) -> Instance:
        """Refused, with the reason."""
        del grace_s, reason, leader_epoch
        raise Refused(f"release of {worker_id}", [self._why], "stop it by hand")

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
        self._given = actuator
        self._actuator: Actuator = NoActuator() if actuator is None else actuator
        self._advice = ADVISORY if actuator is None else ""
        self._model = model
        self._grace_s = release_grace_s
        self._flight = _Flight()
        self._places = asyncio.Semaphore(CALLS_MAX)
        self._done: list[Done] = []
        self._unanswered: dict[str, tuple[StartOrder, str, int]] = {}

    def take(self, decision: Decision, *, leader_epoch: int) -> None:
        """Begin everything that a decision asks for; returns at once."""
        self.carry_out(
            decision.decision_id,
            decision.orders,
            decision.drains,
            decision.releases,
            decision.activations,
            decision.flips,
            leader_epoch=leader_epoch,
            policy_version=decision.policy_version,
        )

    def carry_out(
        self,
        decision_id: str,
        orders: Iterable[StartOrder] = (),
        drains: Iterable[Drain] = (),
        releases: Iterable[Release] = (),
        activations: Iterable[Activation] = (),
        flips: Iterable[Flip] = (),
        *,
        leader_epoch: int,
        policy_version: int = 0,
    ) -> None:
        """Begin them in the name of a decision; a call in flight is not doubled.

        `policy_version`: that the orders were decided under, for whoever carries them out.
        """
        for order in orders:
            work = self._order(order, decision_id, leader_epoch, policy_version)
            self._begin("order", order.worker_id, work)
        for drain in drains:
            work = self._drain(drain, decision_id, leader_epoch)
            self._begin("drain", drain.worker_id, work)
        for release in releases:
            work = self._release(release, decision_id, leader_epoch)
            self._begin("release", release.worker_id, work)
        for one in activations:
            work = self._activate(one, decision_id, leader_epoch)
            self._begin("activate", one.worker_id, work)
        for flip in flips:
            self._begin("flip", flip.worker_id, self._flip(flip, decision_id, leader_epoch))

    def tell_again(
        self,
        decision: Decision,
        observation: Observation,
        memory: Memory,
        workers: Iterable[Worker],
        *,
        deadline_s: float,
        leader_epoch: int,
    ) -> None:
        """What the router does not show of what it was told was lost: it is told again."""
        if self._advice or not (memory.draining or memory.changing):
            return
        drains = lost_drains(
            workers,
            memory.draining,
            fresh=[d.worker_id for d in decision.drains],
            deadline_s=deadline_s,
        )
        told, turned = fast.untold(observation, memory)
        fresh = {a.worker_id for a in decision.activations}
        fresh |= {f.worker_id for f in decision.flips}
        self.carry_out(
            decision.decision_id,
            drains=drains,
            activations=[a for a in told if a.worker_id not in fresh],
            flips=[f for f in turned if f.worker_id not in fresh],
            leader_epoch=leader_epoch,
        )

    def ration(self, decision: Decision, *, leader_epoch: int) -> None:
        """Give the order of admission, anew in each decision: it lasts for a few ticks only."""
        order = decision.ration
        if order is None:
            return
        told = Ration(
            order.priority,
            order.admit_share,
            order.ttl_s,
            order.why[:RATION_WHY_MAX],
            decision.decision_id,
            order.retry_after_s,
        )

        # Of those that only go on nothing is told: most are not in the journal.
        decision_id = decision.decision_id if order.turned else ""

        async def call() -> Done:
            if self._advice:
                return Done("advised", "", "", decision_id, self._advice)
            await self._router.ration(self._model, told, leader_epoch=leader_epoch)
            return Done("rationed", "", "", decision_id, order.why)

        work = self._saying(call, "ration_failed", "", "", decision_id)
        self._begin("ration", self._model, work)

    def repeat(self, open_orders: Container[str], *, leader_epoch: int) -> None:
        """Give orders again whose call nobody answered, as long as they are open.

        Whether one was taken is not known: the same worker id makes it one worker either way.
        """
        for worker_id, (order, decision_id, version) in list(self._unanswered.items()):
            del self._unanswered[worker_id]
            if worker_id in open_orders:
                self.carry_out(
                    decision_id, (order,), leader_epoch=leader_epoch, policy_version=version
                )

    def advise(self, only: bool) -> None:
        """From the next call on act on nothing, or act again; without an actuator it never acts."""
        if self._given is not None:
            self._advice = ADVISED if only else ""
            self._actuator = NoActuator(ADVISED) if only else self._given

    @property
    def advice(self) -> str:
        """Why it acts on nothing; empty when it acts."""
        return self._advice

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
                done = await work()
            self._done.append(done)  # looked up now: a tick may have taken the list meanwhile
        finally:
            self._flight.tasks.pop(key, None)

    def _order(
        self, order: StartOrder, decision_id: str, epoch: int, policy_version: int
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
            standby=order.standby,
            holds=Holds(order.holds),
            graph_stages=order.graph_stages,
            node_preference=order.nodes,
            policy_version=policy_version,
        )

        async def call() -> Done:
            try:
                async with asyncio.timeout(ORDER_S_MAX):
                    instance = await self._actuator.provision(wanted, leader_epoch=epoch)
            except (Unavailable, OSError, TimeoutError) as error:
                # Perhaps it was taken: no refusal, and so the same order again, not another one.
                self._unanswered[order.worker_id] = order, decision_id, policy_version
                while len(self._unanswered) > UNANSWERED_MAX:
                    self._unanswered.pop(next(iter(self._unanswered)))
                note = str(error) or type(error).__name__
                return Done("unanswered", order.worker_id, order.pool, decision_id, note)
            return Done("ordered", order.worker_id, order.pool, decision_id, instance.node_note)

        return self._saying(call, "refused", order.worker_id, order.pool, decision_id)

    def _drain(self, drain: Drain, decision_id: str, epoch: int) -> Callable[[], Awaitable[Done]]:
        return self._word(
            ("draining", "drain_failed"),
            drain,
            decision_id,
            lambda: self._router.drain(
                drain.worker_id,
                epoch=drain.epoch,
                reason=f"scale-down: {drain.why}",
                deadline_s=drain.deadline_s,
                scale_decision_id=decision_id,
                leader_epoch=epoch,
            ),
        )

    def _activate(
        self, one: Activation, decision_id: str, epoch: int
    ) -> Callable[[], Awaitable[Done]]:
        return self._word(
            ("activating", "activate_failed"),
            one,
            decision_id,
            lambda: self._router.activate(
                one.worker_id,
                epoch=one.epoch,
                reason=one.why,
                deadline_s=one.deadline_s,
                scale_decision_id=decision_id,
                leader_epoch=epoch,
            ),
        )

    def _flip(self, flip: Flip, decision_id: str, epoch: int) -> Callable[[], Awaitable[Done]]:
        return self._word(
            ("flipping", "flip_failed"),
            flip,
            decision_id,
            lambda: self._router.flip(
                flip.worker_id,
                role=ROLE_OF[flip.to],
                epoch=flip.epoch,
                reason=flip.why,
                deadline_s=flip.deadline_s,
                scale_decision_id=decision_id,
                leader_epoch=epoch,
            ),
        )

    def _word(
        self,
        kinds: tuple[str, str],
        one: Drain | Activation | Flip,
        decision_id: str,
        tell: Callable[[], Awaitable[object]],
    ) -> Callable[[], Awaitable[Done]]:
        """One thing that the router tells a worker; `kinds` name its outcome when told, and not."""
        told, failed = kinds

        async def call() -> Done:
            if self._advice:
                # Advice is taken as followed: the next one builds on it instead of repeating it.
                return Done("advised", one.worker_id, one.pool, decision_id, self._advice)
            await tell()
            return Done(told, one.worker_id, one.pool, decision_id, one.why)

        return self._saying(call, failed, one.worker_id, one.pool, decision_id)

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
    """What was asked for and not taken, in the words of the brain."""
    kinds = {"refused", "drain_failed", "activate_failed", "flip_failed"}
    return tuple(Refusal(d.worker_id, d.pool, d.note) for d in done if d.kind in kinds)


def lost_drains(
    workers: Iterable[Worker],
    draining: Iterable[tuple[str, float]],
    *,
    fresh: Container[str],
    deadline_s: float,
) -> list[Drain]:
    """Drains that the router does not show, to be told again; those of now are on their way."""
    leaving = {worker_id for worker_id, _since_s in draining if worker_id not in fresh}
    return [
        Drain(w.worker_id, "prefill" if w.role is Role.PREFILL else "decode", 0, deadline_s, AGAIN)
        for w in workers
        if w.worker_id in leaving and w.state is WorkerState.READY
    ]
