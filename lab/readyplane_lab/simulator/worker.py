"""A worker's life on virtual time, as its agent lives it: lease, start, gate, serving, drain.

Every step goes through the production router's port and the production lifecycle table; only what
takes time on a machine (segments, weights, engine) is modelled. As an agent does, it serves on while
the router cannot be reached, and asks for a lost lease once more and passes the gate again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from readyplane.core.errors import (
    LostLease,
    NotFound,
    ReadyplaneError,
    Refused,
    StaleEpoch,
    Unavailable,
)
from readyplane.core.kv import KvEvent, KvEventBatch
from readyplane.core.profile import ClassProfile
from readyplane.core.startup import Segment, SegmentName, StartMode, WeightTier
from readyplane.core.worker import Holds, Lease, Role, Serving, StartProgress, WorkerOffer
from readyplane.ports import Directive, Order, RankReport, Renewal
from readyplane_agent.lifecycle import STARTS, Event, State, holds_lease, step
from readyplane_lab.simulator.engine import SimEngine
from readyplane_lab.simulator.evidence import checks_of, serving_of
from readyplane_lab.simulator.graphs import Staging
from readyplane_lab.simulator.ledger import Account, Part
from readyplane_lab.simulator.site import Begin, Mishap, Phase, Site

COMPILING = frozenset({SegmentName.COMPILE, SegmentName.CUDA_GRAPH})
ASKED_AGAIN_MAX = 8
REACH_EVERY_S = 0.5
NEWS_S = 0.5
"""How often it renews while it stands by or drains, as an agent does."""

Answer = TypeVar("Answer")


class SimWorker:
    """One allocation, from order to release.

    Args:
        profile: of its engine. told: the one the router is told, where that differs.
        role: that it registers with. start: what names this start among all, for the draws.
        account: where its GPU-seconds are booked. reopen: another account, of the other pool.
        begin: how it comes to serve.

    Attributes:
        allocated_s, ready_s, drain_s, released_s: virtual seconds, None while it has not happened.
        start_s: when the start that makes it ready began: ordered, told to serve, or turned.
        state: where its agent is. tier: where its weights came from.
        born_s: when it was allocated; `allocated_s` and those after it tell of the stage it serves
            now, `past` of the ones before. unreachable_until_s: no word to or from the router
            before then.
    """

    def __init__(
        self,
        order: Order,
        *,
        site: Site,
        profile: ClassProfile,
        told: ClassProfile | None = None,
        role: Role,
        start: tuple[object, ...],
        account: Account,
        reopen: Callable[[str], Account],
        begin: Begin = Begin.COLD,
        on_released: Callable[[SimWorker], None],
    ) -> None:
        self.order = order
        self.role = role
        self.profile = profile
        self.account = account
        self.begin = begin
        staged = order.graph_stages and order.mode is not StartMode.EAGER
        graph_blocks = site.startup.graph_kv_tokens // site.block_size
        self.engine = SimEngine(
            profile,
            block_size=site.block_size,
            clock=site.clock,
            graph_blocks=graph_blocks if staged else None,
        )
        self.engine.on_busy = account.busy
        self.state = State.NEW
        self.tier = WeightTier.UNKNOWN
        self.allocated_s = self.born_s = self.start_s = site.clock.monotonic_s()
        self.past: tuple[Phase, ...] = ()
        self.ready_s: float | None = None
        self.drain_s: float | None = None
        self.released_s: float | None = None
        self.unreachable_until_s = 0.0
        self.failure = ""
        self._site = site
        self._manifest = site.artifacts.of(order.manifest_digest)
        self._told = told or profile
        self._named = start
        self._on_released = on_released
        self._segments: list[Segment] = []
        self._lease: Lease | None = None
        self._step = ""
        self._told_ready = False
        self._kv_sequence = 0
        self._kv_anew = False
        self._reopen = reopen
        self._pool = str(order.role)
        self._served = False
        self._begun_s = self.born_s
        self._word = asyncio.Event()
        self._serve_until_s, self._serve_why = 0.0, ""
        self._imported_s: float | None = None
        self._staging: Staging | None = None
        if staged:
            self._staging = Staging(
                order,
                self._manifest,
                self.engine,
                profile=self._told.name,
                kv_blocks=graph_blocks,
                seconds=self._seconds_of_all,
                router=site.router,
                clock=site.clock,
                lease=self._held,
                told=self._told_anew,
            )
        self.task = asyncio.get_running_loop().create_task(self._live())

    @property
    def pool(self) -> str:
        """Name of the pool that it serves, or was ordered for."""
        return self._pool

    @property
    def incarnation(self) -> str:
        """One life only: the order's id says it."""
        return f"{self.order.worker_id}-i"

    @property
    def engine_url(self) -> str:
        """What the gateway dials."""
        return f"http://{self.order.worker_id}:8000"

    def crash(self, why: str) -> None:
        """The process and its engine are gone without a word."""
        self.failure = why
        self.task.cancel()

    async def release(self) -> None:
        """End it, however far it is."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    @property
    def phase(self) -> Phase:
        """What it is now, in the words of what it was before."""
        return Phase(
            self._pool,
            self.allocated_s,
            self.start_s,
            self.ready_s,
            self.drain_s,
            self.released_s,
            self.tier,
            self.account.waits,
        )

    @property
    def waits(self) -> bool:
        """Whether a standby waits for its word, with weights or with a process only."""
        return self.state in (State.STANDBY, State.BARE)

    def told_to_drain(self) -> None:
        """The router will send nothing new here."""
        if self.drain_s is None:
            self.drain_s = self._site.clock.monotonic_s()
            if self.ready_s is not None:
                self.engine.settle_busy()
                self.account.become(Part.DRAIN)

    # ------------------------------------------------------------------ life

    async def _live(self) -> None:
        try:
            await self._start()
            await self._serve()
        except (LostLease, StaleEpoch) as error:
            if holds_lease(self.state):
                self._tell(Event.FENCED_OFF)
            self.failure = str(error)
        except ReadyplaneError as error:
            self.failure = self.failure or str(error)
            await self._leave("the start failed")
        finally:
            if self._staging is not None:
                self._staging.stop()
            self._site.sources.remove_peer(self.order.worker_id)
            self.engine.kill(self.failure or "the worker has left")
            self.released_s = self._site.clock.monotonic_s()
            self.account.close()
            self._on_released(self)

    async def _start(self) -> None:
        await self._run(SegmentName.SCHEDULE, self._seconds(SegmentName.SCHEDULE))
        await self._in_reach()
        self._take(await self._site.router.register(self._offer()))
        self._tell(Event.LEASE_GRANTED)
        if self.order.standby and self.order.holds is Holds.PROCESS and not await self._wait_bare():
            return
        await self._rank("scheduled")
        async with self._renews():
            await self._load()
        await self._join()
        self._site.sources.add_peer(self.order.worker_id)

    def _serves(self) -> None:
        """It has passed the gate: to serve, or to wait for its word."""
        if self.state is State.STANDBY:
            self.account.become(Part.STANDBY)
        elif self.ready_s is None:
            self._served = True
            self.ready_s = self._site.clock.monotonic_s()
            self.account.become(Part.IDLE)

    async def _load(self) -> None:
        """Every segment of a start up to the canary."""
        site, names = self._site, list(self._site.startup.segments)
        for name in names[:2]:
            if name is not SegmentName.RUNTIME_IMPORT or self._imported_s is None:
                await self._drawn(name)
        self._tell(Event.SOURCES_PLANNED)
        self._segments.append(Segment(SegmentName.WEIGHT_TRANSFER, site.clock.monotonic_s(), None))
        cached = site.startup.is_cached(site.draws, *self._named)
        cached = cached or site.nodes.holds(self.order.worker_id)
        alone = self.begin is Begin.FIRST
        self.tier = await site.sources.fetch(cached=cached, alone=alone)
        site.nodes.loaded(self.order.worker_id)
        self._end_segment()
        self._tell(Event.WEIGHTS_VERIFIED)
        await self._rank("verified")
        await self._or_mishap()
        for name in names[2:-1]:
            await self._drawn(name)
        await self._placed()
        await self._drawn(names[-1])
        self._tell(Event.CANARY_PASSED)

    async def _turn(self, to: Role) -> None:
        """Weights and engine are there already: only connections and the canary are new."""
        await self._leave(f"it becomes {to}")
        self.past = (*self.past, replace(self.phase, released_s=self._site.clock.monotonic_s()))
        self.account.close()
        self._pool, self.role = str(to), to
        self.account = self._reopen(self._pool)
        self.engine.on_busy = self.account.busy
        self.allocated_s = self.start_s = self._site.clock.monotonic_s()
        self.ready_s = self.drain_s = None
        self.tier = WeightTier.L0_PEER_GPU
        await self._in_reach()
        self._take(await self._site.router.register(self._offer()))
        self._tell(Event.TURNED)
        async with self._renews():
            await self._rank("connected")
            await self._rank("placed")
            turns = len(self.past)
            seconds = self._site.startup.flipping_s(self._site.draws, *self._named, turns)
            await self._site.clock.sleep(seconds)
        self._tell(Event.CANARY_PASSED)
        await self._join()

    async def _wait_bare(self) -> bool:
        """Wait with an imported process, holding nothing; the start begins with the word to serve.

        False when it was not wanted and has left.
        """
        began_s = self._site.clock.monotonic_s()
        async with self._renews():
            await self._drawn(SegmentName.RUNTIME_IMPORT)
        self._imported_s = self._site.clock.monotonic_s() - began_s
        self._tell(Event.IMPORTED)
        self.account.become(Part.STANDBY)
        while True:
            words = {d.kind for d in await self._renew()}
            if words & {"drain", "leave", "stop"}:
                self._tell(Event.LEAVE_ASKED)
                await self._leave("it stood by and is not needed")
                return False
            if "activate" in words:
                break
            await self._told_or(NEWS_S)
        now_s = self._begun_s = self.start_s = self._site.clock.monotonic_s()
        self._tell(Event.ACTIVATE_ASKED)
        self.account.become(Part.BOOT)
        name, saved_s = SegmentName.RUNTIME_IMPORT, self._imported_s
        self._segments = [Segment(name, now_s, now_s, modelled=True, saved_s=saved_s)]
        await self._renew()  # it waits no more: its group is to form from now on
        return True

    async def _placed(self) -> None:
        self._tell(Event.ENGINE_UP)
        if self._staging is not None:
            await self._staging.came_up()
        await self._rank("connected")
        await self._rank("placed")

    async def _activate(self) -> None:
        """A standby is to serve; told too late, it stands by again."""
        self.start_s = self._site.clock.monotonic_s()
        self._tell(Event.ACTIVATE_ASKED)
        self.account.become(Part.BOOT)
        seconds = self._site.startup.activation_s(self._site.draws, *self._named)
        async with self._renews():
            await self._site.clock.sleep(seconds)
        await self._join()

    async def _or_mishap(self) -> None:
        mishap = self._site.mishap(self.order.role)
        if mishap is Mishap.HANGS:
            await asyncio.get_running_loop().create_future()
        if mishap is Mishap.FAILS:
            self._tell(Event.START_FAILED)
            raise Unavailable("the engine did not come up", "look at its log")

    async def _join(self) -> None:
        """Hand the evidence in; whoever is not admitted ends."""
        group_epoch = await self._rank("canary_passed")
        serving = self._serving()
        verdict = await self._asked(
            lambda: self._site.router.admit(
                self.order.worker_id,
                self.incarnation,
                self._epoch,
                serving=serving,
                checks=checks_of(
                    self._manifest,
                    blocks=serving.kv_total_blocks,
                    profile=self._told,
                    epoch=self._epoch,
                    group_epoch=group_epoch,
                ),
            )
        )
        if not verdict.admitted:
            self._tell(Event.REFUSED)
            self.failure = "; ".join(verdict.reasons)
            raise Refused("admission", verdict.reasons)
        self._tell(Event.STOOD_BY if verdict.standby else Event.ADMITTED)
        self._serves()
        if self._staging is not None and self.state is State.READY:
            self._staging.begin(serving)

    async def _serve(self) -> None:
        """Renew, and follow the words that come with it, until the word to leave."""
        drained: asyncio.Task[None] | None = None
        while self.state is not State.LEAVING:
            done = drained is not None and drained.done()
            words = {d.kind: d for d in await self._renew(drained=done)}
            if words.keys() & {"leave", "stop"}:
                self._tell(Event.LEAVE_ASKED)
                await self._leave("drained")
                return
            if self.state is State.REJOINING:
                drained = None  # a router that came back empty knows of no drain
                await self._interrupt("the router had lost it")
                await self._join()
            flip = words.get("flip")
            if "activate" in words and self.state is State.STANDBY:
                await self._activate()
            elif "drain" in words and self.state not in (State.DRAINING, State.LEAVING):
                if self.state is State.STANDBY:
                    self._tell(Event.LEAVE_ASKED)
                    await self._leave("it stood by and is not needed")
                    return
                self._tell(Event.DRAIN_ASKED)
                await self._interrupt("it is to leave")
                drained = drained or asyncio.get_running_loop().create_task(self.engine.idle())
            elif flip is not None and flip.role is not None:
                if self.state is State.READY and flip.role is not self.role:
                    self._tell(Event.FLIP_ASKED)
                    drained = asyncio.get_running_loop().create_task(self.engine.idle())
                if self.state is State.FLIPPING and flip.deadline_s == 0.0:
                    drained = None
                    await self._interrupt("it changes the stage")
                    await self._turn(flip.role)
            assert self._lease is not None
            soon = self.state in (State.STANDBY, State.DRAINING, State.FLIPPING)
            await self._told_or(NEWS_S if soon else self._lease.ttl_s / 3)

    async def _interrupt(self, why: str) -> None:
        if self._staging is not None:
            await self._staging.interrupt(why)

    async def _told_or(self, seconds: float) -> None:
        """Until the router has something to say, or so long."""
        waits = [
            asyncio.ensure_future(self._site.clock.sleep(seconds)),
            asyncio.ensure_future(self._word.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._word.clear()

    @contextlib.asynccontextmanager
    async def _renews(self) -> AsyncIterator[None]:
        """Keep the lease while something takes its time."""
        renewing = asyncio.get_running_loop().create_task(self._renewing())
        try:
            yield
        finally:
            renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)

    async def _renewing(self) -> None:
        while True:
            assert self._lease is not None
            await self._site.clock.sleep(self._lease.ttl_s / 3)
            if {d.kind for d in await self._renew()} & {"leave", "stop"}:
                # A start that is no longer wanted has served nobody: there is nothing to drain.
                self.crash("told to leave before it served")
                return

    async def _renew(self, *, drained: bool = False) -> tuple[Directive, ...]:
        answer = await self._asked(lambda: self._site.router.renew(self._renewal(drained)))
        self._lease = answer.lease
        # The finished segments are told once more after admission, then never again.
        self._told_ready = self._served or self.state is State.STANDBY
        for word in answer.directives:
            self._kv_anew = self._kv_anew or word.kind == "replay_kv"
            if word.kind == "activate":
                now_s = self._site.clock.monotonic_s()
                self._serve_until_s, self._serve_why = now_s + (word.deadline_s or 0.0), word.reason
        return answer.directives

    def _renewal(self, drained: bool) -> Renewal:
        events = self.engine.take_kv_events()
        if self._kv_anew:
            # What the engine holds is not told again: it is credited with less than it has.
            self._kv_anew = False
            events = (KvEvent("cleared"), *events)
        batches: tuple[KvEventBatch, ...] = ()
        if events:
            batches = (KvEventBatch(self._kv_sequence, events),)
            self._kv_sequence += 1
        return Renewal(
            self.order.worker_id,
            self.incarnation,
            self._epoch,
            progress=None if self._told_ready else self._progress(),
            load=self.engine.load() if self.ready_s is not None else None,
            kv_events=batches,
            drained=drained,
            stands_by=Holds.PROCESS if self.state is State.BARE else None,
        )

    async def _leave(self, reason: str) -> None:
        if self._lease is not None and self._site.clock.monotonic_s() >= self.unreachable_until_s:
            await self._site.router.leave(
                self.order.worker_id, self.incarnation, self._epoch, reason=reason
            )

    # ------------------------------------------------------------------ the router

    async def _in_reach(self) -> None:
        """Wait while there is no way to the router."""
        while self._site.clock.monotonic_s() < self.unreachable_until_s:
            left_s = self.unreachable_until_s - self._site.clock.monotonic_s()
            await self._site.clock.sleep(min(REACH_EVERY_S, left_s))

    async def _asked(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Ask the router when it can be reached; a lost lease is asked for once more first."""
        for _ in range(ASKED_AGAIN_MAX):
            await self._in_reach()
            try:
                return await call()
            except (LostLease, NotFound):
                await self._again()
        raise Unavailable("the router takes every lease back", "look at its log")

    async def _again(self) -> None:
        """The lease anew, under the same incarnation; the router knows whether that may be."""
        self._take(await self._site.router.register(self._offer()))
        self._tell(Event.LEASE_REGRANTED)
        self._kv_anew, self._told_ready = True, False
        if self._step and self.state in STARTS:
            await self._site.router.report_rank(self._report(self._step))

    # ------------------------------------------------------------------ parts

    def _held(self) -> Lease:
        assert self._lease is not None
        return self._lease

    def _take(self, lease: Lease) -> None:
        self._lease = lease
        listen = self._site.router.hear
        listen(lease.worker_id, lease.incarnation, lambda _: self._word.set())

    def _told_anew(self) -> None:
        """What renewals tell of the start has changed."""
        self._told_ready = False

    @property
    def _epoch(self) -> int:
        return self._held().epoch

    def _tell(self, event: Event) -> None:
        self.state = step(self.state, event)

    async def _drawn(self, name: SegmentName) -> None:
        await self._run(name, self._seconds(name))

    def _seconds(self, name: SegmentName) -> float:
        """An eager start compiles nothing and captures nothing, one in stages not before it serves;
        what is compiled ahead is loaded.
        """
        if (self.order.mode is StartMode.EAGER or self._staging is not None) and name in COMPILING:
            return 0.0
        return self._seconds_of_all(name)

    def _seconds_of_all(self, name: SegmentName) -> float:
        if self.order.mode is StartMode.AOT and name is SegmentName.COMPILE:
            return self._site.startup.compiled_s
        return self._site.startup.seconds(name, self._site.draws, *self._named)

    async def _run(self, name: SegmentName, seconds: float) -> None:
        self._segments.append(Segment(name, self._site.clock.monotonic_s(), None, modelled=True))
        await self._site.clock.sleep(seconds)
        self._end_segment()

    def _end_segment(self) -> None:
        self._segments[-1] = replace(self._segments[-1], end_s=self._site.clock.monotonic_s())

    async def _rank(self, name: str) -> int:
        status = await self._asked(lambda: self._site.router.report_rank(self._report(name)))
        self._step = name
        return status.group_epoch

    def _report(self, name: str) -> RankReport:
        return RankReport(
            self.order.worker_id,
            self.incarnation,
            self._epoch,
            rank=0,
            step=name,
            manifest_digest=self._manifest.digest,
        )

    def _offer(self) -> WorkerOffer:
        order, standby = self.order, self.order.standby and not self._served
        left_s = self._serve_until_s - self._site.clock.monotonic_s()
        told = standby and left_s > 0
        return WorkerOffer(
            worker_id=order.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            model=order.model,
            worker_class=order.worker_class,
            generation=order.generation,
            manifest_digest=self._manifest.digest,
            node=self._site.nodes.of(order.worker_id),
            scale_decision_id=order.scale_decision_id,
            ordered_ago_s=self._site.clock.monotonic_s() - self.born_s,
            mode=order.mode,
            convertible=order.convertible_tpot_s > 0,
            standby=standby,
            holds=order.holds,
            told_left_s=left_s if told else None,
            told_reason=self._serve_why if told else "",
        )

    def _progress(self) -> StartProgress:
        later = () if self._staging is None else self._staging.segments
        segments = (*self._segments, *later)
        return StartProgress(self._begun_s, self._site.clock.monotonic_s(), segments)

    def _serving(self) -> Serving:
        return serving_of(
            self.order,
            self._manifest,
            self.engine,
            engine_url=self.engine_url,
            profile=self._told,
            tier=self.tier,
            stage=None if self._staging is None else self._staging.stage,
        )
