"""The router's use-cases: `ports.Router` over a store, epochs, a registry and a clock.

Owns the order of things: who is told first, what is undone when the store refuses, what goes on
while the store is away. Judgement is in the pure brains (`gate`, `group`, `lease`, `prefix`,
`pair`), a model's queue and bookings at its `Desk`, membership in `membership`. `run` is the
background work; everything else is called through the port. The simulator runs this very class on
virtual time with memory twins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from readyplane.core.errors import (
    NotFound,
    Overloaded,
    ReadyplaneError,
    Unavailable,
)
from readyplane.core.fencing import Fences
from readyplane.core.profile import ClassProfile
from readyplane.core.ration import Ration
from readyplane.core.work import RequestEvent, RequestShape, reservation_id_of
from readyplane.core.worker import CheckResult, Fleet, Lease, Role, Serving, Worker, WorkerOffer
from readyplane.kit.clock import Clock
from readyplane.ports import (
    GateVerdict,
    GroupStatus,
    Pair,
    RankReport,
    Renewal,
    RenewalAnswer,
    RouterSignals,
)
from readyplane_router.admission import Admission, Manifests
from readyplane_router.answers import (
    check_events,
    check_shape,
    end_of,
    ends_of,
    learn,
    model_signals,
    pair_from,
)
from readyplane_router.bookings import Held, Owed
from readyplane_router.desk import Desk
from readyplane_router.dry import dry_run_of, explain_booked
from readyplane_router.epochs import Epochs
from readyplane_router.ledger import Ledger
from readyplane_router.link import Link
from readyplane_router.membership import Membership
from readyplane_router.moving import Moving
from readyplane_router.pair.why import wait_left_s
from readyplane_router.policy import RouterPolicy
from readyplane_router.rations import Rations
from readyplane_router.roster import Roster
from readyplane_router.seats import ALL_SIDES
from readyplane_router.store import Store
from readyplane_router.together import Together
from readyplane_router.waiting import Waiting

TAKE_TRIES_MAX = 8
TAKE_PAUSE_S = 0.02
ISL_MAX = 16_000_000
OTHER_MODEL = "other"

log = logging.getLogger(__name__)


class RouterService:
    """What is alive, and which pair serves a request."""

    def __init__(
        self,
        *,
        store: Store,
        epochs: Epochs,
        clock: Clock,
        registry: Manifests | None,
        profiles: Mapping[str, ClassProfile],
        incarnation: str,
        policy: RouterPolicy | None = None,
        on_admitted: Callable[[Worker], None] | None = None,
        on_followed: Callable[[str, Worker, float], None] | None = None,
    ) -> None:
        """Put together; `start` before use, `run` as background work.

        Args:
            registry: where manifests are read (any `ports.Registry`); None admits attached only.
            profiles: class profiles by name. incarnation: identity of this router's life.
            on_admitted: told of every start that was admitted; on_followed: of every worker that
                serves as it was told (activate, flip), with the seconds since (for metrics).
        """
        self.policy = policy or RouterPolicy()
        self.incarnation = incarnation
        self._clock = clock
        self._store = store
        self._began_s = clock.monotonic_s()
        self._timers: dict[str, tuple[float, asyncio.TimerHandle]] = {}
        self._unknown_models: dict[str, float] = {}
        self._other_refused = 0
        self._ended = False
        self._fences = Fences()
        self.desks: dict[str, Desk] = {}
        self.roster = Roster()
        self.link = Link(clock, self.policy, self.roster.bump)
        self.roster.standing = self.link.standing
        self._ledger = Ledger(store, self.link, clock, self.policy, self.desks)
        self.moving = Moving(self._ledger, clock, self.policy, self.desks, self._pump)
        self._rations = Rations(store, self.link, clock, self.desks)
        self.together = Together(store, self.link, clock, self.policy, self.desks, incarnation)
        self.members = Membership(
            store=store,
            epochs=epochs,
            clock=clock,
            admission=Admission(registry, dict(profiles), self.policy),
            roster=self.roster,
            link=self.link,
            incarnation=incarnation,
            policy=self.policy,
            desk=self.desk,
            pump=self._pump,
            owe=self._ledger.owe,
            put_back=self._ledger.put_back,
            on_admitted=on_admitted,
            on_followed=on_followed,
        )

    async def start(self) -> None:
        """Take over what the store knows. Raises Unavailable when store or epochs do not answer."""
        await self.members.start()
        self._began_s = self._clock.monotonic_s()

    async def run(self) -> None:
        """Housekeeping every `tick_s`, and the changes of other routers; endless."""
        tasks = [asyncio.create_task(self._ticking())]
        if self._store.shared:
            tasks.append(asyncio.create_task(self.members.follow()))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _ticking(self) -> None:
        while True:
            await self._clock.sleep(self.policy.tick_s)
            await self.tick()

    async def aclose(self) -> None:
        """The end of this router, told to the others; nothing is done for it afterwards."""
        self._ended = True
        await self.together.end(began_s=self._began_s)

    async def tick(self) -> None:
        """One round of housekeeping."""
        if self._ended:
            return
        await self.members.tick()
        await self.members.look_after()
        if self.link.answering:
            try:
                await self._ledger.settle()
                await self._rations.hear()
                await self.together.round(began_s=self._began_s)
            except Unavailable as error:
                self.link.failed(error)
        for model, desk in list(self.desks.items()):
            desk.settle_ends(now_s=self._clock.monotonic_s())
            self._pump(model)

    # --------------------------------------------------------------------- workers

    async def register(self, offer: WorkerOffer) -> Lease:
        return await self.members.register(offer)

    async def renew(self, renewal: Renewal) -> RenewalAnswer:
        return await self.members.renew(renewal)

    def hear(self, worker_id: str, incarnation: str, told: Callable[[RenewalAnswer], None]) -> None:
        self.members.hear(worker_id, incarnation, told)

    async def report_rank(self, report: RankReport) -> GroupStatus:
        return await self.members.report_rank(report)

    async def admit(
        self,
        worker_id: str,
        incarnation: str,
        epoch: int,
        *,
        serving: Serving,
        checks: Sequence[CheckResult],
    ) -> GateVerdict:
        return await self.members.admit(
            worker_id, incarnation, epoch, serving=serving, checks=checks
        )

    async def leave(self, worker_id: str, incarnation: str, epoch: int, *, reason: str) -> None:
        await self.members.leave(worker_id, incarnation, epoch, reason=reason)

    async def drain(
        self,
        worker_id: str,
        *,
        epoch: int = 0,
        reason: str = "",
        deadline_s: float = 300.0,
        scale_decision_id: str = "",
        leader_epoch: int = 0,
    ) -> Worker:
        await self._fence(worker_id, leader_epoch)
        return await self.members.drain(
            worker_id,
            epoch=epoch,
            reason=reason,
            deadline_s=deadline_s,
            scale_decision_id=scale_decision_id,
        )

    async def activate(
        self,
        worker_id: str,
        *,
        epoch: int = 0,
        reason: str = "",
        deadline_s: float = 0.0,
        scale_decision_id: str = "",
        leader_epoch: int = 0,
    ) -> Worker:
        await self._fence(worker_id, leader_epoch)
        return await self.members.activate(
            worker_id,
            epoch=epoch,
            reason=reason,
            deadline_s=deadline_s,
            scale_decision_id=scale_decision_id,
        )

    async def flip(
        self,
        worker_id: str,
        *,
        role: Role,
        epoch: int = 0,
        reason: str = "",
        deadline_s: float = 0.0,
        scale_decision_id: str = "",
        leader_epoch: int = 0,
    ) -> Worker:
        await self._fence(worker_id, leader_epoch)
        return await self.members.flip(
            worker_id,
            role=role,
            epoch=epoch,
            reason=reason,
            deadline_s=deadline_s,
            scale_decision_id=scale_decision_id,
        )

    async def ration(self, model: str, order: Ration, *, leader_epoch: int = 0) -> Ration | None:
        desk = await self._desk_of(model)
        if leader_epoch:
            await self._follow(model, leader_epoch)
        return await self._rations.give(desk, order)

    async def _fence(self, worker_id: str, leader_epoch: int) -> None:
        member = self.roster.members.get(worker_id)
        if member is not None and leader_epoch:
            await self._follow(member.offer.model, leader_epoch)

    async def _follow(self, model: str, leader_epoch: int) -> None:
        """Obey a leader, unless this or another router has seen a newer one. Raises StaleEpoch."""
        self._fences.take(model, leader_epoch)
        try:
            newest = await self._store.fence(model, leader_epoch)
        except Unavailable:
            return  # what this router has seen itself still counts
        self._fences.take(model, newest)
        self._fences.take(model, leader_epoch)

    async def list_workers(self, model: str = "") -> Fleet:
        return self.roster.fleet(model)

    def watch(self, model: str = "") -> AsyncGenerator[Fleet]:
        return self.roster.watch(model)

    # --------------------------------------------------------------------- requests

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
        check_shape(shape)
        desk = await self._desk_of(shape.model)
        self.link.check_not_cut_off()
        replaces = self.moving.now(replaces)
        reservation_id = reservation_id_of(shape.request_id, replaces)
        if not dry_run:
            held = desk.held.get(reservation_id)
            if held is not None and held.pair is not None:
                return held.pair
            twin = desk.waiting.get(reservation_id)
            if twin is not None:
                return await self._same_answer(twin)
            if replaces:
                await self._release(desk, replaces)
        entry = desk.entry(
            reservation_id,
            shape,
            now_s=self._clock.monotonic_s(),
            granted=asyncio.get_running_loop().create_future(),
            avoid=frozenset(avoid),
        )
        if dry_run:
            now_s = self._clock.monotonic_s()
            return dry_run_of(desk, entry, desk.pairing, explain=explain, now_s=now_s)
        why = self._count_arrival(desk, entry, replaces)
        if why and not replaces:  # what has been admitted once is served
            desk.refused("rationed", entry)
            raise desk.rationing.error(why, now_s=entry.arrived_s)
        desk.waiting[reservation_id] = entry
        try:
            pair = await self._place(desk, entry, explain=explain, chosen=chosen)
        except BaseException as error:
            self._abandon(desk, entry, error)
            raise
        del desk.waiting[reservation_id]
        if entry.answer is not None and not entry.answer.done():
            entry.answer.set_result(pair)
        return pair

    async def move(
        self, shape: RequestShape, *, reservation_id: str, worker_id: str, emitted: int
    ) -> Pair:
        self.link.check_not_cut_off()
        return await self.moving.move(
            shape, reservation_id=reservation_id, worker_id=worker_id, emitted=emitted
        )

    async def complete(self, events: Sequence[RequestEvent]) -> int:
        check_events(events)
        now_s = self._clock.monotonic_s()
        unknown = 0
        owed: dict[str, Owed] = {}
        strangers: list[RequestEvent] = []
        for event in self.moving.followed(events):
            for model, desk in self.desks.items():
                if event.reservation_id in desk.held:
                    told = owed.get(model)
                    if told is None:
                        told = owed[model] = Owed()
                    desk.event(event, told, now_s=now_s)
                    break
                if desk.end_of_lost(event, now_s=now_s):
                    unknown += 1
                    break
            else:
                strangers.append(event)
        for model, told in owed.items():
            self._pump(model)
            if told.releases or told.grows:
                await self._ledger.tell(model, told)
        if strangers:
            unknown += await self._ledger.strangers(strangers)
        return unknown

    async def signals(self, model: str = "", *, leader_epoch: int = 0) -> RouterSignals:
        if leader_epoch > self._fences.newest(model):
            await self._follow(model, leader_epoch)
        self._fences.take(model, leader_epoch)
        now_s = self._clock.monotonic_s()
        own = {
            name: model_signals(desk, now_s)
            for name, desk in self.desks.items()
            if model in ("", name)
        }
        return RouterSignals(
            incarnation=self.incarnation,
            uptime_s=now_s - self._began_s,
            models=self.together.merged(own, now_s=now_s, model=model),
            fleet=self.together.noted(self.roster.fleet(model), now_s=now_s),
            routers_missing=self.together.missing(now_s),
        )

    # --------------------------------------------------------------------- placing

    async def _place(
        self,
        desk: Desk,
        entry: Waiting,
        *,
        explain: bool,
        chosen: Callable[[Pair], None] | None = None,
    ) -> Pair:
        """`chosen`: told of the first choice while it is being reserved, which may be refused."""
        first = True  # nothing has been waited for between arrival and here
        for attempt in range(TAKE_TRIES_MAX):
            desk.enqueue(entry)
            self._pump(desk.model, entry.arrived_s if first else None)
            first = False
            held = await self._granted(desk, entry)
            explanation = self._explained(desk, entry, held) if explain else None
            pair = held.pair = self._pair(held, explanation)
            if chosen is not None and not attempt:
                chosen(pair)
            taken = await self._ledger.take(desk, held)
            if not taken.refused:
                if taken.repeated:
                    desk.drop(held.reservation_id, now_s=self._clock.monotonic_s())
                    return pair_from(taken.payload)
                now_s = self._clock.monotonic_s()
                desk.windows["ttft_predicted"].add(pair.predicted_ttft_s, now_s=now_s)
                desk.windows["tpot_predicted"].add(pair.predicted_tpot_s, now_s=now_s)
                return pair
            # Another router was first: learn what the seats hold now and judge again.
            desk.take_conflicts += 1
            desk.drop(held.reservation_id, now_s=self._clock.monotonic_s())
            for seat, used in zip(ends_of(held), taken.used, strict=False):
                learn(seat, used)
            await self.members.refresh_if_shut(taken.refused, desk.model)
            if attempt:
                await self._clock.sleep(TAKE_PAUSE_S * attempt)
            entry.granted = asyncio.get_running_loop().create_future()
        raise Overloaded("other routers were first, time and again", desk.retry_after_s())

    async def _granted(self, desk: Desk, entry: Waiting) -> Held:
        """Wait in the queue, for no longer than the bound of the present regime."""
        pair = self.policy.pair
        while not entry.granted.done():
            now_s = self._clock.monotonic_s()
            left_s = wait_left_s(
                pair,
                empty=entry.regime == "empty",
                regime_s=now_s - entry.regime_since_s,
                waited_s=now_s - entry.arrived_s,
            )
            try:
                async with asyncio.timeout(max(0.0, left_s) + 0.001):
                    await asyncio.shield(entry.granted)
            except TimeoutError:
                if not entry.granted.done():
                    desk.judge(entry, now_s=self._clock.monotonic_s())
        return entry.granted.result()

    def _explained(self, desk: Desk, entry: Waiting, held: Held) -> dict[str, Any]:
        return explain_booked(desk, entry, held, desk.pairing, now_s=self._clock.monotonic_s())

    def _pair(self, held: Held, explanation: Mapping[str, Any] | None) -> Pair:
        p, d = held.prefill, held.decode
        return Pair(
            reservation_id=held.reservation_id,
            prefill=end_of(p, held.prefill_cached),
            decode=end_of(d, held.decode_cached),
            local=held.local,
            predicted_ttft_s=held.waited_s + held.terms.ttft_s,
            predicted_tpot_s=held.terms.tpot_s,
            waited_s=held.waited_s,
            ttl_s=self.policy.reservation_ttl_s,
            explanation=explanation,
        )

    def _pump(self, model: str, now_s: float | None = None) -> None:
        """Place whoever can go; wake again when mere time changes something."""
        desk = self.desks[model]
        if not desk.queue:
            return
        now_s = self._clock.monotonic_s() if now_s is None else now_s
        again_s = desk.pump(now_s=now_s)
        had = self._timers.get(model)
        if had is not None and not had[1].cancelled():
            if again_s is not None and now_s <= had[0] <= now_s + again_s + 0.001:
                return
            had[1].cancel()
            del self._timers[model]
        if again_s is not None:
            delay_s = max(0.001, again_s + 0.0005)
            handle = asyncio.get_running_loop().call_later(delay_s, self._woken, model)
            self._timers[model] = (now_s + delay_s, handle)

    def _woken(self, model: str) -> None:
        self._timers.pop(model, None)
        self._pump(model)

    def _abandon(self, desk: Desk, entry: Waiting, error: BaseException) -> None:
        """The request ended without a pair: an error, or its client left (field report B76)."""
        desk.withdraw(entry)
        desk.waiting.pop(entry.reservation_id, None)
        held = desk.drop(entry.reservation_id, now_s=self._clock.monotonic_s())
        if held is not None:
            self._ledger.owe(desk.model, [(entry.reservation_id, ALL_SIDES)])
            self._pump(desk.model)
        if isinstance(error, ReadyplaneError):
            desk.refused("conflicts" if isinstance(error, Overloaded) else "unavailable", entry)
        elif not entry.refused:
            desk.abort("client")
        if entry.answer is not None and not entry.answer.done():
            twin = (
                error
                if isinstance(error, ReadyplaneError)
                else Unavailable("the first call for this request was given up", "ask again")
            )
            entry.answer.set_exception(twin)

    async def _same_answer(self, entry: Waiting) -> Pair:
        if entry.answer is None:
            entry.answer = asyncio.get_running_loop().create_future()
        return await asyncio.shield(entry.answer)

    # --------------------------------------------------------------------- desks

    def desk(self, model: str) -> Desk:
        """The desk of a model, opened when first needed."""
        found = self.desks.get(model)
        if found is None:
            found = self.desks[model] = Desk(model, self.policy)
        return found

    async def _desk_of(self, model: str) -> Desk:
        """The desk of a model that exists: some worker has it, or the registry knows it.

        Raises:
            NotFound: nobody knows this model (so that junk names open no desks, B159).
        """
        found = self.desks.get(model)
        if found is not None:
            return found
        try:
            await self.check_model(model)
        except NotFound:
            self._other_refused += 1
            raise
        if not self.roster.serves(model) and len(self.desks) >= self.policy.models_max:
            raise Overloaded(f"{len(self.desks)} models are served already", 30.0)
        return self.desk(model)

    async def check_model(self, model: str) -> None:
        """Raises NotFound where no living worker has the model, nor the registry knows it."""
        if model in self.desks or self.roster.serves(model):
            return
        now_s = self._clock.monotonic_s()
        if self._unknown_models.get(model, 0.0) > now_s or not await self.members.is_published(
            model
        ):
            if len(self._unknown_models) >= self.policy.models_max:
                self._unknown_models.clear()
            self._unknown_models[model] = now_s + 5.0
            raise NotFound("model", model, "list the models, or start a worker for it")

    def now_s(self) -> float:
        """This router's clock."""
        return self._clock.monotonic_s()

    @property
    def other_refused(self) -> int:
        """Requests for models that nobody knows."""
        return self._other_refused

    def _count_arrival(self, desk: Desk, entry: Waiting, replaces: str) -> str:
        """Why an order of admission refuses it, empty when it is admitted."""
        counters = desk.counters
        counters.repaired += bool(replaces)
        if desk.ends.found(replaces) is not None:
            # It has been counted when it came first; another router's, or life's, has not.
            return ""
        isl, most = entry.shape.isl, 0
        for key, tokens in desk.cached(entry, now_s=entry.arrived_s).items():
            seat = desk.seats[key]
            if tokens > most and not seat.shut and seat.role.serves(Role.PREFILL):
                most = tokens
        counters.arrivals += 1
        counters.arrival_tokens += isl
        counters.arrival_uncached_tokens += max(1, isl - most)
        if entry.shape.tenant:
            desk.clients.arrived(entry.shape, max(1, isl - most), desk.lengths, entry.arrived_s)
        priority = entry.shape.priority
        return desk.rationing.arrived(priority, max(1, isl - most), now_s=entry.arrived_s)

    async def _release(self, desk: Desk, reservation_id: str) -> None:
        """A failed pair is given back before another one is looked for."""
        now_s = self._clock.monotonic_s()
        held = desk.drop(reservation_id, now_s=now_s)
        if held is not None:
            desk.lose(reservation_id, "client", held.isl, now_s=now_s)
        await self._ledger.tell(desk.model, Owed(releases=[(reservation_id, ALL_SIDES)]))
