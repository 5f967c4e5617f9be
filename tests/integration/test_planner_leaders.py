"""Planner processes that are killed and stopped while they act: fencing, on real stores.

Router and actuator are a fluid fleet of the test behind real gRPC. In the end every allocation is
compared with the journal: none twice, none lost, none that nobody decided.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc.aio
import httpx

from readyplane.core.errors import StaleEpoch
from readyplane.core.worker import Role, WorkerState
from readyplane.kit.auth import TokenCheck
from readyplane.kit.clock import SystemClock
from readyplane.kit.database import async_engine
from readyplane.kit.redis import connect
from readyplane.kit.rpc import OPTIONS, Guard
from readyplane.ports import Instance, Order
from readyplane_lab.up import actuator_rpc
from readyplane_planner.postgres import PostgresJournal
from readyplane_router import rpc as router_rpc
from tests.unit.planner_world import MODEL, HandClock, World, policy

TTL_S = 3.0
SETTLED = (WorkerState.READY, WorkerState.PROVISIONED)


class Fleet(World):
    """The fluid fleet on the machine's clock; orders may be held up before they are judged."""

    def __init__(self, clock: SystemClock) -> None:
        hand = HandClock()
        hand.now_s = clock.monotonic_s()
        super().__init__(hand, t_ready_s=lambda _n: 0.5)
        self._real = clock
        self.gate = asyncio.Event()
        self.gate.set()
        self.held: list[Order] = []
        self.fenced: list[str] = []

    async def complete(self, *_events: Any) -> None:
        """The router's side serves it; nobody here sends requests."""
        raise NotImplementedError

    async def flow(self) -> None:
        while True:
            await self._real.sleep(0.05)
            self.advance(self._real.monotonic_s() - self.clock.now_s)

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        if not self.gate.is_set():
            self.held.append(order)
            await self.gate.wait()
        try:
            return await super().provision(order, leader_epoch=leader_epoch)
        except StaleEpoch:
            self.fenced.append(order.worker_id)
            raise


class Planner:
    """One planner process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.http = httpx.AsyncClient(base_url=url, timeout=5.0)

    async def state(self) -> dict[str, Any]:
        answer = await self.http.get("/v1/state")
        return dict(answer.json()) if answer.status_code == 200 else {}

    async def stands_by(self) -> bool:
        return "standing by" in str((await self.state()).get("degraded", "standing by"))

    def send(self, what: signal.Signals) -> None:
        self.process.send_signal(what)


async def until(what: Callable[[], Any], within_s: float = 90.0) -> None:
    async with asyncio.timeout(within_s):
        while True:
            found = what()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.05)


async def leading(*planners: Planner) -> Planner:
    """The one that leads, as soon as exactly one does."""
    found: list[Planner] = []

    async def one() -> bool:
        found[:] = [p for p in planners if not await p.stands_by()]
        return len(found) == 1

    await until(one)
    return found[0]


@asynccontextmanager
async def served(fleet: Fleet, other: int) -> AsyncIterator[tuple[str, str]]:
    """(router, actuator) addresses over gRPC."""
    router = grpc.aio.server(interceptors=[Guard(TokenCheck(""))], options=OPTIONS)
    router_rpc.register(router, fleet, SystemClock())  # type: ignore[arg-type]
    port = router.add_insecure_port("127.0.0.1:0")
    await router.start()
    actuator = await actuator_rpc.serve(fleet, address=f"127.0.0.1:{other}", token="")
    flow = asyncio.create_task(fleet.flow())
    try:
        yield f"127.0.0.1:{port}", f"127.0.0.1:{other}"
    finally:
        flow.cancel()
        fleet.gate.set()
        await actuator.stop(0.1)
        await router.stop(0.1)


@asynccontextmanager
async def planner(
    name: str, stores: tuple[str, str], ports: tuple[str, str], folder: Path
) -> AsyncIterator[Planner]:
    policy_file, ready = folder / "policy.json", folder / f"{name}.json"
    quick = policy(
        tick_s=0.2,
        up={"cooldown_s": 0.2, "hold_s": 0.2},
        down={"cooldown_s": 2.0, "hold_s": 30.0},
        t_ready_prior={"p50_s": 0.5, "p90_s": 1.0, "p99_s": 2.0},
        forecast={"window_s": 1.0},
    )
    policy_file.write_text(json.dumps(quick.document()))
    with (folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "readyplane_planner", "--policy", str(policy_file)),
            *("--database-url", stores[0], "--redis-url", stores[1]),
            *("--router", ports[0], "--actuator", ports[1], "--registry", "127.0.0.1:1"),
            *("--leader-ttl-s", str(TTL_S), "--ready-file", str(ready)),
            stderr=log,
        )
    try:
        await until(lambda: ready.exists() or process.returncode is not None, 60.0)
        assert process.returncode is None, (folder / f"{name}.log").read_text()[-2000:]
        yield Planner(process, json.loads(ready.read_text())["http"])
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            await process.wait()


async def audited(database_url: str, fleet: Fleet) -> list[str]:
    """Allocations against the journal; gives the orders back that nobody knows the end of (yet)."""
    engine = async_engine(database_url)
    try:
        journal = PostgresJournal(engine)
        asked: Counter[str] = Counter()
        untold = []
        for record in await journal.newest(MODEL, limit=1000, changes_only=True):
            outcomes = (await journal.get(record.decision_id))[1] if record.changed else []
            for order in record.document["orders"]:
                asked[order["worker_id"]] += 1
                if not {o.kind for o in outcomes if o.subject == order["worker_id"]}:
                    untold.append(order["worker_id"])
    finally:
        await engine.dispose()
    allocated = Counter(o.worker_id for o in fleet.provisions)
    assert set(allocated.values()) <= {1}
    assert set(asked.values()) <= {1}
    assert set(allocated) <= set(asked)
    return untold


async def test_b146_leaders_killed_and_stopped_in_the_middle_of_an_order(
    database_url: str, redis_url: str, tmp_path: Path, free_port: int
) -> None:
    """B146: kill -9, then SIGSTOP, then the lease store away: counted at the end."""
    fleet = Fleet(SystemClock())
    stores = database_url, redis_url

    def live(role: Role = Role.PREFILL) -> int:
        return len(fleet.members(role, *SETTLED))

    async with served(fleet, free_port) as ports, planner("a", stores, ports, tmp_path) as first:
        await until(lambda: live() == 1 and live(Role.DECODE) == 1)
        async with (
            planner("b", stores, ports, tmp_path) as second,
            planner("c", stores, ports, tmp_path) as third,
        ):
            await until(second.stands_by)
            # --- kill -9 while an order is under way: its call ends with the process
            fleet.gate.clear()
            fleet.rps = lambda _t: 3.5
            await until(lambda: fleet.held)
            asked = {o.worker_id for o in fleet.held}
            first.send(signal.SIGKILL)
            killed_s = fleet.clock.now_s
            await first.process.wait()
            await asyncio.sleep(0.1)
            fleet.gate.set()
            await until(lambda: fleet.fences.newest(MODEL) >= 2)
            assert fleet.clock.now_s - killed_s < TTL_S + 20.0, "the next lease, not a restart"
            await until(lambda: asked <= set(fleet.boxes))
            await until(lambda: live() >= 2)
            # --- SIGSTOP while an order is under way: it arrives after the lease was taken
            fleet.held.clear()
            fleet.gate.clear()
            fleet.rps = lambda _t: 6.0
            await until(lambda: fleet.held)
            late = {o.worker_id for o in fleet.held}
            leader = await leading(second, third)
            epoch = fleet.fences.newest(MODEL)
            leader.send(signal.SIGSTOP)
            await until(lambda: fleet.fences.newest(MODEL) > epoch)
            fleet.gate.set()
            await until(lambda: late <= set(fleet.fenced))
            leader.send(signal.SIGCONT)
            await until(leader.stands_by)
            leader = await leading(second, third)
            await until(lambda: late <= set(fleet.boxes))
            # --- the lease store away for longer than a lease: all stays, nobody leads twice
            await asyncio.sleep(1.0)
            living, drained = set(fleet.boxes), list(fleet.drains)
            epoch = fleet.fences.newest(MODEL)
            client = connect(redis_url)
            await client.execute_command("CLIENT", "PAUSE", str(int(2.5 * TTL_S * 1000)), "ALL")
            await asyncio.sleep(2.0 * TTL_S)
            assert fleet.fences.newest(MODEL) == epoch
            assert living <= {n for n, b in fleet.boxes.items() if b.alive} | set(fleet.releases)
            assert (fleet.drains, fleet.releases) == (drained, [])
            assert (await leader.state())["pools"]["prefill"]["ready"] >= 2
            with suppress(Exception):
                await client.aclose()
            await leading(second, third)

            async def all_told() -> bool:
                return not await audited(database_url, fleet)

            await until(all_told)
            for planner_ in (second, third):
                await planner_.http.aclose()
