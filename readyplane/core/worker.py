"""Workers, leases and the fleet: frozen, epoch-stamped values.

Identity is content, incarnation is one process life, epoch is a fencing number; an address is none
of these. A worker is one complete parallel group that serves as a unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from readyplane.core.identity import KvFormat
from readyplane.core.stage import CapacityStage
from readyplane.core.startup import Segment, StartMode, WeightTier

MEETING = "sglang/"
"""How connectors begin whose engines meet under a bootstrap room: both legs go out at once."""


class Role(StrEnum):
    """The stage a worker serves. `BOTH` serves prefill and decode (no hand-over needed)."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def serves(self, stage: Role) -> bool:
        """Whether a worker of this role can take the given stage."""
        return self in (stage, Role.BOTH)


class WorkerState(StrEnum):
    """Where a worker is between order and release.

    ORDERED (desired only) → PROVISIONED (agent runs, lease held) → READY (gate passed, routable) →
    DRAINING (no new work) → GONE. STANDBY: gate passed, not routable until activated. STALLED: no
    progress although it has work; not routable.
    """

    ORDERED = "ordered"
    PROVISIONED = "provisioned"
    STANDBY = "standby"
    READY = "ready"
    DRAINING = "draining"
    STALLED = "stalled"
    GONE = "gone"


class Holds(StrEnum):
    """What a standby holds while it waits.

    WEIGHTS: everything; it passed the gate and serves within a second. PROCESS: an engine process
    that has imported what it needs, and neither weights nor device memory. ASLEEP: it passed the
    gate, then gave its device back; its weights lie in host memory.
    """

    WEIGHTS = "weights"
    PROCESS = "process"
    ASLEEP = "asleep"


@dataclass(frozen=True, slots=True)
class WorkerOffer:
    """What an agent offers when it asks for a lease: who it is and what it will be.

    Attributes:
        worker_id: name given by whoever ordered it; unique among the living.
        incarnation: id of this process life.
        role, model, worker_class: what it will serve and on what.
        generation: rollout generation of its group.
        manifest_digest: artifact it was told to serve.
        node: machine name, for placement.
        scale_decision_id: the decision that ordered it (empty for a manual start).
        ranks: number of ranks that must come up together.
        agent_url: where the agent serves chunks and health, `http://host:port`.
        ordered_ago_s: seconds since the order was given, where known, else None.
        mode: start mode.
        attached: an engine that was already running and was brought under control.
        convertible: a decode worker that also takes prompts in short chunks; its role is BOTH.
        standby: it is to pass the gate, and to serve only when activated. holds: what it holds until
            then.
        told_left_s, told_reason: it was told to serve under a lease that it has lost, and has so
            many seconds left to do so; None where it was told nothing.
    """

    worker_id: str
    incarnation: str
    role: Role
    model: str
    worker_class: str
    generation: int = 1
    manifest_digest: str = ""
    node: str = "local"
    scale_decision_id: str = ""
    ranks: int = 1
    agent_url: str = ""
    ordered_ago_s: float | None = None
    mode: StartMode = StartMode.JIT
    attached: bool = False
    convertible: bool = False
    standby: bool = False
    holds: Holds = Holds.WEIGHTS
    told_left_s: float | None = None
    told_reason: str = ""

    @property
    def counts_as(self) -> Role:
        """The stage whose capacity it is: what it does for the other one is never counted on."""
        return Role.DECODE if self.convertible else self.role


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker's right to be counted. TTL is chosen by the router, epoch fences predecessors.

    How often it is renewed, how long an answer may take and when it is asked again are shares of
    the TTL, so that one lost renewal never ends a lease (`renewed_within_s`).
    """

    worker_id: str
    incarnation: str
    epoch: int
    ttl_s: float

    @property
    def renew_every_s(self) -> float:
        """Between two renewals."""
        return self.ttl_s / 3

    @property
    def answer_within_s(self) -> float:
        """Bound on one renewal's answer."""
        return self.ttl_s / 4

    @property
    def retry_within_s(self) -> float:
        """Longest pause before a renewal without an answer is sent again."""
        return self.ttl_s / 8

    @property
    def renewed_within_s(self) -> float:
        """Longest time between two renewals that arrive, with one lost between them."""
        return self.renew_every_s + self.answer_within_s + self.retry_within_s


@dataclass(frozen=True, slots=True)
class StartProgress:
    """What a start has done so far, on the agent's monotonic clock.

    Attributes:
        segments: finished and running segments; `now_s` is the agent's clock when it was sent.
        start_s: when the agent process began on that clock.
        log_tail: end of the engine's log, for a start that hangs.
        failure: why the start failed, empty while it has not.
        dead_end: of a failure that the same start would meet again wherever it is made: `bytes`
            (wrong or missing at every source), `identity`, `trust`, `canary_missing`, `not_offered`
            (the engine cannot what was ordered); else empty.
    """

    start_s: float
    now_s: float
    segments: tuple[Segment, ...] = ()
    log_tail: str = ""
    failure: str = ""
    dead_end: str = ""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What the engine itself says about its load. None means not known, never zero.

    Attributes:
        running, waiting: sequences in the engine.
        waiting_prefill_tokens: prompt tokens not yet computed, queued or running.
        kv_used_blocks, kv_total_blocks: KV pool.
        prefill_tokens_total, decode_tokens_total, cached_tokens_total: counters of this
            incarnation.
        preemptions_total: counter.
        iterations_total: counter of engine steps: the sign of life.
        lateness_p99_s: how late a modelled engine runs behind its model; None for a real one.
        age_s: seconds since the engine was read, when the report was sent.
    """

    running: int | None = None
    waiting: int | None = None
    waiting_prefill_tokens: int | None = None
    kv_used_blocks: int | None = None
    kv_total_blocks: int | None = None
    prefill_tokens_total: int | None = None
    decode_tokens_total: int | None = None
    cached_tokens_total: int | None = None
    preemptions_total: int | None = None
    iterations_total: int | None = None
    lateness_p99_s: float | None = None
    age_s: float = 0.0

    @property
    def sign_of_life(self) -> int | None:
        """A counter that grows while it gets on: its iterations, or the tokens of an engine that
        counts no iterations (SGLang); None when nobody knows.
        """
        if self.iterations_total is not None:
            return self.iterations_total
        tokens = (self.prefill_tokens_total, self.decode_tokens_total)
        known = [t for t in tokens if t is not None]
        return sum(known) if len(known) == len(tokens) else None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check of the ready gate: passed or not, with the evidence that says so (R18.1)."""

    name: str
    passed: bool
    evidence: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Serving:
    """How a ready worker is reached and what it can hold; sent with the gate evidence.

    Attributes:
        engine_url: base URL of the engine's OpenAI-style API.
        kv: KV format, compared before pairing.
        kv_total_blocks, block_size: KV pool. max_model_len: tokens of prompt plus output.
        profile: name of the registered class profile.
        max_num_seqs: most sequences that the engine runs at once.
        tokenizer_digest: identity of the tokenizer the engine loaded.
        kv_side_channel: `host:port` of the KV connector, empty if none.
        tier: where the weights came from. mode: how it was started.
        flips: the engine can serve the other stage without a new start.
        moves: it hands a sequence that decodes over to another engine (docs/drain.md).
        stage: of its capacity profile, where it was started in stages; None for a whole start.
    """

    engine_url: str
    kv: KvFormat
    kv_total_blocks: int
    block_size: int
    max_model_len: int
    profile: str
    max_num_seqs: int = 256
    tokenizer_digest: str = ""
    kv_side_channel: str = ""
    tier: WeightTier = WeightTier.UNKNOWN
    mode: StartMode = StartMode.JIT
    flips: bool = False
    moves: bool = False
    stage: CapacityStage | None = None

    @property
    def runs(self) -> StartMode:
        """How its iterations run now: eagerly until a staged start has got its graphs."""
        return self.mode if self.stage is None or self.stage.compiled else StartMode.EAGER

    @property
    def bootstrap(self) -> str:
        """`host:port` where its engine meets a decode engine, whose leg must be sent at the same
        time; empty where the prefill leg's answer says where the KV is.
        """
        return self.kv_side_channel if self.kv.connector.startswith(MEETING) else ""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as the router knows it.

    Attributes:
        offer: who it is. epoch: its fencing number. state: where it is.
        serving: how to reach it; None until the gate admitted it.
        progress: start-up so far. load: last engine report.
        checks: verdicts of the gate. drain_reason: why it drains.
        provisioned_s, ready_s, draining_s: router clock when it entered that state, else None.
        renewed_s: router clock of the last renewal.
        active: sequences the router assigned and has not seen finish.
        promised_prefill_tokens, promised_kv_blocks: reserved by the router.
        told: what it has been told to do and has not done yet: activate or flip, empty for nothing.
        rank_steps: of several ranks the last step that each has passed, by its number, an empty text
            for none; empty for one rank, and where the answering router does not know.
        holds: of a standby that waits, with what; None of any other.
    """

    offer: WorkerOffer
    epoch: int
    state: WorkerState
    serving: Serving | None = None
    progress: StartProgress | None = None
    load: LoadReport = LoadReport()
    checks: tuple[CheckResult, ...] = ()
    drain_reason: str = ""
    provisioned_s: float | None = None
    ready_s: float | None = None
    draining_s: float | None = None
    renewed_s: float = 0.0
    active: int = 0
    promised_prefill_tokens: int = 0
    promised_kv_blocks: int = 0
    told: str = ""
    rank_steps: tuple[str, ...] = ()
    holds: Holds | None = None

    @property
    def worker_id(self) -> str:
        """Name given by whoever ordered it."""
        return self.offer.worker_id

    @property
    def role(self) -> Role:
        """Stage it serves."""
        return self.offer.role

    @property
    def key(self) -> tuple[str, str]:
        """(worker id, incarnation): what samples are joined on."""
        return self.offer.worker_id, self.offer.incarnation


@dataclass(frozen=True, slots=True)
class Fleet:
    """A snapshot of all workers the router knows, stamped with a version that only grows.

    Attributes:
        version: grows with every change. workers: by worker id.
        degraded: why the view may be old (for example, the lease store is away); empty if fresh.
    """

    version: int = 0
    workers: Mapping[str, Worker] = field(default_factory=dict)
    degraded: str = ""

    def of(self, model: str, stage: Role, *states: WorkerState) -> Iterator[Worker]:
        """Workers of a model that serve a stage, in the given states (any when none given)."""
        for worker in self.workers.values():
            wanted = not states or worker.state in states
            if wanted and worker.offer.model == model and worker.role.serves(stage):
                yield worker
