"""What goes wrong during a run: frozen values with a time, seconds since the first arrival.

Owns what may go wrong; the world carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from readyplane.core.worker import Role


@dataclass(frozen=True, slots=True)
class Crash:
    """The worker of a role that has served longest is gone without a word."""

    at_s: float
    role: Role


Fault = Crash
