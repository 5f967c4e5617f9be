"""What parameters of the learned optimiser cost on a set of inputs, against the planner's own.

Owns the one figure that is searched for: GPU-hours over those of `size` on the same input, and a price
for every share of requests below the attainment that `size` reaches (or that is asked for, where it
reaches more). Played in the fluid mode, by the production brain and its guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from readyplane.core.errors import NotFound
from readyplane_lab.proof.entrants import scenarios
from readyplane_lab.proof.inputs import Case, make_case
from readyplane_lab.proof.measure import score
from readyplane_lab.proof.ours import CONTENDER
from readyplane_lab.proof.play import play_fielded
from readyplane_planner.decide import decide
from readyplane_planner.optimise import Optimiser, size
from readyplane_planner.optimise.tuned import Parameters, tuned

WANTED = 0.99
MISS_PRICE = 20.0
"""One per cent of requests missed costs as much as a fifth of the fleet."""


@dataclass(frozen=True, slots=True)
class Played:
    """One input as it went."""

    attainment: float
    gpu_hours: float


def cases(names: Sequence[str], *, t_ready_s: float, peak: float, seed: int) -> list[Case]:
    """The inputs by the names of their scenarios. Raises NotFound or InvalidField."""
    known = scenarios()
    for name in names:
        if name not in known:
            raise NotFound("scenario", name, f"known are {', '.join(known)}")
    return [make_case(known[name], t_ready_s=t_ready_s, peak=peak, seed=seed) for name in names]


def played(case: Case, optimiser: Optimiser) -> Played:
    """One run of the default policy with that optimiser."""
    fielded = CONTENDER.make(CONTENDER.default, case.setting)
    if optimiser is not size:
        fielded = replace(fielded, brain=partial(decide, optimiser=optimiser))
    run = play_fielded(case, fielded, mode="fluid")
    found = score(run, slo=case.scenario.slo, times=case.times, hindsight=case.hindsight)
    return Played(found.attainment, found.gpu_hours)


def cost(found: Sequence[Played], base: Sequence[Played]) -> float:
    """Mean over the inputs; 1 is what the planner's own optimiser costs."""
    total = 0.0
    for one, own in zip(found, base, strict=True):
        missed = max(0.0, min(WANTED, own.attainment) - one.attainment)
        total += one.gpu_hours / own.gpu_hours + MISS_PRICE * missed
    return total / len(base)


def all_played(inputs: Sequence[Case], parameters: Parameters | None) -> list[Played]:
    """Every input with these parameters; None for the planner's own optimiser."""
    optimiser = size if parameters is None else tuned(parameters)
    return [played(case, optimiser) for case in inputs]
