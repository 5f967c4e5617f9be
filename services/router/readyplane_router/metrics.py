"""The router's metrics: read from the service when somebody scrapes, starts as they are admitted.

Owns names and labels (R24.1). Gauges and counters are made anew at every scrape from what is alive,
so that nothing of a gone worker stays (field report B160); a model label is given only to models
that have a desk, anything else is `other` (B159).
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from readyplane.core.startup import SegmentName
from readyplane.core.worker import Role, Worker, WorkerState
from readyplane_router.desk import Desk
from readyplane_router.service import OTHER_MODEL, RouterService
from readyplane_router.told import ACTIVATE, FLIP

START_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 900)
LABELS = ("pool", "worker_class", "model")
SEGMENT_METRICS: dict[str, tuple[SegmentName, ...]] = {
    "image_pull_seconds": (SegmentName.IMAGE,),
    "runtime_import_seconds": (SegmentName.RUNTIME_IMPORT,),
    "artifact_discovery_seconds": (SegmentName.ARTIFACT_DISCOVERY,),
    "arena_prefault_seconds": (SegmentName.ARENA_PREFAULT,),
    "weight_read_seconds": (SegmentName.WEIGHT_READ,),
    "weight_transfer_seconds": (SegmentName.WEIGHT_TRANSFER,),
    "weight_deserialize_seconds": (SegmentName.WEIGHT_DESERIALIZE,),
    "host_to_device_seconds": (SegmentName.HOST_TO_DEVICE,),
    "parallel_init_seconds": (SegmentName.PARALLEL_INIT,),
    "compile_seconds": (SegmentName.COMPILE,),
    "cuda_graph_capture_seconds": (SegmentName.CUDA_GRAPH,),
    "kv_profile_seconds": (SegmentName.KV_PROFILE,),
    "warmup_seconds": (SegmentName.WARMUP,),
    "verify_seconds": (SegmentName.VERIFY,),
    "parallel_group_barrier_seconds": (SegmentName.GROUP_BARRIER,),
    "canary_seconds": (SegmentName.CANARY,),
    "router_registration_seconds": (SegmentName.ROUTER_REGISTRATION,),
}


class StartMetrics:
    """Histograms of start-up segments; `admitted` is handed to the service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register under `readyplane_`."""
        self._schedule = Histogram(
            "readyplane_schedule_to_gpu_seconds",
            "From the order until the agent runs on its machine",
            LABELS,
            buckets=START_BUCKETS_S,
            registry=registry,
        )
        self._segments = {
            name: Histogram(
                f"readyplane_{name}",
                f"Seconds of {name.removesuffix('_seconds').replace('_', ' ')} in a start",
                LABELS,
                buckets=START_BUCKETS_S,
                registry=registry,
            )
            for name in SEGMENT_METRICS
        }
        self._hits = Counter(
            "readyplane_compile_cache_hit",
            "Starts whose compile artifacts were found",
            LABELS,
            registry=registry,
        )
        self._misses = Counter(
            "readyplane_compile_cache_miss",
            "Starts that had to compile, by reason",
            (*LABELS, "reason"),
            registry=registry,
        )
        self._followed = {
            ACTIVATE: Histogram(
                "readyplane_activation_seconds",
                "From telling a standby to serve until it is routable",
                LABELS,
                buckets=START_BUCKETS_S,
                registry=registry,
            ),
            FLIP: Histogram(
                "readyplane_flip_seconds",
                "From telling a worker to serve the other stage until it does, its drain included",
                LABELS,
                buckets=START_BUCKETS_S,
                registry=registry,
            ),
        }
        self._reasons: set[str] = set()

    def followed(self, what: str, worker: Worker, seconds: float) -> None:
        """Count one worker that serves as it was told."""
        self._followed[what].labels(*_labels_of(worker)).observe(seconds)

    def admitted(self, worker: Worker) -> None:
        """Count one finished start."""
        labels = _labels_of(worker)
        progress = worker.progress
        if progress is None:
            return
        totals: dict[SegmentName, float] = {}
        for segment in progress.segments:
            end_s = progress.now_s if segment.end_s is None else segment.end_s
            totals[segment.name] = totals.get(segment.name, 0.0) + max(0.0, end_s - segment.start_s)
            if segment.name is SegmentName.COMPILE:
                self._cache(labels, segment.detail)
        if SegmentName.SCHEDULE in totals:
            self._schedule.labels(*labels).observe(totals[SegmentName.SCHEDULE])
        elif worker.offer.ordered_ago_s is not None:
            self._schedule.labels(*labels).observe(worker.offer.ordered_ago_s)
        for name, segments in SEGMENT_METRICS.items():
            seconds = [totals[s] for s in segments if s in totals]
            if seconds:
                self._segments[name].labels(*labels).observe(sum(seconds))

    def _cache(self, labels: tuple[str, ...], detail: str) -> None:
        for word in detail.split():
            if word == "cache=hit":
                self._hits.labels(*labels).inc()
            elif word.startswith("cache=miss"):
                reason = word.partition(":")[2] or "unknown"
                if reason not in self._reasons and len(self._reasons) >= 32:
                    reason = "other"
                self._reasons.add(reason)
                self._misses.labels(*labels, reason).inc()


class RouterCollector(Collector):
    """Everything that can be read off the service when somebody asks."""

    def __init__(self, service: RouterService) -> None:
        """Read from `service` at every scrape."""
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self._pools()
        yield from self._models()
        yield from self._prefixes()
        yield from self._membership()

    def _pools(self) -> Iterator[Metric]:
        fleet = self._service.roster.fleet()
        groups: dict[tuple[str, ...], list[Worker]] = {}
        for worker in fleet.workers.values():
            if worker.state is not WorkerState.GONE:
                groups.setdefault(_labels_of(worker), []).append(worker)
        workers = _gauge("router_workers", "Workers the router knows, by state", (*LABELS, "state"))
        queue = _gauge("prefill_queue_tokens", "Prompt tokens promised to P and not yet computed")
        active = _gauge("decode_active_sequences", "Sequences promised to decode workers")
        usage = _gauge("kv_usage_ratio", "KV blocks promised or used, of all, 0 to 1")
        tier = _gauge(
            "weight_source_tier", "Workers by where their weights came from", (*LABELS, "tier")
        )
        for labels, found in groups.items():
            for state in (
                WorkerState.PROVISIONED,
                WorkerState.STANDBY,
                WorkerState.READY,
                WorkerState.DRAINING,
                WorkerState.STALLED,
            ):
                count = sum(w.state is state for w in found)
                workers.add_metric((*labels, str(state)), count)
            if any(w.role.serves(Role.PREFILL) for w in found):
                queue.add_metric(labels, sum(w.promised_prefill_tokens for w in found))
            if found[0].role.serves(Role.DECODE):
                active.add_metric(labels, sum(w.active for w in found))
            total = sum(w.serving.kv_total_blocks for w in found if w.serving)
            if total:
                used = sum(
                    max(w.promised_kv_blocks, w.load.kv_used_blocks or 0)
                    for w in found
                    if w.serving
                )
                usage.add_metric(labels, used / total)
            tiers: dict[str, int] = {}
            for worker in found:
                if worker.serving is not None:
                    name = str(worker.serving.tier)
                    tiers[name] = tiers.get(name, 0) + 1
            for name, count in tiers.items():
                tier.add_metric((*labels, name), count)
        yield from (workers, queue, active, usage, tier)

    def _prefixes(self) -> Iterator[Metric]:
        events = _counter("router_kv_events", "KV event faults, by kind", ("model", "kind"))
        hits = _gauge(
            "router_prefix_hit_ratio",
            "Prefix tokens that a worker found in its cache, over those that were counted on",
            ("model", "worker"),
        )
        silent = _gauge(
            "router_kv_silent_workers",
            "Workers that were sent prompts and told of no KV event: their prefixes are guessed",
            ("model",),
        )
        for model, desk in self._service.desks.items():
            for kind in desk.index.counts.__slots__:
                events.add_metric((model, kind), getattr(desk.index.counts, kind))
            for key, ratio in desk.hits.ratios().items():
                if key in desk.seats:
                    hits.add_metric((model, desk.seats[key].worker_id), ratio)
            silent.add_metric((model,), desk.index.silent(now_s=self._service.now_s()))
        yield from (events, hits, silent)

    def _models(self) -> Iterator[Metric]:
        service = self._service
        windows = {
            name: _gauge(
                f"{name}_seconds",
                f"{name.replace('_', ' ')} over the window",
                ("model", "quantile"),
            )
            for name in ("ttft_actual", "ttft_predicted", "tpot_actual", "tpot_predicted")
        }
        totals = {
            name: _counter(f"router_{name}", text)
            for name, text in (
                ("arrivals", "Requests that arrived"),
                ("arrival_tokens", "Prompt tokens that arrived"),
                ("arrival_uncached_tokens", "Prompt tokens that no prefill worker held"),
                ("finished", "Requests that finished"),
                ("output_tokens", "Tokens generated"),
                ("attained", "Requests that met both targets"),
                ("repaired", "Legs that failed and were paired anew"),
                ("handovers", "Requests handed from P to D"),
            )
        }
        refused = _counter("router_refused", "Requests refused, by reason", ("model", "reason"))
        aborted = _counter(
            "router_aborted",
            "Requests that ended without an answer, by reason",
            ("model", "reason"),
        )
        unended = _gauge(
            "router_open_requests", "Arrived and neither finished, refused nor aborted", ("model",)
        )
        queued = _gauge("router_queue_requests", "Requests waiting in the router", ("model",))
        tokens = _gauge("router_queue_tokens", "Prompt tokens waiting in the router", ("model",))
        growths = _counter(
            "router_reservation_growths",
            "Reservations that an output outgrew, by whether the worker still had the room",
            ("model", "outcome"),
        )
        conflicts = _counter("router_take_conflicts", "Pairs that another router took first")
        expired = _counter("router_reservations_expired", "Reservations that ran out")
        factor = _gauge(
            "router_prefill_factor", "Measured over predicted prefill time", ("model", "profile")
        )
        slower = _gauge(
            "router_worker_factor",
            "Measured over predicted time of a worker that differs from its class",
            ("model", "worker", "stage"),
        )
        links = _gauge(
            "router_link_factor", "Measured over predicted time of a link class", ("model", "link")
        )
        cut = _gauge(
            "router_links_cut", "Links between two workers whose circuit is not closed", ("model",)
        )
        rationed = _gauge(
            "router_ration_admit_share",
            "While an order of admission is in force: share admitted of its own priority",
            ("model", "priority"),
        )
        for model, desk in service.desks.items():
            order = desk.rationing.order(now_s=service.now_s())
            if order is not None:
                rationed.add_metric((model, str(order.priority)), order.admit_share)
            for name, family in totals.items():
                family.add_metric((model,), getattr(desk.counters, name))
            for reason, count in desk.refusals.items():
                refused.add_metric((model, reason), count)
            for reason, count in desk.ends.aborts.items():
                aborted.add_metric((model, reason), count)
            unended.add_metric((model,), desk.open_requests)
            queued.add_metric((model,), len(desk.queue))
            tokens.add_metric((model,), desk.queued_tokens)
            conflicts.add_metric((model,), desk.take_conflicts)
            growths.add_metric((model, "within"), desk.grown - desk.overflowed)
            growths.add_metric((model, "overflow"), desk.overflowed)
            expired.add_metric((model,), desk.expired)
            for profile, correction in desk.rates.classes.items():
                factor.add_metric((model, profile), correction.factor)
            for seat in desk.seats.values():
                for stage, own in desk.rates.own_of(seat.key):
                    slower.add_metric((model, seat.worker_id, stage), own)
            for link, correction in desk.rates.links.items():
                links.add_metric((model, link), correction.factor)
            cut.add_metric((model,), desk.cuts.open_links)
            self._windows(model, desk, windows)
        refused.add_metric((OTHER_MODEL, "unknown_model"), service.other_refused)
        yield from windows.values()
        yield from totals.values()
        yield from (refused, aborted, unended, queued, tokens, conflicts, expired, factor)
        yield growths
        yield from (slower, links, cut)
        yield rationed

    def _windows(self, model: str, desk: Desk, windows: dict[str, GaugeMetricFamily]) -> None:
        now_s = self._service.now_s()
        for name, family in windows.items():
            count, p50, p90, p99, _mean = desk.windows[name].quantiles(now_s=now_s)
            if count:  # unknown is not zero: no sample, no series
                for quantile, value in (("0.5", p50), ("0.9", p90), ("0.99", p99)):
                    family.add_metric((model, quantile), value)

    def _membership(self) -> Iterator[Metric]:
        members = self._service.members
        events = _counter("router_leases", "What became of leases, by event", ("event",))
        for name, count in members.counts.items():
            events.add_metric((name,), count)
        events.add_metric(("store_absences",), self._service.link.absences)
        moves = _counter(
            "router_moves", "Requests that asked for another decode worker", ("outcome",)
        )
        moves.add_metric(("moved",), self._service.moving.moved)
        moves.add_metric(("refused",), self._service.moving.refused)
        answering = _gauge("router_store_answering", "Whether the store answers: 1 or 0", ())
        answering.add_metric((), float(self._service.link.answering))
        routers = _gauge("router_instances", "Routers that share the store", ())
        routers.add_metric((), self._service.link.routers)
        unheard = _gauge(
            "router_signals_missing", "Other routers that live and whose signals are not heard", ()
        )
        unheard.add_metric((), self._service.together.missing(self._service.now_s()))
        yield from (events, moves, answering, routers, unheard)


def _labels_of(worker: Worker) -> tuple[str, str, str]:
    return str(worker.offer.counts_as), worker.offer.worker_class, worker.offer.model


def _gauge(name: str, text: str, labels: tuple[str, ...] = LABELS) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"readyplane_{name}", text, labels=labels)


def _counter(name: str, text: str, labels: tuple[str, ...] = ("model",)) -> CounterMetricFamily:
    return CounterMetricFamily(f"readyplane_{name}", text, labels=labels)
