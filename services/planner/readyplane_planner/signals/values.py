"""What reaches the planner, as values: samples, typed signals, and the Observation made of them.

A signal has a unit, an age and a kind, in which unknown is never zero. Work is token work, never
request counts (R4). Handed to every brain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from readyplane.core.startup import StartQuantiles
from readyplane.core.worker import Role, Worker, WorkerState
from readyplane_planner.signals.outside import EngineSample

# What must be known before a pool may shrink (B05: partial data never shrinks).
SHRINK_NEEDS = ("arrivals", "prefill_work", "finished", "queue", "in_flight", "decoding")


class Kind(StrEnum):
    """What a signal's value is worth. IDLE is a known zero; the last three are not known."""

    FRESH = "fresh"
    IDLE = "idle"
    STALE = "stale"
    MISSING = "missing"
    WARMING = "warming"


_FRESH, _IDLE = Kind.FRESH, Kind.IDLE


@dataclass(frozen=True, slots=True)
class Signal:
    """One number with its unit, its age in seconds and what it is worth."""

    kind: Kind
    value: float | None
    unit: str
    age_s: float = 0.0
    why: str = ""

    @property
    def known(self) -> bool:
        """Whether a decision may rest on the value."""
        return self.kind is _FRESH or self.kind is _IDLE

    def get(self, otherwise: float = 0.0) -> float:
        """The value where it is known, else the given stand-in that the caller answers for."""
        return self.value if self.known and self.value is not None else otherwise


@dataclass(frozen=True, slots=True)
class Latency:
    """Quantiles of `count` samples over `window_s`; count 0 means that nothing is known."""

    window_s: float = 0.0
    count: int = 0
    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GenerationEnds:
    """Requests of one generation by how they ended; of a sample since the router began.

    Attributes:
        digest: artifact of the pair that served them. finished: with all their tokens. attained: of
            those, with both targets met. failed: lost by a worker of that generation. late: under way
            now, and too late already.
    """

    digest: str
    finished: int = 0
    attained: int = 0
    failed: int = 0
    late: int = 0


@dataclass(frozen=True, slots=True)
class PriorityWork:
    """Requests and uncached prompt tokens of one priority; of a sample since the router began, of an
    observation since the sample before.
    """

    priority: int
    requests: float
    tokens: float


@dataclass(frozen=True, slots=True)
class ClientCount:
    """Counters of one client since its counting began, of which `life` tells one from the next."""

    name: str
    life: int
    arrivals: float | None
    prefill_work: float | None


@dataclass(frozen=True, slots=True)
class ClientWork:
    """What one client brings. arrivals: requests/s. prefill_work: uncached prompt tokens/s."""

    name: str
    arrivals: Signal
    prefill_work: Signal


@dataclass(frozen=True, slots=True)
class RouterSample:
    """One answer of the router, stamped on receipt with the planner's own clock (B155).

    Attributes:
        taken_s: planner clock. incarnation, uptime_s: the router's life.
        model_known: whether the router listed the model at all; an empty answer is no zero (B02).
        counters, gauges: by name. latency: ttft_actual, ttft_predicted, tpot_actual, ...
        length_counts: joint ISL x OSL counts. workers: of this model only (B10).
        generations: ends by artifact; None where the router does not tell.
        degraded: why the router's view may be old.
        engines: what engines told beside the router (by worker and incarnation).
        by_targets: no router answered: the fleet is that of the engines that were read, and there
            are no counters.
        clients: the largest of labelled traffic, the largest first.
        priorities: arrivals. ration: the order of admission that the router follows; for people.
        routers_missing: others that live, and whose part of all this it does not know.
    """

    taken_s: float
    incarnation: str
    uptime_s: float
    model_known: bool = True
    counters: Mapping[str, float | None] = field(default_factory=dict)
    gauges: Mapping[str, float | None] = field(default_factory=dict)
    latency: Mapping[str, Latency] = field(default_factory=dict)
    length_counts: Sequence[Sequence[float]] = ()
    workers: tuple[Worker, ...] = ()
    generations: tuple[GenerationEnds, ...] | None = None
    degraded: str = ""
    engines: tuple[EngineSample, ...] = ()
    by_targets: bool = False
    clients: tuple[ClientCount, ...] = ()
    priorities: tuple[PriorityWork, ...] = ()
    ration: Mapping[str, Any] | None = None
    routers_missing: int = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """One instance of the actuator, in the words of this brain. Ages in seconds."""

    worker_id: str
    role: Role
    state: str
    worker_class: str = ""
    manifest_digest: str = ""
    generation: int = 1
    mode: str = "jit"
    scale_decision_id: str = ""
    node: str = ""
    allocated_ago_s: float = 0.0
    running_ago_s: float | None = None
    exited_ago_s: float | None = None
    exit_code: int | None = None
    reason: str = ""
    standby: bool = False


@dataclass(frozen=True, slots=True)
class NodeView:
    """What the registry says of one node: seconds to fetch the artifact there from the best source.

    Attributes:
        fetch_s: None where it did not say. tier, source_node: of that source. why: its words.
    """

    node: str
    fetch_s: float | None = None
    tier: str = "unknown"
    source_node: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An order that the actuator did not take, or a drain that the router did not, and why (B35)."""

    worker_id: str
    pool: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What a decision needs of one living worker; None is not known.

    Attributes:
        ready_age_s, drain_age_s: seconds in that state, from the router's clock alone.
        active, promised_prefill_tokens, promised_kv_blocks: assigned by the router, so never
            older than a dispatch (B64).
        prefill_rate: tokens/s computed since its last report; dry_rate: at which its queue of then
            would just have lasted until now, so that well below it the worker was never idle.
        iteration_s: measured while it ran.
        decode_rate: output tokens/s since its last report. kv_capacity: KV tokens that it holds.
        failure: why its start failed.
        unpairable: why no ready worker of the other stage can exchange KV with it; empty when one
            can, or when there is none to judge by.
        convertible: a decode worker (its role here) that is lent to prefill in short chunks.
        standby: ordered to wait until it is activated. standby_age_s: since its lease, while it does.
            bare: it holds a process only, and has to load before it can serve.
        mode: as it runs now: eager until a staged start has got its graphs. kv_published: KV tokens
            of its capacity profile, where that has stages.
        told: activate or flip, while it has been told and has not done it. flips: its engine can
            serve the other stage without a new start.
        missing: what neither it nor its engine tells, of what its stage is judged by (B19).
    """

    worker_id: str
    incarnation: str
    role: Role
    state: WorkerState
    worker_class: str
    epoch: int = 0
    generation: int = 1
    manifest_digest: str = ""
    mode: str = "jit"
    node: str = ""
    attached: bool = False
    scale_decision_id: str = ""
    ready_age_s: float | None = None
    drain_age_s: float | None = None
    active: int = 0
    promised_prefill_tokens: int = 0
    promised_kv_blocks: int = 0
    running: int | None = None
    waiting: int | None = None
    waiting_prefill_tokens: int | None = None
    kv_usage: float | None = None
    prefill_rate: float | None = None
    dry_rate: float | None = None
    iteration_s: float | None = None
    decode_rate: float | None = None
    kv_tokens: float | None = None
    kv_capacity: float | None = None
    failure: str = ""
    unpairable: str = ""
    convertible: bool = False
    standby: bool = False
    standby_age_s: float | None = None
    bare: bool = False
    kv_published: int | None = None
    told: str = ""
    flips: bool = False
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean lengths in tokens and the spread of prompt work; `known` is False for priors."""

    isl: float
    uncached: float
    osl: float
    isl_cv2: float
    known: bool


@dataclass(frozen=True, slots=True)
class EndedStart:
    """A start that would fail again wherever it is made (`StartProgress.dead_end`), and its words."""

    worker_id: str
    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything a decision rests on, of one model, at one instant.

    Attributes:
        arrivals: requests/s. prompt_work: prompt tokens/s arriving, prefill_work: those of them
            that no prefix cache held.
        finished: requests/s. missed: requests/s that ended late, refused or without an answer.
        generated: output tokens/s as the decode engines count them.
        queue: prompt tokens waiting in router and engines and not yet computed (R4.2).
        in_flight: requests queued, in prefill or decoding.
        decoding, remaining, kv: sequences, tokens to come, KV tokens resident in the D pool.
        workers: living. allocations: what the actuator holds.
        fleet_known: whether the router's fleet is fresh; allocations_known: the actuator's list.
        refused: orders and drains that were not taken since the last observation.
        nodes: where workers may start, as the registry sees them.
        t_ready: start quantiles by pool, and by `start_key` where classes or modes are told apart.
        bad: refused samples. dead_series: ignored worker series.
        generations: ends of requests since the last sample by artifact, None when not known.
        extra: signals that queries were configured for, beside those above; one that is not known
            holds a pool as any other does (B05). silent: sources that did not answer, and why.
        dt_s: seconds that the rates cover, 0 when there is no rate.
        priorities: what came in them by priority; empty where that is not known.
        clients: what the largest clients bring of it, where requests are labelled; none is needed.
        dead_ends: starts that ended for good, as long as the router shows them, gone ones included.
    """

    model: str
    taken_s: float
    arrivals: Signal
    prompt_work: Signal
    prefill_work: Signal
    finished: Signal
    generated: Signal
    queue: Signal
    in_flight: Signal
    decoding: Signal
    remaining: Signal
    kv: Signal
    lengths: Lengths
    latency: Mapping[str, Latency] = field(default_factory=dict)
    workers: tuple[WorkerView, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    fleet_known: bool = True
    allocations_known: bool = True
    refused: tuple[Refusal, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    t_ready: Mapping[str, StartQuantiles] = field(default_factory=dict)
    missed: Signal = Signal(Kind.MISSING, None, "requests/s", why="nobody counts them")
    bad: tuple[str, ...] = ()
    dead_series: int = 0
    generations: tuple[GenerationEnds, ...] | None = None
    degraded: str = ""
    dt_s: float = 0.0
    extra: Mapping[str, Signal] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    priorities: tuple[PriorityWork, ...] = ()
    clients: tuple[ClientWork, ...] = ()
    dead_ends: tuple[EndedStart, ...] = ()

    def signals(self) -> dict[str, Signal]:
        """By name, for the record, the metrics and a person."""
        work = ("arrivals", "prompt_work", "prefill_work", "finished", "generated")
        backlog = ("queue", "in_flight", "decoding", "remaining", "kv")
        return {name: getattr(self, name) for name in (*work, *backlog)} | dict(self.extra)

    def unknown(self) -> tuple[str, ...]:
        """Names of the signals without which nothing may shrink."""
        needed = (name for name in SHRINK_NEEDS if not getattr(self, name).known)
        return (*needed, *(name for name, signal in self.extra.items() if not signal.known))

    @property
    def idle(self) -> bool:
        """Known to have no demand and nothing in flight; not the same as no data (B02, B04)."""
        return self.arrivals.kind is Kind.IDLE and self.in_flight.known and not self.in_flight.value


@dataclass(frozen=True, slots=True)
class Priors:
    """What stands in while nothing was measured, and the bounds of freshness in seconds."""

    isl: float = 1000.0
    osl: float = 256.0
    isl_cv2: float = 1.0
    stale_after_s: float = 7.0
    warm_s: float = 10.0
