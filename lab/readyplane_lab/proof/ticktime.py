"""One tick of the planner: the decision alone at 10, 32 and 1,000 workers, and the whole round.

The fleet is half prefill and half decode, near its SLO, with two starts under way at any time. Then
the whole round again at 32 and 1,000 workers of eight classes that both pools may start, in the mode
that is to be chosen: more is wanted than there is in every tick, so that every tick chooses. Medians
over the ticks after a warm-up, in milliseconds of this thread's CPU. Handed to `readyplane prove`, whose last line says them, and to the bench.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from readyplane.core.identity import KvFormat
from readyplane.core.worker import Fleet, LoadReport, Role, Serving, Worker, WorkerOffer
from readyplane.core.worker import WorkerState as State
from readyplane.kit.clock import cpu_s
from readyplane.ports import Instance, LatencyWindow, ModelSignals, Order, RouterSignals
from readyplane_lab.demo import WORKER_CLASS
from readyplane_planner.decide import Decision, Memory, decide
from readyplane_planner.journal import MemoryJournal
from readyplane_planner.leadership import Leadership, MemoryLeaseStore
from readyplane_planner.policy import read_policy
from readyplane_planner.service import PlannerService

MODEL = "bench"
DIGEST = "sha256:" + "a" * 64
ISL, OSL = 1024, 256
RPS_A_WORKER = 3.0
"""Of each prefill worker: what keeps it about two thirds busy."""
SEQUENCES_A_WORKER = 12
STARTING = 2
WARM_UP = 40
CLASSES = 8


class Clock:
    """Time that the bench moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic_s(self) -> float:
        """Seconds."""
        return self.now_s

    def wall_s(self) -> float:
        """Seconds."""
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        """At once."""
        self.now_s += seconds


class Fleets:
    """Router and actuator over a fleet that nobody changes; arrivals vary by chance."""

    def __init__(
        self, clock: Clock, workers: int, *, classes: Sequence[str] = (WORKER_CLASS,)
    ) -> None:
        self._clock = clock
        self._half = workers // 2
        self._generator = np.random.default_rng(1)
        self._arrived = self._finished = 0
        names = [(r, f"{r[0]}-{i}") for r in (Role.PREFILL, Role.DECODE) for i in range(self._half)]
        of = itertools.cycle(classes)
        self._orders = [Order(name, role, MODEL, next(of), DIGEST) for role, name in names]
        roles = (Role.PREFILL,) if len(classes) == 1 else (Role.PREFILL, Role.DECODE)
        for role, i in itertools.product(roles, range(STARTING)):
            self._orders.append(Order(f"{role[0]}-s{i}", role, MODEL, next(of), DIGEST))
        self._workers = {
            o.worker_id: self._worker(o, State.PROVISIONED if "-s" in o.worker_id else State.READY)
            for o in self._orders
        }

    def _worker(self, order: Order, state: State) -> Worker:
        offer = WorkerOffer(
            order.worker_id, "1", order.role, MODEL, order.worker_class, manifest_digest=DIGEST
        )
        if state is not State.READY:
            return Worker(offer, 1, state)
        serving = Serving("http://127.0.0.1:1", KvFormat(DIGEST), 59_000, 16, 131_072, WORKER_CLASS)
        return Worker(offer, 1, state, serving, ready_s=100.0)

    def advance(self) -> None:
        """One second of arrivals, and every worker's report of it."""
        self._clock.now_s += 1.0
        came = int(self._generator.poisson(RPS_A_WORKER * self._half))
        self._arrived += came
        self._finished += came
        now_s = self._clock.now_s
        tokens = int(now_s) * ISL
        load = LoadReport(
            running=SEQUENCES_A_WORKER,
            waiting=0,
            waiting_prefill_tokens=ISL,
            kv_used_blocks=900,
            kv_total_blocks=59_000,
            prefill_tokens_total=tokens,
            decode_tokens_total=tokens,
            iterations_total=int(now_s * 15),
        )
        active = self._generator.integers(0, 2 * SEQUENCES_A_WORKER, len(self._workers)).tolist()
        for (name, worker), held in zip(self._workers.items(), active, strict=True):
            ready = worker.state is State.READY
            self._workers[name] = replace(
                worker, load=load if ready else worker.load, renewed_s=now_s, active=held
            )

    async def signals(self, model: str = "", *, leader_epoch: int = 0) -> RouterSignals:
        """What the router would tell."""
        del model, leader_epoch
        lengths = tuple(
            tuple(50.0 if (i, j) == (3, 6) else 0.0 for j in range(14)) for i in range(8)
        )
        decoding = SEQUENCES_A_WORKER * self._half
        part = ModelSignals(
            MODEL,
            arrivals_total=self._arrived,
            arrival_tokens_total=self._arrived * ISL,
            arrival_uncached_tokens_total=self._arrived * ISL,
            finished_total=self._finished,
            prefilling_requests=self._half,
            prefilling_tokens=self._half * ISL,
            decoding_requests=decoding,
            decoding_remaining_tokens=decoding * OSL / 2,
            decoding_kv_tokens=decoding * ISL,
            ttft_actual=LatencyWindow(10.0, 50, 0.5, 1.0, 1.5),
            tpot_actual=LatencyWindow(10.0, 50, 0.05, 0.06, 0.07),
            length_counts=lengths,
        )
        return RouterSignals("r", self._clock.now_s, {MODEL: part}, Fleet(1, dict(self._workers)))

    async def list_instances(self, **_: Any) -> list[Instance]:
        """Everything allocated; starts stay young, so that they stay on their way."""
        now_s = self._clock.now_s
        return [
            Instance(
                o,
                "running",
                o.worker_id,
                allocated_ago_s=now_s % 5.0 if "-s" in o.worker_id else 900.0,
            )
            for o in self._orders
        ]

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        """Taken, and nothing comes of it."""
        del leader_epoch
        return Instance(order, "pending")

    async def release(self, worker_id: str, **_: Any) -> Instance:
        """Taken likewise."""
        return Instance(next(o for o in self._orders if o.worker_id == worker_id), "running")

    async def drain(self, worker_id: str, **_: Any) -> Worker:
        """Taken likewise."""
        return self._workers[worker_id]


def measure_ticks() -> dict[str, float]:
    """decide_ms_10, decide_ms_32, decide_ms_1000, tick_ms_10, tick_ms_32 and tick_ms_1000."""
    decide_10, tick_10 = asyncio.run(_ticks(10, 600))
    decide_32, _ = asyncio.run(_ticks(32, 400))
    decide_1000, tick_1000 = asyncio.run(_ticks(1000, 100))
    print(f"a whole tick of 1,000 workers: {tick_1000:.1f} ms", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        offered = _offered(Path(folder), CLASSES)
        mixed_32, mixed_tick_32 = asyncio.run(_ticks(32, 200, offered))
        mixed_1000, mixed_tick_1000 = asyncio.run(_ticks(1000, 100, offered))
    said = f"{CLASSES} classes: decisions {mixed_32:.1f} ms at 32 and {mixed_1000:.1f} ms at 1,000"
    print(said, flush=True)
    return {
        "decide_ms_10": decide_10,
        "decide_ms_32": decide_32,
        "decide_ms_1000": decide_1000,
        "tick_ms_10": tick_10,
        "tick_ms_32": mixed_tick_32,
        "tick_ms_1000": mixed_tick_1000,
    }


def tick_figures(count: int = 120) -> str:
    """`tick_ms_32=... tick_ms_1000=...` of eight classes, for the last line of a proof."""
    with tempfile.TemporaryDirectory() as folder:
        offered = _offered(Path(folder), CLASSES)
        small = asyncio.run(_ticks(32, count, offered))[1]
        large = asyncio.run(_ticks(1000, count // 2, offered))[1]
    return f"tick_ms_32={small:.2f} tick_ms_1000={large:.1f}"


def _offered(folder: Path, count: int) -> list[dict[str, Any]]:
    """Classes of half to twice the speed at about the same price for it."""
    made = []
    for k in range(count):
        name, slow = f"class-{k}", 0.5 * 4.0 ** (k / max(1, count - 1))
        path = folder / f"{name}.json"
        document = {"extends": WORKER_CLASS, "name": name, "worker_class": name}
        path.write_text(json.dumps({**document, "slow_factor": 10.0 * slow}))
        price = 0.93 ** (k % 3) / slow
        made.append({"worker_class": name, "profile": str(path), "price": price, "max": 200})
    return made


async def _ticks(
    workers: int, count: int, offered: Sequence[dict[str, Any]] = ()
) -> tuple[float, float]:
    """Median milliseconds of a decision, and of the whole tick that holds it."""
    clock = Clock()
    names = tuple(c["worker_class"] for c in offered) or (WORKER_CLASS,)
    fleet = Fleets(clock, workers, classes=names)
    thought: list[float] = []

    def timed(*args: Any, **names: Any) -> tuple[Decision, Memory]:
        began_s = cpu_s()
        made = decide(*args, **names)
        thought.append(cpu_s() - began_s)
        return made

    # Bounds that the fleet fills: everything is worked out each tick, and nothing is ordered.
    half, of = workers // 2, {"worker_class": WORKER_CLASS, "profile": WORKER_CLASS}
    prefill = {"min": half + STARTING, "max": half + STARTING, **of}
    decode = {"min": half, "max": half, **of}
    policy: dict[str, Any] = {"model": MODEL, "manifest": DIGEST, "tick_s": 1.0}
    if offered:
        # More is wanted than is on its way, and no more may be.
        pool = {"min": 1, "max": 1000, "classes": list(offered)}
        slow = {"ttft_s": 4.0, "tpot_s": 0.2}
        free = {"headroom": 1.0, "start_mode": "auto", "up": {"pending_max": STARTING}, "slo": slow}
        policy |= {"prefill": pool, "decode": pool, **free}
    else:
        policy |= {"prefill": prefill, "decode": decode}
    ids = itertools.count()
    service = PlannerService(
        policy=read_policy(policy),
        router=fleet,  # type: ignore[arg-type]
        actuator=fleet,
        registry=None,
        journal=MemoryJournal(),
        leadership=Leadership(
            MemoryLeaseStore(clock.monotonic_s),
            name=MODEL,
            holder="bench",
            ttl_s=10.0,
            now_s=clock.monotonic_s,
        ),
        clock=clock,
        make_id=lambda: f"{next(ids):06x}",
        brain=timed,
    )
    await service.begin()
    took: list[float] = []
    for _ in range(count):
        fleet.advance()
        began_s = cpu_s()
        await service.tick()
        took.append(cpu_s() - began_s)
        await asyncio.sleep(0)
    return 1e3 * float(np.median(thought[WARM_UP:])), 1e3 * float(np.median(took[WARM_UP:]))
