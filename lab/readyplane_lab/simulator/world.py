"""The simulated world: production router and planner over memory stores, everything else modelled.

Owns putting it together and running one workload through it. A world is deterministic: the same
workload, options and seed give the same result, in any process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from readyplane import profiles
from readyplane.core import convertible
from readyplane.core.errors import InvalidField, NotFound, Unavailable
from readyplane.core.profile import ClassProfile, LinkClass
from readyplane.core.startup import StartMode
from readyplane.core.work import Slo
from readyplane.core.worker import Holds, Role
from readyplane.kit.clock import cpu_s
from readyplane.ports import Order
from readyplane_lab.simulator import invariants
from readyplane_lab.simulator.actuator import SimActuator
from readyplane_lab.simulator.artifact import Artifacts
from readyplane_lab.simulator.directives import Directive
from readyplane_lab.simulator.faults import Fault
from readyplane_lab.simulator.gateway import SimGateway
from readyplane_lab.simulator.ledger import Ledger
from readyplane_lab.simulator.loop import VirtualClock, VirtualLoop, run_virtual
from readyplane_lab.simulator.nodes import Nodes
from readyplane_lab.simulator.router import SimRouter
from readyplane_lab.simulator.script import Mishaps, Script, Stage
from readyplane_lab.simulator.site import BLOCK_SIZE, Begin, Site
from readyplane_lab.simulator.sources import WeightSources
from readyplane_lab.simulator.startup import Draws, StartUpModel
from readyplane_lab.simulator.telemetry import SteppedClock, Telemetry
from readyplane_lab.simulator.unmodelled import refuse_unmodelled
from readyplane_lab.simulator.watch import Witness
from readyplane_lab.simulator.worker import SimWorker
from readyplane_lab.simulator.world_result import (
    WorldResult,
    columns_of,
    from_zero,
    lives_of,
    row_of,
)
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_planner.decide import decide
from readyplane_planner.decide.follow import Brain
from readyplane_planner.journal import MemoryJournal
from readyplane_planner.leadership import Leadership, MemoryLeaseStore
from readyplane_planner.policy import PoolPolicy, read_policy
from readyplane_planner.service import PlannerService
from readyplane_router.epochs import MemoryEpochs
from readyplane_router.pair import PairPolicy
from readyplane_router.policy import RouterPolicy
from readyplane_router.store import MemoryStore

SAMPLE_EVERY_S = 5.0
SWEEP_EVERY_S = 5.0
READY_WITHIN_S = 86_400.0
LEADS_FOR_S = 10.0
DECISIONS_MAX = 10_000
POLL_S = 0.1
LINK = LinkClass("rdma-400g", 50e9, 0.002)


@dataclass(frozen=True, slots=True)
class WorldOptions:
    """What is simulated.

    Attributes:
        policy: planner policy document. seed: of start-ups. startup: how starts take time.
        link: between prefill and decode workers. brain: plans in place of the planner's own.
        initial: (prefill, decode) workers that are ready before the first request arrives and that
            no decision ordered; None: the planner begins with nothing, and the first request
            arrives when there is a pair.
        block_size: tokens of a KV block.
        classes: profiles of worker classes besides the policy's two, for brains that order them.
        quota: GPUs of a worker class that may be held at once. nodes: machines and their GPUs; none
            gives every worker a machine of its own. prices: per GPU-hour, where they
            are not the policy's or the profile's.
        faults, directives: what happens at which moment. standbys: (prefill, decode) workers that
            are loaded at the first arrival and wait to be activated; only with `initial`.
        record: False keeps neither series nor documents of decisions.
        moves: requests on a worker that drains go on at another one, as a gateway moves them.
    """

    policy: Mapping[str, Any]
    seed: int = 1
    startup: StartUpModel = field(default_factory=StartUpModel)
    link: LinkClass = LINK
    brain: Brain | None = None
    initial: tuple[int, int] | None = None
    block_size: int = BLOCK_SIZE
    faults: tuple[Fault, ...] = ()
    classes: Mapping[str, str] = field(default_factory=dict)
    quota: Mapping[str, int] = field(default_factory=dict)
    nodes: Mapping[str, int] = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)
    directives: tuple[Directive, ...] = ()
    standbys: tuple[int, int] = (0, 0)
    record: bool = True
    moves: bool = False


class World:
    """One run's world. Use `run_world`."""

    def __init__(self, options: WorldOptions, loop: VirtualLoop) -> None:
        self.options = options
        self.clock = VirtualClock(loop)
        self.policy = read_policy(options.policy)
        refuse_unmodelled(self.policy)
        self.artifacts = Artifacts(self.policy.model)
        self.slo = Slo(self.policy.slo.ttft_s, self.policy.slo.tpot_s)
        self.classes = _classes(self.policy.prefill, self.policy.decode, options.classes)
        self.told = {name: self._told(profile) for name, profile in self.classes.items()}
        self.ledger = Ledger(self.clock)
        self.telemetry = Telemetry(self.clock)
        self.wall = SteppedClock(self.clock)
        self.mishaps = Mishaps()
        self.sources = WeightSources(options.startup, clock=self.clock)
        self.sources.on_death = self._source_died
        self.nodes = Nodes(
            options.nodes, options.startup, gpus_of=lambda name: self.classes[name].gpus
        )
        self.artifacts.way = self.nodes.way
        self.actuator = SimActuator(
            self.spawn, clock=self.clock, quota=options.quota, nodes=self.nodes
        )
        self.router = SimRouter(
            telemetry=self.telemetry,
            on_drain=self._drains,
            store=MemoryStore(self.clock),
            epochs=MemoryEpochs(),
            clock=self.clock,
            registry=self.artifacts,
            profiles={p.name: p for p in (*self.classes.values(), *self.told.values())},
            incarnation="router-0",
            policy=RouterPolicy(pair=PairPolicy(slo=self.slo)),
        )
        self._site = Site(
            router=self.router,
            artifacts=self.artifacts,
            startup=options.startup,
            sources=self.sources,
            nodes=self.nodes,
            draws=Draws(options.seed),
            clock=self.clock,
            mishap=self.mishaps.take,
            block_size=options.block_size,
        )
        self.witness = Witness(options.brain or decide, cpu_s=cpu_s, on_tick=self._ticked)
        self._journal = MemoryJournal()
        self._leases = MemoryLeaseStore(self.clock.monotonic_s)
        self._ids = itertools.count()
        self._holders = itertools.count()
        self.planner = self._planner()
        self.gateway = SimGateway(
            self.router,
            self.actuator.living,
            model=self.policy.model,
            slo=self.slo,
            link=options.link,
            kv_bytes_per_token=self.classes[self.policy.prefill.worker_class].kv_bytes_per_token,
            clock=self.clock,
            block_size=options.block_size,
            tells_pace=any(getattr(f, "slowness", 1.0) != 1.0 for f in options.faults),
            mover=self.router if options.moves else None,
        )
        self._broken: asyncio.Future[Any] = loop.create_future()
        self._tasks: list[asyncio.Task[Any]] = []
        self._planning: asyncio.Task[None] | None = None
        self._starts: Counter[tuple[object, ...]] = Counter()
        self._rows: list[dict[str, Any]] = []
        self._swept_s = -math.inf
        loop.set_exception_handler(lambda _loop, context: self._break(context.get("exception")))

    # ------------------------------------------------------------------ parts

    def _planner(self) -> PlannerService:
        return PlannerService(
            policy=self.policy,
            router=self.router,
            actuator=self.actuator,
            registry=self.artifacts,
            journal=self._journal,
            leadership=Leadership(
                self._leases,
                name=self.policy.model,
                holder=f"planner-{next(self._holders)}",
                ttl_s=LEADS_FOR_S,
                now_s=self.clock.monotonic_s,
            ),
            clock=self.wall,
            make_id=lambda: f"{next(self._ids):06x}",
            brain=self.witness,
        )

    def spawn(self, order: Order, how: Begin = Begin.COLD) -> SimWorker:
        """Allocate one worker; asked by the actuator."""
        if order.worker_class not in self.classes:
            remedy = f"name its profile in WorldOptions.classes; known: {', '.join(self.classes)}"
            raise NotFound("worker class", order.worker_class, remedy)
        known = self.classes[order.worker_class]
        profile = self.artifacts.run_by(known, order.manifest_digest)
        if order.mode is StartMode.EAGER:
            profile = profile.eager
        takes_both = order.convertible_tpot_s > 0
        # Only such starts count among those of their pool: they are what all policies have.
        plain = how in (Begin.COLD, Begin.FIRST)
        kind = (str(order.role),) if plain else (str(order.role), str(how))
        self._starts[kind] += 1
        worker = SimWorker(
            order,
            site=self._site,
            profile=convertible.engine_profile(profile) if takes_both else profile,
            told=self.told[order.worker_class] if takes_both else known,
            role=Role.BOTH if takes_both else order.role,
            start=(*kind, self._starts[kind]),
            account=self.ledger.open(str(order.role), profile.gpus),
            reopen=lambda pool: self.ledger.open(pool, profile.gpus),
            begin=how,
            on_released=self.actuator.ended,
        )
        worker.task.add_done_callback(self._over)
        return worker

    def _told(self, profile: ClassProfile) -> ClassProfile:
        return convertible.told_profile(profile, tpot_s=self.slo.tpot_s)

    def _drains(self, worker_id: str) -> None:
        worker = self.actuator.living.get(worker_id)
        if worker is not None:
            worker.told_to_drain()

    def _source_died(self, worker_id: str) -> None:
        worker = self.actuator.living.get(worker_id)
        if worker is not None:
            worker.crash("died while giving its weights")

    def order(self, worker_id: str, role: Role) -> Order:
        """An order of a worker that no decision asks for."""
        pool = self.policy.prefill if role is Role.PREFILL else self.policy.decode
        return Order(
            worker_id=worker_id,
            role=role,
            model=self.policy.model,
            worker_class=pool.worker_class,
            manifest_digest=self.artifacts.newest.digest,
            mode=StartMode.JIT
            if self.policy.start_mode == "auto"
            else StartMode(self.policy.start_mode),
            convertible_tpot_s=self._convertible_tpot_s if role is Role.DECODE else 0.0,
            holds=Holds(pool.standby_holds),
            graph_stages=self.policy.graph_stages and self.policy.start_mode != "eager",
        )

    @property
    def _convertible_tpot_s(self) -> float:
        return self.slo.tpot_s if self.policy.decode.convertible else 0.0

    # ------------------------------------------------------------------ running

    async def run(self, requests: Sequence[WorkloadRequest]) -> WorldResult:
        """From nothing to the last record; the first request arrives when its workers are ready.

        Raises:
            Broken: an invariant does not hold. Whatever else broke inside.
        """
        playing = asyncio.get_running_loop().create_task(self._play(requests))
        either: set[asyncio.Future[Any]] = {playing, self._broken}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._broken.done():
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            self._broken.result()
        self._broken.cancel()
        return playing.result()

    async def _play(self, requests: Sequence[WorkloadRequest]) -> WorldResult:
        async with self._services():
            began_s, began_wall_s = self.clock.monotonic_s(), self.clock.wall_s()
            self.ledger.bill(began_s, began_s + requests[-1].at_s)
            self._beside(began_s)
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    await self.clock.sleep(began_s + request.at_s - self.clock.monotonic_s())
                    group.create_task(self.gateway.serve(request)).add_done_callback(self._over)
            ended_s = self.clock.monotonic_s()
            decisions = await self._decisions()
        records = tuple(sorted(self.gateway.records, key=lambda r: r.index))
        invariants.each_request_ended_once(records, requests)
        self._sweep()
        offered = (*self.policy.prefill.classes, *self.policy.decode.classes)
        named = {c.worker_class: c.price for c in offered if c.price is not None}
        prices = {**named, **self.options.prices}
        return WorldResult(
            records=records,
            asked=tuple(r.osl for r in sorted(requests, key=lambda r: r.index)),
            lives=tuple(
                life
                for w in self.actuator.everyone.values()
                for life in lives_of(w, prices=prices, began_s=began_s, ended_s=ended_s)
            ),
            decisions=decisions,
            series=columns_of(self._rows),
            targets=from_zero(self.witness.targets, began_s),
            counts=self._counts(),
            seconds=ended_s - began_s,
            began_wall_s=began_wall_s,
            planner_s=tuple(self.witness.thought_s),
        )

    def _beside(self, began_s: float) -> None:
        """Begin what goes on beside the requests."""
        stage = Stage(
            clock=self.clock,
            wall=self.wall,
            actuator=self.actuator,
            router=self.router,
            sources=self.sources,
            telemetry=self.telemetry,
            mishaps=self.mishaps,
            artifacts=self.artifacts,
            restart=self._restart_planner,
            order=self.order,
        )
        script = Script(stage)
        for event in (*self.options.faults, *self.options.directives):
            self._start(script.play(event, began_s=began_s))
        if self.options.record:
            self._start(self._sampling(began_s))

    @contextlib.asynccontextmanager
    async def _services(self) -> AsyncIterator[None]:
        """Router, planner and the workers of the beginning; all ready inside."""
        await self.router.start()
        self._start(self.router.run())
        try:
            if self.options.initial is None:
                self._plan()
                await self._first_pair()
            else:
                await self._first_fleet(self.options.initial)
                # Only now: nobody shall cancel a start before there is any demand to judge it by.
                self._plan()
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.gather(*(w.release() for w in list(self.actuator.living.values())))

    def _plan(self) -> None:
        self._planning = self._start(self.planner.run())

    async def _restart_planner(self, after_s: float) -> None:
        """The planner is gone without a word; another begins, once the lease has run out."""
        if self._planning is not None:
            self._planning.cancel()
            await asyncio.gather(self._planning, return_exceptions=True)
        await self.clock.sleep(after_s)
        self.planner = self._planner()
        self._plan()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside the rest; if it breaks, the run is over."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._over)
        self._tasks.append(task)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException | None) -> None:
        if error is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _first_pair(self) -> None:
        def roles() -> set[Role]:
            living = self.actuator.living.values()
            return {w.order.role for w in living if w.ready_s is not None}

        deadline_s = self.clock.monotonic_s() + READY_WITHIN_S
        while not roles() >= {Role.PREFILL, Role.DECODE}:
            await self._await_ready(deadline_s)

    async def _first_fleet(self, initial: tuple[int, int]) -> None:
        pools = zip((Role.PREFILL, Role.DECODE), initial, self.options.standbys, strict=True)
        workers = []
        for role, count, standbys in pools:
            for what, how, many in (
                ("first", Begin.FIRST, count),
                ("standby", Begin.STANDBY, standbys),
            ):
                for number in range(many):
                    order = self.order(
                        f"{role.value[0]}-{what}-{chr(97 + number % 26)}{number}", role
                    )
                    order = replace(order, standby=how is Begin.STANDBY)
                    workers.append(self.actuator.begin(order, how))
        deadline_s = self.clock.monotonic_s() + READY_WITHIN_S
        while any(w.ready_s is None and not w.waits for w in workers):
            lost = any(w.released_s is not None for w in workers)
            await self._await_ready(0.0 if lost else deadline_s)

    async def _await_ready(self, deadline_s: float) -> None:
        if self.clock.monotonic_s() > deadline_s:
            everyone = self.actuator.everyone.values()
            failures = {w.order.worker_id: w.failure for w in everyone if w.failure}
            why = f"starts failed: {failures or 'none'}"
            raise NotFound("ready pair", self.policy.model, why)
        await self.clock.sleep(POLL_S)

    # ------------------------------------------------------------------ watching

    def _ticked(self) -> None:
        """The planner has decided; what must hold is looked at, not too often."""
        if self.clock.monotonic_s() - self._swept_s >= SWEEP_EVERY_S:
            self._sweep()

    def _sweep(self) -> None:
        now_s = self._swept_s = self.clock.monotonic_s()
        for desk in self.router.desks.values():
            invariants.seats_are_booked_once(desk)
        for worker_id, worker in self.actuator.living.items():
            invariants.engine_is_sound(worker_id, worker.engine)
        held = (
            (w.account.gpus, w.born_s, now_s if w.released_s is None else w.released_s)
            for w in self.actuator.everyone.values()
        )
        invariants.bill_adds_up(self.ledger.total(), held, self.ledger.window)

    async def _sampling(self, began_s: float) -> None:
        while True:
            with contextlib.suppress(Unavailable):  # the planner has not looked yet
                state = await self.planner.state(self.policy.model)
                t_s = self.clock.monotonic_s() - began_s
                self._rows.append({"t_s": t_s, "open": self.gateway.open, **row_of(state)})
            await self.clock.sleep(SAMPLE_EVERY_S)

    async def _decisions(self) -> tuple[dict[str, Any], ...]:
        if not self.options.record:
            return ()
        found = await self.planner.list_decisions(
            model=self.policy.model, limit=DECISIONS_MAX, changes_only=True
        )
        return tuple(found)

    def _counts(self) -> dict[str, float]:
        engines = [w.engine.model.stats() for w in self.actuator.everyone.values()]
        booked = self.ledger.booked().items()
        members = self.router.members.counts
        return {
            "decisions": len(self.witness.thought_s),
            "fallbacks": self.witness.fallbacks,
            "guard_overrides": self.witness.overrides.total(),
            "leases_expired": members["expired"],
            "orders_refused": self.actuator.refused,
            "preemptions": sum(e.preemptions_total for e in engines),
            "repairs": sum(r.repaired for r in self.gateway.records),
            **{f"gpu_s.{pool}.{part}": seconds for (pool, part), seconds in booked},
            **{f"sources.{name}": count for name, count in sorted(self.sources.counts.items())},
        }


def run_world(options: WorldOptions, requests: Sequence[WorkloadRequest]) -> WorldResult:
    """Simulate one workload from beginning to end.

    Raises:
        InvalidField: no requests.
    """
    if not requests:
        raise InvalidField("requests", 0, "give a workload with at least one request")
    loop = VirtualLoop()
    try:
        world = World(options, loop)
    except BaseException:
        loop.close()
        raise
    return run_virtual(world.run(requests), loop=loop)


def _classes(
    prefill: PoolPolicy, decode: PoolPolicy, more: Mapping[str, str]
) -> dict[str, ClassProfile]:
    """Profile of each worker class that may be ordered."""
    offered = {c.worker_class: c.profile for c in (*prefill.classes, *decode.classes)}
    both = {prefill.worker_class: prefill.profile, decode.worker_class: decode.profile}
    names = {**more, **offered, **both}
    return {name: profiles.load(profile) for name, profile in sorted(names.items())}
