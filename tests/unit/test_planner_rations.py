"""Admission as an order of the planner: who gives way, how much, for how long, and when no more."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from readyplane.core.errors import Unavailable
from readyplane.core.ration import PrioritySignals, Ration
from readyplane.core.worker import Role
from readyplane.ports import RouterSignals
from readyplane_planner.decide.rations import (
    PRIORITIES_MAX,
    RationMemory,
    Weight,
    cut,
    excess,
    faded,
    moved,
)
from readyplane_planner.recall import recall
from tests.unit.planner_world import MODEL, HandClock, Run, World, planner, policy

P, D = Role.PREFILL, Role.DECODE
EVEN = (Weight(0, 50.0, 5000.0), Weight(1, 30.0, 3000.0), Weight(2, 20.0, 2000.0))


# ------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    ("tokens", "requests", "protect_from", "expected"),
    [
        (0.0, 0.0, None, None),
        (0.1, 0.0, None, (0, 0.8)),  # a tenth of all is a fifth of the least important
        (0.5, 0.0, None, (0, 0.0)),
        (0.6, 0.0, None, (1, 0.65)),  # all of 0, and a third of 1: shares are rounded down
        (0.0, 0.25, None, (0, 0.5)),
        (1.0, 1.0, None, (1, 0.0)),  # never the highest, whatever is asked
        (1.0, 1.0, 1, (0, 0.0)),
        (1.0, 1.0, 0, None),
    ],
)
def test_the_least_important_give_way_and_no_more_than_is_needed(
    tokens: float, requests: float, protect_from: int | None, expected: tuple[int, float] | None
) -> None:
    found = cut(EVEN, tokens=tokens, requests=requests, protect_from=protect_from)
    assert (None if found is None else (found.priority, found.admit_share)) == expected
    if found is not None and expected != (1, 0.0) and protect_from is None:
        assert found.tokens >= tokens - 1e-9 and found.requests >= requests - 1e-9


def test_nobody_gives_way_where_all_are_equal() -> None:
    assert cut(EVEN[:1], tokens=0.9, requests=0.9, protect_from=None) is None
    assert faded((), [(7, 3.0, 300.0)], 2.0) == ()
    assert faded((), [(7, 3.0, 300.0), (1, 1.0, 10.0)], 2.0)[0].priority == 1
    # One that has not come for minutes is not present any more, and then all are equal again.
    assert faded(EVEN[1:], [(2, 5.0, 10.0)], 300.0) == ()


def test_what_is_remembered_of_priorities_is_bounded() -> None:
    many = faded((), [(p, 1.0, 1.0) for p in range(1000)], 1.0)
    assert len(many) == PRIORITIES_MAX and many[-1].priority == 999


def test_the_excess_is_the_least_that_brings_the_rest_in_time() -> None:
    assert excess(lambda _x: 0.01, goal=0.025) == 0.0
    assert excess(lambda x: max(0.0, x - 0.6), goal=0.0) == pytest.approx(0.4, abs=1e-4)
    assert excess(lambda _x: 1.0, goal=0.025) == pytest.approx(1.0, abs=1e-4)


def test_a_successor_has_its_own_clock() -> None:
    mine = RationMemory(EVEN, 1, 0.5, 10.0, 12.0, 20.0, None)
    assert moved(mine, 100.0) == replace(mine, begun_s=110.0, turned_s=112.0, renewed_s=120.0)


# -------------------------------------------------------------------------------- decisions


@dataclass
class Labelled(World):
    """Arrivals of several priorities by their share; what it is ordered, it admits."""

    shares: dict[int, float] = field(default_factory=lambda: {0: 0.6, 5: 0.4})
    orders: list[Ration] = field(default_factory=list)
    until_s: float = 0.0
    ration_away: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.offered = self.rps
        self.rps = lambda t: self.offered(t) * self.admitted()  # what reaches the engines

    def admitted(self) -> float:
        if not self.orders or self.clock.now_s >= self.until_s:
            return 1.0
        order, share = self.orders[-1], 0.0
        for priority, part in self.shares.items():
            keeps = order.admit_share if priority == order.priority else 1.0
            share += part * (0.0 if priority < order.priority else keeps)
        return share

    def advance(self, dt_s: float) -> None:
        before = dict(self.totals)
        super().advance(dt_s)
        admitted = max(1e-9, self.admitted())
        for name in ("arrivals_total", "arrival_tokens_total", "arrival_uncached_tokens_total"):
            grown = self.totals[name] - before.get(name, 0.0)
            self.totals[name] = before.get(name, 0.0) + grown / admitted  # refused ones arrived too

    async def ration(self, model: str, order: Ration, *, leader_epoch: int = 0) -> Ration | None:
        assert model == MODEL and leader_epoch > 0
        self.fences_router.take(MODEL, leader_epoch)
        if self.ration_away:
            raise Unavailable("router away", "wait")
        self.orders.append(order)
        self.until_s = self.clock.now_s + (order.ttl_s if order.admit_share < 1.0 else 0.0)
        return order

    def _signals_now(self) -> RouterSignals:
        found = super()._signals_now()
        part = found.models[MODEL]
        priorities = tuple(
            PrioritySignals(
                p,
                int(part.arrivals_total * share),
                int(part.arrival_uncached_tokens_total * share),
            )
            for p, share in sorted(self.shares.items(), reverse=True)
        )
        return replace(found, models={MODEL: replace(part, priorities=priorities)})


def burst(t: float) -> float:
    return 8.0 if 60.0 <= t < 160.0 else 2.0


async def run_of(shares: dict[int, float], *, seconds: float = 200.0, **more: Any) -> Run:
    world = Labelled(HandClock(), rps=burst, t_ready_s=lambda _n: 40.0, shares=shares)
    world.add(P, 1)
    world.add(D, 2)
    run = await planner(world, policy(**more))
    await run.step(seconds)
    return run


async def test_while_capacity_is_on_its_way_the_least_important_give_way() -> None:
    run = await run_of({0: 0.6, 5: 0.4})
    world = run.world
    assert isinstance(world, Labelled)
    given = [d for d in run.decisions if d.ration is not None]
    first, last = given[0], given[-1]
    begun_s = world.begun_s
    assert 60.0 < first.at_s - begun_s <= 70.0, "no order before the burst, one within seconds"
    assert first.ration.turned and first.changed and first.ration.priority == 0
    assert "shedding" in {r.code for r in first.why}
    assert first.ration.late_without > 0.05 and first.ration.late_with < first.ration.late_without
    # Renewed in each tick, journalled when it turns, and over once the workers are there.
    assert len(given) > 10 * sum(d.ration.turned for d in given) / 3
    assert last.ration.admit_share == 1.0 and "shedding_ended" in {r.code for r in last.why}
    assert last.at_s - begun_s < 160.0, "the burst is not over, the workers have come"
    assert [o.admit_share for o in world.orders][-1] == 1.0 and run.decisions[-1].ration is None
    # Demand that is refused is planned for all the same.
    assert max(d.prefill.target for d in run.decisions) >= 3
    shown = await run.service.explain(first.decision_id)
    assert "admission: priorities" in shown["text"] and "unless renewed" in shown["text"]
    assert any(e["what"] == "rationed" for e in shown["timeline"]) or shown["decision"]["ration"]
    record, outcomes = await run.journal.get(first.decision_id)
    assert recall(record)["same"] and "rationed" in {o.kind for o in outcomes}
    state = await run.service.state()
    assert state["degradation"] == {"ordered": None, "in_force": None}


async def test_equal_priorities_and_the_switch_change_nothing_at_all() -> None:
    plain = await run_of({0: 1.0}, seconds=90.0)
    other = await run_of({7: 1.0}, seconds=90.0)
    off = await run_of({0: 0.6, 5: 0.4}, seconds=90.0, degradation={"mode": "off"})
    for run in (plain, other, off):
        assert isinstance(run.world, Labelled) and run.world.orders == []
        assert all(d.ration is None for d in run.decisions)
    assert plain.desired == other.desired == off.desired


async def test_a_router_that_is_away_is_told_again_and_a_pause_gives_no_order() -> None:
    world = Labelled(HandClock(), rps=burst, t_ready_s=lambda _n: 40.0)
    world.add(P, 1)
    world.add(D, 2)
    run = await planner(world, policy())
    world.ration_away = True
    await run.step(70.0)
    assert world.orders == [] and run.decisions[-1].ration is not None
    world.ration_away = False
    await run.step(3.0)
    assert world.orders, "each tick gives it anew"
    await run.service.set_paused(True)
    count = len(world.orders)
    await run.step(10.0)
    assert len(world.orders) == count and run.decisions[-1].ration is None


async def test_unknown_data_gives_no_order_and_what_stood_goes_on_when_it_is_back() -> None:
    world = Labelled(HandClock(), rps=burst, t_ready_s=lambda _n: 60.0)
    world.add(P, 1)
    world.add(D, 2)
    run = await planner(world, policy())
    await run.step(72.0)
    assert run.decisions[-1].ration is not None
    world.away = True
    await run.step(6.0)
    assert run.decisions[-1].ration is None, "it runs out at the router by itself"
    world.away = False
    await run.step(15.0)
    assert run.decisions[-1].ration is not None


def test_a_cut_tells_what_it_costs() -> None:
    found = cut(EVEN, tokens=0.1, requests=0.0, protect_from=None)
    assert found is not None and (found.priority, found.admit_share) == (0, 0.8)
    assert [found.tokens, found.requests] == pytest.approx([0.1, 0.1])
