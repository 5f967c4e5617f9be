"""What an engine may offer beyond the port: to wait without weights, to sleep, to upgrade its graphs.

Owns three Protocols and the values they give. An adapter implements those that its engine can do and
leaves the others out, or withholds what it has from the adapter it is made of; whoever asks for one
that is left out gets `NotOffered` with the engine's name (`offered`), so that nobody takes an engine
that cannot for one that did.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar, runtime_checkable

from readyplane.core.errors import Unsupported
from readyplane_agent.engines.port import EnginePort, EngineSpec, GenerateResult

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Imported:
    """An engine process that waits to be told what to load.

    Attributes:
        pid: of the process. start_s, ready_s: CLOCK_MONOTONIC when it was started, and when it had
            imported everything: what a start spends between them is saved when it is used.
        resident_bytes: of its memory in the host. device_bytes: what it holds of the device, None
            when nobody says; a bare standby holds none.
    """

    pid: int
    start_s: float
    ready_s: float
    resident_bytes: int | None = None
    device_bytes: int | None = None


@runtime_checkable
class StandsBy(Protocol):
    """An engine whose process can be there before anything of its model is."""

    async def stand_by(
        self, spec: EngineSpec, *, stall_s: float = 60.0, limit_s: float = 600.0
    ) -> Imported:
        """Start the process; returns when it has imported everything and waits.

        It holds neither weights nor device memory, and has read none of the files that `spec` names:
        only `engine_id`, `model`, `work_dir`, `log_path`, `host`, `environment` and `extra_args` are
        settled by now. `start(spec)` of the same adapter then hands the whole spec to the waiting
        process in place of starting one: same pid, and `startup_segments()` holds what comes after,
        with a `runtime_import` of no length whose `saved_s` is what the waiting saved.

        Raises Unavailable when it died, made no progress for `stall_s`, or took `limit_s`.
        """
        ...


class SleepDepth(StrEnum):
    """What a sleeping engine has given up besides its KV, which is always gone.

    WEIGHTS_IN_HOST: the device; weights lie in host memory. WEIGHTS_GONE: weights are to be loaded
    and verified again before it may answer.
    """

    WEIGHTS_IN_HOST = "weights_in_host"
    WEIGHTS_GONE = "weights_gone"


@runtime_checkable
class Sleeps(Protocol):
    """An engine that can give its device back and take it again, process and code kept."""

    async def sleep(self, depth: SleepDepth) -> None:
        """Give the device back. Raises Refused while a request runs or KV is held for a reader."""
        ...

    async def wake(self) -> None:
        """Take the device again; after WEIGHTS_GONE the weights are read again from the arena.

        Returns when it answers. Raises Unavailable, or IdentityMismatch when the weights that it
        has now are not those it had (`weights_missing` where there are none, B129).
        """
        ...


class CaptureState(StrEnum):
    """Where the capture of the next graphs is."""

    IDLE = "idle"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Graphs:
    """The graphs of an engine, and what the next stage of them would take.

    Attributes:
        used, captured: shapes (sequences an iteration) that requests run with, that are captured.
        wanted: all that the start mode has. state, failure: of the capture.
        kv_total_blocks: blocks that requests may use now. kv_blocks_after: once all of `wanted`
            are captured. graph_bytes: taken by what is captured.
    """

    used: tuple[int, ...]
    captured: tuple[int, ...]
    wanted: tuple[int, ...]
    state: CaptureState
    kv_total_blocks: int
    kv_blocks_after: int
    graph_bytes: int
    failure: str = ""

    @property
    def complete(self) -> bool:
        """Whether requests run with all there is to run with."""
        return set(self.used) >= set(self.wanted)


@runtime_checkable
class StagesGraphs(Protocol):
    """An engine that starts with few graphs (`EngineSpec.graph_stages`) and captures more later."""

    async def graphs(self) -> Graphs:
        """As they are now. Raises Unavailable."""
        ...

    async def capture(self) -> None:
        """Begin to capture what is wanted and not captured, beside requests and stalling none.

        Memory for them is taken from free KV blocks, never from one in use; requests go on with what
        is `used`. Idempotent. Raises Unavailable.
        """
        ...

    async def answer_captured(
        self, prompt_token_ids: tuple[int, ...], *, max_tokens: int
    ) -> GenerateResult:
        """One greedy answer made with what is captured, before requests are. For the check."""
        ...

    async def use_captured(self) -> Graphs:
        """From the next iteration on requests run with what is captured. Idempotent."""
        ...

    async def drop_captured(self) -> Graphs:
        """Back to what the start had: capture stopped, memory given back to KV. Idempotent."""
        ...


@runtime_checkable
class Withholds(Protocol):
    """An adapter that has the methods of an offer from the one it is made of, and cannot do it."""

    def withheld(self, what: type[object]) -> str:
        """What it is that cannot, after the engine's name; empty for what it does offer."""
        ...


class NotOffered(Unsupported):
    """The engine does not offer what a start was ordered with; no other start of it would."""


def offered(engine: EnginePort, what: type[T], name: str, text: str) -> T:
    """The engine as one that offers `what`.

    Raises:
        NotOffered: it does not; `name` is the engine's, `text` says what was wanted.
    """
    why = engine.withheld(what) if isinstance(engine, Withholds) else ""
    if isinstance(engine, what) and not why:
        return engine
    who = f"{name} {why}".rstrip()
    raise NotOffered(f"{text} by engine {who}", "start it without, or take an engine that can")
