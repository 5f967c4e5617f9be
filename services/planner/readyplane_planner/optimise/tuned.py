"""A learned optimiser: the sizing with parameters that were tuned in the simulator.

Owns what the parameters mean and their ranges; `readyplane_lab.tuning` searches them and writes
`tuned.json` beside this file, with the inputs, the seed and what it gained. The search of `size` stays
the one search: what is learned is how cautious it is, and about what.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from readyplane.core.errors import InvalidField
from readyplane_planner.optimise.size import size
from readyplane_planner.optimise.values import Demand, Optimiser, Problem, Proposal

RANGES = {
    "headroom_p": (0.25, 4.0),
    "headroom_d": (0.25, 4.0),
    "band": (0.25, 4.0),
    "catch_up": (0.25, 4.0),
    "spread_p": (0.0, 1.5),
    "spread_d": (0.0, 1.5),
    "late": (0.2, 3.0),
}


@dataclass(frozen=True, slots=True)
class Parameters:
    """What was learned; 1 is as the policy says.

    Attributes:
        headroom_p, headroom_d, band, catch_up: factors of what the policy says, by pool.
        spread_p, spread_d: of the distance from the expected demand to its bound, how much counts.
        late: factor of the share of requests that may be late.
    """

    headroom_p: float = 1.0
    headroom_d: float = 1.0
    band: float = 1.0
    catch_up: float = 1.0
    spread_p: float = 1.0
    spread_d: float = 1.0
    late: float = 1.0


def read_parameters(document: Mapping[str, object]) -> Parameters:
    """Parameters of a recorded document; what is not given is 1.

    Raises:
        InvalidField: a name that does not exist, or a value out of its range.
    """
    names = {f.name for f in fields(Parameters)}
    values: dict[str, float] = {}
    for name, value in document.items():
        if name not in names:
            raise InvalidField(f"parameters.{name}", value, f"known are {', '.join(sorted(names))}")
        low, high = RANGES[name]
        sound = isinstance(value, int | float) and not isinstance(value, bool)
        if not sound or not low <= float(value) <= high:  # type: ignore[arg-type]
            raise InvalidField(f"parameters.{name}", value, f"use {low} to {high}")
        values[name] = float(value)  # type: ignore[arg-type]
    return Parameters(**values)


def tuned(parameters: Parameters) -> Optimiser:
    """The optimiser of these parameters."""

    def optimise(problem: Problem) -> Proposal:
        late = min(0.5, (1.0 - problem.quantile) * parameters.late)
        headroom = problem.headroom * parameters.headroom_p
        # One headroom for both pools is what a problem has; D's own is put into its demand.
        more_d = (1.0 + problem.headroom * parameters.headroom_d) / (1.0 + headroom)
        return size(
            replace(
                problem,
                demand_p=_spread(problem.demand_p, parameters.spread_p, 1.0),
                demand_d=_spread(problem.demand_d, parameters.spread_d, more_d),
                headroom=headroom,
                band=problem.band * parameters.band,
                catch_up_s=problem.catch_up_s * parameters.catch_up,
                quantile=1.0 - late,
            )
        )

    return optimise


def _spread(demand: Demand, spread: float, factor: float) -> Demand:
    lasting = demand.level + (demand.lasting - demand.level) * spread
    if not math.isfinite(lasting):
        return demand
    return replace(demand, sustained=max(0.0, lasting * factor))
