"""Targets from elsewhere become a Decision: what any other brain needs to stand in for `decide`.

A brain that only knows how many workers it wants (a baseline, a plan worked out in hindsight) gets
from here what every brain shares: the census of what is really there, pending capacity counted,
orders, cancelled starts, victims and drains. No guard and no optimiser: only bounds and budget, so
that a foreign rule is compared as published and not as ours would have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from readyplane_planner import guard
from readyplane_planner.capacity import Load
from readyplane_planner.decide import acting, rolling
from readyplane_planner.decide.pools import Pool, census, eta_s, not_draining
from readyplane_planner.decide.values import (
    POOLS,
    Decision,
    Memory,
    Plan,
    PoolDecision,
    Reason,
)
from readyplane_planner.forecast import Forecast
from readyplane_planner.guard import Counts, Limits, Verdict
from readyplane_planner.signals import Observation

UNKNOWN_LOAD = Load(None, None, None, None, None)


class Brain(Protocol):
    """What plans: `decide`, or whatever is to be compared with it."""

    def __call__(
        self,
        observation: Observation,
        plan: Plan,
        memory: Memory,
        *,
        now_s: float,
        decision_id: str,
    ) -> tuple[Decision, Memory]:
        """The decision of one tick, and the memory for the next."""
        ...


@dataclass(frozen=True, slots=True)
class Targets:
    """Workers wanted of each pool, pending ones included; None leaves the pool as it is."""

    prefill: int | None
    decode: int | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class PoolCount:
    """One pool as a foreign rule sees it; workers.

    Attributes:
        ready: serve now. pending: ordered and expected. draining: serve out what they hold.
    """

    ready: int
    pending: int
    draining: int

    @property
    def live(self) -> int:
        """Ready and pending."""
        return self.ready + self.pending


def count_pools(
    observation: Observation, plan: Plan, memory: Memory, *, now_s: float
) -> Mapping[str, PoolCount]:
    """By pool name, from the same census that `follow` acts on."""
    memory = not_draining(observation, memory)
    found = (census(name, observation, plan, memory, now_s=now_s) for name in POOLS)
    return {
        pool.name: PoolCount(
            len(pool.ready), len(pool.coming) + len(pool.waiting), len(pool.draining)
        )
        for pool in found
    }


def follow(
    targets: Targets,
    observation: Observation,
    plan: Plan,
    memory: Memory,
    *,
    now_s: float,
    decision_id: str,
) -> tuple[Decision, Memory]:
    """Move both pools to the targets, within the plan's bounds and budget.

    Args:
        targets: of this tick. plan: bounds, budget, artifact and victims' rules.
        now_s: planner's monotonic clock. decision_id: becomes part of every new worker's name.
    """
    memory = not_draining(observation, memory)
    pools = (
        census("prefill", observation, plan, memory, now_s=now_s),
        census("decode", observation, plan, memory, now_s=now_s),
    )
    counts = (_counts(pools[0], memory), _counts(pools[1], memory))
    wanted = (targets.prefill, targets.decode)
    limits = (plan.prefill.limits, plan.decode.limits)
    before = (memory.guard_p.desired, memory.guard_d.desired)
    bounded = [
        _held(count, was) if plan.paused else _verdict(want, count, limit)
        for want, count, limit, was in zip(wanted, counts, limits, before, strict=True)
    ]
    verdicts = guard.budgeted((bounded[0], bounded[1]), counts, limits, plan.budget_gpus, before)
    said = [Reason("followed", targets.why or "targets from elsewhere")]
    for name, verdict in zip(POOLS, verdicts, strict=True):
        said.extend(Reason(code, text, name) for code, text in verdict.reasons)
    acted = acting.act(observation, plan, memory, pools, verdicts, said, decision_id, now_s=now_s)
    acted.verdicts = guard.within(acted.verdicts, counts, limits, plan.budget_gpus, before)
    after = [
        replace(acted.memory.guard(name), desired=verdict.target)
        for name, verdict in zip(POOLS, acted.verdicts, strict=True)
    ]
    memory = replace(acted.memory, guard_p=after[0], guard_d=after[1], last_s=now_s)
    both = [
        PoolDecision(
            before=count.live if was is None else was,
            target=verdict.target,
            wanted=want,
            keep=want,
            counts=count,
            load=UNKNOWN_LOAD,
            forecast=Forecast(0.0, 0.0, 0.0, 0.0, 0.0),
            worker_rate=0.0,
            correction=1.0,
            t_ready=observation.t_ready[pool.name],
            etas_s=tuple(
                sorted(
                    eta_s(c.age_s, observation.t_ready[pool.name], late=False) for c in pool.coming
                )
            ),
        )
        for was, want, count, verdict, pool in zip(
            before, wanted, counts, acted.verdicts, pools, strict=True
        )
    ]
    decision = Decision(
        decision_id=decision_id,
        model=plan.model,
        at_s=now_s,
        policy_version=plan.version,
        policy_digest=plan.digest,
        prefill=both[0],
        decode=both[1],
        orders=tuple(acted.orders),
        drains=tuple(acted.drains),
        releases=tuple(acted.releases),
        why=tuple(said),
        rollout=acted.rollout,
        activations=acted.activations,
        flips=acted.flips,
    )
    return decision, memory


def _counts(pool: Pool, memory: Memory) -> Counts:
    """A roll-out's extra workers stand beside the target here too."""
    return rolling.without_surge(pool.counts(backlog=False, breach=False), pool, memory)


def _verdict(want: int | None, count: Counts, limits: Limits) -> Verdict:
    live = count.live
    target = live if want is None else min(limits.high, max(limits.low, want))
    return Verdict(target, grow=max(0, target - live), shrink=max(0, live - target))


def _held(count: Counts, was: int | None) -> Verdict:
    """Paused: whatever the rule wants, a person decides."""
    text = "a person holds the targets"
    return Verdict(count.live if was is None else was, reasons=(("paused", text),))
