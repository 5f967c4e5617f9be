"""The simulated world: production router and planner over memory stores, everything else modelled.

Owns putting it together and running one workload through it. A world is deterministic: the same
workload, options and seed give the same result, in any process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from readyplane import profiles
from readyplane.core.errors import NotFound
from readyplane.core.identity import ArtifactKind, Canary, FileEntry, Manifest, TensorEntry
from readyplane.core.profile import LinkClass
from readyplane.core.work import Slo
from readyplane.core.worker import Role
from readyplane.ports import Instance, Order
from readyplane_lab.simulator.gateway import Record, SimGateway
from readyplane_lab.simulator.loop import VirtualClock, VirtualLoop, run_virtual
from readyplane_lab.simulator.startup import Draws, StartUpModel, WeightSources
from readyplane_lab.simulator.worker import SimWorker
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_planner.journal import MemoryJournal
from readyplane_planner.leadership import Leadership, MemoryLeaseStore
from readyplane_planner.policy import read_policy
from readyplane_planner.service import PlannerService
from readyplane_router.epochs import MemoryEpochs
from readyplane_router.service import RouterService
from readyplane_router.store import MemoryStore

SAMPLE_EVERY_S = 5.0
FIRST_PAIR_WITHIN_S = 3600.0
LINK = LinkClass("rdma-400g", 50e9, 0.002)


@dataclass(frozen=True, slots=True)
class WorldOptions:
    """What is simulated.

    Attributes:
        policy: planner policy document. seed: of start-ups. startup: how starts take time.
        link: between prefill and decode workers.
        crashes: (seconds since the first arrival, role): the longest-serving worker of that role
            is gone without a word.
    """

    policy: Mapping[str, Any]
    seed: int = 1
    startup: StartUpModel = field(default_factory=StartUpModel)
    link: LinkClass = LINK
    crashes: tuple[tuple[float, Role], ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """One allocation; virtual seconds from the first arrival (negative: before it)."""

    worker_id: str
    role: str
    allocated_s: float
    ready_s: float | None
    released_s: float
    tier: str
    failure: str


@dataclass(frozen=True, slots=True)
class WorldResult:
    """What a run came to. Series are sampled every 5 virtual seconds.

    `began_wall_s`: the first arrival on the virtual wall clock, on which decisions are dated.
    """

    records: tuple[Record, ...]
    lives: tuple[WorkerLife, ...]
    decisions: tuple[dict[str, Any], ...]
    series: Mapping[str, Any]
    seconds: float
    began_wall_s: float


class SimActuator:
    """`readyplane.ports.Actuator` whose processes are `SimWorker`s."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._leader_epoch = 0

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        """Start one worker. Idempotent by worker id."""
        self._leader_epoch = max(self._leader_epoch, leader_epoch)
        if order.worker_id not in self._world.everyone:
            self._world.spawn(order)
        return self._instance(order.worker_id)

    async def release(
        self, worker_id: str, *, grace_s: float = 10.0, reason: str = "", leader_epoch: int = 0
    ) -> Instance:
        """End it."""
        del grace_s, reason
        self._leader_epoch = max(self._leader_epoch, leader_epoch)
        if worker_id not in self._world.everyone:
            raise NotFound("worker", worker_id)
        if worker_id in self._world.living:
            await self._world.living[worker_id].release()
        return self._instance(worker_id)

    async def list_instances(self) -> list[Instance]:
        """Everything allocated, and the last 256 that ended."""
        ended = [w for w in self._world.everyone if w not in self._world.living]
        shown = [*ended[-256:], *self._world.living]
        return [self._instance(worker_id) for worker_id in shown]

    def _instance(self, worker_id: str) -> Instance:
        worker = self._world.everyone[worker_id]
        now_s = self._world.clock.monotonic_s()
        ended = worker.released_s
        state = "running" if ended is None else ("failed" if worker.failure else "exited")
        return Instance(
            order=worker.order,
            state=state,
            node=worker_id,
            allocated_ago_s=now_s - worker.allocated_s,
            running_ago_s=now_s - worker.allocated_s,
            exited_ago_s=None if ended is None else now_s - ended,
            exit_code=None if ended is None else int(bool(worker.failure)),
            reason=worker.failure,
        )


class Manifests:
    """The part of a registry that router and planner read, with one artifact."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    async def get_manifest(self, digest: str) -> Manifest:
        """By digest."""
        if digest != self.manifest.digest:
            raise NotFound("artifact", digest)
        return self.manifest

    async def resolve(
        self, reference: str, *, kind: str = "weights", need: Mapping[str, str] | None = None
    ) -> Manifest:
        """Every name means the one artifact."""
        del reference, kind, need
        return self.manifest


class World:
    """One run's world. Use `run_world`."""

    def __init__(self, options: WorldOptions, loop: VirtualLoop) -> None:
        self.options = options
        self.clock = VirtualClock(loop)
        self.living: dict[str, SimWorker] = {}
        self.everyone: dict[str, SimWorker] = {}
        self.policy = read_policy(options.policy)
        self.manifest = one_tensor_manifest(self.policy.model)
        names = {self.policy.prefill.profile, self.policy.decode.profile}
        self.profiles = {name: profiles.load(name) for name in sorted(names)}
        self._sources = WeightSources(options.startup, clock=self.clock)
        self._draws = Draws(options.seed)
        ids = itertools.count()
        self.router = RouterService(
            store=MemoryStore(self.clock),
            epochs=MemoryEpochs(),
            clock=self.clock,
            registry=Manifests(self.manifest),
            profiles=self.profiles,
            incarnation="router-0",
        )
        self.planner = PlannerService(
            policy=self.policy,
            router=self.router,
            actuator=SimActuator(self),
            registry=Manifests(self.manifest),
            journal=MemoryJournal(),
            leadership=Leadership(
                MemoryLeaseStore(self.clock.monotonic_s),
                name=self.policy.model,
                holder="planner-0",
                ttl_s=10.0,
                now_s=self.clock.monotonic_s,
            ),
            clock=self.clock,
            make_id=lambda: f"{next(ids):06x}",
        )
        self.gateway = SimGateway(
            self.router,
            self.living,
            model=self.policy.model,
            slo=Slo(self.policy.slo.ttft_s, self.policy.slo.tpot_s),
            link=options.link,
            kv_bytes_per_token=self.profiles[self.policy.prefill.profile].kv_bytes_per_token,
            clock=self.clock,
        )
        self._rows: list[dict[str, Any]] = []

    def spawn(self, order: Order) -> None:
        """Allocate one worker."""
        pool = self.policy.prefill if order.role is Role.PREFILL else self.policy.decode
        worker = SimWorker(
            order,
            router=self.router,
            manifest=self.manifest,
            profile=self.profiles[pool.profile],
            startup=self.options.startup,
            sources=self._sources,
            draws=self._draws,
            clock=self.clock,
            on_released=self._forget,
        )
        self.everyone[order.worker_id] = worker
        self.living[order.worker_id] = worker

    def _forget(self, worker: SimWorker) -> None:
        self.living.pop(worker.order.worker_id, None)

    async def run(self, requests: Sequence[WorkloadRequest]) -> WorldResult:
        """From nothing to the last record; the first request arrives when a pair is ready."""
        async with self._services():
            await self._first_pair()
            began_s, began_wall_s = self.clock.monotonic_s(), self.clock.wall_s()
            side = [asyncio.create_task(self._sampling(began_s))]
            side += [
                asyncio.create_task(self._crash(began_s + at_s, role))
                for at_s, role in self.options.crashes
            ]
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    await self.clock.sleep(began_s + request.at_s - self.clock.monotonic_s())
                    group.create_task(self.gateway.serve(request))
            for task in side:
                task.cancel()
            await asyncio.gather(*side, return_exceptions=True)
            ended_s = self.clock.monotonic_s()
            decisions = await self.planner.list_decisions(
                model=self.policy.model, limit=100_000, changes_only=True
            )
        return WorldResult(
            records=tuple(sorted(self.gateway.records, key=lambda r: r.index)),
            lives=tuple(_life(w, began_s, ended_s) for w in self.everyone.values()),
            decisions=tuple(decisions),
            series=_columns(self._rows),
            seconds=ended_s - began_s,
            began_wall_s=began_wall_s,
        )

    @contextlib.asynccontextmanager
    async def _services(self) -> AsyncIterator[None]:
        await self.router.start()
        tasks = [
            asyncio.create_task(self.router.run()),
            asyncio.create_task(self.planner.run()),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(w.release() for w in list(self.living.values())))

    async def _first_pair(self) -> None:
        deadline_s = self.clock.monotonic_s() + FIRST_PAIR_WITHIN_S
        while self.clock.monotonic_s() < deadline_s:
            roles = {w.order.role for w in self.living.values() if w.ready_s is not None}
            if roles >= {Role.PREFILL, Role.DECODE}:
                return
            await self.clock.sleep(0.1)
        failures = {w.order.worker_id: w.failure for w in self.everyone.values() if w.failure}
        raise NotFound("ready pair", self.policy.model, f"starts failed: {failures or 'none'}")

    async def _crash(self, at_s: float, role: Role) -> None:
        await self.clock.sleep(at_s - self.clock.monotonic_s())
        serving = [
            w for w in self.living.values() if w.order.role is role and w.ready_s is not None
        ]
        if serving:
            min(serving, key=lambda w: w.ready_s or 0.0).crash("crashed")

    async def _sampling(self, began_s: float) -> None:
        while True:
            state = await self.planner.state(self.policy.model)
            row: dict[str, Any] = {
                "t_s": self.clock.monotonic_s() - began_s,
                "open": self.gateway.open,
            }
            for name, pool in (state.get("pools") or {}).items():
                for key in ("desired", "provisioned", "ready", "load", "queue_tokens"):
                    row[f"{name}.{key}"] = pool.get(key)
            for name in ("ttft", "tpot"):
                actual = state.get("latency", {}).get(name, {}).get("actual", {})
                row[f"{name}.p90_s"] = actual.get("p90_s") if actual.get("count") else None
            self._rows.append(row)
            await self.clock.sleep(SAMPLE_EVERY_S)


def run_world(options: WorldOptions, requests: Sequence[WorkloadRequest]) -> WorldResult:
    """Simulate one workload from beginning to end."""
    loop = VirtualLoop()
    try:
        world = World(options, loop)
    except BaseException:
        loop.close()
        raise
    return run_virtual(world.run(requests), loop=loop)


def _life(worker: SimWorker, began_s: float, ended_s: float) -> WorkerLife:
    ready_s, released_s = worker.ready_s, worker.released_s
    return WorkerLife(
        worker_id=worker.order.worker_id,
        role=str(worker.order.role),
        allocated_s=worker.allocated_s - began_s,
        ready_s=None if ready_s is None else ready_s - began_s,
        released_s=min(ended_s, ended_s if released_s is None else released_s) - began_s,
        tier=str(worker.tier),
        failure=worker.failure,
    )


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def one_tensor_manifest(model: str) -> Manifest:
    """An artifact of one tensor: the simulator moves no bytes, but the gate asks for identity."""
    zero = "0" * 32
    return Manifest(
        kind=ArtifactKind.WEIGHTS,
        model=model,
        files=(FileEntry("model.safetensors", 4096, "sha256:" + "0" * 64, (zero,)),),
        tensors=(TensorEntry("w", "U8", (1024,), "model.safetensors", 0, 1024),),
        config={"max_model_len": 131_072, "vocab_size": 512, "eos_token_id": 2, "block_size": 16},
        canary=Canary((3, 4, 5), (6, 7)),
    )
