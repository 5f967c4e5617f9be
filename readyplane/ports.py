"""The services as Protocols in core words: what a caller may rely on, whoever implements it.

Implemented by each service's `service.py` (in process, for the simulator), by `readyplane.client`
(over gRPC), and checked by one contract suite. Errors are those of `readyplane.core.errors`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from readyplane.core.breakdown import ClientSignals, GenerationSignals
from readyplane.core.chunks import ChunkRanges
from readyplane.core.identity import Manifest
from readyplane.core.kv import KvEventBatch
from readyplane.core.ration import PrioritySignals, Ration
from readyplane.core.resolution import CANDIDATES_SHOWN_MAX, Resolution
from readyplane.core.startup import StartMode, WeightTier
from readyplane.core.trust import Trail
from readyplane.core.work import RequestEvent, RequestShape
from readyplane.core.worker import (
    CheckResult,
    Fleet,
    Lease,
    LoadReport,
    Role,
    Serving,
    StartProgress,
    Worker,
    WorkerOffer,
)

# --------------------------------------------------------------------------- registry


@dataclass(frozen=True, slots=True)
class ManifestSummary:
    """A line about one manifest."""

    digest: str
    kind: str
    model: str
    size_bytes: int
    file_count: int
    tensor_count: int
    created_s: float
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tag:
    """A mutable name and the digest it points at; `version` grows with every change."""

    name: str
    digest: str
    version: int
    created_s: float


@dataclass(frozen=True, slots=True)
class Source:
    """Who can give the bytes of an artifact: `{url}/{path}` serves ranges of every file.

    Attributes:
        readers: places taken now, told by the registry; what an announcement says of it is ignored.
        partial: it is still loading, and has verified only the chunks of `held` yet (numbered as in
            `core.chunks`). It announces itself so before it plans its own fetch, with nothing held,
            and again as it gets on: a later starter may then read behind it (R8.4). What it holds
            is a lower bound: it may hold more when asked, never fewer.
        layout_digest: the layout in which the bytes lie there; empty: as in the manifest.
        slo_share: the larger of TTFT and TPOT of the requests that this worker serves, as a share
            of its target; None when it serves nobody or does not know (R9.1).
        draining: takes no new readers; those that read may finish (R22.3).
    """

    source_id: str
    digest: str
    tier: WeightTier
    url: str
    worker_id: str = ""
    incarnation: str = ""
    node: str = ""
    bandwidth_bytes_per_s: float = 0.0
    readers: int = 0
    readers_max: int = 2
    partial: bool = False
    held: ChunkRanges = ()
    layout_digest: str = ""
    slo_share: float | None = None
    draining: bool = False
    rack: str = ""


@dataclass(frozen=True, slots=True)
class RankedSource:
    """A source at its place in a plan, with the predicted seconds and why it stands there.

    Attributes:
        gives: which of the missing chunks it holds already.
        complete_in_s: until it holds all of them; None when it does, or when nobody knows.
    """

    source: Source
    predicted_s: float
    why: str
    gives: ChunkRanges = ()
    complete_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Sources best first; `excluded` says who was left out and why.

    The first source is the parent in the fan-out: read all that is missing from it, waiting for
    chunks that it will hold soon; the others are for when it fails, stalls or refuses. Then plan
    anew with what is still missing. `retry_after_s` is set when nobody has a place now.
    """

    sources: tuple[RankedSource, ...]
    excluded: tuple[str, ...] = ()
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """A reader's place at a source, for `ttl_s` unless renewed.

    Attributes:
        source_incarnation, layout_digest: of the source; an answer with others is not from it.
        bytes_per_s: how fast to read at most, so that serving is not harmed; 0: no bound.
        readers: of the source now, this one included; 0: not told.
    """

    transfer_id: str
    ttl_s: float
    source_incarnation: str = ""
    layout_digest: str = ""
    bytes_per_s: float = 0.0
    readers: int = 0


@dataclass(frozen=True, slots=True)
class StartNode:
    """A node where a worker could start.

    Attributes:
        queue_s: until a place is free there (T_queue).
        runtime_init_s: what a start takes there besides queue and artifact; None: as elsewhere.
        ingress_bytes_per_s: how fast bytes can come in at all; 0: not known.
        places: how many can start there.
    """

    node: str
    rack: str = ""
    queue_s: float = 0.0
    runtime_init_s: float | None = None
    ingress_bytes_per_s: float = 0.0
    places: int = 1


@dataclass(frozen=True, slots=True)
class StartChoice:
    """One start on one node from one source: T_queue + T_artifact + T_runtime_init, and why."""

    node: str
    source: Source
    queue_s: float
    artifact_s: float
    runtime_init_s: float
    total_s: float
    why: str


@dataclass(frozen=True, slots=True)
class StartPlacement:
    """Where starts should go (R8.2): `choices` one for each, in the order they would be given.

    Attributes:
        alternatives: the best of every other node for the first start, best first.
        excluded: nodes and sources that were left out, each with its reason.
    """

    choices: tuple[StartChoice, ...]
    alternatives: tuple[StartChoice, ...] = ()
    excluded: tuple[str, ...] = ()


class Registry(Protocol):
    """What is immutable, and who holds the bytes now."""

    async def publish_manifest(
        self, document: Mapping[str, Any], *, bytes_elsewhere: bool = False
    ) -> tuple[str, bool]:
        """Store a manifest; returns (digest, created). Idempotent by content."""
        ...

    async def get_manifest(self, digest: str) -> Manifest:
        """One manifest. Raises NotFound."""
        ...

    async def list_manifests(self, *, model: str = "", kind: str = "") -> list[ManifestSummary]:
        """Newest first."""
        ...

    async def set_tag(
        self, name: str, digest: str, *, expected_digest: str = "", force: bool = False
    ) -> Tag:
        """Compare-and-set. Raises Conflict when another digest is found, NotFound."""
        ...

    async def sign_manifest(self, digest: str, *, public_key: bytes, envelope: str) -> bool:
        """Store a signature that verifies; False when this key had signed it before."""
        ...

    async def record_origin(self, digest: str, origin: Mapping[str, str]) -> None:
        """Note beside it where an artifact's bytes came from."""
        ...

    async def trail(self, digest: str) -> Trail:
        """What was said of a manifest since it was published. Raises NotFound."""
        ...

    async def hold_upload(
        self, upload_id: str, sha256: Sequence[str], *, release: bool = False
    ) -> float:
        """Keep bytes that are about to be published from being collected; returns the ttl in s."""
        ...

    async def list_tags(self, name: str = "") -> list[Tag]:
        """Current tags, or the history of one, newest first."""
        ...

    async def resolve(
        self, reference: str, *, kind: str = "weights", need: Mapping[str, str] | None = None
    ) -> Manifest:
        """By digest, tag or model name. Raises NotFound or IdentityMismatch naming the fields."""
        ...

    async def resolve_need(
        self,
        reference: str,
        *,
        kind: str,
        need: Mapping[str, str],
        candidates_max: int = CANDIDATES_SHOWN_MAX,
    ) -> Resolution:
        """As `resolve`; what misses is an answer with the nearest candidates. Raises NotFound."""
        ...

    async def announce_source(self, source: Source) -> float:
        """Announce or refresh; returns the ttl in seconds."""
        ...

    async def withdraw_source(self, source_id: str, *, reason: str = "") -> None:
        """Take a source back at once."""
        ...

    async def plan_fetch(
        self,
        digest: str,
        *,
        worker_id: str,
        incarnation: str,
        node: str,
        missing: ChunkRanges = (),
        rack: str = "",
        layout_digest: str = "",
    ) -> FetchPlan:
        """Sources for one target, best first; `missing` empty means every chunk."""
        ...

    async def place_start(
        self, digest: str, *, nodes: Sequence[StartNode], starts: int = 1, layout_digest: str = ""
    ) -> StartPlacement:
        """Where to start next, over (node, source). Raises NotFound, InvalidField."""
        ...

    async def acquire_transfer(
        self,
        source_id: str,
        digest: str,
        *,
        worker_id: str,
        incarnation: str,
        request_id: str,
        source_incarnation: str = "",
        layout_digest: str = "",
        readers_seen: int | None = None,
    ) -> Transfer:
        """Reserve a reader's place, or renew it with the same `request_id`.

        Give what the plan said of the source: its incarnation, the layout needed, its readers. Of
        many starters that planned at once one gets the place, the others plan anew and find it as
        the one to read behind.

        Raises:
            Overloaded: the source is full, leaves, is barred, or has more readers than planned.
            NotFound: the source is gone, or holds another artifact.
            StaleEpoch: it is another life of the source than the one expected.
            IdentityMismatch: its bytes lie in another layout.
        """
        ...

    async def release_transfer(
        self, transfer_id: str, *, transferred_bytes: int, elapsed_s: float, failure: str = ""
    ) -> bool:
        """Give the place back; True when the source was quarantined for lying."""
        ...


# --------------------------------------------------------------------------- router


@dataclass(frozen=True, slots=True)
class Directive:
    """What a worker must do now: drain, leave, replay_kv, activate, flip, stage_up, stop.

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
    """

    worker_id: str
    incarnation: str
    epoch: int
    progress: StartProgress | None = None
    load: LoadReport | None = None
    kv_events: tuple[KvEventBatch, ...] = ()
    drained: bool = False
    quiet: bool = False


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
    """How far one rank is: scheduled, verified, connected, placed, canary_passed, failed."""

    worker_id: str
    incarnation: str
    epoch: int
    rank: int
    step: str
    manifest_digest: str = ""
    detail: str = ""


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
    """One end of a pair."""

    worker_id: str
    incarnation: str
    epoch: int
    engine_url: str
    cached_tokens: int = 0


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
        """Judge the gate evidence; admitted means routable from now on."""
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
        """A standby is to serve, with its next renewal; told for `deadline_s` (0: the router's).

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


# --------------------------------------------------------------------------- planner


class Planner(Protocol):
    """What should be, and why. Documents are JSON objects described in the planner's README."""

    async def state(self, model: str = "") -> dict[str, Any]:
        """What a person watches."""
        ...

    def watch_state(self, model: str = "") -> AsyncIterator[dict[str, Any]]:
        """The same after every tick."""
        ...

    async def list_decisions(
        self, *, model: str = "", limit: int = 50, changes_only: bool = False
    ) -> list[dict[str, Any]]:
        """Newest first."""
        ...

    async def explain(self, decision_id: str) -> dict[str, Any]:
        """One decision with what came of it. Raises NotFound."""
        ...

    async def replay(self, decision_id: str) -> dict[str, Any]:
        """It is taken again from its recorded inputs and compared. Raises NotFound, InvalidField."""
        ...

    async def what_if(self, changes: Mapping[str, str], *, model: str = "") -> dict[str, Any]:
        """The last decision beside the one under changes. Raises UnknownField, InvalidField."""
        ...

    async def get_policy(self, model: str = "") -> tuple[dict[str, Any], int]:
        """Policy in force and its version."""
        ...

    async def set_policy(
        self,
        policy: Mapping[str, Any],
        *,
        model: str = "",
        merge: bool = False,
        expected_version: int = 0,
    ) -> tuple[dict[str, Any], int]:
        """Compare-and-set. Raises UnknownField, InvalidField, Conflict."""
        ...

    async def set_paused(self, paused: bool, *, model: str = "", reason: str = "") -> bool:
        """Hold all targets, or let go."""
        ...


# --------------------------------------------------------------------------- actuator


@dataclass(frozen=True, slots=True)
class Order:
    """One worker to be started.

    Attributes:
        convertible_tpot_s: above 0, a decode worker that also takes prompts in short chunks, between
            iterations that keep this time per output token.
        standby: loaded and proved, then waiting until the router activates it.
    """

    worker_id: str
    role: Role
    model: str
    worker_class: str
    manifest_digest: str
    generation: int = 1
    mode: StartMode = StartMode.JIT
    scale_decision_id: str = ""
    node_preference: tuple[str, ...] = ()
    convertible_tpot_s: float = 0.0
    standby: bool = False


@dataclass(frozen=True, slots=True)
class Instance:
    """One allocation: pending, running, exited or failed. Ages in seconds, None if not yet."""

    order: Order
    state: str
    node: str = "local"
    node_note: str = ""
    pid: int = 0
    allocated_ago_s: float = 0.0
    running_ago_s: float | None = None
    exited_ago_s: float | None = None
    exit_code: int | None = None
    reason: str = ""
    log_tail: str = ""


class Actuator(Protocol):
    """Starts and stops worker processes; knows nothing of load."""

    async def provision(self, order: Order, *, leader_epoch: int = 0) -> Instance:
        """Idempotent by worker_id. Raises Refused with reasons."""
        ...

    async def release(
        self, worker_id: str, *, grace_s: float = 10.0, reason: str = "", leader_epoch: int = 0
    ) -> Instance:
        """Take the resources back. Idempotent. Raises NotFound."""
        ...

    async def list_instances(self, *, model: str = "", leader_epoch: int = 0) -> list[Instance]:
        """Every instance, the recently ended ones too.

        With a leader's number the list is complete for that leader: from this answer on, orders
        and releases of an older one of `model` are refused. Raises StaleEpoch for an older one.
        """
        ...
