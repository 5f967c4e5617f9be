"""The segments of T_ready, their critical path, and quantiles of start-ups (R1.2, R6).

Owns the arithmetic only: agents measure segments, the planner keeps the quantiles.
All times are seconds on one clock (the agent's monotonic clock).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

# How `FetchPlan.excluded` says that waiting is vain, or that it is not: readers judge by these.
NOT_WHOLE = "its bytes are not whole"
NO_BYTES = "this registry serves no bytes"
OWN_REQUESTS = "its own requests take"

WHY_HEADER = "X-Readyplane-Why"
"""On an HTTP answer without bytes: why, for whoever reads bytes and no error documents."""


class SegmentName(StrEnum):
    """The segments of R6.1, the arena's memory and what comes later, in their usual order."""

    SCHEDULE = "schedule"
    IMAGE = "image"
    RUNTIME_IMPORT = "runtime_import"
    ARTIFACT_DISCOVERY = "artifact_discovery"
    ARENA_PREFAULT = "arena_prefault"
    WEIGHT_READ = "weight_read"
    WEIGHT_TRANSFER = "weight_transfer"
    WEIGHT_DESERIALIZE = "weight_deserialize"
    HOST_TO_DEVICE = "host_to_device"
    PARALLEL_INIT = "parallel_init"
    COMPILE = "compile"
    CUDA_GRAPH = "cuda_graph"
    KV_PROFILE = "kv_profile"
    WARMUP = "warmup"
    VERIFY = "verify"
    GROUP_BARRIER = "group_barrier"
    CANARY = "canary"
    ROUTER_REGISTRATION = "router_registration"
    GRAPH_STAGE = "graph_stage"


LATER = frozenset({SegmentName.GRAPH_STAGE})
"""What a worker goes on with once it serves (R14): shown with its start, no part of T_ready."""


class WeightTier(StrEnum):
    """Where weights came from (R8.1)."""

    L0_PEER_GPU = "L0"
    L1_HOST = "L1"
    L2_NVME = "L2"
    L3_RACK = "L3"
    L4_OBJECT = "L4"
    UNKNOWN = "unknown"


class StartMode(StrEnum):
    """How the engine gets its code (R13.1)."""

    EAGER = "eager"
    JIT = "jit"
    AOT = "aot"


@dataclass(frozen=True, slots=True)
class Segment:
    """One timed segment; `end_s` is None while it runs; `modelled` when it was only slept.

    `saved_s`: what it would have taken, and did not because it was done before (a standby).
    """

    name: SegmentName
    start_s: float
    end_s: float | None
    modelled: bool = False
    detail: str = ""
    saved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Exclusive seconds per segment, summing with `unexplained_s` to `wall_s`."""

    wall_s: float
    exclusive_s: Mapping[SegmentName, float]
    inclusive_s: Mapping[SegmentName, float]
    unexplained_s: float

    @property
    def dominant(self) -> SegmentName | None:
        """Segment with the largest exclusive share."""
        if not self.exclusive_s:
            return None
        return max(self.exclusive_s, key=lambda name: (self.exclusive_s[name], str(name)))

    @property
    def unexplained_fraction(self) -> float:
        """Share of the wall time that no segment explains, 0 to 1."""
        return self.unexplained_s / self.wall_s if self.wall_s > 0 else 0.0


def critical_path(segments: Iterable[Segment], *, start_s: float, end_s: float) -> CriticalPath:
    """Split the wall time [start_s, end_s] over the segments.

    Where segments overlap (pipelining), each instant belongs to the running segment that ends
    last: the one that everything waits for. Instants that no segment covers are unexplained. What
    comes after T_ready (`LATER`) has no part in it.
    """
    spans = [
        (s.name, max(s.start_s, start_s), min(end_s if s.end_s is None else s.end_s, end_s))
        for s in segments
        if s.name not in LATER
    ]
    spans = [span for span in spans if span[2] > span[1]]
    cuts = sorted({start_s, end_s, *(s[1] for s in spans), *(s[2] for s in spans)})
    exclusive: dict[SegmentName, float] = {}
    unexplained = 0.0
    for left, right in pairwise(cuts):
        running = [s for s in spans if s[1] <= left and s[2] >= right]
        if not running:
            unexplained += right - left
            continue
        owner = max(running, key=lambda s: (s[2], s[1], str(s[0])))[0]
        exclusive[owner] = exclusive.get(owner, 0.0) + right - left
    inclusive: dict[SegmentName, float] = {}
    for name, left, right in spans:
        inclusive[name] = inclusive.get(name, 0.0) + right - left
    return CriticalPath(max(0.0, end_s - start_s), exclusive, inclusive, unexplained)


@dataclass(frozen=True, slots=True)
class StartSample:
    """One finished start: its key, seconds and when it was seen.

    Attributes:
        worker_class, tier, mode: the key of R1.2.
        provision_s: order to agent running. ready_s: agent running to routable.
        seen_at_s: clock of whoever keeps the samples.
        staged: it was ready before its graphs, so that it says nothing of a whole start.
    """

    worker_class: str
    tier: WeightTier
    mode: StartMode
    provision_s: float
    ready_s: float
    seen_at_s: float
    staged: bool = False

    @property
    def capacity_s(self) -> float:
        """T_capacity = T_provision + T_worker_ready (R1.2)."""
        return self.provision_s + self.ready_s


@dataclass(frozen=True, slots=True)
class StartQuantiles:
    """P50/P90/P99 of T_capacity with sample count and age of the newest sample."""

    p50_s: float
    p90_s: float
    p99_s: float
    count: int
    age_s: float


def start_quantiles(
    samples: Sequence[StartSample], *, now_s: float, prior: StartQuantiles
) -> StartQuantiles:
    """Quantiles of `capacity_s`; without samples the prior, with few a blend with it.

    Fewer than 5 samples cannot speak for the tail: the larger of prior and measured is kept for
    P90 and P99 until then, since too short a T_ready breaks SLOs and too long a one costs little.
    """
    if not samples:
        return prior
    values = sorted(s.capacity_s for s in samples)
    p50, p90, p99 = (_quantile(values, q) for q in (0.5, 0.9, 0.99))
    age_s = now_s - max(s.seen_at_s for s in samples)
    few = 5
    if len(samples) < few:
        weight = len(samples) / few
        p90 = max(p90, (1 - weight) * prior.p90_s + weight * p90)
        p99 = max(p99, (1 - weight) * prior.p99_s + weight * p99)
    return StartQuantiles(p50, p90, p99, len(samples), age_s)


def _quantile(values: Sequence[float], share: float) -> float:
    """A quantile of sorted values, linear between two of them."""
    at = share * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)
