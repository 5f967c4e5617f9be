"""The stage of a worker's capacity profile: what it runs with now, and what it will (R14). Pure.

Owns the value that an agent publishes, its digest, and what two stages of one worker must agree in.
A worker that started with few graphs serves at once, slower; once more are captured and checked it
publishes another stage, and the memory of those graphs is no KV any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from readyplane.core.errors import InvalidField
from readyplane.core.identity import digest_of

SHAPES_MAX = 4096


class UpgradeState(StrEnum):
    """How far a worker's upgrade is.

    FIRST: serves with what the start had. CAPTURING: more graphs are captured, their memory is no
    KV from now on. CHECKING: they are compared with what serves. COMPLETE: requests run with them.
    ROLLED_BACK: a step failed, and everything is as after the start. UNSUPPORTED: the engine has no
    stages, and started whole.
    """

    FIRST = "first"
    CAPTURING = "capturing"
    CHECKING = "checking"
    COMPLETE = "complete"
    ROLLED_BACK = "rolled_back"
    UNSUPPORTED = "unsupported"


COMPILED = frozenset({UpgradeState.COMPLETE, UpgradeState.UNSUPPORTED})
"""Where the profile's own times hold; elsewhere those of an eager start."""


@dataclass(frozen=True)
class CapacityStage:
    """One stage of one worker's capacity profile.

    Attributes:
        state: of the upgrade. profile: class profile that it refers to.
        shapes: sequences an iteration for which requests run with graphs.
        graph_bytes: device memory of all captured graphs; None where the engine has no account.
        kv_tokens: that requests may use, graph memory taken off.
        failure: why it was rolled back, or cannot be upgraded.
        took_s: seconds from ready to this state; None before anything began.
    """

    state: UpgradeState
    profile: str
    shapes: tuple[int, ...]
    kv_tokens: int
    graph_bytes: int | None = None
    failure: str = ""
    took_s: float | None = field(default=None, compare=False)

    @property
    def number(self) -> int:
        """1 as it started, 2 upgraded."""
        return 2 if self.state is UpgradeState.COMPLETE else 1

    @property
    def compiled(self) -> bool:
        """Whether the profile's own times hold."""
        return self.state in COMPILED

    @cached_property
    def digest(self) -> str:
        """Identity of what is promised: times, shapes and KV; not of how far the upgrade is."""
        return digest_of(
            {
                "profile": self.profile,
                "compiled": self.compiled,
                "shapes": list(self.shapes),
                "kv_tokens": self.kv_tokens,
                "graph_bytes": self.graph_bytes,
            }
        )

    def at(self, took_s: float) -> CapacityStage:
        """The same, reached so long after ready."""
        return replace(self, took_s=took_s)


def check_stage(stage: CapacityStage, *, kv_total_blocks: int, block_size: int) -> None:
    """A stage against the serving facts that it is sent with.

    Raises:
        InvalidField: names the field, the value and the remedy.
    """
    pool = kv_total_blocks * block_size
    if stage.kv_tokens != pool:
        remedy = f"publish the {pool} tokens of the {kv_total_blocks} blocks that are served"
        raise InvalidField("stage.kv_tokens", stage.kv_tokens, remedy)
    if not stage.profile:
        raise InvalidField("stage.profile", "", "name the class profile")
    if len(stage.shapes) > SHAPES_MAX or any(shape < 1 for shape in stage.shapes):
        raise InvalidField("stage.shapes", stage.shapes[:8], f"give at most {SHAPES_MAX} from 1")
    if stage.state is UpgradeState.ROLLED_BACK and not stage.failure:
        raise InvalidField("stage.failure", "", "say why it was rolled back")
    if stage.graph_bytes is not None and stage.graph_bytes < 0:
        raise InvalidField("stage.graph_bytes", stage.graph_bytes, "use a number from 0")
