"""Targets that no number of workers can reach, told when a policy is saved and not when it fails.

Owns what is impossible by the profiles and the prior lengths alone. Such a policy is kept, since
both are only what is known so far; it is flagged `target_unreachable` with the best that can be had
(B18, B170).
"""

from __future__ import annotations

from dataclasses import dataclass

from readyplane.core.profile import ClassProfile
from readyplane_planner.decide import Plan
from readyplane_planner.decide.values import PoolPlan


@dataclass(frozen=True, slots=True)
class Warned:
    """A field whose value is allowed and cannot do what it says; `best` is what can be had."""

    field: str
    value: float
    best: float
    text: str
    code: str = "target_unreachable"


def unreachable(plan: Plan, *, isl: float, osl: float) -> tuple[Warned, ...]:
    """Every target that is out of reach, by its field.

    Args:
        isl, osl: mean lengths in tokens that the policy assumes.
    """
    prefill, decode = plan.prefill, plan.decode
    own_s = plan.overhead_s + min(p.prefill_s(isl) for p in _profiles(prefill))
    step_s = min(p.iteration_s(1.0, isl + osl / 2.0) for p in _profiles(decode))
    checks = (
        (
            "policy.slo.ttft_s",
            plan.ttft_s,
            own_s,
            plan.ttft_s < own_s,
            f"a prompt of {isl:.0f} tokens takes {own_s:.3g} s on a worker that does nothing else",
        ),
        (
            "policy.slo.tpot_s",
            plan.tpot_s,
            step_s,
            plan.tpot_s < step_s,
            f"one sequence alone takes {step_s:.3g} s a token",
        ),
        *(
            (
                f"policy.{name}.max",
                float(pool.limits.high),
                1.0,
                pool.limits.high < 1,
                "no request is served without a worker of either pool",
            )
            for name, pool in (("prefill", prefill), ("decode", decode))
        ),
    )
    return tuple(
        Warned(field, value, best, f"{text}: {field} = {value:g} is never met")
        for field, value, best, missed, text in checks
        if missed
    )


def _profiles(pool: PoolPlan) -> list[ClassProfile]:
    """Of every class that the pool may start: the best of them says what can be had."""
    return [c.profile for c in pool.classes] or [pool.profile]
