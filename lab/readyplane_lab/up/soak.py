"""`make soak`: traffic through a whole stack while its processes are killed and stopped.

Two routers, workers that come and go by the planner, and a seeded course of `soak_faults`: kill -9
of engines, agents, routers and Redis, pauses beyond the lease. It is broken, and ends with 1, when
a request hangs, an error of a client has no type, or anything stays reserved once all has ended.

    soak seconds= requests= finished= errors= hung= untyped= leaked= faults=
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import aiohttp

from readyplane.client import RouterClient
from readyplane.core.errors import ReadyplaneError, Unavailable
from readyplane.kit.clock import Clock, SystemClock
from readyplane.kit.redis import connect
from readyplane_lab.up.options import UpOptions
from readyplane_lab.up.soak_faults import Faults
from readyplane_lab.up.stack import Stack, running_stack
from readyplane_lab.workload.conversation import Wave, conversation
from readyplane_lab.workload.request import WorkloadRequest, prompt_tokens
from readyplane_router.redis import RedisStore
from readyplane_router.seats import Use

HUNG_AFTER_S = 90.0
READY_S_MAX = 120.0
LEASE_TTL_S, RESERVATION_TTL_S = 6.0, 20.0
SETTLE_S_MAX = LEASE_TTL_S + 2 * RESERVATION_TTL_S + 20.0
ROUTER_POLICY = {"lease_ttl_s": LEASE_TTL_S, "reservation_ttl_s": RESERVATION_TTL_S}
OSL_FACTOR = 0.3
MESSAGES_KEPT = 8


@dataclass(slots=True)
class Ends:
    """How the requests ended.

    Attributes:
        typed: errors by HTTP status (0: within a stream) and code. untyped: what had neither.
    """

    sent: int = 0
    finished: int = 0
    hung: int = 0
    typed: Counter[str] = field(default_factory=Counter)
    untyped: list[str] = field(default_factory=list)

    @property
    def ended(self) -> int:
        """Requests that have one."""
        return self.finished + self.hung + sum(self.typed.values()) + len(self.untyped)


class Clients:
    """Sends a workload and keeps how each request ended."""

    def __init__(self, url: str, model: str, clock: Clock) -> None:
        """`url`: of the gateway."""
        self.ends = Ends()
        self._url, self._model, self._clock = f"{url}/v1/completions", model, clock

    async def run(self, requests: Iterable[WorkloadRequest]) -> None:
        """Each at its time; returns when all have ended."""
        began_s = self._clock.monotonic_s()
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            asyncio.TaskGroup() as group,
        ):
            for request in requests:
                wait_s = began_s + request.at_s - self._clock.monotonic_s()
                await self._clock.sleep(max(0.0, wait_s))
                self.ends.sent += 1
                group.create_task(self._one(session, request))

    async def _one(self, session: aiohttp.ClientSession, request: WorkloadRequest) -> None:
        try:
            async with asyncio.timeout(HUNG_AFTER_S):
                await self._ask(session, request)
        except TimeoutError:
            self.ends.hung += 1
        except (aiohttp.ClientError, ValueError) as error:
            self.ends.untyped.append(f"{type(error).__name__}: {error}")

    async def _ask(self, session: aiohttp.ClientSession, request: WorkloadRequest) -> None:
        body = {
            "model": self._model,
            "prompt": prompt_tokens(request).tolist(),
            "max_tokens": max(request.osl, 16),
            "stream": True,
            "vllm_xargs": {"modelled_output_tokens": request.osl},
        }
        async with session.post(self._url, json=body) as response:
            if response.status != 200:
                self._failed(response.status, await response.text())
                return
            async for line in response.content:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    continue
                if data == b"[DONE]":
                    self.ends.finished += 1
                    return
                if "error" in json.loads(data):
                    self._failed(0, data.decode())
                    return
        self.ends.untyped.append("the stream ended without [DONE] and without an error")

    def _failed(self, status: int, text: str) -> None:
        try:
            code = json.loads(text)["error"]["code"]
        except (ValueError, KeyError, TypeError):
            code = None
        if code:
            self.ends.typed[f"{status} {code}"] += 1
        else:
            self.ends.untyped.append(f"HTTP {status}: {text[:200]}")


async def _until_ready(stack: Stack, clock: Clock) -> None:
    router = RouterClient(stack.book.router, stack.book.token)
    try:
        async with asyncio.timeout(READY_S_MAX):
            while True:
                fleet = await router.list_workers(stack.book.model)
                roles = {w.offer.role for w in fleet.workers.values() if w.state == "ready"}
                if len(roles) > 1:
                    return
                await clock.sleep(0.5)
    finally:
        await router.aclose()


async def _leaks(stack: Stack, clock: Clock) -> list[str]:
    """What is still reserved once nothing can be; waits as long as a forgotten one may live."""
    store = RedisStore(connect(stack.stores.redis_url))
    routers = [
        RouterClient(service.grpc, stack.book.token) for service in stack.services.like("router")
    ]
    until_s = clock.monotonic_s() + SETTLE_S_MAX
    left = ["nobody answered"]
    try:
        while left and clock.monotonic_s() < until_s:
            await clock.sleep(1.0)
            try:
                usage = await store.usage(stack.book.model)
                left = [f"store {name}: {use}" for name, use in usage.items() if use != Use()]
                for router in routers:
                    fleet = await router.list_workers(stack.book.model)
                    left += [
                        f"{router.address} {name}: {w.active} active, {w.promised_kv_blocks} blocks"
                        for name, w in fleet.workers.items()
                        if w.state != "gone" and (w.active or w.promised_kv_blocks)
                    ]
                    left += [
                        f"engine of {name}: {w.load.running} running"
                        for name, w in fleet.workers.items()
                        if w.state == "ready" and w.load.running
                    ]
            except Unavailable as error:
                left = [str(error)]
    finally:
        await store.aclose()
        await asyncio.gather(*(router.aclose() for router in routers))
    return left


async def _soak(seconds: float, seed: int, rate_rps: float) -> int:
    clock = SystemClock()
    began_s = clock.monotonic_s()

    def say(sentence: str) -> None:
        print(f"{clock.monotonic_s() - began_s:7.1f} s  {sentence}", flush=True)

    options = UpOptions(
        quick=True,
        load=False,
        model_bytes=50_000_000,
        routers=2,
        router_policy=ROUTER_POLICY,
        seed=seed,
    )
    async with running_stack(options, clock=clock, say=say) as stack:
        await _until_ready(stack, clock)
        say("ready; requests and faults begin")
        clients = Clients(stack.book.gateway_http, stack.book.model, clock)
        faults = Faults(stack, clock, say, seed, pause_s=1.5 * LEASE_TTL_S)
        requests = conversation(
            Wave(rate_rps, swing=0.3), seed=seed, duration_s=seconds, osl_factor=OSL_FACTOR
        )
        doing = asyncio.create_task(faults.run())
        driving = asyncio.create_task(clients.run(requests))
        await asyncio.wait((doing, driving, stack.failed), return_when=asyncio.FIRST_COMPLETED)
        doing.cancel()
        await asyncio.gather(doing, return_exceptions=True)
        if stack.failed.done():
            say(f"the stack gave up: {stack.failed.result()}")
            driving.cancel()
            return 1
        await driving
        say("all requests have ended; waiting until nothing is reserved")
        leaks = await _leaks(stack, clock)
    return _verdict(seconds, clients.ends, leaks, faults.done)


def _verdict(seconds: float, ends: Ends, leaks: list[str], faults: Counter[str]) -> int:
    for text in (*ends.untyped[:MESSAGES_KEPT], *leaks[:MESSAGES_KEPT]):
        print(f"broken: {text}")
    errors = ", ".join(f"{count} x {name}" for name, count in ends.typed.most_common())
    print(f"errors: {errors or 'none'}")
    print("faults: " + ", ".join(f"{count} x {name}" for name, count in sorted(faults.items())))
    lost = ends.sent - ends.ended
    print(
        f"soak seconds={seconds:g} requests={ends.sent} finished={ends.finished} "
        f"errors={sum(ends.typed.values())} hung={ends.hung + lost} untyped={len(ends.untyped)} "
        f"leaked={len(leaks)} faults={sum(faults.values())}"
    )
    return int(bool(ends.hung or lost or ends.untyped or leaks or not ends.finished))


def main() -> int:
    """Soak, say what came of it, 1 when something is broken."""
    parser = argparse.ArgumentParser(description="traffic while processes are killed and stopped")
    parser.add_argument("--seconds", type=float, default=600.0, help="of traffic")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    given = parser.parse_args()
    try:
        return asyncio.run(_soak(given.seconds, given.seed, given.rate))
    except ReadyplaneError as error:
        print(f"broken: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
