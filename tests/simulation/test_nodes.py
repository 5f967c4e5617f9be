"""Machines: a worker starts where the weights are, when the planner may choose (R8.2)."""

from __future__ import annotations

from typing import Any

from readyplane_lab.simulator.startup import StartUpModel
from readyplane_lab.simulator.world_result import WorldResult
from tests.simulation.sim_world import steady, world

MACHINES = {"a": 3, "b": 5}
"""The two workers of the beginning come to the larger one, and the next is not drawn to either."""
FAR = StartUpModel(
    weight_bytes=3e9, store_bytes_per_s=1e8, peer_readers_max=0, disk_bytes_per_s=2e9, sigma=0.0
)
"""Thirty seconds from the store, one and a half from the machine's own disk."""


def grown(nodes: list[dict[str, Any]]) -> WorldResult:
    slow = {"worker_class": "h200-slow10", "profile": "h200-slow10"}
    policy = {"nodes": nodes, "prefill": {"max": 2, **slow}, "decode": {"max": 2, **slow}}
    fleet: dict[str, Any] = {"initial": (1, 1), "nodes": MACHINES, "startup": FAR, "record": True}
    return world(None, steady(7.0, 60.0), policy=policy, **fleet)


def test_r8_2_a_preferred_machine_that_holds_the_weights_serves_sooner() -> None:
    blind = grown([])
    told = grown([{"name": name, "gpus": gpus} for name, gpus in MACHINES.items()])
    starts = [
        [x for x in run.lives if x.decision_id and x.ready_s is not None] for run in (blind, told)
    ]
    assert [x.tier for x in starts[0]][:1] == ["L4"]
    assert starts[1] and {x.tier for x in starts[1]} == {"L2"}
    took_s = [[x.ready_s - x.allocated_s for x in some if x.ready_s] for some in starts]
    assert max(took_s[1]) < max(took_s[0]) - 20.0
    orders = [o for d in told.decisions for o in d["orders"]]
    assert all(o["nodes"] for o in orders)
    why = [r["text"] for d in told.decisions for r in d["reasons"] if r["code"] == "node"]
    assert any("its own L2" in text for text in why)


def test_what_has_no_room_is_refused_and_a_full_machine_is_said() -> None:
    run = world(None, steady(7.0, 40.0), initial=(1, 1), nodes={"only": 2})
    assert run.counts["orders_refused"] >= 1
    assert len(run.lives) == 2
