"""What a policy may ask of agents that no simulated worker does: refused by name, never left out.

Owns that list for both modes of the simulator.
"""

from __future__ import annotations

from readyplane.core.errors import InvalidField
from readyplane_planner.policy import Policy

REMEDY = "leave it out here; agents do it, simulated workers do not"


def refuse_unmodelled(policy: Policy) -> None:
    """Check a policy before it is played.

    Raises:
        InvalidField: starts in stages, or standbys that hold less than everything.
    """
    if policy.graph_stages:
        raise InvalidField("policy.graph_stages", policy.graph_stages, REMEDY)
    for name in ("prefill", "decode"):
        holds = getattr(policy, name).standby_holds
        if holds != "weights":
            raise InvalidField(f"policy.{name}.standby_holds", holds, REMEDY)
