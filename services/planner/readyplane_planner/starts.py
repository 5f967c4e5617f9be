"""Starts as they were: the document of one start, its sample, and quantiles of T_ready (R1.2, R6).

Owns the reading of a worker's progress. Hands start documents to the state and to explain, and
quantiles to the signals brain. Seconds; 0 is the moment of the order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from readyplane.core.stage import UpgradeState
from readyplane.core.startup import (
    LATER,
    CriticalPath,
    StartMode,
    StartQuantiles,
    StartSample,
    WeightTier,
    critical_path,
    start_quantiles,
)
from readyplane.core.worker import Role, Worker, WorkerState
from readyplane_planner.decide import POOLS, ROLE_OF, Plan, fast, start_key

SAMPLES_MAX = 64
SAMPLE_AGE_S_MAX = 6 * 3600.0
TIER_SAMPLES_MIN = 5
KNOWN_S_MAX = 60.0
MODE_SHARES = {StartMode.JIT: 1.0, StartMode.EAGER: 0.6, StartMode.AOT: 0.75}
"""Of the T_ready of a compiling start. Of an engine's initialisation compiling and capturing graphs
took 60 % where they were measured (25 s against 10 s with a filled cache), and that is about
half to two thirds of a start that has its weights near."""
RUNNING = frozenset({WorkerState.ORDERED, WorkerState.PROVISIONED})


def path_of(worker: Worker) -> tuple[CriticalPath, float] | None:
    """(critical path, agent's clock at the order); None before the agent told anything."""
    progress = worker.progress
    if progress is None:
        return None
    segments = [s for s in progress.segments if s.name not in LATER]
    begun_s = min([progress.start_s, *(s.start_s for s in segments)])
    ends = [s.end_s for s in segments if s.end_s is not None]
    over = worker.state not in RUNNING and bool(ends) and len(ends) == len(segments)
    end_s = max(ends) if over else max([progress.now_s, *ends])
    return critical_path(progress.segments, start_s=begun_s, end_s=end_s), begun_s


def start_document(worker: Worker) -> dict[str, Any]:
    """The start of one worker for a person: segments, exclusive shares, what it waits for."""
    found = path_of(worker)
    progress = worker.progress
    if found is None or progress is None:
        return {
            "wall_s": None,
            "segments": [],
            "exclusive_s": {},
            "unexplained_s": None,
            "blocking_segment": None,
            "dominant_segment": None,
            "log_tail": "",
            "failure": "",
            "ended_in": None,
        }
    path, begun_s = found
    open_segments = [s for s in progress.segments if s.end_s is None]
    starting = worker.state in RUNNING
    running = max(open_segments, key=lambda s: s.start_s, default=None)
    blocking = running if starting else None
    return {
        "wall_s": path.wall_s,
        "segments": [
            {
                "name": str(s.name),
                "start_s": s.start_s - begun_s,
                "end_s": None if s.end_s is None else s.end_s - begun_s,
                "modelled": s.modelled,
                "detail": s.detail,
                "saved_s": s.saved_s,
            }
            for s in progress.segments
        ],
        "exclusive_s": {str(name): value for name, value in path.exclusive_s.items()},
        "unexplained_s": path.unexplained_s,
        "blocking_segment": None if blocking is None else str(blocking.name),
        "dominant_segment": None if path.dominant is None else str(path.dominant),
        "log_tail": progress.log_tail if starting or progress.failure else "",
        "failure": progress.failure,
        "ended_in": str(running.name) if running is not None and progress.failure else None,
    }


def sample_of(worker: Worker, *, ordered_ago_s: float | None, now_s: float) -> StartSample | None:
    """The sample of a worker that has become ready; None for one that nobody ordered."""
    if worker.offer.attached:
        return None
    tier = worker.serving.tier if worker.serving is not None else WeightTier.UNKNOWN
    found = path_of(worker)
    if found is not None and worker.progress is not None and found[0].wall_s > 0:
        path, begun_s = found
        provision_s = max(0.0, worker.progress.start_s - begun_s)
        ready_s = max(0.0, path.wall_s - provision_s)
    elif ordered_ago_s is not None:
        provision_s, ready_s = 0.0, max(0.0, ordered_ago_s)
    else:
        return None
    offer = worker.offer
    stage = None if worker.serving is None else worker.serving.stage
    staged = stage is not None and stage.state is not UpgradeState.UNSUPPORTED
    return StartSample(offer.worker_class, tier, offer.mode, provision_s, ready_s, now_s, staged)


class StartBook:
    """The newest starts by role, bounded in number and age."""

    def __init__(self) -> None:
        self._samples: dict[Role, deque[StartSample]] = {}
        self._changes: dict[tuple[str, str, str], deque[StartSample]] = {}
        self._known: dict[
            tuple[Role, str, str, bool, StartQuantiles], tuple[float, StartQuantiles]
        ] = {}

    def add(self, role: Role, sample: StartSample) -> None:
        """Keep one more."""
        self._samples.setdefault(role, deque(maxlen=SAMPLES_MAX)).append(sample)
        self._known.clear()

    def changed(
        self, pool: str, worker_class: str, kind: str, seconds: float, *, now_s: float
    ) -> None:
        """Keep what an activation or a flip took, from the word until it served."""
        mine = self._changes.setdefault((pool, worker_class, kind), deque(maxlen=SAMPLES_MAX))
        tier, mode = WeightTier.L0_PEER_GPU, StartMode.JIT
        mine.append(StartSample(worker_class, tier, mode, 0.0, seconds, now_s))

    def changes(self, *, now_s: float) -> dict[str, StartQuantiles]:
        """By `start_key`, with the kind of change in place of a start mode."""
        return {
            start_key(*key): start_quantiles(
                tuple(kept), now_s=now_s, prior=fast.PRIORS.get(key[2], fast.LOAD_PRIOR)
            )
            for key, kept in self._changes.items()
        }

    def recall(self, told: Iterable[tuple[Mapping[str, Any], float]]) -> None:
        """Take in `ready` outcomes of the journal, each with the clock at which it was seen."""
        for document, seen_at_s in told:
            kept = document.get("sample")
            for sample in samples_from([(kept, seen_at_s)] if kept else ()):
                self.add(Role(str(document.get("role", Role.PREFILL))), sample)

    def quantiles(
        self,
        role: Role,
        *,
        worker_class: str,
        mode: str,
        prior: StartQuantiles,
        now_s: float,
        staged: bool = False,
    ) -> StartQuantiles:
        """For the class and mode that would be started, whole or `staged`, and its latest tier."""
        key = (role, worker_class, mode, staged, prior)
        known = self._known.get(key)
        if known is not None and now_s - known[0] < KNOWN_S_MAX:
            at_s, found = known
            age_s = found.age_s + now_s - at_s
            return StartQuantiles(found.p50_s, found.p90_s, found.p99_s, found.count, age_s)
        made = self._measure(role, worker_class, mode, staged, prior, now_s)
        self._known[key] = now_s, made
        return made

    def _measure(
        self,
        role: Role,
        worker_class: str,
        mode: str,
        staged: bool,
        prior: StartQuantiles,
        now_s: float,
    ) -> StartQuantiles:
        fitting = [
            s
            for s in self._samples.get(role, ())
            if s.worker_class == worker_class
            and s.mode == StartMode(mode)
            and s.staged is staged
            and now_s - s.seen_at_s <= SAMPLE_AGE_S_MAX
        ]
        if fitting:
            same_tier = [s for s in fitting if s.tier is fitting[-1].tier]
            if len(same_tier) >= TIER_SAMPLES_MIN:
                fitting = same_tier
        return start_quantiles(fitting, now_s=now_s, prior=prior)


def t_ready(
    book: StartBook, plan: Plan, *, prior: StartQuantiles, now_s: float
) -> dict[str, StartQuantiles]:
    """Quantiles by pool, of its reference class in its usual mode, and by `start_key` besides where
    classes or modes are to be chosen among, or where activations and flips were seen.
    """
    found: dict[str, StartQuantiles] = book.changes(now_s=now_s)
    chosen = plan.start_mode == "auto"
    usual = StartMode.JIT if chosen else StartMode(plan.start_mode)
    for name in POOLS:
        role, pool = ROLE_OF[name], plan.pool(name)
        found[name] = book.quantiles(
            role,
            worker_class=pool.worker_class,
            mode=usual,
            prior=prior,
            now_s=now_s,
            staged=_staged(plan, usual),
        )
        if not (pool.classes or chosen):
            continue
        for worker_class in pool.names:
            own = book.quantiles(
                role,
                worker_class=worker_class,
                mode=usual,
                prior=prior,
                now_s=now_s,
                staged=_staged(plan, usual),
            )
            found[start_key(name, worker_class, usual)] = own
            for mode in (m for m in StartMode if m is not usual and chosen):
                found[start_key(name, worker_class, mode)] = book.quantiles(
                    role,
                    worker_class=worker_class,
                    mode=mode,
                    prior=in_mode(own, mode),
                    now_s=now_s,
                    staged=_staged(plan, mode),
                )
    return found


def _staged(plan: Plan, mode: StartMode) -> bool:
    """Whether such a start would be ready before its graphs."""
    return plan.graph_stages and mode is not StartMode.EAGER


def in_mode(usual: StartQuantiles, mode: StartMode) -> StartQuantiles:
    """What a compiling start took, as another mode is assumed to take it until it was tried."""
    share = MODE_SHARES[mode]
    return StartQuantiles(share * usual.p50_s, share * usual.p90_s, share * usual.p99_s, 0, 0.0)


def sample_document(sample: StartSample) -> dict[str, Any]:
    """A sample for the journal."""
    return {
        "worker_class": sample.worker_class,
        "tier": str(sample.tier),
        "mode": str(sample.mode),
        "staged": sample.staged,
        "provision_s": sample.provision_s,
        "ready_s": sample.ready_s,
        "capacity_s": sample.capacity_s,
    }


def samples_from(documents: Iterable[tuple[Mapping[str, Any], float]]) -> list[StartSample]:
    """Samples out of journal documents, each with the clock at which it was seen."""
    out: list[StartSample] = []
    for doc, seen_at_s in documents:
        try:
            out.append(
                StartSample(
                    str(doc["worker_class"]),
                    WeightTier(doc["tier"]),
                    StartMode(doc["mode"]),
                    float(doc["provision_s"]),
                    float(doc["ready_s"]),
                    seen_at_s,
                    bool(doc.get("staged", False)),
                )
            )
        except (KeyError, ValueError, TypeError):
            continue  # written by another version: one sample less, never a wrong one
    return out
