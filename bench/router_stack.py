"""Both sides of the router benches as processes: our routers on real stores, and the peer.

Owns how they are started, and whose CPU counts for whom: for us the routers, the registry and every
process of Redis and Postgres; for the peer its one process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.own_services import own_services
from bench.router_fleet import BLOCK_SIZE
from readyplane_lab.up.local_server import free_port
from readyplane_lab.up.processes import ProcessTable

ROOT = Path(__file__).resolve().parents[1]
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PEER_THREADS = 2
PEER_MODEL, PEER_GROUPS = "demo", ("prefill", "decode")
READY_S_MAX = 60.0
POLL_EVERY_S = 0.05
FLEET = "fleet"
FIRST = 5  # a real-time priority: any goes before the usual ones
OTHERS_TURN_S = 1.0


@dataclass(slots=True)
class Side:
    """A running side: where it listens, and the processes whose CPU is its own.

    Attributes:
        usual: of ours, the addresses of the ports that `grpc.aio` serves.
    """

    addresses: tuple[str, ...]
    processes: list[psutil.Process] = field(default_factory=list)
    usual: tuple[str, ...] = ()

    def cpu_s(self) -> float:
        """CPU seconds so far."""
        return sum(t.user + t.system for t in (p.cpu_times() for p in self.processes))

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Meanwhile it and its client go before everything else on the machine (needs root).

        For a machine that does other work, too. Keep it short, and pause after it: the others wait.
        """
        threads = [
            int(entry.name)
            for process in (psutil.Process(), *self.processes)
            for entry in Path(f"/proc/{process.pid}/task").iterdir()
        ]
        _schedule(threads, os.SCHED_FIFO, FIRST)
        try:
            yield
        finally:
            _schedule(threads, os.SCHED_OTHER, 0)
            time.sleep(OTHERS_TURN_S)


def _schedule(threads: Sequence[int], policy: int, priority: int) -> None:
    for thread in threads:
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setscheduler(thread, policy, os.sched_param(priority))


@asynccontextmanager
async def our_side(
    folder: Path, *, prefills: int, decodes: int, routers: int = 1
) -> AsyncIterator[Side]:
    """Routers with real stores and a fleet of ready workers."""
    async with own_services(folder) as own:
        services, table = own.services, own.table
        registry = services.plan("registry", args=("--blob-dir", str(folder / "blobs")))
        planned, lean = [], []
        for number in range(routers):
            port = free_port()
            router = services.plan("router", args=("--pick-port", str(port)))
            router.name = f"router{number}"
            router.environment["READYPLANE_REGISTRY"] = registry.grpc
            planned.append(router)
            lean.append(f"127.0.0.1:{port}")
        await asyncio.gather(*(services.start(s) for s in (registry, *planned)))
        await _fleet(table, folder, planned[0].grpc, registry.grpc, prefills, decodes)
        await asyncio.sleep(1.5)  # the other routers hear of the workers from the store
        apart = {r.pid for r in table.running() if r.name == FLEET}
        processes = [
            child
            for child in psutil.Process().children(recursive=True)
            if child.pid not in apart and "warden" not in " ".join(child.cmdline())
        ]
        yield Side(tuple(lean), processes, tuple(r.grpc for r in planned))


async def _fleet(
    table: ProcessTable, folder: Path, router: str, registry: str, prefills: int, decodes: int
) -> None:
    ready = folder / "run" / "fleet.ready"
    command = [sys.executable, "-m", "bench.router_fleet", "--router", router]
    command += ["--registry", registry, "--ready-file", str(ready)]
    command += ["--prefills", str(prefills), "--decodes", str(decodes)]
    await table.spawn(FLEET, command, {**os.environ}, folder / "logs" / "fleet.log")
    async with asyncio.timeout(READY_S_MAX):
        while not ready.exists():
            if table.returncode(FLEET) is not None:
                raise RuntimeError(f"the fleet ended:\n{table.log_tail(FLEET)}")
            await asyncio.sleep(0.1)


@asynccontextmanager
async def their_side(folder: Path, *, prefills: int, decodes: int) -> AsyncIterator[Side]:
    """Dynamo's selection service with as many workers; `PEER_PYTHON` must be there."""
    folder.mkdir(parents=True)
    port = free_port()
    address = f"127.0.0.1:{port}"
    async with ProcessTable(folder) as table:
        command = [str(PEER_PYTHON), "-m", "dynamo.select_service"]
        command += ["--port", str(port), "--threads", str(PEER_THREADS)]
        pid = await table.spawn("peer", command, {**os.environ}, folder / "peer.log")
        await asyncio.to_thread(_enlist, address, prefills, decodes)
        yield Side((address,), [psutil.Process(pid)])


def _enlist(address: str, prefills: int, decodes: int) -> None:
    """Tell the peer its workers, and wait until all are schedulable."""
    until_s = time.monotonic() + READY_S_MAX
    while True:
        try:
            _call(address, "/health")
            break
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(POLL_EVERY_S)
    events = free_port()  # nobody publishes there: as in our fleet, no KV events come
    number = 0
    for group, count in zip(PEER_GROUPS, (prefills, decodes), strict=True):
        for _ in range(count):
            number += 1
            worker = {
                "worker_id": number,
                "model_name": PEER_MODEL,
                "routing_group": group,
                "endpoint": f"http://w{number}:8000",
                "block_size": BLOCK_SIZE,
                "data_parallel_start_rank": 0,
                "data_parallel_size": 1,
                "total_kv_blocks": 10_000,
                "max_num_batched_tokens": 8_192,
                "kv_events_endpoints": {"0": f"tcp://127.0.0.1:{events}"},
            }
            _call(address, "/workers", worker)
    while True:
        try:
            found = json.loads(_call(address, "/ready"))
            if found["schedulable_workers"] >= number:
                return
        except OSError:
            pass
        if time.monotonic() > until_s:
            raise RuntimeError("the peer's workers did not become schedulable")
        time.sleep(POLL_EVERY_S)


def _call(address: str, path: str, document: object | None = None) -> bytes:
    data = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(
        f"http://{address}{path}", data=data, headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return bytes(answer.read())
