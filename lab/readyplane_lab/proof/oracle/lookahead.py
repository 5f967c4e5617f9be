"""The optimiser of `layers` with perfect knowledge of the next T_ready + T_drain only (O_look).

Owns one step of the receding horizon. What it costs more than the clairvoyant is the price of
short sight; what a real policy costs more than it is the price of forecast and control.

For pools that do not depend on each other short sight costs nothing: the optimum only asks whether
a worker is wanted again within the cost of a start, and that is as far as it sees. What is left is
what the clairvoyant's plan and this one are told differently: each plans from the fleet it finds.
"""

from __future__ import annotations

import math

from readyplane_lab.proof.oracle.bound import needs_of
from readyplane_lab.proof.oracle.layers import layered
from readyplane_lab.proof.oracle.plan import Clock
from readyplane_lab.proof.port import Setting
from readyplane_lab.simulator.outcome import Floats
from readyplane_planner.decide.follow import Targets, count_pools, follow
from readyplane_planner.decide.values import Decision, Memory, Plan
from readyplane_planner.signals import Observation


def look(window: Floats, *, step_s: float, beta_s: float, live: int, lead_s: float) -> int:
    """Workers to hold or order now.

    The plan over the window says which of the present workers are worth keeping for what comes
    back within it. Growth is ordered when it must be, `lead_s` before the need; what comes later
    is ordered later, when more is known.

    Args:
        window: known needs, from the step of now on, not empty. beta_s: cost of a start.
        live: workers ready or on their way.
    """
    kept = int(layered(window, step_s=step_s, beta_s=beta_s, initial=live).workers[0])
    due = max(1, math.ceil(lead_s / step_s - 1e-9))
    return max(kept, int(window[:due].max()))


class ShortSighted:
    """A brain for one run that knows the next T_ready + T_drain of each pool, and no more.

    Args:
        setting: with the need. margin: multiplies it before it is rounded up.
    """

    def __init__(self, setting: Setting, *, margin: float = 1.0) -> None:
        self._setting = setting
        self._needs = needs_of(setting, margin=margin)
        self._clock = Clock()

    def __call__(
        self,
        observation: Observation,
        plan: Plan,
        memory: Memory,
        *,
        now_s: float,
        decision_id: str,
    ) -> tuple[Decision, Memory]:
        """One tick."""
        at_s = self._clock.since(now_s)
        counts = count_pools(observation, plan, memory, now_s=now_s)
        prefill = self._target(0, at_s, counts["prefill"].live, plan.tick_s)
        decode = self._target(1, at_s, counts["decode"].live, plan.tick_s)
        targets = Targets(prefill, decode, "from what is known of the near future")
        return follow(targets, observation, plan, memory, now_s=now_s, decision_id=decision_id)

    def _target(self, pool: int, at_s: float, live: int, tick_s: float) -> int:
        known, need = self._setting.hindsight, self._needs[pool]
        beta_s = self._setting.t_ready.p50_s + self._setting.drain_s[pool]
        lead_s = self._setting.t_ready.p90_s + tick_s
        first = min(len(need) - 1, math.floor(at_s / known.step_s + 1e-9))
        offset_s = max(0.0, at_s - first * known.step_s)  # how much of the first step has passed
        last = math.ceil((at_s + max(beta_s, lead_s)) / known.step_s - 1e-9)
        window = need[first : max(first + 1, last)]
        return look(window, step_s=known.step_s, beta_s=beta_s, live=live, lead_s=offset_s + lead_s)
