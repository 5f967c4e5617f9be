"""A tiny fluid fleet on a hand-cranked clock: what the planner's scenario tests decide about.

Plays router and actuator in one process. Work flows as tokens, workers come up after T_ready, drain
while their sequences last. Nothing here knows the planner; it only answers its two ports.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from readyplane.core.breakdown import GenerationSignals
from readyplane.core.errors import NotFound, Refused, Unavailable
from readyplane.core.fencing import Fences
from readyplane.core.identity import KvFormat
from readyplane.core.startup import Segment, SegmentName, StartMode, WeightTier
from readyplane.core.worker import (
    Fleet,
    LoadReport,
    Role,
    Serving,
    StartProgress,
    Worker,
    WorkerOffer,
    WorkerState,
)
from readyplane.ports import (
    Instance,
    LatencyWindow,
    ModelSignals,
    Order,
    RouterSignals,
)
from readyplane.profiles import load
from readyplane_planner.decide import decide
from readyplane_planner.decide.follow import Brain
from readyplane_planner.journal import MemoryJournal
from readyplane_planner.leadership import Leadership, MemoryLeaseStore
from readyplane_planner.policy import Policy, read_policy
from readyplane_planner.service import PlannerService
from readyplane_planner.upkeep import Upkeep

MODEL = "demo"
DIGEST = "sha256:" + "a" * 64
PROFILE = load("h200-slow10")
FORMAT = KvFormat(DIGEST)
WALL_S = 1_700_000_000.0


class HandClock:
    """Time that only `advance` moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return WALL_S + self.now_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


@dataclass
class Box:
    """One worker with its allocation."""

    order: Order
    allocated_s: float
    ready_s: float
    state: WorkerState = WorkerState.PROVISIONED
    draining_s: float | None = None
    exited_s: float | None = None
    failed: bool = False
    leased: bool = True
    active: int = 0
    kv: KvFormat = FORMAT
    attached: bool = False
    ends_s: float | None = None
    told: str = ""
    told_s: float = 0.0
    becomes: Role | None = None
    dead_end: str = ""
    turned: Role | None = None

    @property
    def role(self) -> Role:
        """What it serves now; its allocation stays what was ordered."""
        return self.turned or self.order.role

    def follow(self, now_s: float) -> None:
        """Do what it was told, a little later."""
        if self.told == "activate" and now_s - self.told_s >= 0.5:
            self.state, self.told = WorkerState.READY, ""
        if self.told == "flip" and now_s - self.told_s >= 2.0:
            self.turned, self.state, self.told = self.becomes, WorkerState.READY, ""
            self.draining_s = None

    @property
    def alive(self) -> bool:
        return self.exited_s is None


@dataclass
class World:
    """Router and actuator over a fluid fleet.

    Attributes:
        rps, isl, osl: demand as functions of seconds since the beginning.
        attains: share of the requests of an artifact that meet both targets.
        t_ready_s: of the next order, by its number. hang: orders that never become ready.
        doom: kind of the dead end in which an order's start ends, after a second; empty for none.
    """

    clock: HandClock
    rps: Callable[[float], float] = lambda _t: 0.0
    isl: Callable[[float], float] = lambda _t: 1155.0
    osl: Callable[[float], float] = lambda _t: 211.0
    hit: Callable[[float], float] = lambda _t: 0.0
    t_ready_s: Callable[[int], float] = lambda _n: 6.0
    hang: Callable[[Order], bool] = lambda _order: False
    refuse: Callable[[Order], str] = lambda _order: ""
    doom: Callable[[Order], str] = lambda _order: ""
    boxes: dict[str, Box] = field(default_factory=dict)
    incarnation: str = "router-1"
    router_begun_s: float = 0.0
    away: bool = False
    frozen: bool = False
    actuator_away: bool = False
    empty: bool = False
    queue: float = 0.0
    sequences: float = 0.0
    totals: dict[str, float] = field(default_factory=dict)
    ends: dict[str, list[float]] = field(default_factory=dict)
    attains: Callable[[str], float] = lambda _digest: 1.0
    last_signals: RouterSignals | None = None
    ttft_s: float = 0.5
    tpot_s: float = 0.06
    provisions: list[Order] = field(default_factory=list)
    drains: list[str] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)
    words: list[tuple[str, str]] = field(default_factory=list)
    deaf: bool = False
    fences: Fences = field(default_factory=Fences)
    fences_router: Fences = field(default_factory=Fences)
    grace_s: float = 3.0
    drain_s: float = 5.0
    overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begun_s = self.clock.now_s
        self.router_begun_s = self.begun_s - 1000.0

    # ------------------------------------------------------------------ physics

    def members(self, role: Role, *states: WorkerState) -> list[Box]:
        return [b for b in self.boxes.values() if b.alive and b.role is role and b.state in states]

    def advance(self, dt_s: float) -> None:
        self.clock.now_s += dt_s
        now_s = self.clock.now_s
        t = now_s - self.begun_s
        for box in self.boxes.values():
            if box.alive and box.ends_s is not None and now_s >= box.ends_s:
                box.exited_s, box.state = now_s, WorkerState.GONE
            if box.alive and box.dead_end and now_s >= box.allocated_s + 1.0:
                box.exited_s, box.state, box.failed = now_s, WorkerState.GONE, True
            if box.alive and box.state is WorkerState.PROVISIONED and now_s >= box.ready_s:
                box.state = WorkerState.STANDBY if box.order.standby else WorkerState.READY
            if box.alive and box.told:
                box.follow(now_s)
        rps, isl, osl, hit = self.rps(t), self.isl(t), self.osl(t), self.hit(t)
        arriving = rps * isl * (1 - hit) * dt_s
        p_workers = self.members(Role.PREFILL, WorkerState.READY)
        rate = len(p_workers) * PROFILE.prefill_tokens_per_s(max(1.0, isl * (1 - hit)))
        served = min(self.queue + arriving, rate * dt_s)
        self.queue += arriving - served
        begun = served / max(1.0, isl * (1 - hit))
        d_workers = self.members(Role.DECODE, WorkerState.READY, WorkerState.DRAINING)
        tokens = 0.0
        if d_workers and self.sequences > 0:
            each = self.sequences / len(d_workers)
            self.tpot_s = PROFILE.iteration_s(each, each * (isl + osl / 2))
            tokens = self.sequences / self.tpot_s * dt_s
        self.sequences = max(0.0, self.sequences + begun - tokens / osl)
        self.ttft_s = PROFILE.prefill_s(isl * (1 - hit)) + (self.queue / rate if rate else 0.0)
        for name, grown in (
            ("arrivals_total", rps * dt_s),
            ("arrival_tokens_total", rps * isl * dt_s),
            ("arrival_uncached_tokens_total", arriving),
            ("output_tokens_total", tokens),
            ("finished_total", tokens / osl),
        ):
            self.totals[name] = self.totals.get(name, 0.0) + grown
        for digest, count in Counter(b.order.manifest_digest for b in d_workers).items():
            finished = tokens / osl * count / len(d_workers)
            ends = self.ends.setdefault(digest, [0.0, 0.0])
            ends[0] += finished
            ends[1] += finished * self.attains(digest)
        for box in self.members(Role.PREFILL, WorkerState.READY):
            box.active = round(self.queue / isl / max(1, len(p_workers)))
        for box in self.members(Role.DECODE, WorkerState.READY):
            box.active = round(self.sequences / max(1, len(d_workers)))
        for box in self.members(Role.PREFILL, WorkerState.DRAINING) + self.members(
            Role.DECODE, WorkerState.DRAINING
        ):
            lasts_s = 0.5 if box.order.role is Role.PREFILL else self.drain_s
            if box.told:
                continue
            if box.draining_s is not None and now_s - box.draining_s >= lasts_s:
                box.state, box.exited_s = WorkerState.GONE, now_s

    # ------------------------------------------------------------------ router

    def worker(self, box: Box) -> Worker:
        now_s = self.clock.now_s
        order = box.order
        serves = box.state not in {WorkerState.PROVISIONED, WorkerState.GONE}
        middle_s = box.allocated_s + 0.2 * (box.ready_s - box.allocated_s)
        progress = StartProgress(
            start_s=box.allocated_s + 0.1 * (box.ready_s - box.allocated_s),
            now_s=now_s,
            segments=(
                Segment(SegmentName.SCHEDULE, box.allocated_s, middle_s),
                Segment(SegmentName.WEIGHT_TRANSFER, middle_s, box.ready_s if serves else None),
            ),
            failure=f"it ended: {box.dead_end}" if box.dead_end and not box.alive else "",
            dead_end="" if box.alive else box.dead_end,
        )
        return Worker(
            offer=WorkerOffer(
                worker_id=order.worker_id,
                incarnation=f"{order.worker_id}/1",
                role=box.role,
                model=order.model,
                worker_class=order.worker_class,
                generation=order.generation,
                manifest_digest=order.manifest_digest,
                scale_decision_id=order.scale_decision_id,
                mode=order.mode,
                attached=box.attached,
                standby=order.standby,
            ),
            epoch=1,
            state=box.state,
            serving=Serving(
                engine_url="http://127.0.0.1:1",
                kv=box.kv,
                kv_total_blocks=59_000,
                block_size=16,
                max_model_len=131_072,
                profile="h200-slow10",
                tier=WeightTier.L4_OBJECT,
                flips=True,
            )
            if serves
            else None,
            progress=progress,
            load=LoadReport(
                running=box.active, kv_used_blocks=box.active * 80, kv_total_blocks=59_000
            ),
            ready_s=box.ready_s if serves else None,
            draining_s=box.draining_s,
            renewed_s=now_s,
            active=box.active,
            told=box.told,
        )

    async def signals(self, model: str = "", *, leader_epoch: int = 0) -> RouterSignals:
        self.fences_router.take(MODEL, leader_epoch)
        if self.away:
            raise Unavailable("router away", "wait")
        if self.frozen and self.last_signals is not None:
            return self.last_signals
        self.last_signals = self._signals_now()
        return self.last_signals

    def _signals_now(self) -> RouterSignals:
        now_s = self.clock.now_s
        fleet = Fleet(
            1,
            {
                b.order.worker_id: self.worker(b)
                for b in self.boxes.values()
                if (b.alive or (b.dead_end and now_s - (b.exited_s or 0.0) < 10.0)) and b.leased
            },
        )
        uptime_s = now_s - self.router_begun_s
        if self.empty:
            return RouterSignals(self.incarnation, uptime_s, {}, fleet)
        t = now_s - self.begun_s
        osl_row = [0.0] * 14
        osl_row[_bin(self.osl(t))] = 100.0
        lengths = tuple(tuple(osl_row) if i == 3 else (0.0,) * 14 for i in range(8))
        whole = {name: int(value) for name, value in self.totals.items()}
        busy = self.rps(t) > 0 or self.queue > 1 or self.sequences > 0.5
        window = LatencyWindow(20.0, 50, self.ttft_s, self.ttft_s, self.ttft_s)
        tpot = LatencyWindow(20.0, 50, self.tpot_s, self.tpot_s, self.tpot_s)
        signals = ModelSignals(
            MODEL,
            **whole,  # type: ignore[arg-type]
            queued_requests=0,
            queued_tokens=0,
            prefilling_requests=int(self.queue / max(1.0, self.isl(t))),
            prefilling_tokens=int(self.queue),
            decoding_requests=int(self.sequences),
            decoding_remaining_tokens=self.sequences * self.osl(t) / 2,
            decoding_kv_tokens=int(self.sequences * self.isl(t)),
            ttft_actual=window if busy else LatencyWindow(),
            tpot_actual=tpot if busy else LatencyWindow(),
            length_counts=lengths,
            generations=tuple(
                GenerationSignals(digest, int(finished), int(attained))
                for digest, (finished, attained) in sorted(self.ends.items())
            ),
        )
        return RouterSignals(
            self.incarnation, uptime_s, {MODEL: replace(signals, **self.overrides)}, fleet
        )

    async def drain(
        self,
        worker_id: str,
        *,
        epoch: int = 0,
        reason: str = "",
        deadline_s: float = 300.0,
        scale_decision_id: str = "",
        leader_epoch: int = 0,
    ) -> Worker:
        self.fences_router.take(MODEL, leader_epoch)
        box = self.boxes.get(worker_id)
        if box is None or not box.alive:
            raise NotFound("worker", worker_id)
        self.drains.append(worker_id)
        if box.draining_s is None:
            box.state, box.draining_s = WorkerState.DRAINING, self.clock.now_s
        return self.worker(box)

    async def activate(self, worker_id: str, **how: Any) -> Worker:
        return self._tell(worker_id, "activate", how)

    async def flip(self, worker_id: str, *, role: Role, **how: Any) -> Worker:
        if self.boxes[worker_id].role is not role and not self.boxes[worker_id].told:
            self.boxes[worker_id].becomes = role
            self.boxes[worker_id].state = WorkerState.DRAINING
            self.boxes[worker_id].draining_s = self.clock.now_s
        return self._tell(worker_id, "flip", how)

    def _tell(self, worker_id: str, kind: str, how: dict[str, Any]) -> Worker:
        self.fences_router.take(MODEL, how["leader_epoch"])
        box = self.boxes.get(worker_id)
        if box is None or not box.alive:
            raise NotFound("worker", worker_id)
        self.words.append((kind, worker_id))
        waits = box.state in {WorkerState.STANDBY, WorkerState.DRAINING}
        if waits and not box.told and not self.deaf:
            box.told, box.told_s = kind, self.clock.now_s
        return self.worker(box)

    # ------------------------------------------------------------------ actuator

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        self.fences.take(MODEL, leader_epoch)
        why = self.refuse(order)
        if why:
            raise Refused("order", [why], "wait")
        if order.worker_id not in self.boxes:
            self.provisions.append(order)
            now_s = self.clock.now_s
            ready_s = now_s + self.t_ready_s(len(self.provisions))
            if self.hang(order):
                ready_s = now_s + 1e9
            self.boxes[order.worker_id] = Box(
                order,
                now_s,
                ready_s,
                kv=KvFormat(order.manifest_digest),
                dead_end=self.doom(order),
            )
        return self.instance(self.boxes[order.worker_id])

    async def release(
        self, worker_id: str, *, grace_s: float = 10.0, reason: str = "", leader_epoch: int = 0
    ) -> Instance:
        box = self.boxes.get(worker_id)
        if box is None:
            raise NotFound("worker", worker_id)
        self.fences.take(MODEL, leader_epoch)
        self.releases.append(worker_id)
        if box.alive and box.ends_s is None:
            box.ends_s = self.clock.now_s + self.grace_s
        return self.instance(box)

    async def list_instances(self, *, model: str = "", leader_epoch: int = 0) -> list[Instance]:
        self.fences.take(MODEL, leader_epoch)
        if self.actuator_away:
            raise Unavailable("actuator away", "wait")
        return [self.instance(b) for b in self.boxes.values()]

    def instance(self, box: Box) -> Instance:
        now_s = self.clock.now_s
        return Instance(
            order=box.order,
            state="running" if box.alive else ("failed" if box.failed else "exited"),
            allocated_ago_s=now_s - box.allocated_s,
            running_ago_s=now_s - box.allocated_s,
            exited_ago_s=None if box.exited_s is None else now_s - box.exited_s,
            exit_code=None if box.alive else (1 if box.failed else 0),
        )

    def add(self, role: Role, count: int, *, prefix: str = "x") -> None:
        """Workers that are ready from the start, ordered by nobody the planner knows."""
        for _ in range(count):
            name = f"{prefix}-{role[0]}-{len(self.boxes)}"
            order = Order(name, role, MODEL, "h200-slow10", DIGEST, 1, StartMode.JIT, "d0")
            now_s = self.clock.now_s
            self.boxes[name] = Box(order, now_s - 100, now_s - 90, WorkerState.READY)


def _bin(osl: float) -> int:
    edges = (0, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
    return max(i for i, edge in enumerate(edges) if edge <= osl)


def policy(**changes: Any) -> Policy:
    """The demo's policy with changes on top."""
    document: dict[str, Any] = {
        "model": MODEL,
        "manifest": DIGEST,
        "prefill": {"min": 1, "max": 6, "worker_class": "h200-slow10", "profile": "h200-slow10"},
        "decode": {"min": 1, "max": 4, "worker_class": "h200-slow10", "profile": "h200-slow10"},
        "tick_s": 1.0,
        "t_ready_prior": {"p50_s": 6.0, "p90_s": 10.0, "p99_s": 15.0},
        # Worlds of a test last minutes, and what they show does not hang on the defaults.
        "forecast": {"warmup_s": 10.0},
        "headroom": 0.1,
        "down": {"band": 0.1},
    }
    for name, value in changes.items():
        below = document.get(name)
        document[name] = {**below, **value} if isinstance(below, dict) else value
    return read_policy(document)


@dataclass
class Run:
    """A planner over a world, cranked tick by tick."""

    world: World
    service: PlannerService
    journal: MemoryJournal
    desired: list[tuple[float, int, int]] = field(default_factory=list)
    decisions: list[Any] = field(default_factory=list)

    async def step(self, seconds: float, *, tick_s: float = 1.0) -> None:
        """Advance; one tick every `tick_s`, the world in finer steps."""
        end_s = self.world.clock.now_s + seconds
        while self.world.clock.now_s < end_s - 1e-9:
            for _ in range(4):
                self.world.advance(tick_s / 4)
            decision = await self.service.tick()
            self.decisions.append(decision)
            for _ in range(6):
                await asyncio.sleep(0)
            t = self.world.clock.now_s - self.world.begun_s
            self.desired.append((t, decision.prefill.target, decision.decode.target))

    def between(self, start_s: float, end_s: float) -> list[tuple[int, int]]:
        return [(p, d) for t, p, d in self.desired if start_s <= t <= end_s]

    def codes(self, last: int = 1) -> set[str]:
        return {r.code for d in self.decisions[-last:] for r in d.why}


async def planner(
    world: World,
    wanted: Policy | None = None,
    *,
    brain: Brain = decide,
    journal: MemoryJournal | None = None,
    registry: Any = None,
    **upkeep: Any,
) -> Run:
    """A planner with memory stores that leads at once."""
    journal = journal or MemoryJournal()
    ids = iter(range(10**9))
    clock = world.clock
    service = PlannerService(
        policy=wanted or policy(),
        router=world,  # type: ignore[arg-type]
        actuator=world,
        registry=registry,
        journal=journal,
        leadership=Leadership(
            MemoryLeaseStore(clock.monotonic_s),
            name=MODEL,
            holder="one",
            ttl_s=10.0,
            now_s=clock.monotonic_s,
        ),
        clock=clock,
        make_id=lambda: f"{next(ids):06x}",
        upkeep=Upkeep(**upkeep),
        brain=brain,
    )
    await service.begin()
    return Run(world, service, journal)
