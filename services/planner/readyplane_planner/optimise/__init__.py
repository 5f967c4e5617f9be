"""The cheapest feasible pair of P and D targets, both in one decision (R21.2, R23.1).

Owns the search: the fewest workers that keep TTFT and TPOT over the coming T_ready, checked end to
end: D must hold and absorb what P hands over, and P beyond what D can absorb is stranded. A learned
optimiser replaces `size` and nothing else; guard stays outside it (R23.2).
"""

from readyplane_planner.optimise.candidates import weigh
from readyplane_planner.optimise.size import size
from readyplane_planner.optimise.values import (
    Bounds,
    Candidate,
    Demand,
    Need,
    Optimiser,
    Parts,
    Problem,
    Proposal,
)

__all__ = [
    "Bounds",
    "Candidate",
    "Demand",
    "Need",
    "Optimiser",
    "Parts",
    "Problem",
    "Proposal",
    "size",
    "weigh",
]
