"""A planner without an actuator advises: it plans, shows and explains, and changes nothing."""

from __future__ import annotations

from readyplane.core.startup import StartMode
from readyplane.core.worker import Role, WorkerState
from readyplane.kit.telemetry import Metrics
from readyplane.ports import Order
from readyplane_planner.actuators import ADVISED, ADVISORY
from readyplane_planner.journal import MemoryJournal
from readyplane_planner.leadership import Leadership, MemoryLeaseStore
from readyplane_planner.metrics import PlannerMetrics
from readyplane_planner.service import PlannerService
from tests.unit.planner_world import DIGEST, MODEL, Box, HandClock, Run, World, planner, policy


async def advisory(world: World, registry: Metrics) -> Run:
    journal, ids, clock = MemoryJournal(), iter(range(10**9)), world.clock
    leases = MemoryLeaseStore(clock.monotonic_s)
    service = PlannerService(
        policy=policy(),
        router=world,  # type: ignore[arg-type]
        actuator=None,
        registry=None,
        journal=journal,
        leadership=Leadership(
            leases, name=MODEL, holder="one", ttl_s=10.0, now_s=clock.monotonic_s
        ),
        clock=clock,
        make_id=lambda: f"{next(ids):06x}",
        metrics=PlannerMetrics(registry),
    )
    await service.begin()
    return Run(world, service, journal)


def stand(world: World, role: Role, count: int) -> None:
    """Workers that somebody else started."""
    for number in range(count):
        order = Order(
            worker_id=f"{role}-{number}",
            role=role,
            model=MODEL,
            worker_class="h200-slow10",
            manifest_digest=DIGEST,
            generation=1,
            mode=StartMode.JIT,
            scale_decision_id="",
        )
        now_s = world.clock.now_s
        world.boxes[order.worker_id] = Box(order, now_s, now_s, WorkerState.READY)


async def test_it_wants_more_and_orders_nothing() -> None:
    """B35: an order that nobody took is an outcome with its reason, not a belief."""
    registry = Metrics()
    world = World(HandClock(), rps=lambda _t: 7.0)
    stand(world, Role.PREFILL, 1)
    stand(world, Role.DECODE, 1)
    run = await advisory(world, registry)
    await run.step(60)
    state = await run.service.state()
    pools = state["pools"]
    assert pools["prefill"]["desired"] > pools["prefill"]["ready"] == 1
    assert pools["decode"]["desired"] > pools["decode"]["ready"] == 1
    assert ADVISORY in state["degraded"]
    assert (world.provisions, world.drains, world.releases) == ([], [], [])
    refused = registry.get_sample_value(
        "readyplane_actuations_total", {"model": MODEL, "outcome": "refused"}
    )
    decisions = await run.service.list_decisions(limit=200, changes_only=True)
    assert refused and refused >= 2
    assert len(decisions) < 15, "refused orders are repeated with back-off"
    told = await run.service.explain(decisions[0]["decision_id"])
    assert told["decision"]["reasons"]


async def test_it_wants_fewer_and_drains_nothing() -> None:
    world = World(HandClock(), rps=lambda _t: 0.5)
    stand(world, Role.PREFILL, 3)
    stand(world, Role.DECODE, 3)
    run = await advisory(world, Metrics())
    await run.step(400)
    pools = (await run.service.state())["pools"]
    assert (pools["prefill"]["desired"], pools["decode"]["desired"]) == (1, 1)
    assert (pools["prefill"]["ready"], pools["decode"]["ready"]) == (3, 3)
    assert (world.drains, world.releases) == ([], [])
    assert all(b.state is WorkerState.READY for b in world.boxes.values())


async def test_rates_and_targets_are_exported_beside_the_counts() -> None:
    """R1.1, R1.4: desired - ready is the gap, in tokens/s as well; a panel can draw the target."""
    registry = Metrics()
    world = World(HandClock(), rps=lambda _t: 7.0)
    stand(world, Role.PREFILL, 2)
    stand(world, Role.DECODE, 2)
    run = await advisory(world, registry)
    await run.step(40)
    state = await run.service.state()
    for pool, target_s in (("prefill", 2.0), ("decode", 0.1)):
        labels = {"pool": pool, "worker_class": "h200-slow10", "model": MODEL}
        for what in ("desired", "provisioned", "ready"):
            value = registry.get_sample_value(f"readyplane_{what}_tokens_per_second", labels)
            assert value == state["pools"][pool][f"{what}_rate"]
        assert registry.get_sample_value("readyplane_slo_target_seconds", labels) == target_s


async def test_by_policy_it_decides_and_records_and_orders_nothing() -> None:
    """With an actuator that would obey; the fleet is somebody else's until the mode is left."""
    world = World(HandClock(), rps=lambda _t: 7.0)
    stand(world, Role.PREFILL, 1)
    stand(world, Role.DECODE, 1)
    run = await planner(world, policy(advisory=True))
    await run.step(60)
    state = await run.service.state()
    assert ADVISED in state["degraded"]
    assert state["pools"]["prefill"]["desired"] > state["pools"]["prefill"]["ready"] == 1
    assert (world.provisions, world.drains, world.releases) == ([], [], [])
    listed = await run.service.list_decisions(limit=200, changes_only=True)
    assert listed and any(d["orders"] for d in listed)
    told = await run.service.explain(next(d["decision_id"] for d in listed if d["orders"]))
    assert "advisory: by policy.advisory" in told["text"]
    await run.service.set_policy({"advisory": False}, merge=True)
    await run.step(60)
    assert world.provisions, "now it acts"
    assert ADVISED not in (await run.service.state())["degraded"]


async def test_what_was_only_advised_to_drain_is_not_drained_when_the_mode_is_left() -> None:
    load = [0.5]
    world = World(HandClock(), rps=lambda _t: load[0])
    stand(world, Role.PREFILL, 3)
    stand(world, Role.DECODE, 3)
    run = await planner(world, policy(advisory=True))
    await run.step(120)
    listed = await run.service.list_decisions(limit=200, changes_only=True)
    assert any(d["drains"] for d in listed) and world.drains == []
    load[0] = 9.0
    await run.step(10)
    await run.service.set_policy({"advisory": False}, merge=True)
    await run.step(3)
    assert world.drains == [], "nobody is drained for what was advised before the load came"
