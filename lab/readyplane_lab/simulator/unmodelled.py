"""What a policy may ask of agents that no simulated worker does: refused by name, never left out.

Owns that list for both modes of the simulator: a fluid has whole starts and standbys with weights only.
"""

from __future__ import annotations

from readyplane.core.errors import InvalidField
from readyplane_planner.policy import Policy

REMEDY = "leave it out here; agents do it, simulated workers do not"
FLUID_REMEDY = "leave it out here, or play each request: a fluid does not have it"


def refuse_unmodelled(policy: Policy, *, fluid: bool = False) -> None:
    """Check a policy before it is played, event by event or as a `fluid`.

    Raises:
        InvalidField: standbys that sleep; of a fluid also starts in stages and bare standbys.
    """
    if fluid and policy.graph_stages:
        raise InvalidField("policy.graph_stages", policy.graph_stages, FLUID_REMEDY)
    for name in ("prefill", "decode"):
        holds = getattr(policy, name).standby_holds
        if holds == "asleep":
            raise InvalidField(f"policy.{name}.standby_holds", holds, REMEDY)
        if fluid and holds != "weights":
            raise InvalidField(f"policy.{name}.standby_holds", holds, FLUID_REMEDY)
