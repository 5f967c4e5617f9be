"""What is decided while signals are not known: what is certain still counts, and a floor after a while.

Owns three rules. A pool may grow for what is known (a queue, sequences that run) while a rate is not
(B40). After `after` looks in a row without knowing, each pool has at least its fallback, also from zero
(B42, B43); the fallback is a floor beside what is there and what is needed, never a target (B40). One
look that knows starts the count anew.
"""

from __future__ import annotations

from dataclasses import replace

from readyplane_planner import optimise
from readyplane_planner.decide.values import POOLS, Memory, Plan, Reason
from readyplane_planner.optimise import Demand, Problem, Proposal
from readyplane_planner.signals import Kind, Observation

UNSEEN = (Kind.MISSING, Kind.STALE)
NEEDED = ("arrivals", "prefill_work", "queue", "decoding")


def knows(observation: Observation) -> bool:
    """Whether everything is known that the optimiser is asked with."""
    return all(getattr(observation, name).known for name in NEEDED)


def stand_in(
    observation: Observation,
    plan: Plan,
    memory: Memory,
    problem: Problem,
    live: tuple[int, int],
    said: list[Reason],
) -> tuple[Proposal | None, Memory]:
    """The proposal of a tick that does not know, None to stay as it is, and the count of such ticks.

    Args:
        problem: with whatever is known; live: workers of both pools, those on their way included.
    """
    unseen = any(getattr(observation, name).kind in UNSEEN for name in NEEDED)
    memory = replace(memory, blind=memory.blind + 1) if unseen else memory
    wanted = list(live)
    queue, decoding = observation.queue, observation.decoding
    if queue.known or decoding.known:
        # No rate is known: only what waits and runs counts, and what it needs is certain.
        certain = optimise.size(
            replace(
                problem,
                demand_p=Demand(0.0, 0.0, backlog=queue.get()),
                demand_d=Demand(0.0, 0.0, sequences=decoding.get()),
                headroom=0.0,
            )
        )
        wanted = [max(a, b) for a, b in zip(wanted, (certain.p, certain.d), strict=True)]
    for place, name in enumerate(POOLS):
        floor = min(plan.pool(name).fallback, plan.pool(name).limits.high)
        if floor and memory.blind >= plan.fallback_after and wanted[place] < floor:
            wanted[place] = floor
            text = f"signals are unknown for {memory.blind} looks: at least {floor}"
            said.append(Reason("fallback", text, name))
    if wanted == list(live):
        return None, memory
    p, d = wanted
    return Proposal(p, d, max(p, live[0]), max(d, live[1])), memory
