"""What a fleet can do besides starting and draining: stand by, be activated, change the stage.

Frozen values with a time, seconds since the first arrival, as in `faults`; `script` carries them
out through the ports of actuator and router, as a person or another planner would.
"""

from __future__ import annotations

from dataclasses import dataclass

from readyplane.core.worker import Role


@dataclass(frozen=True, slots=True)
class StandBy:
    """Allocate and load workers that are not to serve yet."""

    at_s: float
    role: Role
    count: int = 1


@dataclass(frozen=True, slots=True)
class Activate:
    """Standbys that are loaded serve after a short drawn time; the oldest first."""

    at_s: float
    role: Role
    count: int = 1


@dataclass(frozen=True, slots=True)
class Flip:
    """Workers of `role` drain it and join the other stage after a short drawn time."""

    at_s: float
    role: Role
    count: int = 1


Directive = StandBy | Activate | Flip
