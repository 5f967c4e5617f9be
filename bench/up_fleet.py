"""The modelled-engine processes of `readyplane up` against the simulator: same requests, same fleet.

Owns one run of the whole local stack with both pools pinned, and the same requests in the
simulator. The processes run in real time on this machine, so what they add (HTTP, scheduling of
processes, a machine that is busy) is in their latencies and not in the simulator's; how late the
engines ran is told with the result.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from bench.static_fleet import Columns, simulate
from readyplane.core.profile import LinkClass
from readyplane.core.work import Slo
from readyplane.kit.clock import SystemClock
from readyplane_lab.demo import WORKER_CLASS
from readyplane_lab.up.options import UpOptions
from readyplane_lab.up.stack import Stack, running_stack
from readyplane_lab.up.traffic import Outcome, Tally, Traffic
from readyplane_lab.workload.request import WorkloadRequest

READY_S_MAX = 180.0
SLO = Slo(2.0, 0.1)
LINK = LinkClass("as-the-engines", 46e9, 0.002)  # what a modelled engine starts with


@dataclass(frozen=True, slots=True)
class Compared:
    """Both runs. `late_p99_s`: how late the modelled engines ran, worst of the workers."""

    simulated: Columns
    processes: Columns
    late_p99_s: float | None

    def rows(self) -> list[tuple[str, float, float]]:
        """(figure, simulator, processes); seconds, attainment as a fraction."""
        out: list[tuple[str, float, float]] = []
        ours, theirs = self.simulated, self.processes
        for name in ("ttft", "tpot"):
            mine, his = (getattr(c, f"{name}_s") for c in (ours, theirs))
            out.append((f"{name} mean", float(np.nanmean(mine)), float(np.nanmean(his))))
            out += [
                (f"{name} p{q}", float(np.nanpercentile(mine, q)), float(np.nanpercentile(his, q)))
                for q in (50, 90, 99)
            ]
        out.append(("attainment", ours.attainment(SLO), theirs.attainment(SLO)))
        return out


def compare(requests: Sequence[WorkloadRequest], fleet: tuple[int, int]) -> Compared:
    """Run both."""
    simulated = simulate(requests, fleet, WORKER_CLASS, link=LINK, tick_s=1.0, slo=SLO)
    tally, late_s = asyncio.run(_drive(requests, fleet))
    return Compared(simulated, _columns(tally), late_s)


async def _drive(
    requests: Sequence[WorkloadRequest], fleet: tuple[int, int]
) -> tuple[Tally, float | None]:
    pools = {
        name: {"min": n, "max": n} for name, n in zip(("prefill", "decode"), fleet, strict=True)
    }
    pools["decode"]["convertible"] = False
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.json"
        policy.write_text(json.dumps(pools))
        options = UpOptions(
            load=False, model_bytes=32_000_000, policy_file=policy, workers_max=sum(fleet)
        )
        async with running_stack(options, clock=SystemClock(), say=lambda _: None) as stack:
            await _until_ready(stack, fleet)
            traffic = Traffic(
                stack.book.gateway_http, stack.book.model, slo=SLO, clock=SystemClock()
            )
            tally = await traffic.run(requests)
            late_s = (await _state(stack)).get("lateness_p99_s")
    return tally, late_s if isinstance(late_s, float) else None


async def _until_ready(stack: Stack, fleet: tuple[int, int]) -> None:
    async with asyncio.timeout(READY_S_MAX):
        while True:
            if stack.failed.done():
                raise RuntimeError(stack.failed.result())
            pools = (await _state(stack)).get("pools")
            if isinstance(pools, dict) and all(
                pools[name]["ready"] >= n
                for name, n in zip(("prefill", "decode"), fleet, strict=True)
            ):
                return
            await asyncio.sleep(0.5)


async def _state(stack: Stack) -> dict[str, object]:
    headers = {"authorization": f"Bearer {stack.book.token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{stack.book.planner_http}/v1/state") as answer,
    ):
        found: dict[str, object] = await answer.json()
        return found if answer.status == 200 else {}


def _columns(tally: Tally) -> Columns:
    done = sorted(
        (s for s in tally.samples if s.outcome is Outcome.FINISHED), key=lambda s: s.index
    )
    return Columns(
        ttft_s=np.array([s.ttft_s for s in done], dtype=np.float64),
        tpot_s=np.array([s.tpot_s if s.osl > 1 else np.nan for s in done], dtype=np.float64),
        lost=tally.sent - len(done),
        worker_s=0.0,
        cached=0.0,
    )
