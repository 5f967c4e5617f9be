"""The router inside a gateway's process: one more replica over a real Redis, and no second truth."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from readyplane import profiles
from readyplane.core import gate_checks as gc
from readyplane.core.errors import ReadyplaneError, Unsupported
from readyplane.core.work import EventKind, RequestEvent
from readyplane.core.worker import Role, WorkerState
from readyplane.kit.clock import SystemClock
from readyplane.kit.redis import connect
from readyplane.kit.telemetry import Metrics
from readyplane.ports import Pair
from readyplane_router.embedded import EmbeddedRouter
from readyplane_router.epochs import MemoryEpochs
from readyplane_router.redis import RedisStore
from readyplane_router.service import RouterService
from tests.router_world import MODEL, FakeWorker, Registry, offer, serving, shape

PROFILE = profiles.load("h200-llama8b-fp8")
SEATS = 4


class Both:
    """A router with which workers register, and the replica in a gateway."""

    def __init__(self, router: RouterService, store: RedisStore, brain: EmbeddedRouter) -> None:
        self.router, self.store, self.brain = router, store, brain
        self.tasks: list[asyncio.Task[Any]] = []

    async def worker(self, name: str, role: Role) -> FakeWorker:
        made = FakeWorker(self.router, offer(name, role, worker_class=PROFILE.name))
        await made.register()
        await made.form()
        serves = serving(profile=PROFILE.name, max_num_seqs=SEATS)
        evidence = {gc.PROFILE: {"name": PROFILE.name, "digest": PROFILE.digest}}
        assert await made.admit(serves=serves, **evidence) == ()
        self.tasks.append(asyncio.create_task(made.keep_renewing(SystemClock())))
        return made

    async def seen(self, *names: str) -> None:
        """Until the replica has them ready."""
        async with asyncio.timeout(60):
            while True:
                fleet = await self.brain.service.list_workers()
                ready = {n for n, w in fleet.workers.items() if w.state is WorkerState.READY}
                if ready >= set(names):
                    return
                await asyncio.sleep(0.02)


@asynccontextmanager
async def both(redis_url: str) -> AsyncIterator[Both]:
    clock = SystemClock()
    store = RedisStore(connect(redis_url))
    router = RouterService(
        store=store,
        epochs=MemoryEpochs(),
        clock=clock,
        registry=Registry(),
        profiles={PROFILE.name: PROFILE},
        incarnation="router-1",
    )
    await router.start()
    brain = EmbeddedRouter(
        redis_url=redis_url,
        policy_file=None,
        profiles_dir=None,
        registry=Registry(),
        clock=clock,
        metrics=Metrics(),
    )
    await brain.start()
    world = Both(router, store, brain)
    world.tasks += [asyncio.create_task(router.run()), asyncio.create_task(brain.run())]
    try:
        yield world
    finally:
        for task in world.tasks:
            task.cancel()
        await asyncio.gather(*world.tasks, return_exceptions=True)
        await brain.aclose()
        await store.aclose()


async def test_it_pairs_what_registered_with_a_router_and_reserves_for_both(redis_url: str) -> None:
    async with both(redis_url) as w:
        await w.worker("p", Role.PREFILL)
        await w.worker("d", Role.DECODE)
        await w.seen("p", "d")
        early: list[Pair] = []
        pair = await w.brain.service.route(shape("r"), chosen=early.append)
        assert early == [pair]
        used = await w.store.usage(MODEL)
        assert used["d"].sequences == used["p"].sequences == 1
        # The router knows it by its id, and gives the same pair for the same request.
        assert (await w.router.route(shape("r"))).reservation_id == pair.reservation_id
        ended = RequestEvent(pair.reservation_id, EventKind.FINISHED, output_tokens=3)
        assert await w.brain.service.complete([ended]) == 0
        assert not any(u.sequences for u in (await w.store.usage(MODEL)).values())
        await told_of(w.router, arrivals=2, finished=1)  # it arrived at both


async def told_of(router: RouterService, *, arrivals: int, finished: int) -> None:
    """Until a planner that asks this router is told of what the gateway paired by itself."""
    async with asyncio.timeout(60):
        while True:
            found = await router.signals(MODEL)
            model = found.models[MODEL]
            if (model.arrivals_total, model.finished_total) == (arrivals, finished):
                assert found.routers_missing == 0 and not found.fleet.degraded
                return
            await asyncio.sleep(0.05)


async def test_both_together_never_book_a_seat_twice(redis_url: str) -> None:
    async with both(redis_url) as w:
        await w.worker("p", Role.PREFILL)
        await w.worker("d", Role.DECODE)
        await w.seen("p", "d")

        async def one(service: RouterService, name: str) -> bool:
            try:
                async with asyncio.timeout(3.0):
                    await service.route(shape(name))
            except (ReadyplaneError, TimeoutError):
                return False
            return True

        asks = [one(w.router, f"a{n}") for n in range(8)]
        asks += [one(w.brain.service, f"b{n}") for n in range(8)]
        got = await asyncio.gather(*asks)
        assert sum(got) == SEATS
        used = await w.store.usage(MODEL)
        assert used["d"].sequences <= SEATS


async def test_a_drain_at_a_router_is_known_to_it_at_once(redis_url: str) -> None:
    async with both(redis_url) as w:
        await w.worker("p", Role.PREFILL)
        await w.worker("d1", Role.DECODE)
        await w.worker("d2", Role.DECODE)
        await w.seen("p", "d1", "d2")
        await w.router.drain("d1", reason="scale down")
        for number in range(4):  # even before it has heard: the store refuses the seat
            pair = await w.brain.service.route(shape(f"r{number}"))
            assert pair.decode.worker_id == "d2"


async def test_nobody_registers_with_it(redis_url: str) -> None:
    async with both(redis_url) as w:
        with pytest.raises(Unsupported, match="register with a router"):
            await w.brain.service.register(offer("x", Role.PREFILL))
