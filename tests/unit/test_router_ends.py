"""Every arrival has exactly one end, and it is counted by its reason."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane import wire
from readyplane.client import RouterClient
from readyplane.core.errors import ReadyplaneError
from readyplane.core.work import EventKind, Slo
from readyplane.core.worker import Role
from readyplane.kit.auth import TokenCheck
from readyplane.kit.clock import SystemClock
from readyplane.kit.rpc import OPTIONS, Guard
from readyplane.ports import Pair
from readyplane.v1 import router_pb2 as pb
from readyplane_router import ends, rpc
from readyplane_router.ends import LOST_WAIT_S, Ends
from readyplane_router.epochs import MemoryEpochs
from readyplane_router.pair import PairPolicy
from readyplane_router.policy import RouterPolicy
from readyplane_router.seats import Take, Taken, Use
from readyplane_router.service import RouterService
from readyplane_router.store import MemoryStore
from tests.router_world import (
    MODEL,
    PROFILE,
    SERVED,
    FakeWorker,
    Registry,
    World,
    events,
    offer,
    on_virtual_time,
    shape,
)

P, D = Role.PREFILL, Role.DECODE
QUICK = RouterPolicy(
    pair=PairPolicy(slo=Slo(2.0, 0.2), wait_max_s=3.0, empty_wait_max_s=3.0),
    reservation_ttl_s=8.0,
    queue_requests_max=6,
)


def balance(router: RouterService) -> tuple[int, int]:
    """Arrivals, and all that became of them."""
    desk = router.desks[MODEL]
    c = desk.counters
    assert c.aborted == sum(desk.ends.aborts.values())
    assert c.refused == sum(desk.refusals.values())
    return c.arrivals, c.finished + c.refused + c.aborted + desk.open_requests


# --------------------------------------------------------------------------- the count


def test_what_is_lost_is_aborted_after_a_while_unless_spoken_of() -> None:
    lost = Ends()
    lost.lose("a", "leg_failed", 10, now_s=0.0)
    lost.lose("b", "expired", 10, now_s=1.0)
    assert lost.found("c") is None
    assert lost.settle(now_s=LOST_WAIT_S) == 0
    found = lost.found("b")
    assert found is not None and found.isl == 10
    assert lost.settle(now_s=LOST_WAIT_S + 0.1) == 1
    assert (lost.aborts, lost.lost) == ({"leg_failed": 1}, {})


def test_what_is_lost_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "LOST_REQUESTS_MAX", 2)
    lost = Ends()
    assert [lost.lose(name, "expired", 1, now_s=0.0) for name in "abc"] == [0, 0, 1]
    assert (list(lost.lost), lost.aborts) == (["b", "c"], {"expired": 1})


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_arrivals_are_what_became_of_them(seed: int) -> None:
    """Whatever clients, gateways and workers do, and whenever they stop doing it."""
    rng = random.Random(seed)

    async def main(world: World) -> None:
        router = await world.router()
        workers = [
            await world.worker(router, f"{r}{i}", role)
            for i in range(2)
            for r, role in (("p", P), ("d", D))
        ]

        async def request(number: int) -> None:
            await world.clock.sleep(rng.random() * 6)
            replaces = ""
            for _ in range(3):
                asking = asyncio.create_task(
                    router.route(
                        shape(f"r{number}", rng.choice([50, 400]), priority=rng.randint(0, 1)),
                        replaces=replaces,
                    )
                )
                if rng.random() < 0.2:
                    await asyncio.wait({asking}, timeout=rng.choice([0.0, 0.01, 1.0]))
                    asking.cancel()
                try:
                    pair = await asking
                except (ReadyplaneError, asyncio.CancelledError):
                    return
                await world.clock.sleep(rng.random() * 3)
                kind = rng.choice(
                    [*SERVED, EventKind.ABORTED, EventKind.LEG_FAILED, "replace", "silent"]
                )
                if kind == "silent":
                    return
                if kind != "replace":
                    told = events(pair, EventKind(kind))
                    await router.complete(told)
                    if kind is not EventKind.LEG_FAILED:
                        if kind is not EventKind.ABORTED and rng.random() < 0.7:
                            await world.clock.sleep(rng.choice([0.0, 12.0]))
                            await router.complete(events(pair, EventKind.FINISHED, output_tokens=3))
                        return
                    if rng.random() < 0.3:
                        return
                replaces = pair.reservation_id

        async def fate() -> None:
            await world.clock.sleep(rng.random() * 6)
            worker = rng.choice(workers)
            if rng.random() < 0.5:
                await worker.leave()
            else:
                await router.drain(worker.offer.worker_id, deadline_s=1.0)

        running = [asyncio.create_task(request(n)) for n in range(25)] + [
            asyncio.create_task(fate())
        ]
        while not all(task.done() for task in running):
            await world.clock.sleep(0.25)
            if MODEL in router.desks:
                came, went = balance(router)
                assert came == went
        await asyncio.gather(*running)
        await world.clock.sleep(60.0)
        came, went = balance(router)
        assert came == went > 0
        assert router.desks[MODEL].open_requests == 0

    on_virtual_time(main, policy=QUICK)


# --------------------------------------------------------------------------- a caller that cancels


class SlowStore(MemoryStore):
    """Takes, and lets the caller wait for the answer."""

    taking: asyncio.Event
    answer: asyncio.Event

    async def take(self, model: str, take: Take) -> Taken:
        taken = await super().take(model, take)
        self.taking.set()
        await self.answer.wait()
        return taken


@dataclass
class Rig:
    """A router with one pair behind a real gRPC server, in real time."""

    service: RouterService
    store: SlowStore
    client: RouterClient

    def route(self, name: str, *, first: int = 0) -> asyncio.Task[Pair]:
        return asyncio.create_task(self.client.route(shape(name, first=first)))

    async def nothing_is_held(self) -> None:
        desk = self.service.desks[MODEL]
        used: list[Use] = []
        for _ in range(1500):
            used = [use for use in await self.usage() if use != Use()]
            if not (desk.held or desk.waiting or used):
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail(f"held: {desk.held}, waiting: {desk.waiting}, in the store: {used}")
        came, went = balance(self.service)
        assert came == went
        assert desk.open_requests == 0

    async def usage(self) -> list[Use]:
        return list((await self.store.usage(MODEL)).values())


@asynccontextmanager
async def rig(policy: RouterPolicy) -> AsyncIterator[Rig]:
    clock = SystemClock()
    store = SlowStore(clock)
    store.taking, store.answer = asyncio.Event(), asyncio.Event()
    store.answer.set()
    service = RouterService(
        store=store,
        epochs=MemoryEpochs(),
        clock=clock,
        registry=Registry(),
        profiles={PROFILE.name: PROFILE},
        incarnation="router-1",
        policy=policy,
    )
    await service.start()
    tasks = [asyncio.create_task(service.run())]
    for name, role in (("p0", P), ("d0", D)):
        worker = await FakeWorker(service, offer(name, role)).start()
        tasks.append(asyncio.create_task(worker.keep_renewing(clock)))
    server = grpc.aio.server(interceptors=(Guard(TokenCheck("")),), options=OPTIONS)
    rpc.register(server, service, clock)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = RouterClient(f"127.0.0.1:{port}")
    try:
        yield Rig(service, store, client)
    finally:
        await client.aclose()
        await server.stop(None)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# A reservation that only its expiry ends would outlive every test here.
PATIENT = RouterPolicy(
    pair=PairPolicy(wait_max_s=24.0), reservation_ttl_s=3600.0, tick_s=0.1, lease_ttl_s=60.0
)


async def test_cancelled_while_it_queues() -> None:
    async with rig(PATIENT) as r:
        pairs = [await r.service.route(shape(f"f{i}", 500, first=1000 * i)) for i in range(2)]
        call = r.route("late", first=9000)
        async with asyncio.timeout(30):
            while not r.service.desks[MODEL].queue:
                await asyncio.sleep(0.01)
        call.cancel()
        async with asyncio.timeout(30):
            while r.service.desks[MODEL].waiting:
                await asyncio.sleep(0.01)
        for pair in pairs:
            await r.service.complete(events(pair, *SERVED))
        await r.nothing_is_held()
        assert r.service.desks[MODEL].ends.aborts == {"client": 1}


async def test_cancelled_while_its_pair_is_being_taken() -> None:
    async with rig(PATIENT) as r:
        r.store.answer.clear()
        call = r.route("taken")
        await r.store.taking.wait()
        assert any(use != Use() for use in await r.usage())
        call.cancel()
        await r.nothing_is_held()
        assert r.service.desks[MODEL].ends.aborts == {"client": 1}


async def test_cancelled_when_its_pair_is_reserved_and_the_answer_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The router has answered and cannot know that nobody received it."""
    calls: list[asyncio.Task[Pair]] = []
    real = wire.pair_to_proto

    def cancelled(pair: Pair) -> pb.RouteResponse:
        calls[-1].cancel()
        return real(pair)

    async with rig(PATIENT) as r:
        with monkeypatch.context() as patch:
            patch.setattr(wire, "pair_to_proto", cancelled)
            calls.append(r.route("unheard"))
            with pytest.raises(asyncio.CancelledError):
                await calls[-1]
            assert "unheard.0" in r.service.desks[MODEL].held
            await r.nothing_is_held()
        assert r.service.desks[MODEL].ends.aborts == {"client": 1}
        told = await r.route("told")  # one that was received is left alone
        assert told.reservation_id in r.service.desks[MODEL].held
