"""What a simulated request costs: production router, planner and engine model on virtual time.

Twice the Azure conversation trace: its hour as `readyplane replay` runs it, with series and
decisions kept, and ten minutes of it repeated until some 32 workers serve, as the benchmark of
policies runs it. CPU seconds of one core, planner ticks included.
"""

from __future__ import annotations

import math
import time
from functools import lru_cache
from itertools import accumulate, takewhile
from pathlib import Path

from readyplane_lab.demo import DEMO_POLICY, WORKER_CLASS
from readyplane_lab.simulator.replay import Replay, run_replay
from readyplane_lab.simulator.world import WorldOptions, run_world
from readyplane_lab.simulator.world_result import WorldResult
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_lab.workload.scaling import scaled
from readyplane_lab.workload.trace import read_trace

FACTOR, SPAN_S, SEED = 5.0, 600.0, 1
FIRST_FLEET = (12, 12)
POOL = {"min": 1, "max": 64, "worker_class": WORKER_CLASS, "profile": WORKER_CLASS}
BLOCK_SIZE = 64


def measure_sim(trace: Path) -> dict[str, float]:
    """azure_hour_s, us_per_request_1x, us_per_request_32 and tick_ms."""
    if not trace.exists():
        print(f"no {trace}: the simulator was not measured", flush=True)
        names = ("azure_hour_s", "us_per_request_1x", "us_per_request_32", "tick_ms")
        return dict.fromkeys(names, math.nan)
    requests = read_trace(trace).requests
    whole_s = hour_s(trace)
    many = scaled(list(takewhile(lambda r: r.at_s < SPAN_S, requests)), FACTOR, SEED)
    result, seconds = _run(many)
    attained = sum(r.attained for r in result.records) / len(many)
    print(
        f"{len(many)} requests in {SPAN_S:.0f} s: attainment {attained:.4f}, "
        f"{_most_ready(result)} workers at the peak",
        flush=True,
    )
    return {
        "azure_hour_s": whole_s,
        "us_per_request_1x": 1e6 * whole_s / len(requests),
        "us_per_request_32": 1e6 * seconds / len(many),
        "tick_ms": 1e3 * sum(result.planner_s) / len(result.planner_s),
    }


@lru_cache
def hour_s(trace: Path) -> float:
    """CPU seconds of a whole trace, as `readyplane replay` runs it."""
    requests = read_trace(trace).requests
    began_s = time.process_time()
    report, _ = run_replay(Replay(trace.name, requests))
    seconds = time.process_time() - began_s
    hours = {role: round(h, 2) for role, h in report["worker_hours"].items()}
    print(
        f"simulated hour: attainment {report['attainment']:.4f}, worker-hours {hours}", flush=True
    )
    return seconds


def _run(requests: tuple[WorkloadRequest, ...]) -> tuple[WorldResult, float]:
    policy = {**DEMO_POLICY, "prefill": POOL, "decode": POOL}
    options = WorldOptions(policy, initial=FIRST_FLEET, block_size=BLOCK_SIZE, record=False)
    began_s = time.process_time()
    result = run_world(options, requests)
    return result, time.process_time() - began_s


def _most_ready(result: WorldResult) -> int:
    """Most workers that were ready at one time."""
    changes = [
        change
        for life in result.lives
        if life.ready_s is not None
        for change in ((life.ready_s, 1), (life.released_s, -1))
    ]
    return max(accumulate(step for _, step in sorted(changes)), default=0)
