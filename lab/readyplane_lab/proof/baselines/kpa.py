"""B3, the Knative Pod Autoscaler on token concurrency, once for each pool.

Rule (knative/serving pkg/autoscaler/scaling, defaults): every 2 s, concurrency averaged over a
stable window of 60 s and a panic window of 6 s, each over the target a pod (70 % of what it holds),
rounded up and kept within [floor(ready / 2), ceil(1000 * ready)]. When the panic number is at least
twice the ready pods, panic begins: the larger of both numbers counts and only ever grows, until the
threshold was not passed for 60 s. It begins in panic at its first number of pods, as an autoscaler
does that finds more than one pod running.

Concurrency is counted in tokens, not in requests, for requests differ a thousandfold: for P the
tokens that arrive within one TTFT target and those that wait, over what a worker computes within
it; for D the sequences that decode or wait, over the most that keep the TPOT target
(`parts/facts.py`). Without data in a window nothing changes, as published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from readyplane_lab.proof.baselines.parts.brain import RuleBrain, bounded, held
from readyplane_lab.proof.baselines.parts.facts import Facts
from readyplane_lab.proof.port import Contender, Fielded, Setting
from readyplane_planner.decide.follow import PoolCount, Targets

TICK_S = 2.0
STABLE_S = 60.0
PANIC_S = 6.0
PANIC_FACTOR = 2.0
UP_RATE = 1000.0
DOWN_RATE = 2.0


@dataclass(frozen=True, slots=True)
class PoolState:
    """Samples (seconds, demand in workers), the panic and what it has asked for, the last target."""

    samples: tuple[tuple[float, float], ...] = ()
    panic_s: float | None = None
    panic_pods: int = 0
    target: int | None = None


@dataclass(frozen=True, slots=True)
class KpaState:
    """Both autoscalers."""

    prefill: PoolState = PoolState()
    decode: PoolState = PoolState()


@dataclass(frozen=True, slots=True)
class Kpa:
    """One autoscaler a pool with the same target share."""

    target: float
    low: tuple[int, int]
    high: tuple[int, int]

    def step(self, facts: Facts, state: KpaState) -> tuple[Targets, KpaState]:
        """One tick of 2 s."""
        both = [
            scale(
                load,
                count,
                pool,
                target=self.target,
                low=self.low[i],
                high=self.high[i],
                now_s=facts.now_s,
            )
            for i, (load, count, pool) in enumerate(
                (
                    (facts.prefill_load, facts.prefill, state.prefill),
                    (facts.decode_load, facts.decode, state.decode),
                )
            )
        ]
        why = "panic" if any(p.panic_s is not None for p in both) else "stable"
        return Targets(both[0].target, both[1].target, why), KpaState(both[0], both[1])


def scale(
    load: float | None,
    count: PoolCount,
    state: PoolState,
    *,
    target: float,
    low: int,
    high: int,
    now_s: float,
) -> PoolState:
    """One tick of one autoscaler; `load` is the pool's demand in workers."""
    if state.target is None and count.live > 1:
        state = PoolState(panic_s=now_s, panic_pods=count.live, target=count.live)
    samples = tuple((at, n) for at, n in state.samples if at > now_s - STABLE_S + 1e-6)
    if load is not None:
        samples = (*samples, (now_s, load))
    recent = [n for at, n in samples if at > now_s - PANIC_S + 1e-6]
    if not recent:
        return PoolState(samples, state.panic_s, state.panic_pods, held(state.target, count.live))
    ready = max(1, count.ready)
    floor, ceiling = math.floor(ready / DOWN_RATE), math.ceil(UP_RATE * ready)
    stable_pods = _pods(sum(n for _at, n in samples) / len(samples), target)
    raw_panic = _pods(sum(recent) / len(recent), target)
    want = bounded(stable_pods, floor, ceiling)
    panic_s, panic_pods = state.panic_s, state.panic_pods
    if raw_panic / ready >= PANIC_FACTOR:
        panic_s = now_s
    elif panic_s is not None and now_s - panic_s > STABLE_S:
        panic_s, panic_pods = None, 0
    if panic_s is not None:
        panic_pods = max(panic_pods, want, bounded(raw_panic, floor, ceiling))
        want = panic_pods
    return PoolState(samples, panic_s, panic_pods, bounded(want, low, high))


def _pods(demand: float, target: float) -> int:
    return math.ceil(demand / target - 1e-9)


def make(target: float, setting: Setting) -> Fielded:
    """Autoscalers of both pools at one target share."""
    rule = Kpa(target, setting.low, setting.high)
    return Fielded(RuleBrain(rule, KpaState()), policy={"tick_s": TICK_S})


CONTENDER = Contender(
    name="kpa",
    title="Knative's autoscaler with stable and panic windows, on token concurrency of each pool.",
    source="knative/serving pkg/autoscaler/scaling (autoscaler.go), defaults of config-autoscaler",
    knob="target share of a worker's token concurrency",
    values=(0.95, 0.85, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3),
    default=0.7,
    make=make,
)
