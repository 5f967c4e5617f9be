"""Real starts of modelled engines in one process: agent, router, registry twin, bytes on disk.

Owns one start from order to the gate's verdict, with a fault planted where one is asked for: in the
engine (`plants.Plant`), in what the agent tells its group, or in its lease. Everything is the code
that runs in production but the process boundary of the engine and the wire between agent and router.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from readyplane import profiles
from readyplane.core.errors import ReadyplaneError
from readyplane.core.identity import Manifest
from readyplane.core.startup import WeightTier
from readyplane.core.worker import CheckResult, Role, Worker, WorkerState
from readyplane.kit.clock import SystemClock
from readyplane.ports import (
    FetchPlan,
    GateVerdict,
    GroupStatus,
    RankedSource,
    RankReport,
    Source,
    Transfer,
)
from readyplane_agent.engines.modelled import settings as engine_settings
from readyplane_agent.engines.modelled.__main__ import serve
from readyplane_agent.engines.modelled.adapter import ModelledEngine
from readyplane_agent.engines.modelled.plants import Plant
from readyplane_agent.engines.modelled.startup import StartupLog
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.life import Life
from readyplane_agent.settings import AgentSettings
from readyplane_agent.trace import StartTrace
from readyplane_lab.up.demo_model import DemoModel, make_demo_model
from readyplane_registry.ingest import Facts, build_manifest
from readyplane_router.epochs import MemoryEpochs
from readyplane_router.policy import RouterPolicy
from readyplane_router.service import RouterService
from readyplane_router.store import MemoryStore

MODEL = "demo"
PROFILE = "h200-llama8b-fp8"
MODEL_BYTES = 8 * 2**20
START_LIMIT_S = 30.0
SEGMENTS = "parallel_init=0,compile=0,cuda_graph=0,kv_profile=0,warmup=0"

# Faults outside of the engine, and the check that must name them.
OTHER_REVISION = "other_revision"
LOST_LEASE = "lost_lease"
RANK_FAULTS = {OTHER_REVISION: "group", LOST_LEASE: "lease"}
# The check that names each planted fault.
NAMED_BY: dict[str, str] = {
    Plant.SWAPPED_TENSORS: "canary",
    Plant.OTHER_PACKING: "canary",
    Plant.WRONG_QUANTISATION: "basics",
    Plant.WRONG_TOKENIZER: "tokenizer_revision",
    Plant.ONE_WAY_KV: "kv_connector",
    Plant.KV_HASHES: "kv_hashes",
    Plant.HALF_KV: "kv_pool",
    Plant.WRONG_EOS: "canary",
    Plant.NOT_GREEDY: "canary",
    Plant.SEED_IGNORED: "basics",
    Plant.CHOICES_IGNORED: "basics",
    **RANK_FAULTS,
}


class EngineInProcess(ModelledEngine):
    """A modelled engine in this process's loop instead of one of its own."""

    def __init__(self, *flags: str) -> None:
        super().__init__(SystemClock())
        self._flags, self._stopping = flags, asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def start(self, spec: EngineSpec) -> None:
        """Begin to serve; its start-up file tells the rest, as a process's would."""
        self._spec = spec
        spec.work_dir.mkdir(parents=True, exist_ok=True)
        s = engine_settings.parse([*self.command(spec)[3:], *self._flags])
        about = {"engine_id": s.engine_id, "pid": os.getpid(), "state": "starting", "failure": ""}
        log = StartupLog(SystemClock(), s.startup_file, about)
        self._process = cast("Any", SimpleNamespace(pid=os.getpid(), returncode=None))
        self._serving = asyncio.create_task(self._live(s, log))

    async def _live(self, s: Any, log: StartupLog) -> None:
        try:
            await serve(s, SystemClock(), log, self._stopping)
        except ReadyplaneError as error:
            log.write(state="failed", failure=str(error))
            assert self._process is not None
            cast("Any", self._process).returncode = 1

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """End it and wait."""
        self._stopping.set()
        if self._serving is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._serving, grace_s)


class Registry:
    """One artifact whose bytes lie on this disk."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self._manifest, self._folder = manifest, folder

    async def get_manifest(self, *_: Any) -> Manifest:
        """The one."""
        return self._manifest

    async def resolve(self, *_: Any, **__: Any) -> Manifest:
        """The one."""
        return self._manifest

    async def plan_fetch(self, digest: str, **_: Any) -> FetchPlan:
        """From the folder."""
        url = f"file://{self._folder}"
        found = Source("disk", digest, WeightTier.L4_OBJECT, url)
        return FetchPlan((RankedSource(found, 1.0, "on this disk"),))

    async def acquire_transfer(self, *_: Any, **__: Any) -> Any:
        """A file needs no place."""
        return Transfer("place", 60.0)

    async def release_transfer(self, *_: Any, **__: Any) -> bool:
        """Nothing was taken."""
        return False

    async def announce_source(self, *_: Any, **__: Any) -> float:
        """Nobody else reads here."""
        return 60.0

    async def withdraw_source(self, *_: Any, **__: Any) -> None:
        """Nobody else reads here."""


class Wire:
    """The router as one agent reaches it, with the faults that lie between them."""

    def __init__(self, router: RouterService, fault: str) -> None:
        self._router, self._fault = router, fault
        self.verdicts: list[GateVerdict] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._router, name)

    async def report_rank(self, report: RankReport) -> GroupStatus:
        """A rank may have loaded another revision."""
        if self._fault == OTHER_REVISION and report.manifest_digest:
            report = replace(report, manifest_digest="sha256:" + "f" * 64)
        return await self._router.report_rank(report)

    async def admit(
        self, worker_id: str, incarnation: str, epoch: int, *, serving: Any, checks: Any
    ) -> GateVerdict:
        """Its lease may have run out while it proved itself."""
        member = self._router.members._members[worker_id]  # noqa: SLF001 - time is its own
        if self._fault == LOST_LEASE:
            member.renewed_s -= 100.0
        verdict = await self._router.admit(
            worker_id, incarnation, epoch, serving=serving, checks=checks
        )
        self.verdicts.append(verdict)
        return verdict


@dataclass
class Outcome:
    """How one start ended: admitted or not, why, and what the router keeps of it."""

    fault: str
    ready: bool
    reasons: tuple[str, ...]
    checks: tuple[CheckResult, ...] = ()
    seconds: float = 0.0

    @property
    def false_ready(self) -> bool:
        """A faulty one was let in."""
        return self.ready and bool(self.fault)

    @property
    def false_refuse(self) -> bool:
        """A good one was not."""
        return not self.ready and not self.fault

    @property
    def named(self) -> bool:
        """The check that is there for this fault says so."""
        check = NAMED_BY.get(self.fault, "")
        return any(reason.startswith(f"{check}:") or check in reason for reason in self.reasons)


@dataclass
class Site:
    """A router with a ready decode worker, and a model on disk."""

    folder: Path
    demo: DemoModel
    manifest: Manifest
    router: RouterService
    peers: list[Life] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    started: int = 0

    @classmethod
    async def open(cls, folder: Path, *, seed: int = 1) -> Site:
        """Make the model, start the router, and a good peer for KV hand-overs."""
        demo = make_demo_model(
            folder / "model", size_bytes=MODEL_BYTES, shards=2, seed=seed, max_model_len=4096
        )
        facts = Facts(config=demo.config, canary=demo.canary)
        manifest, *_ = build_manifest(demo.folder, model=MODEL, facts=facts)
        clock = SystemClock()
        router = RouterService(
            store=MemoryStore(clock),
            epochs=MemoryEpochs(),
            clock=clock,
            registry=cast("Any", Registry(manifest, demo.folder)),
            profiles={PROFILE: profiles.load(PROFILE)},
            incarnation="router-1",
            policy=RouterPolicy(),
        )
        await router.start()
        site = cls(folder, demo, manifest, router)
        peer = site._life("peer", Role.DECODE, "", ())[0]
        site.peers.append(peer)
        site.tasks.append(asyncio.create_task(peer.run()))
        await site.ready("peer", site.tasks[0])
        return site

    async def ready(self, worker_id: str, running: asyncio.Task[Any]) -> Worker | None:
        """The worker once it is ready; None when its life ended before."""
        async with asyncio.timeout(START_LIMIT_S):
            while True:
                found = (await self.router.list_workers(MODEL)).workers.get(worker_id)
                if found is not None and found.state is WorkerState.READY:
                    return found
                if running.done():
                    return None
                await asyncio.sleep(0.01)

    def _life(
        self, name: str, role: Role, fault: str, flags: Sequence[str]
    ) -> tuple[Life, Wire, EngineInProcess]:
        work = self.folder / name
        work.mkdir(parents=True, exist_ok=True)
        plants = ("--plant", fault) if fault in set(Plant) else ()
        engine = EngineInProcess("--modelled-segments", SEGMENTS, *plants, *flags)
        wire = Wire(self.router, fault)
        clock = SystemClock()
        life = Life(
            AgentSettings(
                worker_id=name,
                role=role,
                model=MODEL,
                router="in-process",
                registry="in-process",
                work_dir=work,
                manifest=self.manifest.digest,
                worker_class=PROFILE,
                kv_tokens=16_384,
            ),
            incarnation=f"{name}-1",
            registry=cast("Any", Registry(self.manifest, self.demo.folder)),
            router=cast("Any", wire),
            engine=engine,
            profile=profiles.load(PROFILE),
            cache=None,
            clock=clock,
            trace=StartTrace(clock, process_start_s=clock.monotonic_s()),
            random=lambda: 0.5,
        )
        return life, wire, engine

    async def start(self, fault: str = "", flags: Sequence[str] = ()) -> Outcome:
        """One prefill worker from order to verdict; it is gone when this returns."""
        self.started += 1
        name = f"w{self.started}"
        life, wire, _ = self._life(name, Role.PREFILL, fault, flags)
        began_s = life.trace.begin_s
        running = asyncio.create_task(life.run())
        try:
            found = await self.ready(name, running)
            seen = (await self.router.list_workers(MODEL)).workers.get(name)
        finally:
            running.cancel()
            await asyncio.wait({running})
            shutil.rmtree(self.folder / name, ignore_errors=True)
        said = [reason for verdict in wire.verdicts for reason in verdict.reasons]
        why = (*said, life.trace.failure) if life.trace.failure else tuple(said)
        checks = () if seen is None else seen.checks
        took_s = SystemClock().monotonic_s() - began_s
        return Outcome(fault, found is not None, tuple(why), checks, took_s)

    async def close(self) -> None:
        """End the peers."""
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
