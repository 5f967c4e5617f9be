"""An actuator that cannot be relied on, and an optimiser that is an adversary, over many short seeds.

Orders and releases are denied, lost, answered late, twice or not at all, or taken and never placed. The
invariants of the world are on; on top of them every allocation is compared with what was decided.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

from readyplane.core.errors import Refused, Unavailable
from readyplane.core.worker import Role
from readyplane.ports import Instance, Order
from readyplane_lab.simulator import faults
from readyplane_lab.simulator import world as simulated
from readyplane_lab.simulator.actuator import SimActuator
from readyplane_lab.simulator.startup import StartUpModel
from readyplane_lab.simulator.world_result import WorldResult
from readyplane_planner.decide import decide
from tests.simulation.sim_world import Fixed, steady, world
from tests.unit.test_planner_optimisers import Adversary

SPAN_S = 60.0
CALM_S = 30.0
"""From then on the line is good, so that a run can end in order."""
POLICY = {
    "up": {"cooldown_s": 1.0},
    "down": {"cooldown_s": 10.0, "hold_s": 5.0},
    "min_ready_s": 2.0,
    "backoff_s": 1.0,
    "orphan_s": 8.0,
    "drain_deadline_s": 30.0,
}


class Unreliable(SimActuator):
    """Calls that are slow, denied, lost on the way, or whose answers are lost, and some made twice."""

    seed = 0
    tried: Counter[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._random = np.random.Generator(np.random.Philox(key=self.seed))
        self._began_s = self._clock.monotonic_s()
        type(self).tried = Counter()

    def _trick(self) -> str:
        if self._clock.monotonic_s() - self._began_s > CALM_S:
            return "well"
        kinds = ("well", "slow", "denied", "lost", "no answer", "twice")
        kind = str(self._random.choice(kinds, p=(0.3, 0.14, 0.14, 0.14, 0.14, 0.14)))
        self.tried[kind] += 1
        return kind

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        trick = self._trick()
        if trick == "denied":
            raise Refused(f"order of {order.worker_id}", ["no capacity"], "ask again later")
        if trick == "lost":
            raise Unavailable("the order was lost", "call again")
        if trick == "slow":
            await self._clock.sleep(float(self._random.uniform(1.0, 14.0)))
        instance = await super().provision(order, leader_epoch=leader_epoch)
        if trick == "twice":
            instance = await super().provision(order, leader_epoch=leader_epoch)
        if trick == "no answer":
            raise Unavailable("the answer was lost", "call again")
        return instance

    async def release(
        self, worker_id: str, *, grace_s: float = 10.0, reason: str = "", leader_epoch: int = 0
    ) -> Instance:
        trick = self._trick()
        if trick in {"denied", "lost"}:
            raise Unavailable("the release was lost", "call again")
        if trick == "slow":
            await self._clock.sleep(float(self._random.uniform(1.0, 10.0)))
        instance = await super().release(
            worker_id, grace_s=grace_s, reason=reason, leader_epoch=leader_epoch
        )
        if trick == "no answer":
            raise Unavailable("the answer was lost", "call again")
        return instance

    async def list_instances(self, *, model: str = "", leader_epoch: int = 0) -> list[Instance]:
        if self._trick() == "lost":
            raise Unavailable("the list was lost", "call again")
        return await super().list_instances(model=model, leader_epoch=leader_epoch)


def played(
    seed: int, monkeypatch: pytest.MonkeyPatch, brain: Any, *more: faults.Fault
) -> WorldResult:
    monkeypatch.setattr(Unreliable, "seed", seed)
    monkeypatch.setattr(simulated, "SimActuator", Unreliable)
    return world(
        brain,
        steady(2.0, SPAN_S, seed),
        policy=POLICY,
        seed=seed,
        startup=StartUpModel(cached_share=0.5, compiled_share=0.5),
        faults=more,
        record=True,
    )


def audit(result: WorldResult) -> None:
    """What was allocated against what was decided."""
    asked = Counter(o["worker_id"] for d in result.decisions for o in d["orders"])
    allocated = Counter(w.worker_id for w in result.lives if w.decision_id)
    assert set(asked.values()) <= {1}, "a name is ordered once"
    assert set(allocated.values()) <= {1}, "and allocated once"
    assert set(allocated) <= set(asked), "and never without an order"


@pytest.mark.parametrize("seed", range(1, 9))
def test_an_actuator_that_cannot_be_relied_on(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ((0.0, 2, 2), (3.0, 4, 3), (15.0, 3, 2), (22.0, 5, 3), (40.0, 2, 2))
    more: tuple[faults.Fault, ...] = (
        faults.StartsHang(4.0, Role.PREFILL),
        *((faults.QuotaDenied(3.0, 10.0, 1, Role.PREFILL),) if seed % 3 == 0 else ()),
        *((faults.PlannerRestart(8.0 + seed, 4.0),) if seed % 2 else ()),
    )
    brain = Fixed(*steps) if seed % 4 else None
    result = played(seed, monkeypatch, brain, *more)
    audit(result)
    assert sum(Unreliable.tried.values()) > 10
    assert {r.outcome for r in result.records} <= {"finished", "refused", "timed_out", "failed"}
    assert sum(r.outcome == "finished" for r in result.records) > 0.9 * len(result.records)
    end_s = max(w.released_s for w in result.lives)
    left = Counter(w.pool for w in result.lives if w.released_s >= end_s - 1e-6)
    if brain is not None:
        want = result.targets[-1][1:]
        assert (left["prefill"], left["decode"]) == tuple(want), "nobody is left behind"


@pytest.mark.parametrize("seed", range(1, 6))
def test_an_adversary_and_an_unreliable_actuator(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R23.2: with everything against it the planner stays live, and inside its bounds."""
    brain = partial(decide, optimiser=Adversary(seed))
    result = played(seed, monkeypatch, brain, faults.PlannerRestart(12.0, 3.0))
    audit(result)
    assert sum(r.outcome == "finished" for r in result.records) > 0.9 * len(result.records)
    codes = {r["code"] for d in result.decisions for r in d["reasons"]}
    assert codes & {"optimiser_failed", "proposal_bounds", "proposal_shrink", "proposal_pair"}
