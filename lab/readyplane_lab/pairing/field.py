"""A fixed fleet on virtual time, and one workload played on it under one rule of pairing.

Owns putting router, workers, links and gateway together without a planner: the fleet never changes,
so that nothing but the choice of pairs can differ. A play is deterministic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from readyplane import profiles
from readyplane.core.errors import InvalidField
from readyplane.core.profile import ClassProfile, LinkClass
from readyplane.core.work import Slo
from readyplane.core.worker import Role
from readyplane.ports import Order
from readyplane_lab.pairing.rivals import Rule, RuledRouter
from readyplane_lab.simulator.artifact import Artifacts
from readyplane_lab.simulator.gateway import Record, SimGateway
from readyplane_lab.simulator.ledger import Ledger
from readyplane_lab.simulator.links import SharedLinks
from readyplane_lab.simulator.loop import VirtualClock, VirtualLoop, run_virtual
from readyplane_lab.simulator.nodes import Nodes
from readyplane_lab.simulator.site import Begin, Site
from readyplane_lab.simulator.sources import WeightSources
from readyplane_lab.simulator.startup import Draws, StartUpModel
from readyplane_lab.simulator.telemetry import Telemetry
from readyplane_lab.simulator.worker import SimWorker
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_router.epochs import MemoryEpochs
from readyplane_router.pair import PairPolicy
from readyplane_router.policy import RouterPolicy
from readyplane_router.store import MemoryStore

MODEL = "pairing"
BLOCK_SIZE = 64
START_S = 30.0
READY_WITHIN_S = 3600.0


@dataclass(frozen=True, slots=True)
class Place:
    """One worker of the fleet: what it does, the profile of its class, the machine it is on."""

    role: Role
    profile: str
    node: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers and what lies between them.

    Attributes:
        near, far: links within a machine and between machines.
    """

    places: tuple[Place, ...]
    near: LinkClass
    far: LinkClass
    slo: Slo


def play(
    fleet: Fleet, requests: Sequence[WorkloadRequest], rule: Rule | None
) -> tuple[Record, ...]:
    """Play a workload; `rule` None is the router's own choice.

    Raises:
        InvalidField: no requests. RuntimeError: a worker of the fleet did not come up.
    """
    if not requests:
        raise InvalidField("requests", 0, "give a workload with at least one request")
    loop = VirtualLoop()
    return run_virtual(_play(fleet, requests, rule, loop), loop=loop)


async def _play(
    fleet: Fleet, requests: Sequence[WorkloadRequest], rule: Rule | None, loop: VirtualLoop
) -> tuple[Record, ...]:
    clock = VirtualClock(loop)
    artifacts = Artifacts(MODEL)
    classes = {name: profiles.load(name) for name in sorted({p.profile for p in fleet.places})}
    router = RuledRouter(
        rule=rule,
        telemetry=Telemetry(clock),
        on_drain=lambda _worker_id: None,
        store=MemoryStore(clock),
        epochs=MemoryEpochs(),
        clock=clock,
        registry=artifacts,
        profiles={p.name: p for p in classes.values()},
        incarnation="router-0",
        policy=RouterPolicy(
            pair=PairPolicy(slo=fleet.slo, local_link=fleet.near, network_link=fleet.far)
        ),
    )
    await router.start()
    tasks = [asyncio.create_task(router.run())]
    startup = StartUpModel(sigma=0.0, weight_bytes=1.0).scaled_to(START_S)
    ledger, workers = Ledger(clock), dict[str, SimWorker]()
    machines = {p.node: sum(classes[q.profile].gpus for q in fleet.places) for p in fleet.places}
    nodes = Nodes(machines, startup, gpus_of=lambda name: _by_class(classes, name))
    site = Site(
        router=router,
        artifacts=artifacts,
        startup=startup,
        sources=WeightSources(startup, clock=clock),
        nodes=nodes,
        draws=Draws(1),
        clock=clock,
        block_size=BLOCK_SIZE,
    )
    for number, place in enumerate(fleet.places):
        profile = classes[place.profile]
        order = Order(
            f"{place.role.value[0]}{number}",
            place.role,
            MODEL,
            profile.worker_class,
            artifacts.newest.digest,
            node_preference=(place.node,),
        )
        nodes.take(order)
        workers[order.worker_id] = SimWorker(
            order,
            site=site,
            profile=profile,
            role=place.role,
            start=(str(place.role), number),
            account=ledger.open(str(place.role), profile.gpus),
            reopen=lambda pool, gpus=profile.gpus: ledger.open(pool, gpus),  # type: ignore[misc]
            begin=Begin.FIRST,
            on_released=lambda _worker: None,
        )
    gateway = SimGateway(
        router,
        workers,
        model=MODEL,
        slo=fleet.slo,
        link=fleet.far,
        kv_bytes_per_token=max(p.kv_bytes_per_token for p in classes.values()),
        clock=clock,
        block_size=BLOCK_SIZE,
        links=SharedLinks(fleet.far, clock, near=fleet.near, node_of=nodes.of),
    )
    try:
        while any(w.ready_s is None for w in workers.values()):
            failures = {w.order.worker_id: w.failure for w in workers.values() if w.failure}
            if failures or clock.monotonic_s() > READY_WITHIN_S:
                raise RuntimeError(f"the fleet did not come up: {failures}")
            await clock.sleep(1.0)
        began_s = clock.monotonic_s()
        async with asyncio.TaskGroup() as group:
            for request in requests:
                await clock.sleep(began_s + request.at_s - clock.monotonic_s())
                group.create_task(gateway.serve(request))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(w.release() for w in workers.values()))
    return tuple(sorted(gateway.records, key=lambda r: r.index))


def _by_class(classes: Mapping[str, ClassProfile], worker_class: str) -> int:
    return next(p.gpus for p in classes.values() if p.worker_class == worker_class)
