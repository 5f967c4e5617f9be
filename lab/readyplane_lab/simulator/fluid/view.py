"""What the planner is shown: an Observation made of the fluid's own state.

Owns the rates between two looks and what each worker would have told of itself. As complete as the
production one, for rules that look at single workers too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from readyplane.core.startup import StartQuantiles
from readyplane_lab.simulator.fluid.decode import Batch
from readyplane_lab.simulator.fluid.fleet import FluidWorker
from readyplane_lab.simulator.fluid.recent import RecentLatency, RecentLengths
from readyplane_planner.decide import ROLE_OF, Plan
from readyplane_planner.signals import (
    Allocation,
    Kind,
    Observation,
    Priors,
    Refusal,
    Signal,
    WorkerView,
)


@dataclass(slots=True)
class Totals:
    """Counted since the run began; requests and tokens, with their weights."""

    arrivals: float = 0.0
    tokens: float = 0.0
    uncached: float = 0.0
    finished: float = 0.0
    missed: float = 0.0


@dataclass(frozen=True, slots=True)
class Now:
    """The state that an Observation is made of.

    Attributes:
        queued, queued_tokens: in the router. prefilling, prefilling_tokens: at prefill workers.
        decoding, kv, remaining: sequences handed over, their KV tokens, expected tokens to come.
    """

    queued: float
    queued_tokens: float
    prefilling: float
    prefilling_tokens: float
    decoding: float
    kv: float
    remaining: float


class View:
    """Makes Observations, one a tick.

    Args:
        uptime_s: of the router when the first request arrives.
    """

    def __init__(self, plan: Plan, priors: Priors, *, uptime_s: float) -> None:
        self._plan = plan
        self._priors = priors
        self._uptime_s = uptime_s
        self._before = Totals()
        self._last_s: float | None = None
        self._clocks: dict[str, tuple[Batch, float, float, float]] = {}

    def begin(self) -> None:
        """A planner that has just begun has no earlier sample."""
        self._last_s = None
        self._clocks.clear()

    def observe(
        self,
        now_s: float,
        now: Now,
        totals: Totals,
        *,
        fleet: Iterable[FluidWorker],
        ended: Sequence[FluidWorker],
        batches: Mapping[str, Batch],
        lengths: RecentLengths,
        windows: Mapping[str, RecentLatency],
        refused: Sequence[Refusal],
        t_ready: Mapping[str, StartQuantiles],
    ) -> Observation:
        """What is known at this second."""
        dt_s = 0.0 if self._last_s is None else now_s - self._last_s
        before, self._before, self._last_s = self._before, replace(totals), now_s
        isl = totals.tokens / totals.arrivals if totals.arrivals else self._priors.isl
        uncached = totals.uncached / totals.arrivals if totals.arrivals else isl
        fleet = list(fleet)
        views = [
            self._worker(w, now_s, dt_s, batches.get(w.worker_id))
            for w in (*fleet, *ended)
            if w.told(now_s)
        ]
        told = [v.decode_rate for v in views if v.decode_rate is not None]
        serving = sum(1 for w in fleet if w.pool == "decode" and w.serving)
        made = sum(told) / len(told) * serving if told else None

        warming = "" if dt_s > 0 else "one sample makes no rate"
        if now_s + self._uptime_s < self._priors.warm_s:
            warming = "the router has just begun"

        def rate(name: str, unit: str) -> Signal:
            if warming:
                return Signal(Kind.WARMING, None, unit, 0.0, warming)
            return _signal((getattr(totals, name) - getattr(before, name)) / dt_s, unit)

        return Observation(
            model=self._plan.model,
            taken_s=now_s,
            arrivals=rate("arrivals", "requests/s"),
            prompt_work=rate("tokens", "tokens/s"),
            prefill_work=rate("uncached", "tokens/s"),
            finished=rate("finished", "requests/s"),
            missed=rate("missed", "requests/s"),
            generated=_signal(made, "tokens/s"),
            queue=_signal(now.queued_tokens + now.prefilling_tokens, "tokens"),
            in_flight=_signal(now.queued + now.prefilling + now.decoding, "requests"),
            decoding=_signal(now.decoding, "sequences"),
            remaining=_signal(now.remaining, "tokens"),
            kv=_signal(now.kv, "tokens"),
            lengths=lengths.lengths(self._priors, max(1.0, isl), max(1.0, min(uncached, isl))),
            latency={name: window.latency(now_s) for name, window in windows.items()},
            workers=tuple(views),
            allocations=tuple(self._allocation(w, now_s) for w in (*ended, *fleet)),
            refused=tuple(refused),
            t_ready=t_ready,
            dt_s=0.0 if warming else dt_s,
        )

    def _worker(
        self, worker: FluidWorker, now_s: float, dt_s: float, batch: Batch | None
    ) -> WorkerView:
        plan = self._plan
        shown: dict[str, Any] = {
            "worker_id": worker.worker_id,
            "incarnation": f"{worker.worker_id}-i",
            "role": ROLE_OF[worker.pool],
            "state": worker.state,
            "worker_class": worker.profile.worker_class,
            "epoch": 1,
            "manifest_digest": plan.manifest_digest,
            "mode": plan.start_mode,
            "node": worker.worker_id,
            "scale_decision_id": worker.decision_id,
            "standby": worker.standby,
        }
        if worker.ready_s is None:
            if worker.stood_s is not None:
                shown["standby_age_s"] = now_s - worker.stood_s
                shown["told"] = "activate" if worker.asked else ""
            return WorkerView(**shown)
        shown["ready_age_s"] = now_s - worker.ready_s
        if worker.drain_s is not None:
            shown["drain_age_s"] = now_s - worker.drain_s
        shown |= (
            self._prefill(worker, now_s, dt_s)
            if batch is None
            else self._decode(worker, batch, dt_s)
        )
        return WorkerView(**shown)

    def _prefill(self, worker: FluidWorker, now_s: float, dt_s: float) -> dict[str, Any]:
        """A prefill worker by its jobs."""
        jobs = worker.jobs
        while jobs and jobs[0][0] <= now_s:
            tokens = jobs.popleft()[2]
            worker.promised -= tokens
            worker.computed += tokens
        if not jobs:
            worker.promised = 0.0
        grown = worker.computed - worker.seen_computed
        before, worker.seen_computed = worker.seen_promised, worker.computed
        worker.seen_promised = worker.promised
        known = dt_s > 0 and grown > 0
        promised = round(worker.promised)
        return {
            "active": len(jobs),
            "promised_prefill_tokens": promised,
            "running": min(1, len(jobs)),
            "waiting": max(0, len(jobs) - 1),
            "waiting_prefill_tokens": promised,
            "kv_usage": min(1.0, worker.promised / worker.profile.kv_capacity_tokens),
            "prefill_rate": grown / dt_s if known else None,
            "dry_rate": before / dt_s if known else None,
            "kv_tokens": worker.promised,
        }

    def _decode(self, worker: FluidWorker, batch: Batch, dt_s: float) -> dict[str, Any]:
        """A decode worker by its share of its batch."""
        size = len(batch.workers)
        n, kv, tokens = batch.n / size, batch.kv / size, batch.tokens / size
        seen = self._clocks.get(worker.worker_id)
        self._clocks[worker.worker_id] = (batch, batch.v, tokens, n)
        iteration = rate = None
        if seen is not None and seen[0] is batch and dt_s > 0:
            steps = batch.v - seen[1]
            if steps > 0 and n > 0 and seen[3] > 0:
                iteration = dt_s / steps
            rate = max(0.0, (tokens - seen[2]) / dt_s)
        capacity = worker.profile.kv_capacity_tokens
        return {
            "active": round(batch.promised_n / size),
            "promised_kv_blocks": round(batch.promised_kv / size / 16),
            "running": round(n),
            "waiting": 0,
            "waiting_prefill_tokens": 0,
            "kv_usage": min(1.0, kv / capacity),
            "iteration_s": iteration,
            "decode_rate": rate,
            "kv_tokens": kv,
        }

    def _allocation(self, worker: FluidWorker, now_s: float) -> Allocation:
        age_s = now_s - worker.allocated_s
        ended_s = worker.released_s
        state = "running" if ended_s is None else ("failed" if worker.failure else "exited")
        return Allocation(
            worker_id=worker.worker_id,
            role=ROLE_OF[worker.pool],
            state=state,
            worker_class=worker.profile.worker_class,
            manifest_digest=self._plan.manifest_digest,
            mode=self._plan.start_mode,
            scale_decision_id=worker.decision_id,
            node=worker.worker_id,
            allocated_ago_s=age_s,
            running_ago_s=age_s,
            exited_ago_s=None if ended_s is None else now_s - ended_s,
            exit_code=None if ended_s is None else int(bool(worker.failure)),
            reason=worker.failure,
            standby=worker.standby,
        )


def _signal(value: float | None, unit: str) -> Signal:
    if value is None:
        return Signal(Kind.MISSING, None, unit, 0.0, "absent or refused")
    return Signal(Kind.IDLE if value == 0 else Kind.FRESH, value, unit)


def unanswered(last: Observation, now: Observation, priors: Priors) -> Observation:
    """What is known without a new answer of the router: nothing but how old its signals are."""
    age_s = now.taken_s - last.taken_s
    unknown: dict[str, Any] = {
        name: Signal(Kind.STALE, None, signal.unit, age_s, "no new answer of the router")
        for name, signal in last.signals().items()
    }
    return replace(
        last,
        **unknown,
        taken_s=now.taken_s,
        allocations=now.allocations,
        refused=now.refused,
        t_ready=now.t_ready,
        fleet_known=age_s <= priors.stale_after_s,
        dt_s=0.0,
    )


def stuck(last: Observation, now: Observation) -> Observation:
    """What is known while the router gives the same answer again: nothing seems to happen."""

    def still(signal: Signal) -> Signal:
        return Signal(Kind.IDLE, 0.0, signal.unit)

    return replace(
        last,
        taken_s=now.taken_s,
        arrivals=still(last.arrivals),
        prompt_work=still(last.prompt_work),
        prefill_work=still(last.prefill_work),
        finished=still(last.finished),
        missed=still(last.missed),
        allocations=now.allocations,
        refused=now.refused,
        t_ready=now.t_ready,
        dt_s=now.dt_s,
    )


def outlying(observation: Observation, factor: float) -> Observation:
    """One answer that tells of so much more demand than there was."""

    def grown(signal: Signal) -> Signal:
        return signal if signal.value is None else replace(signal, value=signal.value * factor)

    return replace(
        observation,
        arrivals=grown(observation.arrivals),
        prompt_work=grown(observation.prompt_work),
        prefill_work=grown(observation.prefill_work),
        queue=grown(observation.queue),
    )
