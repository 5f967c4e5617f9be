"""What renewals cost: 2,000 workers at 1 Hz, each over a stream of its own.

`python -m bench.renew [--workers N] [--window-s S] [--over-grpc]`. Prints at the end:

    bench-renew renew_core_share= redis_core_share= postgres_core_share= renewals_per_s=
                us_per_renewal=

renew_core_share: CPU seconds a second of the router process, with real Redis and Postgres and a
load report in every renewal; redis_core_share, postgres_core_share: of theirs, on our account. No
request is routed meanwhile. The agents run in a process of their own, which is not counted.
Sessions are on the lean port; `--over-grpc` measures them on the other one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

import psutil

from bench.own_services import own_services
from readyplane.kit.clock import SystemClock
from readyplane_lab.up.local_server import free_port
from readyplane_lab.up.processes import ProcessTable

AGENTS = "agents"
READY_S_MAX = 240.0
LEASE_TTL_S = 600.0
"""Long, so that a whole fleet gets through the gate first; renewals come at 1 Hz all the same."""


async def _measure(
    folder: Path, workers: int, window_s: float, *, over_grpc: bool
) -> dict[str, float]:
    async with own_services(folder) as own:
        lean = free_port()
        policy = folder / "run" / "router-policy.json"
        policy.write_text(json.dumps({"lease_ttl_s": LEASE_TTL_S}))
        flags = ("--pick-port", str(lean), "--policy-file", str(policy))
        router = own.services.plan("router", args=flags)
        await own.services.start(router)
        log = folder / "logs" / "agents.log"
        sessions = router.grpc if over_grpc else f"127.0.0.1:{lean}"
        await _agents(own.table, router.grpc, sessions, workers, log)
        return await _window(own.table, log, window_s)


async def _agents(table: ProcessTable, router: str, sessions: str, workers: int, log: Path) -> None:
    ready = log.with_suffix(".ready")
    command = [sys.executable, "-m", "bench.renew_agents", "--router", router]
    command += ["--sessions", sessions, "--workers", str(workers), "--ready-file", str(ready)]
    await table.spawn(AGENTS, command, {**os.environ}, log)
    async with asyncio.timeout(READY_S_MAX):
        while not ready.exists():
            if table.returncode(AGENTS) is not None:
                raise SystemExit(f"the agents ended:\n{table.log_tail(AGENTS)}")
            await asyncio.sleep(0.1)


async def _window(table: ProcessTable, log: Path, window_s: float) -> dict[str, float]:
    clock = SystemClock()
    pids = {record.name: record.pid for record in table.running()}
    router = psutil.Process(pids["router"])
    groups: dict[str, list[psutil.Process]] = {"router": [router], "redis": [], "postgres": []}
    for process in psutil.Process().children(recursive=True):
        name = process.name()
        if "valkey" in name or "redis" in name:
            groups["redis"].append(process)
        elif "postgres" in name:
            groups["postgres"].append(process)
    before, count = {name: _cpu_s(found) for name, found in groups.items()}, _renewed(log)
    began_s = clock.monotonic_s()
    await asyncio.sleep(window_s)
    took_s = clock.monotonic_s() - began_s
    share = {name: (_cpu_s(found) - before[name]) / took_s for name, found in groups.items()}
    rate = (_renewed(log) - count) / took_s
    return {
        "renew_core_share": share["router"],
        "redis_core_share": share["redis"],
        "postgres_core_share": share["postgres"],
        "renewals_per_s": rate,
        "us_per_renewal": 1e6 * share["router"] / rate,
    }


def _cpu_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes if process.is_running()]
    return float(sum(t.user + t.system for t in times))


def _renewed(log: Path) -> int:
    told = [line.split() for line in log.read_text().splitlines() if line.startswith("renewed ")]
    if int(told[-1][3]):
        raise SystemExit(f"renewals failed:\n{log.read_text()[-2000:]}")
    return int(told[-1][1])


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="what renewals cost")
    parser.add_argument("--workers", type=int, default=2_000)
    parser.add_argument("--window-s", type=float, default=20.0)
    parser.add_argument("--over-grpc", action="store_true", help="sessions over grpc.aio")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(
            _measure(Path(folder), given.workers, given.window_s, over_grpc=given.over_grpc)
        )
    print("bench-renew " + " ".join(f"{k}={v:.3f}" for k, v in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
