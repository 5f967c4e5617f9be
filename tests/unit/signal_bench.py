"""The brain on observations that a test makes: samples in, decisions out, one call a tick.

Plays router and fleet without ports or journal: orders become ready, drained workers leave. What the
load does to the fleet is the test's business; nothing is modelled here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from readyplane.core.startup import StartQuantiles
from readyplane.core.worker import LoadReport, Role, Worker, WorkerOffer, WorkerState
from readyplane_planner.decide import ROLE_OF, Decision, Memory, Plan, decide
from readyplane_planner.policy import make_plan
from readyplane_planner.signals import (
    Allocation,
    Latency,
    Observation,
    Priors,
    RouterSample,
    observe,
)
from readyplane_planner.signals.outside import EngineSample, Outside, Reading
from tests.unit.planner_world import DIGEST, MODEL, policy

T_READY = StartQuantiles(6.0, 10.0, 15.0, 9, 0.0)
PRIORS = Priors(isl=1155.0, osl=211.0, stale_after_s=4.0, warm_s=10.0)
READY_AFTER_S = 6.0


@dataclass
class Bench:
    """`p`, `d`: workers that are ready from the beginning."""

    p: int = 1
    d: int = 1
    plan: Plan = field(
        default_factory=lambda: make_plan(policy(), version=1, manifest_digest=DIGEST)
    )
    memory: Memory = field(default_factory=Memory)
    now_s: float = 1000.0
    life: str = "router-1"
    born_s: float = 0.0
    previous: RouterSample | None = None
    current: RouterSample | None = None
    totals: dict[str, float] = field(default_factory=dict)
    workers: dict[str, tuple[Role, float]] = field(default_factory=dict)
    report: LoadReport = field(default_factory=lambda: LoadReport(running=1))
    seen: Observation | None = None
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        for role, count in ((Role.PREFILL, self.p), (Role.DECODE, self.d)):
            for number in range(count):
                self.workers[f"{role[0]}-{number}"] = role, self.now_s - 500.0

    def tick(
        self,
        rps: float = 0.0,
        *,
        isl: float = 1155.0,
        osl: float = 211.0,
        dt_s: float = 1.0,
        queue: float = 0.0,
        decoding: float | None = None,
        ttft_s: float = 0.4,
        counters: Mapping[str, Any] | None = None,
        gauges: Mapping[str, Any] | None = None,
        latency: Mapping[str, Latency] | None = None,
        answers: bool = True,
        known: bool = True,
        extra: tuple[Worker, ...] = (),
        engines: tuple[EngineSample, ...] = (),
        readings: tuple[Reading, ...] = (),
    ) -> Decision:
        """One second, or `dt_s`, of that load, and what is decided on it.

        Args:
            answers, known: whether the router does, and knows the model. counters, gauges, latency:
            in the place of what follows from the load. extra: workers beside those of the fleet.
        """
        self.now_s += dt_s
        for name, grown in (
            ("arrivals_total", rps),
            ("arrival_tokens_total", rps * isl),
            ("arrival_uncached_tokens_total", rps * isl),
            ("finished_total", rps),
        ):
            self.totals[name] = self.totals.get(name, 0.0) + grown * dt_s
        self._follow()
        if decoding is None:
            decoding = rps * osl * 0.06
        window = Latency(20.0, 50 if rps else 0, ttft_s, ttft_s, ttft_s)
        tpot = Latency(20.0, 50 if rps else 0, 0.06, 0.06, 0.06)
        sample = RouterSample(
            taken_s=self.now_s,
            incarnation=self.life,
            uptime_s=self.now_s - self.born_s,
            model_known=known,
            counters={**self.totals, **(counters or {})} if known else {},
            gauges={
                "queued_requests": 0.0,
                "queued_tokens": 0.0,
                "prefilling_requests": round(queue / isl),
                "prefilling_tokens": queue,
                "decoding_requests": decoding,
                "decoding_remaining_tokens": decoding * osl / 2,
                "decoding_kv_tokens": decoding * isl,
                **(gauges or {}),
            }
            if known
            else {},
            latency={"ttft_actual": window, "tpot_actual": tpot, **(latency or {})},
            workers=(*self._fleet(), *extra),
            engines=engines,
        )
        self.previous, self.current = self.current, sample if answers else self.current
        self.seen = observe(
            model=MODEL,
            previous=self.previous,
            current=self.current,
            allocations=self._allocations(),
            t_ready={"prefill": T_READY, "decode": T_READY},
            priors=PRIORS,
            now_s=self.now_s,
            outside=Outside(readings),
        )
        decision, self.memory = decide(
            self.seen,
            self.plan,
            self.memory,
            now_s=self.now_s,
            decision_id=f"d{len(self.decisions)}-t",
        )
        self.decisions.append(decision)
        return decision

    def run(self, ticks: int, rps: float = 0.0, **load: Any) -> Decision:
        """That many ticks of the same load; the last decision."""
        for _ in range(ticks):
            self.tick(rps, **load)
        return self.decisions[-1]

    def restart(self) -> None:
        """The router begins another life and counts from zero."""
        self.life, self.born_s = self.life + "'", self.now_s
        self.totals.clear()

    def crash(self, name: str) -> None:
        """That worker is gone."""
        del self.workers[name]

    @property
    def targets(self) -> tuple[int, int]:
        """(P, D) of the last decision."""
        return targets(self.decisions[-1])

    def read(self, signal: str, value: float | None, **fields: Any) -> Reading:
        """A reading of this tick."""
        fields.setdefault("unit", "s")
        return Reading(signal, fields.pop("unit"), value, self.now_s + 1.0, **fields)

    def _follow(self) -> None:
        """Orders of the past become ready in their time, and the drained are gone."""
        for order in self.memory.orders:
            if self.now_s - order.ordered_s >= READY_AFTER_S:
                self.workers.setdefault(order.worker_id, (ROLE_OF[order.pool], self.now_s))
        for decision in self.decisions[-1:]:
            for drain in decision.drains:
                self.workers.pop(drain.worker_id, None)

    def _fleet(self) -> tuple[Worker, ...]:
        return tuple(
            replace(worker(name, role, now_s=self.now_s, load=self.report), ready_s=ready_s)
            for name, (role, ready_s) in self.workers.items()
        )

    def _allocations(self) -> tuple[Allocation, ...]:
        held = [
            Allocation(name, role, "running", "h200-slow10", DIGEST, allocated_ago_s=600.0)
            for name, (role, _ready_s) in self.workers.items()
        ]
        held += [
            Allocation(
                o.worker_id,
                ROLE_OF[o.pool],
                "running",
                "h200-slow10",
                DIGEST,
                allocated_ago_s=self.now_s - o.ordered_s,
            )
            for o in self.memory.orders
            if o.worker_id not in self.workers
        ]
        return tuple(held)


def worker(
    name: str, role: Role, *, now_s: float, life: str = "1", load: LoadReport | None = None
) -> Worker:
    """A ready worker of the fleet."""
    offer = WorkerOffer(name, f"{name}/{life}", role, MODEL, "h200-slow10", manifest_digest=DIGEST)
    return Worker(
        offer,
        1,
        WorkerState.READY,
        load=load or LoadReport(),
        ready_s=now_s - 100.0,
        renewed_s=now_s,
    )


def targets(decision: Decision) -> tuple[int, int]:
    """(P, D)."""
    return decision.prefill.target, decision.decode.target


def codes(decision: Decision) -> set[str]:
    """The reasons' codes."""
    return {r.code for r in decision.why}
