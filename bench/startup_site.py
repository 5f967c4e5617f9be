"""Real starts for `bench.startup`: a registry, a router, and agents, each a process of its own.

Owns what a start finds: which node's cache it has, whether code and a KV size for its key are
published, and whose key it is. Nothing is taken away between two starts; a start that shall find
less has a key (R12.1, R16.1) under which nobody has published it.

Two keys of compiled code differ by one variable that counts for every engine and means nothing to
any. Under `kept` code is published; under `lost` an agent has no room to keep any, so that each
start compiles while its KV size is published all the same.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path

from bench.own_services import Own, own_services
from bench.startup_cells import (
    EAGER,
    FULL,
    HIT,
    LOCAL,
    REUSED,
    Cell,
    Taken,
    cold_cell,
    mistaken,
)
from readyplane.client import RegistryClient, RouterClient
from readyplane.core.errors import Unavailable
from readyplane.core.identity import ArtifactKind
from readyplane.core.kv_profile import CO_TENANT_STEP_BYTES
from readyplane.core.startup import LATER, Segment, SegmentName, critical_path
from readyplane.core.worker import Holds, Worker, WorkerState
from readyplane.kit.clock import SystemClock
from readyplane_agent.settings import AgentSettings
from readyplane_registry.ingest import Facts, RemoteBlobs, publish_directory

MODEL = "bench"
KEY = "VLLM_BENCH_STARTUP_KEY"
"""By its prefix it counts for the code of every engine; none reads it."""
KEPT, LOST = "kept", "lost"
STANDBY = ("--standby", "true", "--holds", "process")
ORDERED_AT = "READYPLANE_ORDERED_AT_MONOTONIC_S"
POLL_S = 0.05
PUBLISHED_S_MAX = 60.0
STOP_GRACE_S = 20.0


class NotStarted(RuntimeError):
    """A start that did not become ready, with the end of its log."""


@dataclass(frozen=True, slots=True)
class Engine:
    """How agents of one engine are started.

    Attributes:
        name: engine adapter. role: stage of its workers. args: of every agent. full_arg: of a start
            that has to measure its KV size, given how much of the device others have, in bytes.
            environment: added. limit_s: of one start.
        sizes_kv: whether it measures and reuses a KV size at all.
    """

    name: str
    role: str = "prefill"
    args: tuple[str, ...] = ()
    full_arg: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 120.0
    partner: bool = False

    @property
    def sizes_kv(self) -> bool:
        """Whether it measures a KV size, and reuses one."""
        return bool(self.full_arg)


@dataclass
class Site:
    """Services that run, and the model they hold."""

    own: Own
    folder: Path
    registry: RegistryClient
    router: RouterClient
    registry_address: str
    router_address: str
    digest: str
    engine: Engine
    numbers: count[int] = field(default_factory=lambda: count(1))
    clock: SystemClock = field(default_factory=SystemClock)

    @property
    def local(self) -> Path:
        """The cache of the node that holds everything."""
        return self.folder / "node-local"

    async def prime(self, cells: Sequence[Cell]) -> list[Taken]:
        """Fill the local node, and publish code and KV sizes for what the cells are to find.

        Returns:
            The first start of all, which found nothing; empty where it had something to find.
        """
        if self.engine.partner:
            await self._with_partner()
        first: list[Worker] = []
        modes = {c.mode for c in cells if c.kv == REUSED or c.code == HIT} or {cells[0].mode}
        for mode in sorted(modes, reverse=True):
            keys = (KEPT,) if mode == EAGER else (KEPT, LOST)
            for key in keys:
                if key == LOST and not any(
                    c.kv == REUSED and c.code not in {HIT, EAGER} for c in cells
                ):
                    continue
                first.append(await self._primed(mode, key))
        cold = cold_cell(sizes_kv=self.engine.sizes_kv)
        taken = [taken_of(cold, worker) for worker in first[:1]]
        for each in taken:
            for why in mistaken(each):
                print(f"  0 {cold.name} {each.path.wall_s:7.2f} s; left out: {why}", flush=True)
        return [each for each in taken if not mistaken(each)]

    async def _with_partner(self) -> None:
        """A decode worker whose engine is up: it is ready itself as soon as it has met the first."""
        words = self.words("partner", mode=EAGER, cache=self.folder / "node-partner", key=KEPT)
        words[words.index("--role") + 1] = "decode"
        await self._spawn("partner", words, KEPT)
        until_s = self.clock.monotonic_s() + self.engine.limit_s
        while not _proves(await self._worker("partner")):
            if (
                self.clock.monotonic_s() > until_s
                or self.own.table.returncode("partner") is not None
            ):
                raise NotStarted(f"no partner:\n{self.own.table.log_tail('partner')}")
            await asyncio.sleep(POLL_S)

    async def _primed(self, mode: str, key: str) -> Worker:
        before = {kind: await self._published(kind) for kind in ArtifactKind}
        expected = set()
        if mode != EAGER and key == KEPT:
            expected.add(ArtifactKind.COMPILE)
        if self.engine.sizes_kv:
            expected.add(ArtifactKind.KV_PROFILE)
        name = f"prime-{mode}-{key}"
        try:
            words = self.words(name, mode=mode, cache=self.local, key=key)
            worker = await self._run(name, words, key)
            await self._until_published(expected, before)
            return worker
        finally:
            await self.own.table.stop(name, grace_s=STOP_GRACE_S)

    async def _until_published(
        self, kinds: set[ArtifactKind], before: Mapping[ArtifactKind, int]
    ) -> None:
        until_s = self.clock.monotonic_s() + PUBLISHED_S_MAX
        for kind in kinds:
            while await self._published(kind) <= before[kind]:
                if self.clock.monotonic_s() > until_s:
                    raise NotStarted(f"the first start published no {kind}")
                await asyncio.sleep(POLL_S)

    async def _published(self, kind: ArtifactKind) -> int:
        return len(await self.registry.list_manifests(kind=kind))

    async def start(self, cell: Cell) -> Taken:
        """One start from order to routable; its worker has left when this returns.

        Raises:
            NotStarted: with the end of the log.
        """
        number = next(self.numbers)
        name = f"w{number}"
        cache = self.local if cell.weights == LOCAL else self.folder / f"node-{name}"
        key = KEPT if cell.code in {HIT, EAGER} else LOST
        taken = (
            number * CO_TENANT_STEP_BYTES
        )  # less would be the same co-tenants, and their size hold
        more = (self.engine.full_arg.format(taken=taken),) if cell.kv == FULL else ()
        words = self.words(name, mode=cell.mode, cache=cache, key=key)
        words += [word for word in more if word]
        try:
            if cell.standby:
                return taken_of(cell, *await self._told(name, words, key))
            return taken_of(cell, await self._run(name, words, key))
        finally:
            await self.own.table.stop(name, grace_s=STOP_GRACE_S)
            if cache != self.local:  # no disk holds a copy of the artifact for every start
                await asyncio.to_thread(shutil.rmtree, cache, ignore_errors=True)

    async def _told(self, name: str, words: Sequence[str], key: str) -> tuple[Worker, float]:
        """A standby with a bare process, told to serve; the worker, and when it was told."""
        await self._spawn(name, [*words, *STANDBY], key)
        await self._until(name, WorkerState.STANDBY)
        told_s = self.clock.monotonic_s()
        reason, limit_s = "a bench wants it now", self.engine.limit_s
        await self.router.activate(name, reason=reason, deadline_s=limit_s)
        return await self._until(name, WorkerState.READY), told_s

    def words(self, name: str, *, mode: str, cache: Path, key: str) -> list[str]:
        """The command line of an agent; `key` is KEPT or LOST."""
        keep = ("--compile-bytes-max", "1") if key == LOST else ()
        return [
            *(sys.executable, "-m", "readyplane_agent"),
            *("--worker-id", name, "--role", self.engine.role, "--model", MODEL),
            *("--manifest", self.digest, "--engine", self.engine.name),
            *("--registry", self.registry_address, "--router", self.router_address),
            *("--work-dir", str(self.folder / "work" / name), "--cache-dir", str(cache)),
            *("--mode", mode, "--node", cache.name),
            *keep,
            *self.engine.args,
        ]

    async def _run(self, name: str, words: Sequence[str], key: str) -> Worker:
        await self._spawn(name, words, key)
        return await self._until(name, WorkerState.READY)

    async def _spawn(self, name: str, words: Sequence[str], key: str) -> None:
        environment = {
            **self.own.environment,
            **self.engine.environment,
            KEY: key,
            ORDERED_AT: repr(self.clock.monotonic_s()),
        }
        await self.own.table.spawn(name, words, environment, self.folder / "logs" / f"{name}.log")

    async def _until(self, name: str, state: WorkerState) -> Worker:
        """The worker in this state; a ready one once it has told all of its segments."""
        until_s = self.clock.monotonic_s() + self.engine.limit_s
        while True:
            worker = await self._worker(name)
            if worker is not None and worker.state is state:
                told = worker.progress is not None and bool(worker.progress.segments)
                if state is WorkerState.STANDBY or (told and _whole(worker)):
                    return worker
            if state is WorkerState.READY and worker is not None and _waits_again(worker):
                raise NotStarted(f"{name} lost its lease, and its word with it: it stands by")
            ended = self.own.table.returncode(name) is not None
            if ended or self.clock.monotonic_s() > until_s:
                how = "ended" if ended else f"was not {state} within {self.engine.limit_s:.0f} s"
                raise NotStarted(f"{name} {how}:\n{self.own.table.log_tail(name)}")
            await asyncio.sleep(POLL_S)

    async def _worker(self, name: str) -> Worker | None:
        """None while the router does not know it, or is too late to say so."""
        try:
            return (await self.router.list_workers(MODEL)).workers.get(name)
        except Unavailable:
            return None


def _waits_again(worker: Worker) -> bool:
    """Whether a standby has loaded and was told nothing: a router that lost it has forgotten."""
    return worker.state is WorkerState.STANDBY and worker.holds is Holds.WEIGHTS


def _proves(worker: Worker | None) -> bool:
    """Whether its engine is up."""
    told = () if worker is None or worker.progress is None else worker.progress.segments
    return any(s.name is SegmentName.CANARY for s in told)


def _whole(worker: Worker) -> bool:
    """Whether its start has ended, as far as it has told; what it does later is not of it."""
    assert worker.progress is not None
    segments = [s for s in worker.progress.segments if s.name not in LATER]
    admitted = any(
        s.name is SegmentName.ROUTER_REGISTRATION and s.detail == "admission" for s in segments
    )
    return admitted and all(s.end_s is not None for s in segments)


def standby_missing() -> str:
    """Why agents cannot stand by with a bare process; empty where they can."""
    known = {item.name for item in fields(AgentSettings)}
    return "" if "holds" in known else "agents hold no bare process here"


def taken_of(cell: Cell, worker: Worker, told_s: float | None = None) -> Taken:
    """The start as the worker told it, since it was ordered or since `told_s`.

    A word to serve comes with a renewal's answer: what passes until the agent has it is its schedule.
    """
    assert worker.progress is not None
    assert worker.serving is not None
    segments = tuple(s for s in worker.progress.segments if s.name not in LATER)
    begin_s = min([worker.progress.start_s, *(s.start_s for s in segments)])
    if told_s is not None:
        heard_s = min(s.start_s for s in segments if s.start_s >= told_s)
        segments = (Segment(SegmentName.SCHEDULE, told_s, heard_s, detail="told"), *segments)
        begin_s = told_s
    end_s = max(s.end_s for s in segments if s.end_s is not None)
    path = critical_path(segments, start_s=begin_s, end_s=end_s)
    return Taken(cell, path, segments, str(worker.serving.tier), begin_s)


@asynccontextmanager
async def site_of(folder: Path, model: Path, facts: Facts, engine: Engine) -> AsyncIterator[Site]:
    """Services on stores of their own, with the folder `model` published.

    Args:
        folder: new or empty.
    """
    async with own_services(folder) as own:
        registry = own.services.plan("registry", args=("--blob-dir", str(folder / "blobs")))
        router = own.services.plan("router")
        router.environment["READYPLANE_REGISTRY"] = registry.grpc
        await asyncio.gather(*(own.services.start(s) for s in (registry, router)))
        asking, telling = RegistryClient(registry.grpc), RouterClient(router.grpc)
        try:
            published = await publish_directory(
                model,
                model=MODEL,
                registry=asking,
                sink=RemoteBlobs(registry.http),
                facts=facts,
            )
            addresses = registry.grpc, router.grpc
            yield Site(own, folder, asking, telling, *addresses, published.digest, engine)
        finally:
            await asking.aclose()
            await telling.aclose()
