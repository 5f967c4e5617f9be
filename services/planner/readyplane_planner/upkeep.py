"""How the planner keeps its own house: how often it writes, looks things up and tidies.

Fixed at start, unlike the policy; handed to the service by whoever wires it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Seconds and counts.

    Attributes:
        sample_every_s: a decision that changes nothing is journalled that often.
        keep_decisions, keep_s: bounds of the journal; prune_every_s: how often they are enforced.
        resolve_every_s, policy_every_s: how often the artifact's name, a newer policy is looked up.
        release_grace_s: until a released worker is killed.
        optimiser_s: how long a foreign optimiser may think in a tick; None asks it on the loop.
    """

    sample_every_s: float = 30.0
    keep_decisions: int = 20_000
    keep_s: float = 30 * 86_400.0
    prune_every_s: float = 600.0
    resolve_every_s: float = 15.0
    policy_every_s: float = 5.0
    release_grace_s: float = 10.0
    optimiser_s: float | None = None
