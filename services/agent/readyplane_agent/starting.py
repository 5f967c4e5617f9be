"""The life of a start, from lease to admission, one segment after another (R6, R17, R18).

Owns the sequence: discovery → weights ∥ engine process → verify → engine → canary → group barrier →
gate. Hands `Started` to `life`. Everything it waits for is either timed by a segment of its own or
by one that the engine adapter reports.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from readyplane.core import gate_checks as gc
from readyplane.core.errors import (
    IdentityMismatch,
    InvalidField,
    LostLease,
    ReadyplaneError,
    Refused,
    StaleEpoch,
    Unavailable,
)
from readyplane.core.identity import Manifest
from readyplane.core.profile import ClassProfile
from readyplane.core.startup import SegmentName
from readyplane.core.worker import CheckResult, Lease, Role, Serving
from readyplane.kit.clock import Clock
from readyplane.ports import FetchPlan, GateVerdict, GroupStatus, RankReport, Registry, Router
from readyplane_agent import probes
from readyplane_agent.arena import Arena
from readyplane_agent.cache import WeightCache
from readyplane_agent.compile_publish import upload_url
from readyplane_agent.engines.layout import arena_layout, tensor_table_document
from readyplane_agent.engines.port import EnginePort, EngineSpec
from readyplane_agent.lifecycle import Event
from readyplane_agent.loader import Loader
from readyplane_agent.nixl_way import Transport
from readyplane_agent.no_source import bounded
from readyplane_agent.pipeline import staging_share
from readyplane_agent.proving import RANKS, Proving
from readyplane_agent.reading import Reader
from readyplane_agent.reuse import Reuse
from readyplane_agent.settings import AgentSettings
from readyplane_agent.source_use import Fetched
from readyplane_agent.start_memory import arena_for, fault_in, take_held
from readyplane_agent.trace import StartTrace
from readyplane_agent.vouching import refuse_untrusted

log = logging.getLogger("agent.start")
T = TypeVar("T")

CHECKPOINT_ENGINES = ("vllm",)
BARRIER_POLL_S = 0.5
SMALL_POLL_S = 0.005
PATIENCE_S = 60.0
PAUSE_S = 0.2
PAUSE_MAX_S = 2.0


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
        self._registry_or_none, self._router, self._engine = registry, router, engine
        self._profile, self._cache, self._clock, self._trace = profile, cache, clock, trace
        self._lease, self._tell, self._started, self._give = lease, tell, started, give
        self._loader: Loader | None = None
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
    def _registry(self) -> Registry:
        if self._registry_or_none is None:
            raise InvalidField("--registry", "", "give the registry's address")
        return self._registry_or_none

    @property
    def manifest_digest(self) -> str:
        """What the worker serves, as the group is told."""
        if self._started.manifest is not None:
            return self._started.manifest.digest
        return self._s.manifest or f"attached:{self._s.model}"

    async def run(self) -> None:
        """From lease to admission.

        Raises:
            ReadyplaneError: why this start has failed.
        """
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
            keeping = reuse.keep(self._engine, manifest)
            self._started.tasks.append(asyncio.create_task(keeping))

    async def rejoin(self) -> None:
        """Prove and hand in everything again, under a lease that was granted anew."""
        now_s = self._clock.monotonic_s()
        self._trace = StartTrace(self._clock, process_start_s=now_s)
        await self._prove()
        await self._join()

    async def activate(self) -> None:
        """Ask the canary once more and hand the evidence in: it is to serve now, if still wanted.

        One answer: what could have changed since the whole proof is what the engine answers now.
        """
        self._trace = StartTrace(self._clock, process_start_s=self._clock.monotonic_s())
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
        with self._trace.span(SegmentName.ARTIFACT_DISCOVERY) as span:
            manifest, _ = await asyncio.gather(self._manifest(), self._rank("scheduled"))
            vouched = await self._vouched(manifest)
            arena = await arena_for(
                manifest,
                pool_dir=self._s.pool_dir,
                pool_bytes_max=self._s.pool_bytes_max,
                owner=self._incarnation,
            )
            self._started.manifest, self._started.arena = manifest, arena
            await self._give(arena)  # before the plan: whoever plans later can read behind us
            plan = await self._plan(manifest)
            told = [f"{r.source.source_id}: {r.why}" for r in plan.sources[:4]]
            if not plan.sources:
                told = [f"no source yet: {text}" for text in bounded(plan.excluded, 4)]
            told = [vouched, *told] if vouched else told
            span.detail = f"{manifest.digest}, {manifest.size_bytes / 1e6:.1f} MB, " + "; ".join(
                told
            )
            spec = self._spec(manifest, arena)
        if self._cache is not None:
            self._started.reuse = Reuse(
                self._s,
                self._cache.folder,
                registry=self._registry,
                clock=self._clock,
                incarnation=self._incarnation,
                upload=upload_url(plan, manifest.digest),
            )
        self._tell(Event.SOURCES_PLANNED)
        self._loader = Loader(
            arena,
            registry=self._registry,
            clock=self._clock,
            reader=Reader(self._s.worker_id, self._incarnation, self._s.node),
            trace=self._trace,
            cache=self._cache,
            staging_bytes=staging_share(
                self._s.staging_bytes,
                node_bytes=self._s.staging_node_bytes,
                node_processes=self._s.node_processes,
                chunk_bytes=min(manifest.chunk_bytes, manifest.size_bytes),
            ),
            connections=self._s.read_connections,
            limit_s=self._s.fetch_limit_s,
            token=self._s.token,
            transport=Transport(self._s.transport, self._s.nixl_python),
        )
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
        with self._trace.span(SegmentName.VERIFY) as span:
            await self._verify(manifest, arena, spec)
            chunks = sum(len(entry.chunks) for entry in manifest.files)
            span.detail = f"{chunks} chunks, {len(manifest.tensors)} tensors"
            await self._rank("verified")
        self._tell(Event.WEIGHTS_VERIFIED)
        if self._cache is not None and not self._cache.holds(manifest):
            store = asyncio.to_thread(self._store, self._cache, arena)
            self._started.tasks.append(asyncio.create_task(store))

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
            _write(self._s.work_dir / "files" / path, arena.view(path))
        await self._engine.start(spec)
        self._trace.follow_engine(self._engine.startup_segments)

    async def _reused(self, manifest: Manifest, spec: EngineSpec) -> EngineSpec:
        reuse = self._started.reuse
        return spec if reuse is None else await reuse.prepare(spec, manifest, self._trace)

    async def _manifest(self) -> Manifest:
        if not self._s.manifest:
            return await self._patient(lambda: self._registry.resolve(self._s.model))
        found = await self._patient(lambda: self._registry.get_manifest(self._s.manifest))
        if found.digest != self._s.manifest:
            raise IdentityMismatch(
                "manifest",
                [f"digest: {found.digest} != {self._s.manifest}"],
                "ask the registry's owner",
            )
        if found.model != self._s.model:
            raise IdentityMismatch(
                "manifest", [f"model: {found.model} != {self._s.model}"], "order the right artifact"
            )
        return found

    async def _vouched(self, manifest: Manifest) -> str:
        return await self._patient(
            lambda: refuse_untrusted(
                manifest,
                registry=self._registry,
                trust_file=self._s.trust_file,
                clock=self._clock,
            )
        )

    async def _plan(self, manifest: Manifest) -> FetchPlan:
        return await self._patient(
            lambda: self._registry.plan_fetch(
                manifest.digest,
                worker_id=self._s.worker_id,
                incarnation=self._incarnation,
                node=self._s.node,
            )
        )

    def _spec(self, manifest: Manifest, arena: Arena) -> EngineSpec:
        work = self._s.work_dir
        config = work / "config.json"
        told = {"quantisation": manifest.quantisation, **manifest.config}
        config.write_text(json.dumps(told))
        tokenizers = [e.path for e in manifest.files if e.purpose == "tokenizer"]
        lent = self._s.convertible_tpot_s > 0
        return EngineSpec(
            engine_id=self._incarnation,
            role=self._s.serves,
            model=manifest.model,
            manifest_digest=manifest.digest,
            arena_path=arena.path,
            tensor_table_path=work / "tensors.json",
            config_path=config,
            tokenizer_path=work / "files" / tokenizers[0] if tokenizers else None,
            profile=self._s.profile or self._s.worker_class,
            work_dir=work,
            log_path=work / "engine.log",
            host=self._s.host,
            mode=self._s.mode,
            compile_cache_dir=None if self._cache is None else work / "compile-cache",
            kv_tokens=self._s.kv_tokens,
            # The told profile has the bound of a convertible worker's chunks; others have none.
            max_batch_tokens=self._profile.max_batch_tokens if lent else 0,
            max_num_seqs=self._profile.max_num_seqs if lent else 0,
            wait_weights=True,
            extra_args=self._s.engine_args,
        )

    async def _verify(self, manifest: Manifest, arena: Arena, spec: EngineSpec) -> None:
        """Seal, check coverage and rank ownership, and only then let the engine have it (R10.3).

        The engine waits for the tensor table, which is therefore written last.
        """
        arena.seal()
        missing = await asyncio.to_thread(probes.missing_tensors, arena, ranks=RANKS)
        if missing:
            raise IdentityMismatch("weights", missing[:8], "publish the artifact again")
        if self._s.engine in CHECKPOINT_ENGINES:
            # These read a folder; until they map the arena themselves the bytes are copied.
            for entry in manifest.files:
                if entry.purpose == "weights":
                    await asyncio.to_thread(
                        _write, self._s.work_dir / "files" / entry.path, arena.view(entry.path)
                    )
        table = tensor_table_document(arena_layout(manifest), manifest_digest=manifest.digest)
        _write(spec.tensor_table_path, json.dumps(table).encode())

    def _store(self, cache: WeightCache, arena: Arena) -> None:
        try:
            written = cache.store(arena)
            log.info("weight cache: %.1f MB written", written / 1e6)
        except OSError as error:
            log.warning("weight cache not written: %s", error)

    async def _attach(self) -> None:
        spec = EngineSpec(
            engine_id=self._incarnation,
            role=self._s.role,
            model=self._s.model,
            manifest_digest=self._s.manifest,
            arena_path=Path(os.devnull),
            tensor_table_path=Path(os.devnull),
            config_path=Path(os.devnull),
            tokenizer_path=None,
            profile=self._s.profile or self._s.worker_class,
            work_dir=self._s.work_dir,
            log_path=self._s.work_dir / "engine.log",
        )
        await self._engine.start(spec)
        self._tell(Event.ENGINE_FOUND)
        await self._rank("scheduled")
        await self._rank("verified")

    # ----------------------------------------------------------------------- proof

    async def _engine_up(self) -> None:
        if self._s.engine == "attached":
            with self._trace.span(SegmentName.PARALLEL_INIT, "waiting for the attached engine"):
                await self._engine.wait_ready(stall_s=self._s.stall_s)
        else:
            await self._own_engine_up()
        self._tell(Event.ENGINE_UP)

    async def _own_engine_up(self) -> None:
        reuse = self._started.reuse
        try:
            await self._engine.wait_ready(stall_s=self._s.stall_s, limit_s=self._s.start_limit_s)
        except Unavailable:
            if reuse is not None:
                await reuse.failed()
            raise
        if reuse is not None:
            await reuse.judge(self._engine.startup_segments())

    async def _prove(self) -> None:
        """Canary, connector and pool; a check that fails ends the start here, with its reason."""
        with self._trace.span(SegmentName.CANARY) as span:
            serving, answered, checks = await self._proving.prove()
            self._started.serving, self._started.checks = serving, tuple(checks)
            span.detail = f"answered {list(answered)[:8]}"
            if not all(check.passed for check in checks):
                await self._hand_in_failed()
            _refuse_failed("start", checks)
            await self._rank("connected")
            await self._rank("placed")

    async def _hand_in_failed(self) -> None:
        """The router is told of the evidence as well: there it stays with the worker."""
        try:
            verdict = await self._ask_admission(0)
            log.warning("the gate refuses: %s", "; ".join(verdict.reasons))
        except ReadyplaneError as error:
            log.warning("the evidence could not be handed in: %s", error)

    # ----------------------------------------------------------------------- barrier and gate

    async def _patient(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call; a service that is away, or has lost our lease, is given time to come back.

        Raises:
            Unavailable: still away after `PATIENCE_S`. LostLease, StaleEpoch: no new lease came
            (the session asks for it). Whatever else the call raises, at once.
        """
        until_s = self._clock.monotonic_s() + PATIENCE_S
        pause_s = PAUSE_S
        while True:
            epoch = self._lease().epoch
            try:
                return await call()
            except (Unavailable, TimeoutError) as error:
                if self._clock.monotonic_s() + pause_s > until_s:
                    raise
                log.warning("%s; trying again", error)
                await self._clock.sleep(pause_s)
                pause_s = min(PAUSE_MAX_S, pause_s * 2)
            except (LostLease, StaleEpoch):
                await self._another_lease(epoch)

    async def _another_lease(self, epoch: int) -> None:
        """Wait until the session has another lease; raises what the router said if none comes."""
        until_s = self._clock.monotonic_s() + 2 * self._lease().ttl_s
        while self._lease().epoch == epoch:
            if self._clock.monotonic_s() > until_s:
                lease = self._lease()
                raise LostLease(lease.worker_id, lease.incarnation, "no other lease was granted")
            await self._clock.sleep(PAUSE_S)

    async def _rank(self, step: str) -> GroupStatus:
        digest = self.manifest_digest if step != "scheduled" else ""

        def tell() -> Awaitable[GroupStatus]:
            lease = self._lease()
            return self._router.report_rank(
                RankReport(
                    worker_id=lease.worker_id,
                    incarnation=lease.incarnation,
                    epoch=lease.epoch,
                    rank=0,
                    step=step,
                    manifest_digest=digest,
                )
            )

        status = await self._patient(tell)
        if status.state == "failed":
            raise Refused("group", [f"failed at {step}", *status.waiting_for], "order it anew")
        return status

    async def _join(self) -> None:
        with self._trace.span(SegmentName.GROUP_BARRIER) as span:
            group_epoch = await self._barrier()
            span.detail = f"group epoch {group_epoch}"
        with self._trace.span(SegmentName.ROUTER_REGISTRATION, "admission"):
            verdict = await self._admit(group_epoch)
        self._tell(Event.STOOD_BY if verdict.standby else Event.ADMITTED)

    async def _barrier(self) -> int:
        """Report the last step (which implies the others) until all ranks have done so.

        How long the others may take is the router's to judge, by their progress; a whole start
        takes `start_limit_s` at most.
        """
        until_s = self._clock.monotonic_s() + self._s.start_limit_s
        while True:
            status = await self._rank("canary_passed")
            if status.state == "published":
                return status.group_epoch
            if self._clock.monotonic_s() > until_s:
                raise Unavailable(
                    f"the group did not form within {self._s.start_limit_s:.0f} s, waiting for "
                    + ", ".join(status.waiting_for),
                    "look at the ranks named, or raise --start-limit-s",
                )
            await self._clock.sleep(BARRIER_POLL_S)

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

    async def _admit(self, group_epoch: int) -> GateVerdict:
        verdict = await self._ask_admission(group_epoch)
        if not verdict.admitted:
            self._tell(Event.REFUSED)
            raise Refused("admission", verdict.reasons, "see the checks of the worker")
        return verdict


def _refuse_failed(what: str, checks: Iterable[CheckResult]) -> None:
    failed = [f"{c.name}: {c.reason or 'failed'}" for c in checks if not c.passed]
    if failed:
        raise Refused(what, failed, "see the evidence in the worker's checks")


def _write(path: Path, data: bytes | memoryview) -> None:
    """Whole or not at all: whoever sees the name sees all bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)
