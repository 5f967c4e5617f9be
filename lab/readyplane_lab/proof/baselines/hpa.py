"""B2, the Kubernetes Horizontal Pod Autoscaler (autoscaling/v2), once for each pool.

Rule (k8s.io/kubernetes, pkg/controller/podautoscaler, defaults): every 15 s
`desired = ceil(ready * metric / target)`, unless the ratio is within the tolerance of 0.1. Pods that
are not ready count as 0 on the way up, so a start under way is not ordered twice; on the way down
they are left out. Growth is taken at once, by at most the larger of +100 % and +4 pods in 15 s;
shrinking follows the largest result of the last 300 s.

The rule knows one metric and one pool. Each pool gets the custom metric that its users would feed
it, as a share of what the ready workers hold within the SLO: P the tokens that must be through
within one TTFT target, D the sequences over the most that keep the TPOT target (`parts/facts.py`).
Both count what waits, so that saturation shows. Without a metric nothing changes, as published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from readyplane_lab.proof.baselines.parts.brain import RuleBrain, bounded
from readyplane_lab.proof.baselines.parts.facts import Facts
from readyplane_lab.proof.port import Contender, Fielded, Setting
from readyplane_planner.decide.follow import PoolCount, Targets

SYNC_S = 15.0
TOLERANCE = 0.1
DOWN_WINDOW_S = 300.0
UP_FACTOR = 2.0
UP_PODS = 4


@dataclass(frozen=True, slots=True)
class PoolState:
    """`spec.replicas` and the recommendations (seconds, pods) that still count."""

    replicas: int | None = None
    said: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class HpaState:
    """Both autoscalers and the time of the next sync."""

    prefill: PoolState = PoolState()
    decode: PoolState = PoolState()
    next_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class Hpa:
    """One autoscaler a pool with the same target share."""

    target: float
    low: tuple[int, int]
    high: tuple[int, int]

    def step(self, facts: Facts, state: HpaState) -> tuple[Targets, HpaState]:
        """One tick; between syncs the replicas stay."""
        if facts.now_s < state.next_s - 1e-6:
            return _targets(state), state
        prefill = sync(
            facts.prefill_load,
            facts.prefill,
            state.prefill,
            target=self.target,
            low=self.low[0],
            high=self.high[0],
            now_s=facts.now_s,
        )
        decode = sync(
            facts.decode_load,
            facts.decode,
            state.decode,
            target=self.target,
            low=self.low[1],
            high=self.high[1],
            now_s=facts.now_s,
        )
        state = HpaState(prefill, decode, facts.now_s + SYNC_S)
        return _targets(state), state


def sync(
    load: float | None,
    count: PoolCount,
    state: PoolState,
    *,
    target: float,
    low: int,
    high: int,
    now_s: float,
) -> PoolState:
    """One sync of one autoscaler; `load` is the pool's demand in workers."""
    current = count.live if state.replicas is None else state.replicas
    said = state.said or ((now_s, current),)
    if load is None or not count.ready:
        return PoolState(current, said)
    want = bounded(desired(load / count.ready, count, current, target=target), low, high)
    said = (*((at, n) for at, n in said if at > now_s - DOWN_WINDOW_S), (now_s, want))
    # Growth follows the newest recommendation (a window of 0 s), shrinking the largest of 300 s.
    stable = min(max(current, want), max(n for _at, n in said))
    limit = max(current + UP_PODS, math.ceil(current * UP_FACTOR))
    return PoolState(bounded(min(stable, limit), low, high), said)


def desired(metric: float, count: PoolCount, current: int, *, target: float) -> int:
    """Pods for an average `metric` of the ready ones, before stabilisation and limits."""
    ratio = metric / target
    if ratio > 1.0 and count.pending:
        pods = count.live
        ratio_all = ratio * count.ready / pods
        if abs(1.0 - ratio_all) <= TOLERANCE + 1e-9 or ratio_all < 1.0:
            return current
        return max(current, math.ceil(ratio_all * pods - 1e-9))
    if abs(1.0 - ratio) <= TOLERANCE + 1e-9:
        return current
    return math.ceil(ratio * count.ready - 1e-9)


def _targets(state: HpaState) -> Targets:
    return Targets(state.prefill.replicas, state.decode.replicas, "horizontal pod autoscaler")


def make(target: float, setting: Setting) -> Fielded:
    """Autoscalers of both pools at one target share."""
    rule = Hpa(target, setting.low, setting.high)
    return Fielded(RuleBrain(rule, HpaState()), policy={"tick_s": SYNC_S})


CONTENDER = Contender(
    name="hpa",
    title="Kubernetes' Horizontal Pod Autoscaler on each pool's share of its capacity at the SLO.",
    source="kubernetes/kubernetes pkg/controller/podautoscaler, autoscaling/v2 defaults",
    knob="target share of capacity",
    values=(0.95, 0.85, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3),
    default=0.7,
    make=make,
)
