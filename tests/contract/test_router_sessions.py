"""What a router says to a worker unasked, in process and over both of its gRPC ports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import grpc.aio
import pytest

from readyplane.client import RouterClient
from readyplane.core.errors import LostLease
from readyplane.core.worker import Role
from readyplane.kit.auth import TokenCheck
from readyplane.kit.clock import SystemClock
from readyplane.kit.lean_rpc import LeanServer
from readyplane.kit.rpc import OPTIONS, Guard
from readyplane.ports import Renewal, RenewalAnswer, Router
from readyplane_router import rpc
from readyplane_router.epochs import MemoryEpochs
from readyplane_router.service import RouterService
from readyplane_router.store import MemoryStore
from tests.router_world import PROFILE, FakeWorker, Registry, offer

WAIT_S_MAX = 20.0


@asynccontextmanager
async def reached(way: str) -> AsyncIterator[tuple[RouterService, Router]]:
    """A router, and the port to it that its workers have."""
    clock = SystemClock()
    service = RouterService(
        store=MemoryStore(clock),
        epochs=MemoryEpochs(),
        clock=clock,
        registry=Registry(),
        profiles={PROFILE.name: PROFILE},
        incarnation="router-1",
    )
    await service.start()
    async with AsyncExitStack() as stack:
        if way == "memory":
            yield service, service
            return
        if way == "lean":
            listening = socket.create_server(("127.0.0.1", 0))
            listening.setblocking(False)
            port = listening.getsockname()[1]
            running = asyncio.create_task(
                LeanServer(rpc.lean_methods(service, clock), TokenCheck()).run(listening)
            )

            async def end() -> None:
                running.cancel()
                await asyncio.wait([running])

            stack.push_async_callback(end)
        else:
            server = grpc.aio.server(interceptors=(Guard(TokenCheck()),), options=OPTIONS)
            rpc.register(server, service, clock)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, 0)
        client = RouterClient(f"127.0.0.1:{port}")
        stack.push_async_callback(client.aclose)
        yield service, client


@pytest.mark.parametrize("way", ["memory", "grpc", "lean"])
async def test_what_a_worker_is_to_do_is_said_between_two_renewals(way: str) -> None:
    async with reached(way) as (service, router):
        worker = FakeWorker(router, replace(offer("d0", Role.DECODE), standby=True))
        await worker.register()
        heard: asyncio.Queue[RenewalAnswer] = asyncio.Queue()
        router.hear("d0", worker.offer.incarnation, heard.put_nowait)
        await worker.renew()
        await service.activate("d0", reason="a burst")
        answer = await asyncio.wait_for(heard.get(), WAIT_S_MAX)
        (word,) = answer.directives
        assert (word.kind, word.reason) == ("activate", "a burst")
        assert answer.lease == worker.lease
        # It is no answer to what is asked meanwhile, and renewals bring it too until it is done.
        (again,) = (await worker.renew()).directives
        assert again.kind == "activate"
        await service.drain("d0", reason="too many")
        told = await asyncio.wait_for(heard.get(), WAIT_S_MAX)
        assert [d.kind for d in told.directives] == ["leave"] and heard.empty()


@pytest.mark.parametrize("way", ["grpc", "lean"])
async def test_where_nobody_listens_the_next_renewal_brings_it(way: str) -> None:
    async with reached(way) as (service, router):
        worker = FakeWorker(router, replace(offer("d0", Role.DECODE), standby=True))
        await worker.register()
        await worker.renew()
        await service.activate("d0")
        assert [d.kind for d in (await worker.renew()).directives] == ["activate"]
        # A quiet one is not waited for: what was said unasked meanwhile is found by the one after it.
        quiet = Renewal("d0", worker.offer.incarnation, worker.lease.epoch, quiet=True)
        async with asyncio.timeout(WAIT_S_MAX):
            while not (await router.renew(quiet)).directives:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("way", ["grpc", "lean"])
async def test_a_session_that_ends_badly_says_why_and_leaves_nothing_to_say(way: str) -> None:
    async with reached(way) as (service, router):
        worker = FakeWorker(router, replace(offer("d0", Role.DECODE), standby=True))
        await worker.register()
        await worker.renew()
        await service.leave("d0", worker.offer.incarnation, worker.lease.epoch, reason="test")
        with pytest.raises(LostLease):
            await worker.renew()
        again = FakeWorker(router, worker.offer)
        await again.register()
        heard: asyncio.Queue[RenewalAnswer] = asyncio.Queue()
        router.hear("d0", again.offer.incarnation, heard.put_nowait)
        await again.renew()
        await service.activate("d0")
        answer = await asyncio.wait_for(heard.get(), WAIT_S_MAX)
        assert answer.lease.epoch == again.lease.epoch
