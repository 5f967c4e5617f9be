"""Routers that the one which is asked does not hear: their part is not known, and nothing shrinks."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import generate_latest

from readyplane.kit.telemetry import Metrics
from readyplane.ports import RouterSignals
from readyplane_planner.metrics import PlannerMetrics
from tests.unit.planner_world import MODEL, HandClock, World, planner


class Others(World):
    """A world whose router may not hear of some others."""

    missing = 0

    async def signals(self, model: str = "", *, leader_epoch: int = 0) -> RouterSignals:
        found = await super().signals(model, leader_epoch=leader_epoch)
        return replace(found, routers_missing=self.missing)


async def test_while_other_routers_are_not_heard_the_pools_grow_and_do_not_shrink() -> None:
    made = Others(HandClock(), rps=lambda t: 6.0 if t < 60 else 0.2 if t < 120 else 9.0)
    run = await planner(made)
    registry = Metrics()
    run.service._metrics = PlannerMetrics(registry)
    await run.step(60)
    assert "routers" not in run.decisions[-1].signals
    before = run.desired[-1][1:]
    made.missing = 1
    await run.step(60)
    assert run.desired[-1][1:] == before
    assert "1 other routers are not heard" in run.decisions[-1].degraded
    assert "partial_data" in run.codes(30)
    await run.step(60)
    assert sum(run.desired[-1][1:]) > sum(before), "what is known to come is served"
    unknown = {"model": MODEL, "signal": "routers"}
    assert registry.get_sample_value("readyplane_signal_unknown", unknown) == 1.0
    made.missing, made.rps = 0, lambda _t: 0.2
    await run.step(150)
    assert sum(run.desired[-1][1:]) < sum(before)
    assert 'signal="routers"' not in generate_latest(registry).decode()
