"""The oracle: what a workload costs at least, and what a planner that knows it would do (pure)."""

from readyplane_lab.proof.oracle.bound import Bound, Lowest, lower_bound, lowest_bill
from readyplane_lab.proof.oracle.osim import Bracket, bracket
from readyplane_lab.proof.oracle.plan import FleetPlan, Scripted, plan_of

__all__ = [
    "Bound",
    "Bracket",
    "FleetPlan",
    "Lowest",
    "Scripted",
    "bracket",
    "lower_bound",
    "lowest_bill",
    "plan_of",
]
