"""The life of a start, from lease to admission, one segment after another (R6, R17, R18).

Owns the sequence: discovery → weights ∥ engine process → verify → engine → canary → group barrier →
gate. Hands `Started` to `life`. Everything it waits for is either timed by a segment of its own or
by one that the engine adapter reports.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from readyplane.core import gate_checks as gc
from readyplane.core.errors import (
    ReadyplaneError,
    Refused,
    Unavailable,
)
from readyplane.core.identity import Manifest
from readyplane.core.profile import ClassProfile
from readyplane.core.stage import CapacityStage
from readyplane.core.startup import SegmentName
from readyplane.core.worker import CheckResult, Lease, Role, Serving
from readyplane.kit.clock import Clock
from readyplane.ports import GateVerdict, Registry, Router
from readyplane_agent import probes
from readyplane_agent.arena import Arena
from readyplane_agent.barrier import Barrier
from readyplane_agent.cache import WeightCache
from readyplane_agent.compile_publish import upload_url
from readyplane_agent.engines.child import is_stopped
from readyplane_agent.engines.offers import StagesGraphs
from readyplane_agent.engines.port import EnginePort, EngineSpec
from readyplane_agent.lifecycle import Event
from readyplane_agent.loader import Loader
from readyplane_agent.loading import Loading, write_whole
from readyplane_agent.no_source import bounded
from readyplane_agent.ordered import attached_engine, own_engine
from readyplane_agent.patience import Patience
from readyplane_agent.proving import Proving
from readyplane_agent.ranks import Ranks
from readyplane_agent.reuse import Reuse
from readyplane_agent.settings import AgentSettings
from readyplane_agent.source_use import Fetched
from readyplane_agent.start_memory import arena_for, fault_in, take_held
from readyplane_agent.trace import StartTrace
from readyplane_agent.upgrading import first_stage
from readyplane_agent.waiting import Waiting

log = logging.getLogger("agent.start")

SMALL_POLL_S = 0.005


@dataclass(slots=True)
class Started:
    """What a start has brought up so far; `life` releases it whatever happens.

    `role` is what the worker registers as, which a flip changes.
    """

    role: Role
    manifest: Manifest | None = None
    arena: Arena | None = None
    fetched: Fetched | None = None
    serving: Serving | None = None
    reuse: Reuse | None = None
    checks: tuple[CheckResult, ...] = ()
    stage: CapacityStage | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def reuse_metrics(self, who: str) -> list[str]:
        """Prometheus text about what was taken over; `who` are the labels of this worker."""
        return [] if self.reuse is None else self.reuse.metrics(who)


class Start:
    """One start of one worker.

    Args:
        settings, incarnation: who this is. registry: None for an attached engine without one.
        lease: the lease as it stands now. tell: lifecycle events. started: filled on the way.
        give: offers an arena's chunks to others from now on.
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
        lease: Callable[[], Lease],
        tell: Callable[[Event], None],
        started: Started,
        give: Callable[[Arena], Awaitable[None]],
    ) -> None:
        self._s, self._incarnation = settings, incarnation
        self._router, self._engine = router, engine
        self._profile, self._cache, self._clock, self._trace = profile, cache, clock, trace
        self._lease, self._tell, self._started, self._give = lease, tell, started, give
        self._loader: Loader | None = None
        self.waiting = Waiting(settings, engine, clock)
        self._patient = Patience(clock, lease)
        self._loading = Loading(
            settings,
            incarnation=incarnation,
            registry=registry,
            cache=cache,
            clock=clock,
            patient=self._patient,
        )
        self._barrier = Barrier(
            router=router,
            clock=clock,
            patient=self._patient,
            lease=lease,
            digest=lambda: self.manifest_digest,
            limit_s=settings.start_limit_s,
        )
        self._ranks = Ranks(
            world=settings.tp,
            engine=engine,
            barrier=self._barrier,
            placed=lambda: () if started.arena is None else started.arena.placed(),
            clock=clock,
        )
        if settings.tp > 1:
            self._barrier.others = lambda: self._ranks.tell(again=True)
        self._proving = Proving(
            settings,
            router=router,
            engine=engine,
            profile=profile,
            clock=clock,
            started=started,
            patient=self._patient,
        )

    @property
    def manifest_digest(self) -> str:
        """What the worker serves, as the group is told."""
        if self._started.manifest is not None:
            return self._started.manifest.digest
        return self._s.manifest or f"attached:{self._s.model}"

    async def run(self) -> None:
        """From lease to admission, of all ranks.

        Raises:
            ReadyplaneError: why this start has failed.
        """
        await self._ranks.beside(self._run())

    async def _run(self) -> None:
        if self._s.engine == "attached":
            await self._attach()
        else:
            await self._load()
        await self._engine_up()
        await self._prove()
        self._tell(Event.CANARY_PASSED)
        await self._join()
        reuse, manifest = self._started.reuse, self._started.manifest
        if reuse is not None and manifest is not None:
            stage = self._started.stage
            whole = stage is None or stage.compiled
            keeping = reuse.keep(self._engine, manifest, compiled=whole)
            self._started.tasks.append(asyncio.create_task(keeping))

    async def check(self) -> None:
        """Whether it can be started as ordered, before anything is loaded.

        Raises:
            NotOffered: the engine cannot wait so. WrongSetting, IdentityMismatch, Refused: who waits
            with a process only could not load when it is told to. The trace shows that it ended
            before the engine's start.
        """
        try:
            self.waiting.check()
            if self.waiting.bare:
                await self._loading.look_ahead()
        except ReadyplaneError:
            self._trace.add(SegmentName.RUNTIME_IMPORT, self._clock.monotonic_s())
            raise

    async def stand_by(self) -> None:
        """Wait with an engine process only, until it is told to load; then the start begins.

        Raises:
            NotOffered: the engine cannot. Unavailable: the process does not come up.
        """
        await self.waiting.stand_by(engine_id=self._incarnation)
        self._tell(Event.IMPORTED)

    async def rejoin(self) -> None:
        """Prove and hand in everything again, under a lease that was granted anew."""
        now_s = self._clock.monotonic_s()
        self._trace = StartTrace(self._clock, process_start_s=now_s)
        await self.waiting.wake()
        await self._prove()
        await self._join()

    async def activate(self) -> None:
        """Ask the canary once more and hand the evidence in: it is to serve now, if still wanted.

        One answer: what could have changed since the whole proof is what the engine answers now. An
        engine that slept is proved whole: its device has been somebody else's meanwhile.
        """
        self._trace = StartTrace(self._clock, process_start_s=self._clock.monotonic_s())
        if await self.waiting.wake():
            await self._prove()
            await self._join()
            return
        question = probes.Question.of(self._started.manifest)
        first = await probes.ask(self._engine, question)
        self._started.checks = tuple(
            probes.canary_again(c, question, first) if c.name == gc.CANARY else c
            for c in self._started.checks
        )
        _refuse_failed("activation", self._started.checks)
        await self._join()

    async def turn(self) -> None:
        """Prove everything again for the stage that `Started.role` now says, and join."""
        self._trace = StartTrace(self._clock, process_start_s=self._clock.monotonic_s())
        await self._prove()
        self._tell(Event.CANARY_PASSED)
        await self._join()

    def stop(self) -> None:
        """Let loader threads end soon."""
        if self._loader is not None:
            self._loader.stop()

    # ----------------------------------------------------------------------- weights

    async def _load(self) -> None:
        with self._trace.span(SegmentName.ARTIFACT_DISCOVERY, follows=True) as span:
            manifest, _ = await asyncio.gather(
                self._loading.manifest(), self._barrier.passed("scheduled")
            )
            vouched = await self._loading.vouched(manifest)
            arena = await arena_for(
                manifest,
                self._s,
                cache=self._cache,
                owner=self._incarnation,
                clock=self._clock,
                trace=self._trace,
            )
            self._started.manifest, self._started.arena = manifest, arena
            await self._give(arena)  # before the plan: whoever plans later can read behind us
            plan = await self._loading.plan(manifest)
            told = [f"{r.source.source_id}: {r.why}" for r in plan.sources[:4]]
            if not plan.sources:
                told = [f"no source yet: {text}" for text in bounded(plan.excluded, 4)]
            told = [vouched, *told] if vouched else told
            span.detail = f"{manifest.digest}, {manifest.size_bytes / 1e6:.1f} MB, " + "; ".join(
                told
            )
            spec = own_engine(
                self._s,
                manifest,
                arena,
                engine_id=self._incarnation,
                profile=self._profile,
                compiles=self._cache is not None,
                graph_stages=self._s.graph_stages and isinstance(self._engine, StagesGraphs),
            )
            if self._cache is not None:
                self._started.reuse = Reuse(
                    self._s,
                    self._cache.folder,
                    registry=self._loading.registry,
                    clock=self._clock,
                    incarnation=self._incarnation,
                    upload=upload_url(plan, manifest.digest),
                )
            self._loader = self._loading.loader(arena, self._trace)
        self._tell(Event.SOURCES_PLANNED)
        held = await take_held(arena, node=self._s.node, clock=self._clock, trace=self._trace)
        self._loader.fetched.uses += held
        faulting = asyncio.create_task(fault_in(arena, self._trace))
        loading = asyncio.create_task(self._loader.run(plan.sources, excluded=plan.excluded))
        try:
            await self._start_engine(manifest, arena, spec, loading)
            self._started.fetched = await loading
        finally:
            self._loader.stop()
            await asyncio.wait([faulting, loading])
        with self._trace.span(SegmentName.VERIFY, follows=True) as span:
            await self._loading.verify(arena, spec)
            chunks = sum(len(entry.chunks) for entry in manifest.files)
            span.detail = f"{chunks} chunks, {len(manifest.tensors)} tensors"
            await self._barrier.passed("verified")
        self._tell(Event.WEIGHTS_VERIFIED)
        self._started.tasks.append(asyncio.create_task(self._loading.keep(arena)))

    async def _start_engine(
        self, manifest: Manifest, arena: Arena, spec: EngineSpec, loading: asyncio.Task[Fetched]
    ) -> None:
        """Start the engine while the weights come in, as soon as its small files are there.

        What can be taken over is fetched meanwhile: an engine looks for it once, when it starts.
        """
        small = [entry.path for entry in manifest.files if entry.purpose != "weights"]
        reusing = asyncio.create_task(self._reused(manifest, spec))
        try:
            while not (loading.done() or all(arena.has(path) for path in small)):
                await self._clock.sleep(SMALL_POLL_S)
            await asyncio.wait({reusing, loading}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and loading.exception() is not None:
                return
            spec = await reusing
        finally:
            reusing.cancel()
            await asyncio.wait({reusing})
        for path in small:
            write_whole(self._s.work_dir / "files" / path, arena.view(path))
        await self._engine.start(spec)
        self._trace.follow_engine(self._engine.startup_segments)

    async def _reused(self, manifest: Manifest, spec: EngineSpec) -> EngineSpec:
        reuse = self._started.reuse
        return spec if reuse is None else await reuse.prepare(spec, manifest, self._trace)

    async def _attach(self) -> None:
        spec = attached_engine(self._s, engine_id=self._incarnation)
        await self._engine.start(spec)
        self._tell(Event.ENGINE_FOUND)
        await self._barrier.passed("scheduled")
        await self._barrier.passed("verified")

    # ----------------------------------------------------------------------- proof

    async def _engine_up(self) -> None:
        if self._s.engine == "attached":
            with self._trace.span(SegmentName.PARALLEL_INIT, "waiting for the attached engine"):
                await self._engine.wait_ready(stall_s=self._s.stall_s)
        else:
            await self._own_engine_up()
        profile = self._s.profile or self._s.worker_class
        self._started.stage = await first_stage(self._s, self._engine, profile=profile)
        self._tell(Event.ENGINE_UP)

    async def _own_engine_up(self) -> None:
        reuse = self._started.reuse
        try:
            await self._engine.wait_ready(stall_s=self._s.stall_s, limit_s=self._s.start_limit_s)
        except Unavailable:
            if reuse is not None:
                await reuse.failed(
                    self._engine.startup_segments(),
                    returncode=self._engine.returncode,
                    stopped=is_stopped(self._engine.pid),
                )
            raise
        if reuse is not None:
            await reuse.judge(self._engine.startup_segments())

    async def _prove(self) -> None:
        """Canary, connector and pool; a check that fails ends the start here, with its reason."""
        with self._trace.span(SegmentName.CANARY, follows=True) as span:
            serving, answered, checks = await self._proving.prove()
            self._started.serving, self._started.checks = serving, tuple(checks)
            span.detail = f"answered {list(answered)[:8]}"
            if not all(check.passed for check in checks):
                await self._hand_in_failed()
            _refuse_failed("start", checks)
            await self._barrier.passed("connected")
            await self._barrier.passed("placed")

    async def _hand_in_failed(self) -> None:
        """The router is told of the evidence as well: there it stays with the worker."""
        try:
            verdict = await self._ask_admission(0)
            log.warning("the gate refuses: %s", "; ".join(verdict.reasons))
        except ReadyplaneError as error:
            log.warning("the evidence could not be handed in: %s", error)

    # ----------------------------------------------------------------------- barrier and gate

    async def _join(self) -> None:
        verdict: GateVerdict | None = None
        while verdict is None:
            epoch = self._lease().epoch
            with self._trace.span(SegmentName.GROUP_BARRIER, follows=True) as span:
                group_epoch = await self._barrier.fall()
                span.detail = f"group epoch {group_epoch}"
            with self._trace.span(SegmentName.ROUTER_REGISTRATION, "admission", follows=True):
                verdict = await self._admit(group_epoch, epoch)
        self._tell(Event.STOOD_BY if verdict.standby else Event.ADMITTED)

    async def _ask_admission(self, group_epoch: int) -> GateVerdict:
        serving = self._started.serving
        assert serving is not None

        def ask() -> Awaitable[GateVerdict]:
            lease = self._lease()
            checks = (
                *self._started.checks,
                probes.lease_check(lease.epoch),
                probes.group_check(group_epoch),
            )
            return self._router.admit(
                lease.worker_id, lease.incarnation, lease.epoch, serving=serving, checks=checks
            )

        return await self._patient(ask)

    async def _admit(self, group_epoch: int, epoch: int) -> GateVerdict | None:
        """The verdict; None: the lease of `epoch` was lost, and with it the group that it judges by."""
        verdict = await self._ask_admission(group_epoch)
        if verdict.admitted:
            return verdict
        if self._lease().epoch != epoch:
            log.warning("not admitted under another lease than its group's: the group forms anew")
            return None
        self._tell(Event.REFUSED)
        raise Refused("admission", verdict.reasons, "see the checks of the worker")


def _refuse_failed(what: str, checks: Iterable[CheckResult]) -> None:
    failed = [f"{c.name}: {c.reason or 'failed'}" for c in checks if not c.passed]
    if failed:
        raise Refused(what, failed, "see the evidence in the worker's checks")
