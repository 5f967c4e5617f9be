"""What the router's tests share: an artifact, evidence, seats, and a router on virtual time."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from readyplane.core import gate_checks as gc
from readyplane.core.errors import NotFound, Unavailable
from readyplane.core.identity import (
    ArtifactKind,
    Canary,
    FileEntry,
    KvFormat,
    Manifest,
    TensorEntry,
)
from readyplane.core.profile import ClassProfile
from readyplane.core.work import EventKind, RequestEvent, RequestShape, Slo, pack_tokens
from readyplane.core.worker import CheckResult, Lease, LoadReport, Role, Serving, WorkerOffer
from readyplane.kit.clock import Clock
from readyplane.ports import GroupStatus, Pair, RankReport, Renewal, RenewalAnswer, Router
from readyplane_lab.simulator.loop import VirtualClock, VirtualLoop, run_virtual
from readyplane_router.epochs import MemoryEpochs
from readyplane_router.group import STEPS
from readyplane_router.pair import PairPolicy, Seat, Times, kv_key, seat_key
from readyplane_router.policy import RouterPolicy
from readyplane_router.seats import Use
from readyplane_router.service import RouterService
from readyplane_router.store import MemoryStore, Store

MODEL = "demo"
MANIFEST = Manifest(
    ArtifactKind.WEIGHTS,
    MODEL,
    (
        FileEntry("model.safetensors", 16, "sha256:" + "1" * 64, ("0" * 32,)),
        FileEntry("tokenizer.json", 8, "sha256:" + "2" * 64, ("0" * 32,), "tokenizer"),
    ),
    tensors=(
        TensorEntry("a", "U8", (8,), "model.safetensors", 0, 8),
        TensorEntry("b", "U8", (8,), "model.safetensors", 8, 8),
    ),
    canary=Canary((1, 2, 3), (7, 8, 9)),
)
DIGEST = MANIFEST.digest
# Prefill: 1 ms a token and 10 ms at least. An iteration: 10 ms, 1 ms a sequence, 1 us a KV token.
PROFILE = ClassProfile(
    name="toy",
    source="made for tests",
    worker_class="toy",
    gpus=1,
    price_per_gpu_hour=1.0,
    prefill_points=((10.0, 10.0), (1000.0, 1000.0), (10000.0, 10000.0)),
    decode_points=((1.0, 1000.0, 12.0), (10.0, 1000.0, 21.0), (1.0, 11000.0, 22.0)),
    kv_capacity_tokens=160_000,
    kv_bytes_per_token=1_000,
)
KV = KvFormat(DIGEST)


class Registry:
    """The part of a registry that the router reads."""

    def __init__(self, *manifests: Manifest) -> None:
        self.manifests = {m.digest: m for m in (manifests or (MANIFEST,))}
        self.away = False

    async def get_manifest(self, digest: str) -> Manifest:
        if self.away:
            raise Unavailable("the registry does not answer", "start it")
        if digest not in self.manifests:
            raise NotFound("artifact", digest)
        return self.manifests[digest]

    async def resolve(self, reference: str) -> Manifest:
        if self.away:
            raise Unavailable("the registry does not answer", "start it")
        for manifest in self.manifests.values():
            if reference in (manifest.model, manifest.digest):
                return manifest
        raise NotFound("artifact", reference)


def evidence(
    epoch: int, group_epoch: int, *, blocks: int = 10_000, **changes: Any
) -> list[CheckResult]:
    """Good evidence; `changes` replace a check's evidence, None leaves the check out."""
    good: dict[str, Mapping[str, Any] | None] = {
        gc.MODEL_REVISION: {"manifest_digest": DIGEST},
        gc.TOKENIZER_REVISION: {"tokenizer_digest": MANIFEST.tokenizer_digest},
        gc.TENSOR_CHECKSUMS: {"chunks_verified": 2, "chunks_total": 2, "failed": []},
        gc.SHARD_COVERAGE: {"tensors": 2, "tensors_expected": 2, "missing": [], "ranks": 1},
        gc.KV_CONNECTOR: {"outbound": True, "inbound": True, "detail": "two blocks each way"},
        gc.CANARY: {"token_ids": [7, 8, 9], "eos_ok": True, "sampling_ok": True},
        gc.BASICS: {
            "eos": True,
            "max_tokens": True,
            "structured": "not offered",
            "sampling": True,
            "quantisation": "none",
            "kv_dtype": "not told",
        },
        gc.KV_POOL: {"kv_total_blocks": blocks, "free_blocks": blocks},
        gc.KV_HASHES: {"token_ids": [], "block_size": 16, "told": []},
        gc.PROFILE: {"name": PROFILE.name, "digest": PROFILE.digest},
        gc.LEASE: {"epoch": epoch},
        gc.GROUP: {"group_epoch": group_epoch},
    }
    good.update(changes)
    return [CheckResult(name, True, ev) for name, ev in good.items() if ev is not None]


def serving(*, blocks: int = 10_000, kv: KvFormat = KV, **changes: Any) -> Serving:
    good = Serving(
        engine_url="http://127.0.0.1:8000",
        kv=kv,
        kv_total_blocks=blocks,
        block_size=16,
        max_model_len=32_768,
        profile=PROFILE.name,
        max_num_seqs=64,
        tokenizer_digest=MANIFEST.tokenizer_digest,
    )
    return replace(good, **changes)


def seat(name: str, role: Role = Role.PREFILL, **changes: Any) -> Seat:
    made = Seat(
        worker_id=name,
        incarnation="i",
        key=seat_key(name, "i"),
        epoch=1,
        role=role,
        node="n1",
        engine_url=f"http://{name}:1",
        kv=KV,
        kv_key="",
        times=TIMES,
        block_size=16,
        kv_total_blocks=10_000,
        max_num_seqs=64,
        max_model_len=32_768,
        sequences_cap=64,
    )
    for field_name, value in changes.items():
        setattr(made, field_name, value)
    made.kv_key = kv_key(made.kv)
    return made


TIMES = Times(PROFILE)


def offer(name: str, role: Role, *, incarnation: str = "", **changes: Any) -> WorkerOffer:
    good = WorkerOffer(name, incarnation or f"{name}-1", role, MODEL, "toy", manifest_digest=DIGEST)
    return replace(good, **changes)


@dataclass
class FakeWorker:
    """An agent's side of the port, by hand."""

    router: Router
    offer: WorkerOffer
    lease: Lease = field(init=False)
    group_epoch: int = 0
    left: bool = False

    async def register(self) -> Lease:
        self.lease = await self.router.register(self.offer)
        return self.lease

    async def form(self) -> int:
        status = GroupStatus("forming")
        for rank in range(self.offer.ranks):
            for step in STEPS:
                status = await self.router.report_rank(
                    RankReport(
                        self.offer.worker_id,
                        self.offer.incarnation,
                        self.lease.epoch,
                        rank,
                        step,
                        self.offer.manifest_digest,
                    )
                )
        assert status.state == "published", status
        self.group_epoch = status.group_epoch
        return self.group_epoch

    async def admit(self, *, serves: Serving | None = None, **changes: Any) -> tuple[str, ...]:
        serves = serves or serving()
        verdict = await self.router.admit(
            self.offer.worker_id,
            self.offer.incarnation,
            self.lease.epoch,
            serving=serves,
            checks=evidence(
                self.lease.epoch, self.group_epoch, blocks=serves.kv_total_blocks, **changes
            ),
        )
        assert verdict.admitted is not bool(verdict.reasons)
        return verdict.reasons

    async def start(self, *, serves: Serving | None = None) -> "FakeWorker":
        await self.register()
        await self.form()
        assert await self.admit(serves=serves) == ()
        return self

    async def renew(self, **news: Any) -> RenewalAnswer:
        return await self.router.renew(
            Renewal(self.offer.worker_id, self.offer.incarnation, self.lease.epoch, **news)
        )

    async def keep_renewing(self, clock: Clock) -> None:
        while not self.left:
            await self.renew(load=LoadReport(iterations_total=1, running=0))
            await clock.sleep(self.lease.ttl_s / 3)

    async def leave(self) -> None:
        self.left = True
        await self.router.leave(
            self.offer.worker_id, self.offer.incarnation, self.lease.epoch, reason="test"
        )


class World:
    """One or more routers on one memory store, on virtual time."""

    def __init__(self, loop: VirtualLoop, *, policy: RouterPolicy | None, shared: bool) -> None:
        self.clock = VirtualClock(loop)
        self.policy = policy or RouterPolicy()
        self.store: Store = MemoryStore(self.clock, shared=shared)
        self.epochs = MemoryEpochs()
        self.registry = Registry()
        self.admissions: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._count = 0

    def service(self, store: Store | None = None) -> RouterService:
        self._count += 1
        return RouterService(
            store=store or self.store,
            epochs=self.epochs,
            clock=self.clock,
            registry=self.registry,
            profiles={PROFILE.name: PROFILE},
            incarnation=f"router-{self._count}",
            policy=self.policy,
            on_admitted=lambda worker: self.admissions.append(worker.worker_id),
        )

    async def router(self, store: Store | None = None) -> RouterService:
        """A started router with its housekeeping."""
        made = self.service(store)
        await made.start()
        self._tasks.append(asyncio.create_task(made.run()))
        return made

    async def worker(
        self,
        router: Router,
        name: str,
        role: Role,
        *,
        renewing: bool = True,
        serves: Serving | None = None,
        **changes: Any,
    ) -> FakeWorker:
        """A worker that passed the gate and renews."""
        made = await FakeWorker(router, offer(name, role, **changes)).start(serves=serves)
        if renewing:
            self._tasks.append(asyncio.create_task(made.keep_renewing(self.clock)))
        return made

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def on_virtual_time(
    main: Callable[[World], Awaitable[None]],
    *,
    policy: RouterPolicy | None = None,
    shared: bool = False,
) -> None:
    """Run a test's coroutine in a world; a failed task of the world fails the test."""
    loop = VirtualLoop()
    world = World(loop, policy=policy, shared=shared)

    async def run() -> None:
        try:
            await main(world)
            for task in world._tasks:
                if task.done() and not task.cancelled():
                    task.result()
        finally:
            await world.end()

    run_virtual(run(), loop=loop)


def shape(request_id: str, isl: int = 160, *, first: int = 0, **changes: Any) -> RequestShape:
    """A prompt of `isl` tokens that starts at token id `first`."""
    tokens = pack_tokens([first + i for i in range(isl)])
    return replace(RequestShape(request_id, MODEL, isl, tokens, max_tokens=64), **changes)


def events(
    pair: Pair, *kinds: EventKind, output_tokens: int = 8, **more: Any
) -> list[RequestEvent]:
    return [
        RequestEvent(pair.reservation_id, kind, output_tokens=output_tokens, **more)
        for kind in kinds
    ]


SERVED = (EventKind.PREFILL_DONE, EventKind.FIRST_TOKEN, EventKind.FINISHED)

QUICK = RouterPolicy(
    pair=PairPolicy(slo=Slo(2.0, 0.2), wait_max_s=5.0, empty_wait_max_s=8.0),
    redis_absence_max_s=20.0,
    reservation_ttl_s=10.0,
)


async def fleet_of(world: World, router: RouterService, p: int = 1, d: int = 1) -> list[FakeWorker]:
    made = [await world.worker(router, f"p{i}", Role.PREFILL) for i in range(p)]
    return made + [await world.worker(router, f"d{i}", Role.DECODE) for i in range(d)]


async def all_free(world: World, router: RouterService) -> None:
    """Nothing is promised any more, neither here nor in the store."""
    for seat in router.desks[MODEL].seats.values():
        assert (seat.sequences, seat.decoding, seat.assigned, seat.transfers) == (0, 0, 0, 0)
        assert (seat.kv_blocks, seat.prefill_tokens, seat.works) == (0, 0, {})
        assert seat.work_s == pytest.approx(0.0) and seat.kv_tokens == pytest.approx(0.0)
    assert all(use == Use() for use in (await world.store.usage(MODEL)).values())
    assert not router.desks[MODEL].held and not router.desks[MODEL].waiting
