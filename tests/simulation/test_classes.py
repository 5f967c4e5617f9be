"""A brain may order another class than the policy's: its profile, its quota, its price."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from readyplane_lab.simulator.world_result import WorldResult
from readyplane_planner.decide import Decision, Memory, Plan
from readyplane_planner.signals import Observation
from tests.simulation.sim_world import Fixed, steady, world

FAST = {"h200": "h200-llama8b-fp8"}


class OfClass:
    """Orders what another brain orders, of one class and in one mode."""

    def __init__(
        self, worker_class: str, *steps: tuple[float, int, int], mode: str = "jit"
    ) -> None:
        self._class, self._mode = worker_class, mode
        self._brain = Fixed(*steps)

    def __call__(
        self,
        observation: Observation,
        plan: Plan,
        memory: Memory,
        *,
        now_s: float,
        decision_id: str,
    ) -> tuple[Decision, Memory]:
        decision, after = self._brain(
            observation, plan, memory, now_s=now_s, decision_id=decision_id
        )
        orders = tuple(
            replace(order, worker_class=self._class, mode=self._mode) for order in decision.orders
        )
        return replace(decision, orders=orders), after


def faster(**options: Any) -> WorldResult:
    brain = OfClass("h200", (0.0, 1, 1), (2.0, 3, 1))
    return world(brain, steady(4.0), initial=(1, 1), classes=FAST, **options)


def test_workers_of_another_class_serve_with_its_times_and_its_price() -> None:
    result = faster(prices={"h200": 3.0})
    added = [w for w in result.lives if w.decision_id]
    assert [(w.worker_class, w.price_per_gpu_hour) for w in added] == [("h200", 3.0)] * 2
    early = [r.ttft_s for r in result.records if r.at_s < 5.0 and r.ttft_s is not None]
    late = [r.ttft_s for r in result.records if r.at_s > 20.0 and r.ttft_s is not None]
    assert max(late) < 0.7 * max(early)  # ten times as fast at prefill, and one hand-over


def test_a_quota_holds_for_its_class_alone() -> None:
    result = faster(quota={"h200": 1, "h200-slow10": 1}, policy={"backoff_s": 1.0})
    assert len([w for w in result.lives if w.decision_id]) == 1
    assert result.counts["orders_refused"] >= 1
    assert len(result.lives) == 3  # the fleet of the beginning is there already


def test_a_class_without_a_profile_is_refused() -> None:
    result = world(OfClass("b300", (0.0, 2, 1)), steady(1.0), initial=(1, 1))
    assert len(result.lives) == 2
    assert result.counts["orders_refused"] >= 1


def test_an_eager_start_is_sooner_and_its_worker_slower() -> None:
    """R13.1: and the router takes it for what it is, so that its predictions hold."""
    ready_s: dict[str, float] = {}
    ttft_s: dict[str, float] = {}
    for mode in ("jit", "eager"):
        brain = OfClass("h200-slow10", (0.0, 1, 1), (2.0, 2, 1), mode=mode)
        result = world(brain, steady(2.0), initial=(1, 1))
        added = next(w for w in result.lives if w.decision_id)
        assert added.ready_s is not None
        ready_s[mode] = added.ready_s - added.allocated_s
        late = [r.ttft_s for r in result.records if r.at_s > 15.0 and r.ttft_s is not None]
        ttft_s[mode] = sum(late) / len(late)
    assert ready_s["eager"] < 0.8 * ready_s["jit"]
    assert ttft_s["eager"] > ttft_s["jit"]
