"""What tests of the simulated world share: a brain that wants what it is told, and short runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np

from readyplane_lab.demo import DEMO_POLICY
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.simulator.world import WorldOptions, run_world
from readyplane_lab.simulator.world_result import WorldResult
from readyplane_lab.workload.conversation import Wave, conversation
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_planner.decide import Decision, Memory, Plan
from readyplane_planner.decide.follow import Brain, Targets, follow
from readyplane_planner.policy import overlay
from readyplane_planner.signals import Observation


class Fixed:
    """Wants the same all the time, or something else from a moment on."""

    def __init__(self, *steps: tuple[float, int | None, int | None]) -> None:
        self._steps = steps
        self._began_s: float | None = None

    def __call__(
        self,
        observation: Observation,
        plan: Plan,
        memory: Memory,
        *,
        now_s: float,
        decision_id: str,
    ) -> tuple[Decision, Memory]:
        self._began_s = now_s if self._began_s is None else self._began_s
        past = [step for step in self._steps if step[0] <= now_s - self._began_s]
        targets = Targets(past[-1][1], past[-1][2], "as planned")
        return follow(targets, observation, plan, memory, now_s=now_s, decision_id=decision_id)


class Recorder:
    """Another brain, and what it saw when."""

    def __init__(self, brain: Brain) -> None:
        self.seen: list[tuple[float, Observation]] = []
        self._brain = brain

    def __call__(
        self,
        observation: Observation,
        plan: Plan,
        memory: Memory,
        *,
        now_s: float,
        decision_id: str,
    ) -> tuple[Decision, Memory]:
        self.seen.append((now_s, observation))
        return self._brain(observation, plan, memory, now_s=now_s, decision_id=decision_id)


@lru_cache
def steady(
    rate_rps: float = 2.0, duration_s: float = 40.0, seed: int = 1
) -> tuple[WorkloadRequest, ...]:
    return tuple(conversation(Wave(rate_rps, swing=0.0), seed=seed, duration_s=duration_s))


def world(
    brain: Brain | None = None,
    requests: tuple[WorkloadRequest, ...] | None = None,
    *,
    policy: Mapping[str, Any] | None = None,
    convertible: bool = False,
    **options: Any,
) -> WorldResult:
    """A short run of the demo's policy; two of each from the beginning unless told otherwise."""
    chosen: Mapping[str, Any] = {"initial": (2, 2), "brain": brain, "record": False, **options}
    document = overlay({**DEMO_POLICY, **(policy or {})}, {"decode": {"convertible": convertible}})
    return run_world(WorldOptions(document, **chosen), requests or steady())


def same(one: RunResult, other: RunResult) -> bool:
    """Whether two runs came to the same, but for what was measured of this machine."""
    for name in (f.name for f in fields(RunResult) if f.name != "planner_s"):
        a, b = getattr(one, name), getattr(other, name)
        if name == "served":
            if any(not np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)):
                return False
        elif a != b:
            return False
    return True
