"""The router's use-cases: `ports.Router` over a store, epochs, a registry and a clock.

Owns the order of things: who is told first, what is undone when the store refuses, what goes on
while the store is away. Judgement is in the pure brains (`gate`, `group`, `lease`, `prefix`,
`pair`), a model's queue and bookings at its `Desk`, membership in `membership`. `run` is the
background work; everything else is called through the port. The simulator runs this very class on
virtual time with memory twins.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from readyplane.core.errors import (
    InvalidField,
    NoPair,
    NotFound,
    Overloaded,
    ReadyplaneError,
    Unavailable,
)
from readyplane.core.profile import ClassProfile
from readyplane.core.work import EventKind, RequestEvent, RequestShape
from readyplane.core.worker import CheckResult, Fleet, Lease, Serving, Worker, WorkerOffer
from readyplane.kit.clock import Clock
from readyplane.ports import (
    End,
    GateVerdict,
    GroupStatus,
    LatencyWindow,
    ModelSignals,
    Pair,
    RankReport,
    Renewal,
    RenewalAnswer,
    RouterSignals,
)
from readyplane_router.desk import Desk, Held, Owed, Waiting
from readyplane_router.epochs import Epochs
from readyplane_router.lease import Standing
from readyplane_router.membership import Manifests, Membership
from readyplane_router.pair import Chosen, Shed, Wait
from readyplane_router.pair.explain import explain as explained
from readyplane_router.policy import RouterPolicy
from readyplane_router.store import Side, Store, Take, Taken, Use

TAKE_TRIES_MAX = 8
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
    ) -> None:
        """Put together; `start` before use, `run` as background work.

        Args:
            registry: where manifests are read (any `ports.Registry`); None admits attached only.
            profiles: class profiles by name. incarnation: identity of this router's life.
            on_admitted: told of every admission (for metrics).
        """
        self.policy = policy or RouterPolicy()
        self.incarnation = incarnation
        self._clock = clock
        self._store = store
        self._began_s = clock.monotonic_s()
        self._timers: dict[str, tuple[float, asyncio.TimerHandle]] = {}
        self._unknown_models: dict[str, float] = {}
        self._owed: dict[str, list[tuple[str, int]]] = {}
        self._other_refused = 0
        self.desks: dict[str, Desk] = {}
        self.members = Membership(
            store=store,
            epochs=epochs,
            clock=clock,
            registry=registry,
            profiles=dict(profiles),
            incarnation=incarnation,
            policy=self.policy,
            desk=self.desk,
            pump=self._pump,
            owe=self._owe,
            on_admitted=on_admitted,
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

    async def tick(self) -> None:
        """One round of housekeeping."""
        await self.members.tick()
        if self.members.answering:
            try:
                await self._settle()
            except Unavailable as error:
                self.members.store_failed(error)
        for model in list(self.desks):
            self._pump(model)

    # --------------------------------------------------------------------- workers

    async def register(self, offer: WorkerOffer) -> Lease:
        return await self.members.register(offer)

    async def renew(self, renewal: Renewal) -> RenewalAnswer:
        return await self.members.renew(renewal)

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
    ) -> Worker:
        return await self.members.drain(
            worker_id,
            epoch=epoch,
            reason=reason,
            deadline_s=deadline_s,
            scale_decision_id=scale_decision_id,
        )

    async def list_workers(self, model: str = "") -> Fleet:
        return self.members.fleet(model)

    def watch(self, model: str = "") -> AsyncGenerator[Fleet]:
        return self.members.watch(model)

    # --------------------------------------------------------------------- requests

    async def route(
        self,
        shape: RequestShape,
        *,
        replaces: str = "",
        avoid: Sequence[str] = (),
        explain: bool = False,
        dry_run: bool = False,
    ) -> Pair:
        _check_shape(shape)
        desk = await self._desk_of(shape.model)
        self._not_cut_off()
        reservation_id = _reservation_id(shape.request_id, replaces)
        if not dry_run:
            held = desk.held.get(reservation_id)
            if held is not None and held.pair is not None:
                return held.pair
            twin = desk.waiting.get(reservation_id)
            if twin is not None:
                return await self._same_answer(twin)
            if replaces:
                await self._replace(desk, replaces)
        entry = desk.entry(
            reservation_id,
            shape,
            now_s=self._clock.monotonic_s(),
            granted=asyncio.get_running_loop().create_future(),
            avoid=frozenset(avoid),
        )
        if dry_run:
            return self._dry_run(desk, entry, explain=explain)
        self._count_arrival(desk, entry, again=bool(replaces))
        desk.waiting[reservation_id] = entry
        try:
            pair = await self._place(desk, entry, explain=explain)
        except BaseException as error:
            self._abandon(desk, entry, error)
            raise
        del desk.waiting[reservation_id]
        if entry.answer is not None and not entry.answer.done():
            entry.answer.set_result(pair)
        return pair

    async def complete(self, events: Sequence[RequestEvent]) -> int:
        now_s = self._clock.monotonic_s()
        unknown = 0
        owed: dict[str, Owed] = {}
        strangers: list[RequestEvent] = []
        for event in events:
            for model, desk in self.desks.items():
                if event.reservation_id in desk.held:
                    desk.event(event, owed.setdefault(model, Owed()), now_s=now_s)
                    break
            else:
                strangers.append(event)
        for model, told in owed.items():
            self._pump(model)
            await self._tell(model, told)
        if strangers:
            unknown = await self._strangers(strangers, now_s)
        return unknown

    async def signals(self, model: str = "") -> RouterSignals:
        now_s = self._clock.monotonic_s()
        return RouterSignals(
            incarnation=self.incarnation,
            uptime_s=now_s - self._began_s,
            models={
                name: _model_signals(desk, now_s)
                for name, desk in self.desks.items()
                if model in ("", name)
            },
            fleet=self.members.fleet(model),
        )

    # --------------------------------------------------------------------- placing

    async def _place(self, desk: Desk, entry: Waiting, *, explain: bool) -> Pair:
        first = True  # nothing has been waited for between arrival and here
        for _ in range(TAKE_TRIES_MAX):
            desk.enqueue(entry)
            self._pump(desk.model, entry.arrived_s if first else None)
            first = False
            held = await self._granted(desk, entry)
            explanation = self._explain(desk, entry, held) if explain else None
            pair = self._pair(held, explanation)
            taken = await self._take(desk, held, pair)
            if not taken.refused:
                if taken.repeated:
                    desk.drop(held.reservation_id, now_s=self._clock.monotonic_s())
                    return _pair_from(taken.payload)
                held.pair = pair
                now_s = self._clock.monotonic_s()
                desk.windows["ttft_predicted"].add(pair.predicted_ttft_s, now_s=now_s)
                desk.windows["tpot_predicted"].add(pair.predicted_tpot_s, now_s=now_s)
                return pair
            # Another router was first: learn what the seats hold now and judge again.
            desk.take_conflicts += 1
            desk.drop(held.reservation_id, now_s=self._clock.monotonic_s())
            for seat, used in zip(_ends(held), taken.used, strict=False):
                _learn(seat, used)
            await self.members.refresh_if_shut(taken.refused, desk.model)
            entry.granted = asyncio.get_running_loop().create_future()
        raise Overloaded("other routers were first, time and again", desk.retry_after_s())

    async def _granted(self, desk: Desk, entry: Waiting) -> Held:
        """Wait in the queue, for no longer than the bound of the present regime."""
        pair = self.policy.pair
        while not entry.granted.done():
            bound_s = pair.empty_wait_max_s if entry.regime == "empty" else pair.wait_max_s
            left_s = entry.regime_since_s + bound_s - self._clock.monotonic_s()
            try:
                async with asyncio.timeout(max(0.0, left_s) + 0.001):
                    await asyncio.shield(entry.granted)
            except TimeoutError:
                if not entry.granted.done():
                    desk.judge(entry, now_s=self._clock.monotonic_s())
        return entry.granted.result()

    async def _take(self, desk: Desk, held: Held, pair: Pair) -> Taken:
        """Make a booking binding for all routers; without the store it binds this one only."""
        if not self.members.answering:
            self._not_cut_off()
            return Taken()
        take = _take_of(held, _payload(pair), self.policy.reservation_ttl_s)
        try:
            taken = await self._store.take(desk.model, take)
        except Unavailable as error:
            self.members.store_failed(error)
            return Taken()
        if not taken.refused and not taken.repeated:
            if held.reservation_id not in desk.held:  # lost its worker meanwhile
                await self._store.release(desk.model, [(held.reservation_id, -1)])
                return Taken(refused="a worker of the pair has just gone")
            held.in_store = True
            if self.members.routers > 1:
                for seat, used in zip(_ends(held), taken.used, strict=False):
                    _learn(seat, used)
        return taken

    def _pair(self, held: Held, explanation: Mapping[str, Any] | None) -> Pair:
        p, d = held.prefill, held.decode
        return Pair(
            reservation_id=held.reservation_id,
            prefill=_end(p, held.prefill_cached),
            decode=_end(d, held.decode_cached),
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
            self._owe(desk.model, [(entry.reservation_id, -1)])
            self._pump(desk.model)
        if not isinstance(error, ReadyplaneError):
            desk.counters.aborted += 1
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

    def _dry_run(self, desk: Desk, entry: Waiting, *, explain: bool) -> Pair:
        now_s = self._clock.monotonic_s()
        verdict = desk.verdict(entry, now_s=now_s)
        told: dict[str, Any] = {}
        if explain:
            told = explained(
                desk.ask(entry, now_s=now_s),
                desk.prefills,
                desk.decodes,
                self.policy.pair,
                now_s=now_s,
            )
        if isinstance(verdict, Chosen):
            return Pair(
                reservation_id="",
                prefill=_end(verdict.prefill, verdict.prefill_cached),
                decode=_end(verdict.decode, verdict.decode_cached),
                local=verdict.local,
                predicted_ttft_s=verdict.terms.ttft_s,
                predicted_tpot_s=verdict.terms.tpot_s,
                waited_s=0.0,
                ttl_s=0.0,
                explanation=told or None,
            )
        if isinstance(verdict, Shed):
            raise desk.error(verdict, entry.shape)
        why = f"{verdict.reason} (it would wait)"
        if told.get("excluded"):
            why += "; " + "; ".join(f"{k}: {v}" for k, v in list(told["excluded"].items())[:8])
        raise _waiting_error(verdict, why, desk)

    def _explain(self, desk: Desk, entry: Waiting, held: Held) -> dict[str, Any]:
        """As it was judged: the booking is taken back for the moment of looking."""
        now_s = self._clock.monotonic_s()
        told = explained(
            desk.ask(entry, now_s=now_s),
            desk.prefills,
            desk.decodes,
            self.policy.pair,
            now_s=now_s,
        )
        told["chosen"] = {
            "prefill": held.prefill.worker_id,
            "decode": held.decode.worker_id,
            "local": held.local,
            "terms": {name: round(getattr(held.terms, name), 6) for name in held.terms.__slots__},
        }
        told["note"] = "pairs are shown with this request already booked; `chosen` is as judged"
        return told

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
        now_s = self._clock.monotonic_s()
        if not self.members.serves(model):
            if self._unknown_models.get(model, 0.0) > now_s or not await self.members.is_published(
                model
            ):
                self._other_refused += 1
                if len(self._unknown_models) >= self.policy.models_max:
                    self._unknown_models.clear()
                self._unknown_models[model] = now_s + 5.0
                raise NotFound("model", model, "list the models, or start a worker for it")
            if len(self.desks) >= self.policy.models_max:
                raise Overloaded(f"{len(self.desks)} models are served already", 30.0)
        return self.desk(model)

    def now_s(self) -> float:
        """This router's clock."""
        return self._clock.monotonic_s()

    @property
    def other_refused(self) -> int:
        """Requests for models that nobody knows."""
        return self._other_refused

    def _count_arrival(self, desk: Desk, entry: Waiting, *, again: bool) -> None:
        counters = desk.counters
        if again:
            counters.repaired += 1
            return
        isl = entry.shape.isl
        held = desk.cached(entry, now_s=entry.arrived_s)
        most = max((held.get(seat.key, 0) for seat in desk.prefills if not seat.shut), default=0)
        counters.arrivals += 1
        counters.arrival_tokens += isl
        counters.arrival_uncached_tokens += max(1, isl - most)

    def _not_cut_off(self) -> None:
        if self.members.standing() is Standing.CUT_OFF:
            raise Unavailable(
                "the router has been without its store for longer than redis_absence_max_s "
                f"({self.policy.redis_absence_max_s} s)",
                "check that Redis runs; routing resumes as soon as it answers",
                2.0,
            )

    # --------------------------------------------------------------------- store

    async def _replace(self, desk: Desk, old: str) -> None:
        held = desk.drop(old, now_s=self._clock.monotonic_s())
        if held is not None or self._store.shared:
            await self._tell(desk.model, Owed(releases=[(old, -1)]))

    async def _tell(self, model: str, owed: Owed) -> int:
        """Tell the store what events meant; what cannot be told now is owed."""
        if not owed.releases and not owed.grows:
            return 0
        if self.members.answering:
            try:
                for reservation_id, side, blocks in owed.grows:
                    await self._store.grow(model, reservation_id, side, blocks)
                return await self._store.release(model, owed.releases)
            except Unavailable as error:
                self.members.store_failed(error)
        self._owe(model, owed.releases)
        return 0

    def _owe(self, model: str, releases: Sequence[tuple[str, int]]) -> None:
        self._owed.setdefault(model, []).extend(releases)

    async def _settle(self) -> None:
        """Pay what is owed, extend what is alive, give up what has run out, learn of the others."""
        if self.members.just_back:
            await self._reconcile()
        for model, releases in list(self._owed.items()):
            await self._store.release(model, releases)
            self._owed.pop(model, None)
        now_s = self._clock.monotonic_s()
        for model, desk in list(self.desks.items()):
            touched, desk.touched = desk.touched, set()
            await self._store.extend(model, list(touched), ttl_s=self.policy.reservation_ttl_s)
            for reservation_id in await self._store.sweep(model):
                if desk.drop(reservation_id, now_s=now_s) is not None:
                    desk.expired += 1
            if self.members.routers > 1 or any(s.other_sequences for s in desk.seats.values()):
                used = await self._store.usage(model)
                for seat in desk.seats.values():
                    _learn(seat, used.get(seat.worker_id, Use()))

    async def _reconcile(self) -> None:
        """The store is back: what is held here is held there again, compared by nobody."""
        for model, desk in self.desks.items():
            for held in list(desk.held.values()):
                if held.pair is None:
                    continue
                take = _take_of(held, _payload(held.pair), self.policy.reservation_ttl_s)
                await self._store.take(model, replace(take, force=True))
                held.in_store = True

    async def _strangers(self, events: Sequence[RequestEvent], now_s: float) -> int:
        """Events of reservations this router does not hold: another one's, or nobody's."""
        ends = (EventKind.FINISHED, EventKind.ABORTED, EventKind.LEG_FAILED)
        for event in events:
            if event.kind is EventKind.LEG_FAILED:
                for desk in self.desks.values():
                    desk.leg_failed(event, now_s=now_s)
        if not self._store.shared or not self.members.answering:
            return len(events)
        unknown = 0
        for event in events:
            found = False
            for model, desk in self.desks.items():
                if event.kind in ends:
                    gone = await self._tell(model, Owed(releases=[(event.reservation_id, -1)]))
                    found = not gone
                    if found and event.kind is EventKind.FINISHED:
                        desk.counters.finished += 1
                        desk.counters.output_tokens += event.output_tokens
                        desk.counters.attained += bool(event.attained)
                else:
                    desk.touched.add(event.reservation_id)
                    found = True
                if found:
                    break
            unknown += not found
        return unknown


def _check_shape(shape: RequestShape) -> None:
    if not shape.request_id or len(shape.request_id) > 200:
        raise InvalidField("request_id", shape.request_id, "give an id of 1 to 200 characters")
    if not shape.model:
        raise InvalidField("model", shape.model, "name the model")
    if not 1 <= shape.isl <= ISL_MAX:
        raise InvalidField("isl", shape.isl, f"give 1 to {ISL_MAX} prompt tokens")
    if shape.token_ids and len(shape.token_ids) != 4 * shape.isl:
        raise InvalidField(
            "token_ids", len(shape.token_ids), f"give 4 bytes a token: {4 * shape.isl} for the isl"
        )
    if shape.max_tokens is not None and not 1 <= shape.max_tokens <= ISL_MAX:
        raise InvalidField("max_tokens", shape.max_tokens, f"give 1 to {ISL_MAX}, or nothing")
    if shape.slo is not None and not (shape.slo.ttft_s > 0 and shape.slo.tpot_s > 0):
        raise InvalidField("slo", str(shape.slo), "give times above 0")


def _reservation_id(request_id: str, replaces: str) -> str:
    """Deterministic, so that the same call finds the same reservation, at any router."""
    if not replaces:
        return f"{request_id}.0"
    head, _, attempt = replaces.rpartition(".")
    if head == request_id and attempt.isdigit():
        return f"{request_id}.{int(attempt) + 1}"
    return f"{request_id}.1"


def _take_of(held: Held, payload: str, ttl_s: float) -> Take:
    p, d = held.prefill, held.decode
    work_us = round(held.terms.prefill_s * 1e6) if held.prefilling else 0
    tokens = held.uncached_tokens if held.prefilling else 0
    sides: tuple[Side, ...]
    if held.local:
        sides = (Side(d.worker_id, d.epoch, Use(1, held.decode_blocks, work_us, tokens)),)
    else:
        blocks = held.prefill_blocks if held.prefilling else 0
        sides = (
            Side(p.worker_id, p.epoch, Use(int(held.prefilling), blocks, work_us, tokens)),
            Side(d.worker_id, d.epoch, Use(1, held.decode_blocks)),
        )
    return Take(held.reservation_id, sides, payload, ttl_s)


def _ends(held: Held) -> tuple[Any, ...]:
    return (held.decode,) if held.local else (held.prefill, held.decode)


def _learn(seat: Any, used: Use) -> None:
    """What other routers have promised on a seat: all that the store counts, less our own."""
    seat.other_sequences = max(0, used.sequences - seat.sequences)
    seat.other_blocks = max(0, used.blocks - seat.kv_blocks)
    seat.other_work_s = max(0.0, used.work_us / 1e6 - seat.work_s)
    seat.other_tokens = max(0, used.tokens - seat.prefill_tokens)


def _end(seat: Any, cached_tokens: int) -> End:
    return End(seat.worker_id, seat.incarnation, seat.epoch, seat.engine_url, cached_tokens)


def _payload(pair: Pair) -> str:
    def end(e: End) -> list[Any]:
        return [e.worker_id, e.incarnation, e.epoch, e.engine_url, e.cached_tokens]

    return json.dumps(
        [
            pair.reservation_id,
            end(pair.prefill),
            end(pair.decode),
            pair.local,
            pair.predicted_ttft_s,
            pair.predicted_tpot_s,
            pair.waited_s,
            pair.ttl_s,
        ]
    )


def _pair_from(payload: str) -> Pair:
    rid, p, d, local, ttft_s, tpot_s, waited_s, ttl_s = json.loads(payload)
    return Pair(rid, End(*p), End(*d), local, ttft_s, tpot_s, waited_s, ttl_s)


def _waiting_error(wait: Wait, why: str, desk: Desk) -> ReadyplaneError:
    if wait.regime == "empty":
        return NoPair(why, 5.0)
    return Overloaded(why, wait.again_in_s or desk.retry_after_s())


def _model_signals(desk: Desk, now_s: float) -> ModelSignals:
    counters = desk.counters
    windows = {}
    for name, window in desk.windows.items():
        count, p50, p90, p99, mean = window.quantiles(now_s=now_s)
        windows[name] = LatencyWindow(window.window_s, count, p50, p90, p99, mean)
    prefilling, decoding = list(desk.prefilling()), list(desk.decoding())
    return ModelSignals(
        model=desk.model,
        arrivals_total=counters.arrivals,
        arrival_tokens_total=counters.arrival_tokens,
        arrival_uncached_tokens_total=counters.arrival_uncached_tokens,
        finished_total=counters.finished,
        finished_prompt_tokens_total=counters.finished_prompt_tokens,
        output_tokens_total=counters.output_tokens,
        refused_total=counters.refused,
        aborted_total=counters.aborted,
        attained_total=counters.attained,
        repaired_total=counters.repaired,
        handovers_total=counters.handovers,
        queued_requests=len(desk.queue),
        queued_tokens=desk.queued_tokens,
        prefilling_requests=len(prefilling),
        prefilling_tokens=sum(h.uncached_tokens for h in prefilling),
        decoding_requests=len(decoding),
        decoding_remaining_tokens=sum(
            desk.lengths.remaining(h.isl, h.emitted, h.max_tokens)[0] for h in decoding
        ),
        decoding_kv_tokens=sum(h.isl + h.emitted for h in decoding),
        length_counts=desk.lengths.snapshot(),
        **windows,
    )
