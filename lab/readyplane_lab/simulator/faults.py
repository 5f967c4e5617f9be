"""What goes wrong during a run: frozen values with a time, seconds since the first arrival.

Owns what may go wrong, in the words of those who write scenarios; `script` carries it out. Where a
worker is hit, it is the one of its role that has served longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from readyplane.core.worker import Role


@dataclass(frozen=True, slots=True)
class Crash:
    """Workers are gone without a word."""

    at_s: float
    role: Role
    count: int = 1


@dataclass(frozen=True, slots=True)
class Stall:
    """An engine makes no progress for a while; its agent goes on renewing."""

    at_s: float
    role: Role
    for_s: float


@dataclass(frozen=True, slots=True)
class Partition:
    """Workers cannot reach the router for a while; longer than a lease, and it lapses."""

    at_s: float
    role: Role
    for_s: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class SourceDies:
    """The next peer that is half-way through giving its weights dies, as source and as worker."""

    at_s: float


@dataclass(frozen=True, slots=True)
class SourceLies:
    """The next peer that gives its weights turns out to give wrong bytes half-way."""

    at_s: float


@dataclass(frozen=True, slots=True)
class SpotReclaim:
    """Workers are to be given back: told to drain, and gone after the notice, drained or not."""

    at_s: float
    role: Role
    notice_s: float = 30.0
    count: int = 1


@dataclass(frozen=True, slots=True)
class QuotaDenied:
    """The actuator takes only `granted` more orders for a while; of any role when None."""

    at_s: float
    for_s: float
    granted: int = 0
    role: Role | None = None


@dataclass(frozen=True, slots=True)
class StartsHang:
    """The next `count` starts that have their weights never come up."""

    at_s: float
    role: Role
    count: int = 1


@dataclass(frozen=True, slots=True)
class StartsFail:
    """The next `count` starts that have their weights fail."""

    at_s: float
    role: Role
    count: int = 1


@dataclass(frozen=True, slots=True)
class SignalsStale:
    """The planner gets the router's last answer again and again for a while."""

    at_s: float
    for_s: float


@dataclass(frozen=True, slots=True)
class SignalsMissing:
    """The planner gets no answer of the router for a while."""

    at_s: float
    for_s: float


@dataclass(frozen=True, slots=True)
class SignalOutlier:
    """One answer of the router tells of `factor` times the demand since the one before."""

    at_s: float
    factor: float = 10.0


@dataclass(frozen=True, slots=True)
class SignalsDistorted:
    """The router's answers come, and are spoilt for a while.

    Attributes:
        how: `empty`: without the model. `broken`: with a NaN in the place of one number. `partial`:
            one number is not there. `dipped`: counters are a hair lower in every other answer.
            `restarted`: the router begins another life at that moment and counts anew.
    """

    at_s: float
    for_s: float
    how: Literal["empty", "broken", "partial", "dipped", "restarted"]


@dataclass(frozen=True, slots=True)
class ClockStep:
    """The planner's wall clock jumps."""

    at_s: float
    by_s: float


@dataclass(frozen=True, slots=True)
class PlannerRestart:
    """The leading planner dies; another begins after a while, from journal and lease alone."""

    at_s: float
    for_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NewArtifact:
    """No fault but a roll-out: another revision is published, which new workers are to serve.

    Its KV fits none of the revision before, so generations stay apart.

    Attributes:
        slowness: times that its engines take, over those of the class.
    """

    at_s: float
    slowness: float = 1.0


Fault = (
    Crash
    | Stall
    | Partition
    | SourceDies
    | SourceLies
    | SpotReclaim
    | QuotaDenied
    | StartsHang
    | StartsFail
    | SignalsStale
    | SignalsMissing
    | SignalOutlier
    | SignalsDistorted
    | ClockStep
    | PlannerRestart
    | NewArtifact
)
