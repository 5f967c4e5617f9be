"""What the fluid mode is asked to run: the fields of the event mode that mean something here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from readyplane.core.profile import LinkClass
from readyplane_lab.simulator.startup import StartUpModel
from readyplane_planner.decide.follow import Brain

LINK = LinkClass("rdma-400g", 50e9, 0.002)
STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class FluidOptions:
    """What is simulated.

    Attributes:
        policy: planner policy document. seed: of start-ups. startup: how starts take time.
        link: between prefill and decode workers.
        brain: plans; None: the production `decide`.
        initial: (P, D) ready before the first arrival; None: the policy's least.
        block_size: tokens of a KV block, the grain of the prefix cache.
        cache_tokens: of the one prefix cache that stands for those of all prefill workers; None:
            as many as the first prefill workers hold, 0: none.
        faults: values of `readyplane_lab.simulator.faults`, as far as a fluid has them.
        step_s: of the fluid. record: keep series and the documents of decisions that changed.
        timer: CPU seconds, for `planner_s`; None leaves that empty.
    """

    policy: Mapping[str, Any]
    seed: int = 1
    startup: StartUpModel = field(default_factory=StartUpModel)
    link: LinkClass = LINK
    brain: Brain | None = None
    initial: tuple[int, int] | None = None
    block_size: int = 64
    cache_tokens: float | None = None
    faults: tuple[Any, ...] = ()
    step_s: float = STEP_S
    record: bool = True
    timer: Callable[[], float] | None = None
