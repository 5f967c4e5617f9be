"""The router's port: what is alive, and which pair serves a request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from readyplane.core.breakdown import ClientSignals, GenerationSignals
from readyplane.core.kv import KvEventBatch
from readyplane.core.ration import PrioritySignals, Ration
from readyplane.core.work import RequestEvent, RequestShape, bootstrap_room
from readyplane.core.worker import (
    CheckResult,
    Fleet,
    Holds,
    Lease,
    LoadReport,
    Role,
    Serving,
    StartProgress,
    Worker,
    WorkerOffer,
)


@dataclass(frozen=True, slots=True)
class Directive:
    """What a worker must do now: drain, leave, replay_kv, activate, flip, stop.

    Attributes:
        role: of a flip, the stage to serve from now on.
    """

    kind: str
    deadline_s: float | None = None
    reason: str = ""
    role: Role | None = None


@dataclass(frozen=True, slots=True)
class Renewal:
    """One message of a worker's session.

    Attributes:
        quiet: an answer that says nothing need not come; for whoever renews often and asks for an
            answer well within the ttl all the same.
        stands_by: of a standby that waits, with what; None while it does not.
    """

    worker_id: str
    incarnation: str
    epoch: int
    progress: StartProgress | None = None
    load: LoadReport | None = None
    kv_events: tuple[KvEventBatch, ...] = ()
    drained: bool = False
    quiet: bool = False
    stands_by: Holds | None = None


@dataclass(frozen=True, slots=True)
class RenewalAnswer:
    """The lease as it now stands, and directives (repeated until done).

    `heard`: the router said so; False after a quiet renewal that nobody waited for.
    `age_s`: seconds since it was asked, for one that is read with a later renewal.
    """

    lease: Lease
    directives: tuple[Directive, ...] = ()
    heard: bool = True
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RankReport:
    """How far one rank is: scheduled, verified, connected, placed, canary_passed, failed.

    Attributes:
        life: how often the rank has started anew in this generation.
        communicator: sum of the lives of the ranks it is connected with, its own included.
        progress: a number that grows while it gets on, told again and again within a long step.
    """

    worker_id: str
    incarnation: str
    epoch: int
    rank: int
    step: str
    manifest_digest: str = ""
    detail: str = ""
    life: int = 0
    communicator: int = 0
    progress: int = 0


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """forming, published (with its epoch) or failed; and which ranks and steps are awaited."""

    state: str
    group_epoch: int = 0
    waiting_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """Admitted, or every reason why not.

    Attributes:
        standby: admitted as a standby, which is not routable until it is activated.
    """

    admitted: bool
    reasons: tuple[str, ...] = ()
    checks: tuple[CheckResult, ...] = ()
    standby: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """One end of a pair. `bootstrap`: see `Serving.bootstrap`."""

    worker_id: str
    incarnation: str
    epoch: int
    engine_url: str
    cached_tokens: int = 0
    bootstrap: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """A reserved pair with what was predicted for it.

    Attributes:
        local: both ends are one worker; no hand-over.
        explanation: cost terms, alternatives, exclusions (only when asked for).
    """

    reservation_id: str
    prefill: End
    decode: End
    local: bool
    predicted_ttft_s: float
    predicted_tpot_s: float
    waited_s: float
    ttl_s: float
    explanation: Mapping[str, Any] | None = None

    @property
    def bootstrap_room(self) -> int | None:
        """The number under which both engines meet, for legs that are sent at once; else None."""
        p, d = self.prefill, self.decode
        if self.local or not p.bootstrap:
            return None
        return bootstrap_room(self.reservation_id, p.incarnation, d.incarnation)


@dataclass(frozen=True, slots=True)
class LatencyWindow:
    """Quantiles of the samples of a window; `count` 0 means that nothing is known."""

    window_s: float = 0.0
    count: int = 0
    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0
    mean_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelSignals:
    """Counters of one model since the router began, and gauges now (see router.proto).

    `clients`: the largest labelled ones; the rest is what they leave of the model's counters.
    """

    model: str
    arrivals_total: int = 0
    arrival_tokens_total: int = 0
    arrival_uncached_tokens_total: int = 0
    finished_total: int = 0
    finished_prompt_tokens_total: int = 0
    output_tokens_total: int = 0
    refused_total: int = 0
    aborted_total: int = 0
    attained_total: int = 0
    repaired_total: int = 0
    handovers_total: int = 0
    queued_requests: int = 0
    queued_tokens: int = 0
    prefilling_requests: int = 0
    prefilling_tokens: int = 0
    decoding_requests: int = 0
    decoding_remaining_tokens: float = 0.0
    decoding_kv_tokens: int = 0
    ttft_actual: LatencyWindow = LatencyWindow()
    ttft_predicted: LatencyWindow = LatencyWindow()
    tpot_actual: LatencyWindow = LatencyWindow()
    tpot_predicted: LatencyWindow = LatencyWindow()
    length_counts: tuple[tuple[float, ...], ...] = ()
    generations: tuple[GenerationSignals, ...] = ()
    priorities: tuple[PrioritySignals, ...] = ()
    ration: Ration | None = None
    clients: tuple[ClientSignals, ...] = ()


@dataclass(frozen=True, slots=True)
class RouterSignals:
    """What the router tells the planner. `incarnation` changes when its counters restart.

    `routers_missing`: others that share its store, live, and have not told it their part lately.
    """

    incarnation: str
    uptime_s: float
    models: Mapping[str, ModelSignals] = field(default_factory=dict)
    fleet: Fleet = field(default_factory=Fleet)
    routers_missing: int = 0


class Router(Protocol):
    """What is alive, and which pair serves a request."""

    async def register(self, offer: WorkerOffer) -> Lease:
        """Grant a lease; an older incarnation of the same worker id is fenced off."""
        ...

    async def renew(self, renewal: Renewal) -> RenewalAnswer:
        """Renew. Raises LostLease or StaleEpoch."""
        ...

    def hear(self, worker_id: str, incarnation: str, told: Callable[[RenewalAnswer], None]) -> None:
        """Call `told` as soon as this incarnation has to do something else than before.

        From its next renewal on, until it registers anew; a later `told` takes the place of an
        earlier one. Nothing is promised: what is not told so comes with the next renewal.
        """
        ...

    async def report_rank(self, report: RankReport) -> GroupStatus:
        """One rank's step towards the group barrier."""
        ...

    async def admit(
        self,
        worker_id: str,
        incarnation: str,
        epoch: int,
        *,
        serving: Serving,
        checks: Sequence[CheckResult],
    ) -> GateVerdict:
        """Judge the gate evidence; admitted means routable from now on.

        Of one that serves already only another stage of its capacity profile is judged.
        """
        ...

    async def leave(self, worker_id: str, incarnation: str, epoch: int, *, reason: str) -> None:
        """Give the lease up."""
        ...

    async def drain(
        self,
        worker_id: str,
        *,
        epoch: int = 0,
        reason: str = "",
        deadline_s: float = 300.0,
        scale_decision_id: str = "",
        leader_epoch: int = 0,
    ) -> Worker:
        """No new assignment from now on. Raises StaleEpoch for an older leader or incarnation."""
        ...

    async def activate(
        self,
        worker_id: str,
        *,
        epoch: int = 0,
        reason: str = "",
        deadline_s: float = 0.0,
        scale_decision_id: str = "",
        leader_epoch: int = 0,
    ) -> Worker:
        """A standby is to serve; told at once and with renewals, for `deadline_s` (0: the router's).

        Idempotent; for who serves it changes nothing. Raises as a drain, and Refused.
        """
        ...

    async def flip(
        self,
        worker_id: str,
        *,
        role: Role,
        epoch: int = 0,
        reason: str = "",
        deadline_s: float = 0.0,
        scale_decision_id: str = "",
        leader_epoch: int = 0,
    ) -> Worker:
        """A ready worker is to serve the other stage, once it has drained its own.

        Idempotent. Raises as a drain, and Refused with every reason why it cannot.
        """
        ...

    async def ration(self, model: str, order: Ration, *, leader_epoch: int = 0) -> Ration | None:
        """Refuse low priorities for a time; idempotent. Raises StaleEpoch, InvalidField, NotFound."""
        ...

    async def list_workers(self, model: str = "") -> Fleet:
        """The fleet now."""
        ...

    def watch(self, model: str = "") -> AsyncIterator[Fleet]:
        """The fleet now and after every change."""
        ...

    async def route(
        self,
        shape: RequestShape,
        *,
        replaces: str = "",
        avoid: Sequence[str] = (),
        explain: bool = False,
        dry_run: bool = False,
    ) -> Pair:
        """Pick and reserve a pair. Raises NoPair, NoCompatiblePair, Overloaded, PromptTooLong."""
        ...

    async def complete(self, events: Sequence[RequestEvent]) -> int:
        """Tell facts; returns how many reservations were not known."""
        ...

    async def signals(self, model: str = "", *, leader_epoch: int = 0) -> RouterSignals:
        """Demand, latency, queues and fleet.

        From the answer on, drains of an older leader of `model` are refused, here too; 0 only reads.
        """
        ...


class Mover(Protocol):
    """The part of a router that moves requests under way from a worker that is to leave."""

    async def move(
        self, shape: RequestShape, *, reservation_id: str, worker_id: str, emitted: int
    ) -> Pair:
        """Another decode worker; both ends of the pair are that one.

        The old reservation is given back once the new one stands, so that there always is one.

        Args:
            shape: as it was routed; a prompt's length is enough. worker_id: where its KV is.
            emitted: output tokens so far.

        Raises:
            NotFound: that worker is not known. Overloaded: no other worker has room now, or fits.
        """
        ...
