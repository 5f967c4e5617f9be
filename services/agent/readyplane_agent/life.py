"""One agent from process start to exit status: start, serve, drain, leave, or fail and say why.

Owns the state (`lifecycle`), the order in which things are given back, and what ends a life:
signals, directives, fencing, and the death of the engine. Everything it started it also ends.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from readyplane.core.errors import LostLease, ReadyplaneError, StaleEpoch
from readyplane.core.profile import ClassProfile
from readyplane.core.startup import SegmentName
from readyplane.core.worker import Lease, Role, WorkerOffer
from readyplane.kit.clock import Clock
from readyplane.ports import Directive, RankReport, Registry, Router
from readyplane_agent import meeting
from readyplane_agent.cache import WeightCache
from readyplane_agent.changing import Changing
from readyplane_agent.dead_end import dead_end
from readyplane_agent.draining import Draining
from readyplane_agent.engine_end import end_text, explained
from readyplane_agent.engines.port import EnginePort
from readyplane_agent.giving import Giving
from readyplane_agent.interference import Watch
from readyplane_agent.kv_events import KvForwarder
from readyplane_agent.lifecycle import (
    ENDS,
    SERVES,
    STARTS,
    WAITS,
    Event,
    ExitCode,
    State,
    holds_lease,
    step,
)
from readyplane_agent.load import LoadReader
from readyplane_agent.loop import News, Session
from readyplane_agent.mapped_watch import MappedWatch
from readyplane_agent.metrics import source_metrics, start_metrics, start_text
from readyplane_agent.ranks import blamed
from readyplane_agent.settings import AgentSettings, WrongSetting
from readyplane_agent.starting import Start, Started
from readyplane_agent.trace import StartTrace, within
from readyplane_agent.transfer import HAND_OVER_LIMIT_S, TransferServer
from readyplane_agent.upgrading import Upgrading

log = logging.getLogger("agent")

START_NEWS_S = 1.0
DRAIN_NEWS_S = 0.5
SERVE_TURN_S = 1.0
STANDBY_NEWS_S = 0.5
ENGINE_WATCH_S = 0.25
LEAVE_LIMIT_S = 3.0
ENGINE_GRACE_S = 5.0
TRANSFER_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class End:
    """Why a life ends."""

    event: Event
    why: str


class _Ended(Exception):
    # Not an error: it carries the end out of the serving code.
    def __init__(self, end: End) -> None:
        super().__init__(end.why)
        self.end = end


class Life:
    """One agent.

    Args:
        settings, incarnation: who this is. registry: None without one (attached engine).
        engine: not started yet. cache: node's weight cache. trace: with the process's start.
        random: 0 to 1, for jitter. on_ready: called once when admitted, with the worker's facts.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        incarnation: str,
        registry: Registry | None,
        router: Router,
        engine: EnginePort,
        profile: ClassProfile,
        cache: WeightCache | None,
        clock: Clock,
        trace: StartTrace,
        random: Callable[[], float],
        on_ready: Callable[[Life], None] = lambda _: None,
    ) -> None:
        self.settings, self.incarnation, self.engine = settings, incarnation, engine
        self._registry, self._router = registry, router
        self._cache, self._clock, self.trace = cache, clock, trace
        self._on_ready = on_ready
        self.state = State.NEW
        self.started = Started(settings.serves)
        self.kv = KvForwarder()
        self._load = LoadReader(engine, clock)
        self.ready_s: float | None = None
        self.up_s: float | None = None  # the start is over: it serves, or stands by
        self._wake = asyncio.Event()
        self._told_ready = self._misset = False
        self._end: asyncio.Future[End] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._rejoining: asyncio.Task[None] | None = None
        self.transfer = TransferServer(
            incarnation=incarnation,
            clock=clock,
            host=settings.host,
            port=settings.http_port,
            readers_max=settings.transfer_readers_max,
            bytes_per_s=settings.transfer_bytes_per_s,
            token=settings.token,
            ttft_target_s=settings.serving_ttft_s,
            tpot_target_s=settings.serving_tpot_s,
            health=self._health,
            metrics=self.metrics,
        )
        self._mapped = MappedWatch(self.started, cache, self.transfer, clock, end=self.end)
        self.transfer.engine_told = lambda: meeting.told(engine)
        self.giving = Giving(
            settings,
            incarnation=incarnation,
            registry=registry,
            transfer=self.transfer,
            cache=cache,
            clock=clock,
        )
        self.session = Session(
            router,
            clock=clock,
            offer=self._offer,
            news=self._news,
            kv=self.kv,
            on_directive=self.direct,
            on_regranted=self._regranted,
            random=random,
        )
        self._draining = Draining(
            settings,
            router=router,
            engine=engine,
            session=self.session,
            transfer=self.transfer,
            clock=clock,
            end=self.end,
        )
        self._start = Start(
            settings,
            incarnation=incarnation,
            registry=registry,
            router=router,
            engine=engine,
            profile=profile,
            cache=cache,
            clock=clock,
            trace=trace,
            lease=self._lease,
            tell=self._tell,
            started=self.started,
            give=self.giving.begin,
        )
        self._waiting = self._start.waiting
        self._upgrading = Upgrading(
            settings,
            router=router,
            engine=engine,
            started=self.started,
            clock=clock,
            trace=trace,
            lease=self._lease,
            told=self._told_anew,
        )
        self._changing = Changing(
            start=self._start,
            started=self.started,
            session=self.session,
            clock=clock,
            state=lambda: self.state,
            tell=self._tell,
            end=self.end,
        )

    # ----------------------------------------------------------------------- the whole life

    async def run(self) -> ExitCode:
        """Live. Returns the exit status; never leaves anything running."""
        self._end = asyncio.get_running_loop().create_future()
        try:
            await self._or_end(self._come_up())
            await self._or_end(self._serve())
        except _Ended as ended:
            end = ended.end
        except (LostLease, StaleEpoch) as error:
            end = End(Event.FENCED_OFF, str(error))
        except (ReadyplaneError, OSError) as error:
            self.trace.dead_end = dead_end(error)
            self._misset = isinstance(error, WrongSetting)
            why = await explained(error, self.engine, self._clock)
            end = End(Event.START_FAILED, self._mapped.explained(why))
        except asyncio.CancelledError:
            end = End(Event.LEAVE_ASKED, "cancelled")
        except Exception as error:  # whatever broke: give everything back, then say so
            log.exception("the agent broke in state %s", self.state)
            end = End(Event.START_FAILED, f"{type(error).__name__}: {error}")
        else:  # pragma: no cover - serving ends only by an end
            end = End(Event.LEAVE_ASKED, "served")
        return await self._close(end)

    async def _come_up(self) -> None:
        with self.trace.span(SegmentName.ROUTER_REGISTRATION, "lease"):
            await self.transfer.start()  # whoever grants the lease is told its address
            await self.session.register(limit_s=self.settings.start_limit_s)
        self._tell(Event.LEASE_GRANTED)
        log.info("lease: epoch %d, ttl %.1f s", self.session.epoch, self._lease().ttl_s)
        self.background(self._keep_session())
        self.background(self._watch_engine())
        self.background(self.giving.keep())
        self.background(self._mapped.keep())
        await self._start.check()
        if self._waiting.bare:
            await self._wait_bare()
        await within(self._start.run(), limit_s=self.settings.start_limit_s, trace=self.trace)
        self.up_s = self._clock.monotonic_s()
        log.info("%s %s", self.state, start_text(self.trace, end_s=self.up_s))
        self.background(self._follow_kv())
        self._ready_at_last()
        await self._changing.rest()

    async def _wait_bare(self) -> None:
        """With a process only, for as long as nobody wants it; its start begins with the word."""
        await within(self._start.stand_by(), limit_s=self.settings.start_limit_s, trace=self.trace)
        await self._waiting.told.wait()
        self._tell(Event.ACTIVATE_ASKED)
        self.trace.begin_anew()

    def _ready_at_last(self) -> None:
        """Once in a life; a standby's moment comes when it is activated."""
        self.session.poke()
        if self.state is State.READY and self.ready_s is None:
            self.ready_s = self._clock.monotonic_s()
            self._on_ready(self)
        if self.state is State.READY:
            self._upgrading.begin()

    async def _serve(self) -> None:
        """Give weights beside serving, and watch a drain until the end."""
        self.giving.poke()
        self.background(Watch(self.engine.serving_times, self.transfer, self._clock).keep())
        while True:
            drains = self.state in {State.DRAINING, State.FLIPPING}
            if drains:
                await self._draining.look(leaves=self.state is State.DRAINING)
            await self._or_wake(DRAIN_NEWS_S if drains else SERVE_TURN_S)

    async def _or_wake(self, seconds: float) -> None:
        waits = {
            asyncio.ensure_future(self._clock.sleep(seconds)),
            asyncio.ensure_future(self._wake.wait()),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._wake.clear()

    async def _close(self, end: End) -> ExitCode:
        """Give everything back, in the order that harms nobody (B60, B65, R22.1)."""
        log.info("ending in state %s: %s", self.state, end.why)
        failed = end.event in {Event.START_FAILED, Event.ENGINE_DIED} or self.state is State.FAILED
        if self.state not in ENDS:
            died = end.event is Event.START_FAILED and self.state in SERVES
            self._tell(Event.ENGINE_DIED if died else end.event)
        if failed:
            self.trace.failure = end.why
            log.error("failed: %s", end.why)
        self._start.stop()
        self._upgrading.stop()
        for task in [*self._tasks, *self._load.asking, *filter(None, [self._rejoining])]:
            task.cancel()
        self.transfer.drain()
        had = self.session.lease is not None
        if self.state is not State.FENCED and had:
            await self._quietly(self.giving.withdraw(end.why))
            if failed:
                await self._quietly(self._report_failure(end.why))
            await self._quietly(self._leave(end.why))
        await self._quietly(self.engine.stop(grace_s=ENGINE_GRACE_S), limit_s=ENGINE_GRACE_S + 5)
        await self.transfer.stop(grace_s=TRANSFER_GRACE_S if self.state is State.LEAVING else 0.0)
        if self.started.tasks:
            await asyncio.wait(set(self.started.tasks), timeout=LEAVE_LIMIT_S)
        if self.started.arena is not None:
            self.started.arena.close()
        shutil.rmtree(self.settings.work_dir, ignore_errors=True)
        code = self._exit_code()
        self._tell(Event.RELEASED)
        return code

    def _exit_code(self) -> ExitCode:
        if self.state is State.FENCED:
            return ExitCode.FENCED
        if self.state is State.FAILED and self._misset:
            return ExitCode.USAGE
        if self.state is State.FAILED:
            return ExitCode.START_FAILED if self.ready_s is None else ExitCode.ENGINE_DIED
        return ExitCode.LEFT

    # ----------------------------------------------------------------------- what ends a life

    def signalled(self, number: int = signal.SIGTERM) -> None:
        """SIGTERM or SIGINT: drain and leave. Again, SIGTERM changes nothing (B65), SIGINT leaves."""
        if self.state is State.DRAINING and number == signal.SIGTERM:
            return
        if self.state in SERVES and self.state is not State.DRAINING:
            log.info("asked to end by a signal: draining")
            self._begin_drain(self.settings.drain_deadline_s, "the agent was asked to end")
            self.background(self._draining.tell_router())
        else:
            self.end(Event.LEAVE_ASKED, "asked to end by a signal")

    def direct(self, directive: Directive) -> None:
        """One directive of the router; repeated ones change nothing."""
        why = directive.reason or f"directive {directive.kind}"
        if directive.kind == "drain":
            if self.state in STARTS or self.state in WAITS:
                self.end(Event.DRAIN_ASKED, why)
            elif self.state is not State.DRAINING and self.state in SERVES:
                deadline_s = directive.deadline_s or self.settings.drain_deadline_s
                self._begin_drain(deadline_s, why)
        elif directive.kind == "stop" and self.state in STARTS:
            self.end(Event.START_FAILED, why)
        elif directive.kind in {"leave", "stop"}:
            self.end(Event.LEAVE_ASKED, why)
        elif directive.kind == "activate":
            self._waiting.hear(directive.deadline_s, why)
            if self.state is State.BARE:
                self._waiting.told.set()
            elif self.state is State.STANDBY:
                self.background(self._activate(why))
        elif directive.kind == "flip" and directive.role is not None:
            self._flip(directive, directive.role, why)
        else:
            log.info("directive %s is not for this worker: %s", directive.kind, why)

    async def _activate(self, why: str) -> None:
        await self._changing.activate(why)
        self._ready_at_last()

    def _flip(self, directive: Directive, role: Role, why: str) -> None:
        """Told until it is done: first to drain for it, and with no time left to go."""
        if self.state is State.READY and role is not self.started.role:
            self._draining.drained = False
            self._changing.flip(role, why)
            self._wake.set()
        if self.state is State.FLIPPING and directive.deadline_s == 0.0:
            self.background(self._turn())

    async def _turn(self) -> None:
        await self._upgrading.interrupt("it changes the stage")
        if await self._changing.turn():
            self._draining.drained = False
            self._ready_at_last()

    def end(self, event: Event, why: str) -> None:
        """End this life; the first reason counts."""
        if self._end is not None and not self._end.done():
            self._end.set_result(End(event, why))

    async def _or_end(self, work: Awaitable[None]) -> None:
        assert self._end is not None
        task: asyncio.Future[None] = asyncio.ensure_future(work)
        both: set[asyncio.Future[Any]] = {task, self._end}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _Ended(self._end.result())
            await task
        finally:
            if not task.done():
                self._start.stop()
                task.cancel()
                await asyncio.wait({task})

    async def _keep_session(self) -> None:
        try:
            await self.session.keep()
        except (LostLease, StaleEpoch) as error:
            self.end(Event.FENCED_OFF, str(error))

    async def _watch_engine(self) -> None:
        while self.engine.returncode is None:
            await self._clock.sleep(ENGINE_WATCH_S)
            if why := self._waiting.frozen(waits=self.state in WAITS):
                return self.end(Event.ENGINE_DIED, why)
        return self.end(Event.ENGINE_DIED, self._mapped.explained(end_text(self.engine)))

    # ----------------------------------------------------------------------- lease and news

    def _lease(self) -> Lease:
        assert self.session.lease is not None
        return self.session.lease

    def _offer(self) -> WorkerOffer:
        s, ordered = self.settings, self.trace.ordered_at_s
        stands_by = s.standby and self.ready_s is None
        told_left_s, told_reason = self._waiting.word() if stands_by else (None, "")
        return WorkerOffer(
            worker_id=s.worker_id,
            incarnation=self.incarnation,
            role=self.started.role,
            model=s.model,
            worker_class=s.worker_class,
            generation=s.generation,
            manifest_digest=s.manifest
            or (self.started.manifest.digest if self.started.manifest else ""),
            node=s.node,
            scale_decision_id=s.scale_decision_id,
            agent_url=self.transfer.url,
            ordered_ago_s=None if ordered is None else self._clock.monotonic_s() - ordered,
            mode=s.mode,
            attached=s.engine == "attached",
            ranks=s.tp,
            convertible=s.convertible_tpot_s > 0,
            standby=stands_by,
            holds=s.holds,
            told_left_s=told_left_s,
            told_reason=told_reason,
        )

    async def _news(self) -> News:
        starting = self.state in STARTS
        progress = None
        if starting or not self._told_ready or self.trace.failure:
            progress = self.trace.progress(self.engine.log_tail(20) if starting else "")
            # The finished segments are told once more after admission, then never again.
            self._told_ready = self.up_s is not None and self.session.failures == 0
        bare = self.state is State.BARE
        lives = self.state in SERVES or (self.state in WAITS and not bare)
        load = await self._load.report(self._lease().ttl_s) if lives else None
        within_s = START_NEWS_S if starting else None
        if self.state in {State.DRAINING, State.FLIPPING}:
            within_s = DRAIN_NEWS_S
        elif self.state in WAITS:
            within_s = STANDBY_NEWS_S  # the word to serve comes with an answer: ask often
        holds = self._waiting.holds(stands_by=self.state is State.STANDBY, bare=bare)
        return News(progress, load, self._draining.drained, within_s, holds)

    def _told_anew(self) -> None:
        """What renewals tell of the start has changed: once more, with the next."""
        self._told_ready = False
        self.session.poke()

    def _regranted(self, lease: Lease) -> None:
        """The router had lost us: what it knew of the gate is gone, so prove everything again."""
        log.warning("lease granted anew: epoch %d", lease.epoch)
        self._told_ready = False
        self._changing.forgotten()
        self._tell(Event.LEASE_REGRANTED)
        if self.state is State.REJOINING and (self._rejoining is None or self._rejoining.done()):
            self._rejoining = asyncio.create_task(self._rejoin())

    async def _rejoin(self) -> None:
        await self._changing.ended()
        await self._upgrading.interrupt("the router had lost it")
        while self.state is State.REJOINING:
            try:
                await self._start.rejoin()
            except (LostLease, StaleEpoch) as error:
                log.warning("rejoining: %s; the session decides", error)
            except ReadyplaneError as error:
                if self._failed():
                    self.end(Event.ENGINE_DIED, str(error))
                    return
                log.warning("rejoining failed: %s; trying again", error)
            else:
                self._ready_at_last()
                await self._changing.rest()
            await self._clock.sleep(1.0)

    def _failed(self) -> bool:
        return self.state is State.FAILED

    def _tell(self, event: Event) -> None:
        before, self.state = self.state, step(self.state, event)
        if before is not self.state:
            log.info("%s -> %s (%s)", before, self.state, event)
            if holds_lease(self.state):
                self.session.poke()

    # ----------------------------------------------------------------------- drain and leave

    def _begin_drain(self, deadline_s: float, why: str) -> None:
        self._draining.begin(deadline_s, why)
        self._tell(Event.DRAIN_ASKED)
        self.background(self._upgrading.interrupt("it is to leave"))
        self.transfer.drain(limit_s=min(deadline_s, HAND_OVER_LIMIT_S))
        self.giving.poke()
        self._wake.set()

    async def _leave(self, why: str) -> None:
        lease = self._lease()
        await self._router.leave(lease.worker_id, lease.incarnation, lease.epoch, reason=why)

    async def _report_failure(self, why: str) -> None:
        """The last renewal carries the failure; the group is told as well (R17.1)."""
        lease = self._lease()
        await self.session.renew()
        await self._router.report_rank(
            RankReport(
                lease.worker_id,
                lease.incarnation,
                lease.epoch,
                blamed(self.engine),
                "failed",
                detail=why,
            )
        )

    async def _quietly(self, work: Awaitable[object], *, limit_s: float = LEAVE_LIMIT_S) -> None:
        """On the way out nothing may keep us: what cannot be told is logged."""
        try:
            async with asyncio.timeout(limit_s):
                await work
        except (ReadyplaneError, TimeoutError, OSError) as error:
            log.warning("while ending: %s", str(error) or type(error).__name__)

    # ----------------------------------------------------------------------- for people

    async def _follow_kv(self) -> None:
        await self.kv.follow(self.engine.kv_events())

    def background(self, work: Awaitable[None]) -> None:
        """Run something beside the worker until it ends; if it breaks, the worker ends, loudly."""

        async def guarded() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except Exception as error:  # a background task that breaks ends the worker, loudly
                log.exception("a background task broke")
                self.end(Event.ENGINE_DIED, f"{type(error).__name__}: {error}")

        self._tasks.append(asyncio.create_task(guarded()))

    def _health(self) -> tuple[bool, str]:
        return holds_lease(self.state), str(self.state)

    def metrics(self) -> str:
        """Prometheus text: segments of this start, bytes given to peers, faults met."""
        s = self.settings
        pool = s.role if s.convertible_tpot_s > 0 else self.started.role
        who = f'worker_id="{s.worker_id}",pool="{pool}",worker_class="{s.worker_class}"'
        end_s = self._clock.monotonic_s() if self.up_s is None else self.up_s
        lines = [*start_metrics(self.trace, who, end_s=end_s), *self.transfer.counted(who)]
        lines += source_metrics(self.started.fetched, who)
        lines += [*self.started.reuse_metrics(who), *self._upgrading.metrics(who)]
        return "\n".join(lines) + "\n"
