"""The values of a decision: the plan it follows, what it remembers, what it orders and why.

All are frozen, made of plain fields and serialisable, so that a journal record replays bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from readyplane.core.profile import ClassProfile
from readyplane.core.startup import StartQuantiles
from readyplane.core.worker import Role
from readyplane_planner.capacity import Combine, Correction, Load
from readyplane_planner.decide.drift import DriftMemory
from readyplane_planner.decide.rations import Rationed, RationMemory
from readyplane_planner.decide.rations import Rules as DegradationRules
from readyplane_planner.decide.seasonal import Ahead
from readyplane_planner.decide.seasonal import Rules as SeasonRules
from readyplane_planner.forecast import Apart, Forecast, Knobs, Series
from readyplane_planner.guard import Counts, Limits, PoolMemory
from readyplane_planner.optimise.values import Candidate
from readyplane_planner.rollout import Generation, Rollout, Rules, Told
from readyplane_planner.signals import Signal

POOLS = ("prefill", "decode")
ROLE_OF = {"prefill": Role.PREFILL, "decode": Role.DECODE}


@dataclass(frozen=True, slots=True)
class ClassPlan:
    """One class that a pool may start.

    Attributes:
        price: of one worker for an hour. low, high: workers of it that the pool has to have, may
            have.
    """

    worker_class: str
    profile: ClassProfile
    price: float
    low: int = 0
    high: int = 1024


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What the policy wants of one pool; `profile` is what one of its workers can do.

    Attributes:
        classes: that may be started, where there are several; the others are counted in workers of
            `worker_class`. spare: workers kept beyond the need, for those that may be lost.
            standby: workers kept beside the pool; standby_holds: what they hold until they serve.
        convertible_tpot_s: above 0, new workers also take prompts in short chunks, between
            iterations that keep this time per output token.
    """

    limits: Limits
    worker_class: str
    profile: ClassProfile
    convertible_tpot_s: float = 0.0
    classes: tuple[ClassPlan, ...] = ()
    spare: int = 0
    fallback: int = 0
    standby: int = 0
    standby_holds: str = "weights"

    @property
    def names(self) -> tuple[str, ...]:
        """Classes that may be started."""
        return tuple(c.worker_class for c in self.classes) or (self.worker_class,)

    def iteration_s(
        self, worker_class: str, mode: str, sequences: float, kv_tokens: float
    ) -> float:
        """Seconds of one decode iteration of a worker of that class, started in that mode."""
        for offered in self.classes:
            if offered.worker_class == worker_class:
                profile = offered.profile
                break
        else:
            profile = self.profile
        return slowness(profile, mode) * profile.iteration_s(sequences, kv_tokens)


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One machine where workers may start: its GPUs, and the classes it holds (none: any)."""

    name: str
    gpus: int
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The policy in the words of the brains (see policy.py for each field), plus what it resolved
    to: `manifest_digest` of the artifact that new workers serve, empty when it is not known, and
    `compiled`, the start modes for which the registry holds compile artifacts.
    """

    model: str
    version: int
    prefill: PoolPlan
    decode: PoolPlan
    ttft_s: float
    tpot_s: float
    slo_quantile: float
    tick_s: float
    headroom: float
    band: float
    catch_up_s: float
    overhead_s: float
    knobs: Knobs
    combine: Combine
    combine_weight: float
    actual_count_min: int
    actual_window_s: float
    min_ready_s: float
    warm_worker_s: float
    eta_bound_factor: float
    orphan_s: float
    order_grace_s: float
    drain_deadline_s: float
    budget_gpus: int | None
    start_mode: str
    manifest_digest: str = ""
    compiled: tuple[str, ...] = ()
    nodes: tuple[NodePlan, ...] = ()
    rollout: Rules = field(default_factory=Rules)
    degradation: DegradationRules = field(default_factory=DegradationRules)
    season: SeasonRules = field(default_factory=SeasonRules)
    paused: bool = False
    fallback_after: int = 10
    hand_hold_s: float = 0.0
    flip: bool = False
    graph_stages: bool = False
    risk: float = 0.01
    digest: str = ""

    def pool(self, name: str) -> PoolPlan:
        """By pool name."""
        return self.prefill if name == "prefill" else self.decode


def slowness(profile: ClassProfile, mode: str) -> float:
    """Times of a worker started in that mode over those of its class."""
    return profile.eager_factor if mode == "eager" else 1.0


def start_key(pool: str, worker_class: str, mode: str) -> str:
    """Where an observation keeps the quantiles of such a start, where they are told apart."""
    return f"{pool}/{worker_class}/{mode}"


@dataclass(frozen=True, slots=True)
class OpenOrder:
    """A worker ordered and not yet ready, failed or given up; of which artifact and generation."""

    worker_id: str
    pool: str
    ordered_s: float
    decision_id: str
    worker_class: str = ""
    mode: str = ""
    digest: str = ""
    number: int = 0
    standby: bool = False


@dataclass(frozen=True, slots=True)
class Changing:
    """A worker that was told to become what it is not yet.

    Attributes:
        kind: `activate` or `flip`. to: the pool whose capacity it will be.
        since_s: planner's clock. deadline_s: of the activation, or of the flip's drain.
    """

    worker_id: str
    kind: str
    to: str
    since_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Denied:
    """A class of a pool whose orders are refused: how often in a row, when last, until when it is
    left alone.
    """

    pool: str
    worker_class: str
    count: int
    at_s: float
    retry_s: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class DeadEnd:
    """Starts of one pool's artifact that ended for good, under one version of the policy.

    Attributes:
        kind: of the last, as the agent says it; why: its failure.
        starts: so many, without a good one between them. worker_ids: the last of them.
        standby: they were to stand by, and that is what could not be: starts that serve at once are
            another matter.
    """

    pool: str
    digest: str
    kind: str
    why: str
    starts: int
    worker_ids: tuple[str, ...]
    policy_version: int
    standby: bool = False


@dataclass(frozen=True, slots=True)
class Owned:
    """Whether somebody else changes a pool; times are of the planner's monotonic clock.

    Attributes:
        known: workers seen in the last look; None before the first. edits: (when, by how many).
        hold_until_s: a hand edit is honoured until then. pauses: in a row, of a conflict;
        pause_until_s: until when nothing is done because of it.
    """

    known: tuple[str, ...] | None = None
    edits: tuple[tuple[float, int], ...] = ()
    hold_until_s: float | None = None
    pauses: int = 0
    pause_until_s: float | None = None


@dataclass(frozen=True, slots=True)
class Averages:
    """Decayed sums whose ratios are recent mean lengths, token-weighted.

    Attributes:
        requests, tokens, uncached: what arrived. finished, generated: requests and output tokens.
        held, running: KV tokens and sequences, each times the seconds of it.
    """

    requests: float = 0.0
    tokens: float = 0.0
    uncached: float = 0.0
    finished: float = 0.0
    generated: float = 0.0
    held: float = 0.0
    running: float = 0.0


@dataclass(frozen=True, slots=True)
class Budget:
    """What the promise has cost so far: requests that arrived, and those of them that missed it.

    Both fade over `demand.BUDGET_TAU_S`, so that what was missed is made up for in time.
    """

    arrived: float = 0.0
    missed: float = 0.0


@dataclass(frozen=True, slots=True)
class Unevenness:
    """Squares of how far the work of single ticks was from that of its moment, and what chance
    makes of requests that come one by one; both fade over `demand.UNEVEN_TAU_S`.
    """

    seen: float = 0.0
    chance: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Everything that one decision hands to the next.

    Attributes:
        work_p, work_d: forecast series; apart_p, apart_d: the same with top clients apart.
        orders: open. draining: (worker id, since); draining_as: (worker id, incarnation) of these.
        served: ids that were ready once, so that a lost lease is not taken for a start.
        suspects: (worker id, since): no lease or no progress although an allocation runs.
        denied: classes whose orders are refused. lives: (pool, seconds) that the workers given up
            last had served. generation: of new workers. rollout: where it is.
        last_s: clock of the last decision. numbered: worker names given so far.
        late_since_s: since when the wait before prefill alone misses TTFT.
        fallbacks: how often the optimiser failed, failing: in a row. blind: looks in a row without
        knowing. bases: what the windows rest on. drift, owned_p, owned_d: see drift, ownership.
        overrides: guard rules that changed a target. changing: told to serve, or to change the stage.
        ration, ahead: see rations, seasonal. dead_ends: see dead_ends.
    """

    work_p: Series = field(default_factory=Series)
    work_d: Series = field(default_factory=Series)
    averages: Averages = Averages()
    budget: Budget = Budget()
    uneven: Unevenness = Unevenness()
    idle_since_s: float | None = None
    correct_p: Correction = field(default_factory=Correction)
    correct_d: Correction = field(default_factory=Correction)
    guard_p: PoolMemory = field(default_factory=PoolMemory)
    guard_d: PoolMemory = field(default_factory=PoolMemory)
    orders: tuple[OpenOrder, ...] = ()
    draining: tuple[tuple[str, float], ...] = ()
    draining_as: tuple[tuple[str, str], ...] = ()
    served: tuple[str, ...] = ()
    suspects: tuple[tuple[str, float], ...] = ()
    generation: Generation = field(default_factory=Generation)
    rollout: Rollout = field(default_factory=Rollout)
    numbered: int = 0
    last_s: float | None = None
    fallbacks: int = 0
    overrides: Mapping[str, int] = field(default_factory=dict)
    bad_samples: int = 0
    late_since_s: float | None = None
    denied: tuple[Denied, ...] = ()
    failing: int = 0
    blind: int = 0
    bases: Mapping[str, str] = field(default_factory=dict)
    drift: DriftMemory = field(default_factory=DriftMemory)
    owned_p: Owned = Owned()
    owned_d: Owned = Owned()
    lives: tuple[tuple[str, float], ...] = ()
    changing: tuple[Changing, ...] = ()
    ration: RationMemory = field(default_factory=RationMemory)
    ahead: Ahead = field(default_factory=Ahead)
    apart_p: Apart = field(default_factory=Apart)
    apart_d: Apart = field(default_factory=Apart)
    dead_ends: tuple[DeadEnd, ...] = ()

    def guard(self, pool: str) -> PoolMemory:
        """The guard's memory of a pool."""
        return self.guard_p if pool == "prefill" else self.guard_d


@dataclass(frozen=True, slots=True)
class StartOrder:
    """One worker to be started.

    Attributes:
        nodes: where it would serve soonest, the best first; empty for no preference.
        why: why this class, mode and node; empty where there was no choice.
        standby: waiting until it is activated; holds: with what. graph_stages: ready with few
            graphs, the others come while it serves.
    """

    worker_id: str
    pool: str
    worker_class: str
    manifest_digest: str
    generation: int
    mode: str
    convertible_tpot_s: float = 0.0
    nodes: tuple[str, ...] = ()
    why: str = ""
    standby: bool = False
    holds: str = "weights"
    graph_stages: bool = False


@dataclass(frozen=True, slots=True)
class Activation:
    """One standby that is to serve; told for `deadline_s` and no longer."""

    worker_id: str
    pool: str
    epoch: int
    deadline_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Flip:
    """One ready worker of `pool` that is to serve `to`, once it has drained (`deadline_s`)."""

    worker_id: str
    pool: str
    to: str
    epoch: int
    deadline_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Placement:
    """An artifact that should lie on a node before a worker starts there (R8.3)."""

    digest: str
    node: str
    why: str


@dataclass(frozen=True, slots=True)
class Drain:
    """One ready worker to be drained: the cheapest to lose, with the scores that made it so."""

    worker_id: str
    pool: str
    epoch: int
    deadline_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Release:
    """One allocation to be given back at once: never served, overdue, or left behind."""

    worker_id: str
    pool: str
    why: str


@dataclass(frozen=True, slots=True)
class Reason:
    """Why: a stable code, a sentence with its numbers, and the pool it is about."""

    code: str
    text: str
    pool: str = ""


@dataclass(frozen=True, slots=True)
class PoolDecision:
    """One pool in a decision: the three capacities, the load and what it rests on.

    Attributes:
        before, target: desired workers before and now. wanted, keep: what the optimiser proposed.
        worker_rate: tokens/s of one worker at the SLO, corrected.
        etas_s: median seconds until each pending worker is expected.
    """

    before: int
    target: int
    wanted: int | None
    keep: int | None
    counts: Counts
    load: Load
    forecast: Forecast
    worker_rate: float
    correction: float
    t_ready: StartQuantiles
    etas_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Expected:
    """What a change of one pool should come to; to be compared with what came.

    Attributes:
        workers: that come, negative: that go. in_p50_s, in_p90_s: seconds from the decision until
            the last of them serves, or has left. rate: tokens/s gained or given up.
        load_now, load_then: predicted latency over target, without the change and once it is there;
            None where it is not known.
    """

    pool: str
    workers: int
    in_p50_s: float
    in_p90_s: float
    rate: float
    load_now: float | None
    load_then: float | None


@dataclass(frozen=True, slots=True)
class Decision:
    """What should be and why. `why` is never empty.

    Attributes:
        candidates: pairs of targets that were weighed, the proposed one first, with their costs.
        binding: the reasons of `why` that kept the targets from what was wanted.
        expected: of each pool that changes, what capacity comes when and what load follows.
        placements: artifacts that should lie where the next workers are expected to start.
        rollout: where the roll-out is.
        activations, flips: workers told to serve at last, and to serve the other stage.
        ration: whom the router is to refuse meanwhile; None for nobody.
        dead_ends: artifacts of which nothing is ordered any more; see `dead_ends`.
    """

    decision_id: str
    model: str
    at_s: float
    policy_version: int
    policy_digest: str
    prefill: PoolDecision
    decode: PoolDecision
    orders: tuple[StartOrder, ...] = ()
    drains: tuple[Drain, ...] = ()
    releases: tuple[Release, ...] = ()
    why: tuple[Reason, ...] = ()
    signal_ages_s: Mapping[str, float | None] = field(default_factory=dict)
    signals: Mapping[str, Signal] = field(default_factory=dict)
    infeasible: tuple[str, ...] = ()
    stranded_p: int = 0
    degraded: str = ""
    candidates: tuple[Candidate, ...] = ()
    binding: tuple[Reason, ...] = ()
    expected: tuple[Expected, ...] = ()
    placements: tuple[Placement, ...] = ()
    rollout: Told = field(default_factory=Told)
    activations: tuple[Activation, ...] = ()
    flips: tuple[Flip, ...] = ()
    ration: Rationed | None = None
    dead_ends: tuple[DeadEnd, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether it moved a target, turned a roll-out or asks for anything."""
        moved = any(p.before != p.target for p in (self.prefill, self.decode))
        told = self.activations or self.flips or (self.ration is not None and self.ration.turned)
        asked = self.orders or self.drains or self.releases or told
        return moved or self.rollout.turned or bool(asked)

    def pool(self, name: str) -> PoolDecision:
        """By pool name."""
        return self.prefill if name == "prefill" else self.decode
