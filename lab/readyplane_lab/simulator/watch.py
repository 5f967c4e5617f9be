"""The planner's brain with a witness: which targets it set when, and how long it thought.

Owns what a run keeps of every decision; the decision itself is the brain's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from readyplane_lab.simulator.invariants import targets_are_in_bounds
from readyplane_planner.decide import Decision, Memory, Plan
from readyplane_planner.decide.follow import Brain
from readyplane_planner.signals import Observation


class Witness:
    """A brain that passes on what another decides.

    Attributes:
        targets: (seconds, prefill, decode) whenever one moved. thought_s: of each decision.
        fallbacks, overrides: of all planners that thought with it.
    """

    def __init__(
        self, brain: Brain, *, cpu_s: Callable[[], float], on_tick: Callable[[], None]
    ) -> None:
        self.targets: list[tuple[float, int, int]] = []
        self.thought_s: list[float] = []
        self.fallbacks = 0
        self.overrides: Counter[str] = Counter()
        self._brain = brain
        self._cpu_s = cpu_s
        self._on_tick = on_tick

    def __call__(
        self,
        observation: Observation,
        plan: Plan,
        memory: Memory,
        *,
        now_s: float,
        decision_id: str,
    ) -> tuple[Decision, Memory]:
        """See `Brain`."""
        began_s = self._cpu_s()
        decision, after = self._brain(
            observation, plan, memory, now_s=now_s, decision_id=decision_id
        )
        self.thought_s.append(self._cpu_s() - began_s)
        targets_are_in_bounds(decision, plan)
        self.fallbacks += after.fallbacks - memory.fallbacks
        self.overrides.update(Counter(after.overrides) - Counter(memory.overrides))
        wanted = (decision.prefill.target, decision.decode.target)
        # A planner that only watches, because another leads, sets no targets.
        if not self.targets or (not plan.paused and self.targets[-1][1:] != wanted):
            self.targets.append((now_s, *wanted))
        self._on_tick()
        return decision, after
