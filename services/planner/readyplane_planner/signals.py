"""Samples become an Observation: typed signals with unit and age, in which unknown is never zero.

Owns the judgement of every number that reaches the planner: differencing counters by incarnation,
refusing NaN, infinities and absurd values, joining worker series with the living fleet, and telling
idle from no data. Hands an Observation to decide. Work is token work, never request counts (R4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from readyplane.core.startup import StartQuantiles
from readyplane.core.work import ISL_EDGES, OSL_EDGES
from readyplane.core.worker import Role, Worker, WorkerState

HUGE = 1e15
"""No counter, gauge or latency of one model is larger; what is larger is a broken sample (B01)."""

# What must be known before a pool may shrink (B05: partial data never shrinks).
SHRINK_NEEDS = ("arrivals", "prefill_work", "finished", "queue", "in_flight", "decoding")
KNOWN_LENGTHS_MIN = 20.0


class Kind(StrEnum):
    """What a signal's value is worth. IDLE is a known zero; the last three are not known."""

    FRESH = "fresh"
    IDLE = "idle"
    STALE = "stale"
    MISSING = "missing"
    WARMING = "warming"


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
        return self.kind in {Kind.FRESH, Kind.IDLE}

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
class RouterSample:
    """One answer of the router, stamped on receipt with the planner's own clock (B155).

    Attributes:
        taken_s: planner clock. incarnation, uptime_s: the router's life.
        model_known: whether the router listed the model at all; an empty answer is no zero (B02).
        counters, gauges: by name. latency: ttft_actual, ttft_predicted, tpot_actual, ...
        length_counts: joint ISL x OSL counts. workers: of this model only (B10).
        degraded: why the router's view may be old.
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
    degraded: str = ""


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
        prefill_rate: tokens/s measured while it was busy all the time; iteration_s: likewise.
        decode_rate: output tokens/s since its last report.
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
    iteration_s: float | None = None
    decode_rate: float | None = None
    kv_tokens: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean lengths in tokens and the spread of prompt work; `known` is False for priors."""

    isl: float
    uncached: float
    osl: float
    isl_cv2: float
    known: bool


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything a decision rests on, of one model, at one instant.

    Attributes:
        arrivals: requests/s. prompt_work: prompt tokens/s arriving, prefill_work: those of them
            that no prefix cache held.
        finished: requests/s. generated: output tokens/s as the decode engines count them.
        queue: prompt tokens waiting in router and engines and not yet computed (R4.2).
        in_flight: requests queued, in prefill or decoding.
        decoding, remaining, kv: sequences, tokens to come, KV tokens resident in the D pool.
        workers: living. allocations: what the actuator holds.
        fleet_known: whether the router's fleet is fresh; allocations_known: the actuator's list.
        refused: orders and drains that were not taken since the last observation.
        t_ready: start quantiles by pool. bad: refused samples. dead_series: ignored worker series.
        dt_s: seconds that the rates cover, 0 when there is no rate.
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
    t_ready: Mapping[str, StartQuantiles] = field(default_factory=dict)
    bad: tuple[str, ...] = ()
    dead_series: int = 0
    degraded: str = ""
    dt_s: float = 0.0

    def signals(self) -> dict[str, Signal]:
        """By name, for the record, the metrics and a person."""
        work = ("arrivals", "prompt_work", "prefill_work", "finished", "generated")
        backlog = ("queue", "in_flight", "decoding", "remaining", "kv")
        return {name: getattr(self, name) for name in (*work, *backlog)}

    def unknown(self) -> tuple[str, ...]:
        """Names of the signals without which nothing may shrink."""
        return tuple(name for name in SHRINK_NEEDS if not getattr(self, name).known)

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


def check(name: str, value: object, bad: list[str]) -> float | None:
    """The number, or None with its name in `bad`: NaN, infinite, text, negative, absurd (B01)."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        bad.append(f"{name}={value!r}")
        return None
    number = float(value)
    if not math.isfinite(number) or number < 0 or number > HUGE:
        bad.append(f"{name}={number}")
        return None
    return number


def difference(
    name: str, before: RouterSample | None, now: RouterSample, bad: list[str]
) -> float | None:
    """Growth of a counter between two samples; None where either is not known.

    A dip within one incarnation is noise and counts as no growth (B15); a new incarnation began at
    zero, so its whole value is growth.
    """
    value = check(name, now.counters.get(name), bad)
    if value is None or before is None:
        return None
    if before.incarnation != now.incarnation:
        return value
    base = check(name, before.counters.get(name), [])
    return None if base is None else max(0.0, value - base)


def observe(
    *,
    model: str,
    previous: RouterSample | None,
    current: RouterSample | None,
    allocations: Sequence[Allocation] | None,
    refused: Sequence[Refusal] = (),
    t_ready: Mapping[str, StartQuantiles],
    priors: Priors,
    now_s: float,
) -> Observation:
    """Turn two consecutive samples of the router and the actuator's list into an Observation.

    Args:
        previous, current: the last two answers; None when there never was one.
        allocations: None when the actuator could not be asked.
        refused: orders since the last observation that were not taken.
    """
    bad: list[str] = []
    age_s = 0.0 if current is None else max(0.0, now_s - current.taken_s)
    kind, why = _freshness(previous, current, age_s, priors)
    dt_s = 0.0
    if current is not None and previous is not None:
        dt_s = max(0.0, current.taken_s - previous.taken_s)
    lengths = _lengths(current, priors)
    rates = _rates(previous, current, dt_s, bad)

    def rate(name: str, unit: str) -> Signal:
        value = rates.get(name)
        return _signal(kind, value, unit, age_s, why)

    gauge_kind = kind if kind in {Kind.MISSING, Kind.STALE} else Kind.FRESH
    gauges = {name: _gauge(current, name, bad) for name in _GAUGES}

    def gauge(value: float | None, unit: str) -> Signal:
        return _signal(gauge_kind, value, unit, age_s, why)

    workers, dead = _workers(previous, current)
    engine = [w.waiting_prefill_tokens for w in workers if w.role.serves(Role.PREFILL)]
    queued, promised = gauges["queued_tokens"], gauges["prefilling_tokens"]
    queue = None
    if queued is not None and promised is not None:
        # The router's promises and the engines' own queues tell of the same prompts: the larger.
        queue = queued + max(promised, float(sum(tokens or 0 for tokens in engine)))
    in_flight = None
    counts = [gauges[n] for n in ("queued_requests", "prefilling_requests", "decoding_requests")]
    if None not in counts:
        in_flight = sum(c for c in counts if c is not None)
    return Observation(
        model=model,
        taken_s=now_s,
        arrivals=rate("arrivals_total", "requests/s"),
        prompt_work=rate("arrival_tokens_total", "tokens/s"),
        prefill_work=rate("arrival_uncached_tokens_total", "tokens/s"),
        finished=rate("finished_total", "requests/s"),
        generated=gauge(_generated(workers), "tokens/s"),
        queue=gauge(queue, "tokens"),
        in_flight=gauge(in_flight, "requests"),
        decoding=gauge(gauges["decoding_requests"], "sequences"),
        remaining=gauge(gauges["decoding_remaining_tokens"], "tokens"),
        kv=gauge(gauges["decoding_kv_tokens"], "tokens"),
        lengths=lengths,
        latency={} if current is None else _latencies(current, bad),
        workers=workers,
        allocations=tuple(allocations or ()),
        fleet_known=current is not None and age_s <= priors.stale_after_s,
        allocations_known=allocations is not None,
        refused=tuple(refused),
        t_ready=dict(t_ready),
        bad=tuple(bad),
        dead_series=dead,
        degraded="" if current is None else current.degraded,
        dt_s=dt_s if kind is Kind.FRESH else 0.0,
    )


_COUNTERS = (
    "arrivals_total",
    "arrival_tokens_total",
    "arrival_uncached_tokens_total",
    "finished_total",
)
_GAUGES = (
    "queued_requests",
    "queued_tokens",
    "prefilling_requests",
    "prefilling_tokens",
    "decoding_requests",
    "decoding_remaining_tokens",
    "decoding_kv_tokens",
)


def _freshness(
    previous: RouterSample | None, current: RouterSample | None, age_s: float, priors: Priors
) -> tuple[Kind, str]:
    if current is None:
        return Kind.MISSING, "the router has not answered yet"
    if not current.model_known:
        return Kind.MISSING, "the router answered without this model"
    if age_s > priors.stale_after_s:
        return Kind.STALE, f"last answer of the router is {age_s:.1f} s old"
    if previous is None:
        return Kind.WARMING, "one sample makes no rate"
    if current.taken_s <= previous.taken_s:
        return Kind.STALE, "no new answer of the router in this tick"
    if current.uptime_s < priors.warm_s or previous.incarnation != current.incarnation:
        return Kind.WARMING, f"the router counts only since {current.uptime_s:.1f} s"
    return Kind.FRESH, ""


def _signal(kind: Kind, value: float | None, unit: str, age_s: float, why: str) -> Signal:
    if kind in {Kind.MISSING, Kind.STALE, Kind.WARMING}:
        return Signal(kind, None, unit, age_s, why)
    if value is None:
        return Signal(Kind.MISSING, None, unit, age_s, "absent or refused")
    return Signal(Kind.IDLE if value == 0 else Kind.FRESH, value, unit, age_s)


def _rates(
    previous: RouterSample | None, current: RouterSample | None, dt_s: float, bad: list[str]
) -> dict[str, float | None]:
    out: dict[str, float | None] = {}
    for name in _COUNTERS:
        grown = None if current is None else difference(name, previous, current, bad)
        out[name] = grown / dt_s if grown is not None and dt_s > 0 else None
    return out


def _gauge(current: RouterSample | None, name: str, bad: list[str]) -> float | None:
    return None if current is None else check(name, current.gauges.get(name), bad)


def _latencies(current: RouterSample, bad: list[str]) -> dict[str, Latency]:
    out: dict[str, Latency] = {}
    for name, window in current.latency.items():
        values = (window.p50_s, window.p90_s, window.p99_s)
        sound = [check(f"{name}.p", value, bad) for value in values]
        # An empty window's quantiles are undefined, not zero (B04); a bad one is no sample at all.
        out[name] = window if window.count > 0 and None not in sound else Latency(window.window_s)
    return out


def _lengths(current: RouterSample | None, priors: Priors) -> Lengths:
    """Means over the router's life: a prior for decide, which follows the recent ones itself."""
    if current is None:
        return Lengths(priors.isl, priors.isl, priors.osl, priors.isl_cv2, known=False)
    total = _share(current, "arrival_tokens_total")
    fresh = _share(current, "arrival_uncached_tokens_total")
    isl = priors.isl if total is None else max(1.0, total)
    uncached = isl if fresh is None else max(1.0, min(fresh, isl))
    counts = current.length_counts
    if sum(sum(row) for row in counts) < KNOWN_LENGTHS_MIN:
        return Lengths(isl, uncached, priors.osl, priors.isl_cv2, known=False)
    return Lengths(isl, uncached, _mean_osl(counts, priors.osl), _spread(counts), known=True)


def _share(sample: RouterSample, tokens: str) -> float | None:
    """Tokens a request since this router began; None before the first request."""
    top, bottom = (check(n, sample.counters.get(n), []) for n in (tokens, "arrivals_total"))
    if top is None or bottom is None or bottom < 1:
        return None
    return top / bottom


def _mean_osl(counts: Sequence[Sequence[float]], prior: float) -> float:
    middles = [(a + b) / 2 for a, b in zip(OSL_EDGES, (*OSL_EDGES[1:], 8192), strict=True)]
    total = weighted = 0.0
    for row in counts:
        for middle, count in zip(middles, row, strict=False):
            total += count
            weighted += count * middle
    return max(1.0, weighted / total) if total > 0 else prior


def _spread(counts: Sequence[Sequence[float]]) -> float:
    """Squared coefficient of variation of prompt lengths, between 0.1 and 4."""
    middles = [(a + b) / 2 for a, b in zip(ISL_EDGES, (*ISL_EDGES[1:], 65536), strict=True)]
    weights = [sum(row) for row in counts]
    total = sum(weights)
    mean = sum(m * w for m, w in zip(middles, weights, strict=False)) / total
    square = sum((m - mean) ** 2 * w for m, w in zip(middles, weights, strict=False)) / total
    return min(4.0, max(0.1, square / (mean * mean)))


def _workers(
    previous: RouterSample | None, current: RouterSample | None
) -> tuple[tuple[WorkerView, ...], int]:
    """The living, joined with their own earlier sample by (id, incarnation) and by nothing else."""
    if current is None:
        return (), 0
    before = {w.key: w for w in previous.workers} if previous is not None else {}
    living = [w for w in current.workers if w.state is not WorkerState.GONE]
    router_now_s = max(
        (t for w in living for t in (w.renewed_s, w.ready_s, w.draining_s) if t is not None),
        default=0.0,
    )
    views = tuple(_view(w, before.get(w.key), router_now_s) for w in living)
    return views, len(before.keys() - {w.key for w in living})


def _view(worker: Worker, before: Worker | None, router_now_s: float) -> WorkerView:
    load = worker.load
    total, used = load.kv_total_blocks, load.kv_used_blocks
    usage = used / total if used is not None and total else None
    block = worker.serving.block_size if worker.serving is not None else 16
    kv_tokens = float(used * block) if used is not None else None
    rate, iteration, decoded = _measured(worker, before)

    def age(since: float | None) -> float | None:
        return None if since is None else max(0.0, router_now_s - since)

    offer = worker.offer
    return WorkerView(
        worker_id=offer.worker_id,
        incarnation=offer.incarnation,
        role=offer.role,
        state=worker.state,
        worker_class=offer.worker_class,
        epoch=worker.epoch,
        generation=offer.generation,
        manifest_digest=offer.manifest_digest,
        mode=str(offer.mode),
        node=offer.node,
        attached=offer.attached,
        scale_decision_id=offer.scale_decision_id,
        ready_age_s=age(worker.ready_s),
        drain_age_s=age(worker.draining_s),
        active=worker.active,
        promised_prefill_tokens=worker.promised_prefill_tokens,
        promised_kv_blocks=worker.promised_kv_blocks,
        running=load.running,
        waiting=load.waiting,
        waiting_prefill_tokens=load.waiting_prefill_tokens,
        kv_usage=usage,
        prefill_rate=rate,
        iteration_s=iteration,
        decode_rate=decoded,
        kv_tokens=kv_tokens,
        failure=worker.progress.failure if worker.progress is not None else "",
    )


def _measured(
    worker: Worker, before: Worker | None
) -> tuple[float | None, float | None, float | None]:
    """(prefill tokens/s, seconds an iteration, output tokens/s) between two reports of one life.

    The first two only where the worker was busy at both ends: else they tell of its load, not of
    its speed.
    """
    if before is None or worker.ready_s is None:
        return None, None, None
    now, old = worker.load, before.load
    dt_s = (worker.renewed_s - now.age_s) - (before.renewed_s - old.age_s)
    if dt_s <= 0:
        return None, None, None
    rate = iteration = decoded = None
    if now.prefill_tokens_total is not None and old.prefill_tokens_total is not None:
        grown = now.prefill_tokens_total - old.prefill_tokens_total
        if grown > 0 and (now.waiting_prefill_tokens or 0) and (old.waiting_prefill_tokens or 0):
            rate = grown / dt_s
    if now.iterations_total is not None and old.iterations_total is not None:
        steps = now.iterations_total - old.iterations_total
        if steps > 0 and (now.running or 0) and (old.running or 0):
            iteration = dt_s / steps
    if now.decode_tokens_total is not None and old.decode_tokens_total is not None:
        decoded = max(0.0, (now.decode_tokens_total - old.decode_tokens_total) / dt_s)
    return rate, iteration, decoded


def _generated(workers: Sequence[WorkerView]) -> float | None:
    """Output tokens/s of the D pool; None when no worker told.

    Reports come less often than ticks: who has not told in this one counts as the others' mean.
    """
    serving = {WorkerState.READY, WorkerState.DRAINING}
    told = [w.decode_rate for w in workers if w.role.serves(Role.DECODE) and w.state in serving]
    known = [rate for rate in told if rate is not None]
    return sum(known) / len(known) * len(told) if known else None
