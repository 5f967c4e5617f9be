"""B7, lazy capacity provisioning, in whole workers, once for each pool.

Rule (Lin, Wierman, Andrew, Thereska, "Dynamic right-sizing for power-proportional data centers",
2011; whole numbers: Albers and Quedenfeld, arXiv 1807.05112): in each slot, take the last state of
the optimal schedule so far when a worker pays its switching cost as it starts (the smallest such
state: the lower bound), and when it pays as it stops (the largest: the upper bound). Move no
further than into that range. It is 3-competitive, and no deterministic rule is better.

The optimal schedules grow slot by slot: the least cost of ending in each state is kept and one
step of dynamic programming is added (`extend`). A slot is 10 s and costs a second's worth of each
worker for each of its seconds, and SHORT times that for each worker short of the need. The
switching cost is what a start wastes, T_ready (its median) and T_drain, in worker-seconds.

The need is the observed one of the slot, no forecast: demand in workers at the SLO, backlog
included (`parts/facts.py`), over the target share that is the knob, rounded up. The papers have no
such share: 1 is theirs. A slot in which nothing is known is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from readyplane_lab.proof.baselines.parts.brain import RuleBrain, bounded
from readyplane_lab.proof.baselines.parts.facts import Facts
from readyplane_lab.proof.port import Contender, Fielded, Setting
from readyplane_lab.simulator.outcome import Floats
from readyplane_planner.decide.follow import Targets

TICK_S = 5.0
SLOT_S = 10.0
SHORT = 100.0


@dataclass(frozen=True, slots=True)
class Lazy:
    """One pool between slots.

    Attributes:
        pays_up, pays_down: least cost so far of ending in each state, when starting or when
            stopping is what costs. now: its state.
    """

    pays_up: Floats
    pays_down: Floats
    now: int


def begin(states: int, now: int) -> Lazy:
    """A pool of states 0 to `states` - 1 that is found in state `now`."""
    cost = np.full(states, np.inf)
    cost[now] = 0.0
    return Lazy(cost, cost, now)


def advance(lazy: Lazy, slot: Floats, *, switch: float) -> Lazy:
    """One slot whose cost in each state is `slot` (convex); starting or stopping costs `switch`."""
    pays_up = extend(lazy.pays_up, up=switch, down=0.0) + slot
    pays_down = extend(lazy.pays_down, up=0.0, down=switch) + slot
    lower = int(np.flatnonzero(pays_up <= pays_up.min() + 1e-9)[0])
    upper = int(np.flatnonzero(pays_down <= pays_down.min() + 1e-9)[-1])
    now = min(max(lazy.now, lower), upper)  # lower <= upper, for the costs are convex
    # Only differences matter; without this the costs of a fortnight would outgrow them.
    return Lazy(pays_up - pays_up.min(), pays_down - pays_down.min(), now)


def extend(cost: Floats, *, up: float, down: float) -> Floats:
    """Least cost of moving into each state, given that of having been in each.

    `up`, `down`: of one step in that direction.
    """
    states = np.arange(len(cost))
    from_below = np.minimum.accumulate(cost - up * states) + up * states
    from_above = np.minimum.accumulate((cost + down * states)[::-1])[::-1] - down * states
    least: Floats = np.minimum(from_below, from_above)
    return least


@dataclass(frozen=True, slots=True)
class LcpState:
    """Both pools, the loads of the slot so far, and when it ends."""

    pools: tuple[Lazy, Lazy] | None = None
    loads: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    due_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Lcp:
    """The rule.

    Attributes:
        target: share of a worker's capacity that counts as full. switch_s: worker-seconds that a
            start costs, of P and D.
    """

    target: float
    switch_s: tuple[float, float]
    low: tuple[int, int]
    high: tuple[int, int]

    def step(self, facts: Facts, state: LcpState) -> tuple[Targets, LcpState]:
        """One tick of 5 s; decides at the end of each slot."""
        pools = state.pools
        if pools is None:
            found = (facts.prefill.live, facts.decode.live)
            pools = (self._begin(0, found[0]), self._begin(1, found[1]))
            state = LcpState(pools, due_s=facts.now_s + SLOT_S)
        loads = tuple(
            before if load is None else (*before, load)
            for before, load in zip(
                state.loads, (facts.prefill_load, facts.decode_load), strict=True
            )
        )
        state = LcpState(pools, (loads[0], loads[1]), state.due_s)
        if facts.now_s >= state.due_s - 1e-6:
            pools = (self._slot(0, pools[0], loads[0]), self._slot(1, pools[1], loads[1]))
            state = LcpState(pools, due_s=facts.now_s + SLOT_S)
        targets = Targets(pools[0].now + self.low[0], pools[1].now + self.low[1], "lazy")
        return targets, state

    def _begin(self, pool: int, live: int) -> Lazy:
        low, high = self.low[pool], self.high[pool]
        return begin(high - low + 1, bounded(live, low, high) - low)

    def _slot(self, pool: int, lazy: Lazy, loads: tuple[float, ...]) -> Lazy:
        if not loads:
            return lazy
        need = math.ceil(sum(loads) / len(loads) / self.target - 1e-9)
        cost = slot_cost(need, low=self.low[pool], high=self.high[pool])
        return advance(lazy, cost, switch=self.switch_s[pool])


def slot_cost(need: float, *, low: int, high: int) -> Floats:
    """Cost of a slot with each number of workers from `low` to `high`, in worker-seconds."""
    workers = np.arange(low, high + 1, dtype=float)
    return SLOT_S * (workers + SHORT * np.maximum(0.0, need - workers))


def make(target: float, setting: Setting) -> Fielded:
    """Lazy provisioning at that share, with the setting's T_ready and T_drain."""
    switch_s = (
        setting.t_ready.p50_s + setting.drain_s[0],
        setting.t_ready.p50_s + setting.drain_s[1],
    )
    rule = Lcp(target, switch_s, setting.low, setting.high)
    return Fielded(RuleBrain(rule, LcpState()), policy={"tick_s": TICK_S})


CONTENDER = Contender(
    name="lcp",
    title="Lazy capacity provisioning: change only when the optimum of the past leaves no choice.",
    source="Lin, Wierman, Andrew, Thereska 2011; in whole workers: arXiv 1807.05112",
    knob="share of a worker's capacity that counts as full",
    values=(1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3),
    default=1.0,
    make=make,
    aware=True,
)
