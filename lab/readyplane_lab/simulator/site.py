"""What all workers of a simulated world share, and the few words in which one of them is told of.

Owns values only: what a worker's life does with them is `worker`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from readyplane.core.startup import WeightTier
from readyplane.core.worker import Role
from readyplane.kit.clock import Clock
from readyplane.ports import Router
from readyplane_lab.simulator.artifact import Artifacts
from readyplane_lab.simulator.nodes import Nodes
from readyplane_lab.simulator.sources import WeightSources
from readyplane_lab.simulator.startup import Draws, StartUpModel

BLOCK_SIZE = 16


class Begin(StrEnum):
    """How an allocation comes to serve."""

    COLD = "cold"
    FIRST = "first"  # as cold, some time before the first request: no other start was in its way
    STANDBY = "standby"  # loaded, then waits to be activated


class Mishap(StrEnum):
    """What may become of a start."""

    HANGS = "hangs"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Site:
    """What all workers of a world share.

    Attributes:
        mishap: asked once a start, when the weights are there: what becomes of it, None for well.
        block_size: tokens of a KV block.
    """

    router: Router
    artifacts: Artifacts
    startup: StartUpModel
    sources: WeightSources
    nodes: Nodes
    draws: Draws
    clock: Clock
    mishap: Callable[[Role], Mishap | None] = lambda _role: None
    block_size: int = BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Phase:
    """What an allocation was before it changed its stage; virtual seconds.

    Attributes:
        start_s: when the start that made it ready began. waits: from when to when it stood by.
    """

    pool: str
    allocated_s: float
    start_s: float
    ready_s: float | None
    drain_s: float | None
    released_s: float | None
    tier: WeightTier
    waits: tuple[tuple[float, float], ...] = ()
