"""What the planner looks at each tick: router, actuator, and the sources beyond them.

Owns asking all at once within a bound, and turning port values into those of the signals brain.
A source that does not answer gives nothing, with the reason; never an old value as a new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from readyplane.core.errors import ReadyplaneError, Refused, StaleEpoch
from readyplane.core.worker import Worker
from readyplane.kit.clock import Clock
from readyplane.ports import Actuator, Instance, LatencyWindow, ModelSignals, Router, RouterSignals
from readyplane_planner.signals import (
    Allocation,
    ClientCount,
    GenerationEnds,
    Latency,
    PriorityWork,
    RouterSample,
)
from readyplane_planner.signals.outside import Beyond, Outside

log = logging.getLogger(__name__)

COUNTERS = (
    "arrivals_total",
    "arrival_tokens_total",
    "arrival_uncached_tokens_total",
    "finished_total",
    "finished_prompt_tokens_total",
    "output_tokens_total",
    "refused_total",
    "aborted_total",
    "attained_total",
    "repaired_total",
    "handovers_total",
)
GAUGES = (
    "queued_requests",
    "queued_tokens",
    "prefilling_requests",
    "prefilling_tokens",
    "decoding_requests",
    "decoding_remaining_tokens",
    "decoding_kv_tokens",
)
ENDED = frozenset({"exited", "failed"})
LATENCIES = ("ttft_actual", "ttft_predicted", "tpot_actual", "tpot_predicted")


@dataclass(frozen=True, slots=True)
class Look:
    """What one look gave; None with its reason where a source did not answer.

    `deposed`: a newer leader has been seen by one of them. `outside`: what beyond them was read.
    """

    router: RouterSample | None
    instances: tuple[Instance, ...] | None
    router_error: str = ""
    actuator_error: str = ""
    deposed: bool = False
    outside: Outside = field(default_factory=Outside)


class LooksBeyond(Protocol):
    """Sources beside router and actuator; one look is bounded by itself and never fails."""

    async def look(self, workers: Sequence[Worker]) -> Beyond:
        """All of them at once. `workers`: the router's fleet as last known."""
        ...


class NoRouter:
    """Where gateways are not ours nobody drains: an advisory planner shows its targets (B35)."""

    async def drain(
        self,
        worker_id: str,
        *,
        epoch: int = 0,
        reason: str = "",
        deadline_s: float = 300.0,
        scale_decision_id: str = "",
    ) -> Worker:
        """Refused, with the reason."""
        del epoch, reason, deadline_s, scale_decision_id
        raise Refused(f"drain of {worker_id}", ["there is no router"], "drain it by hand")

    async def signals(self, model: str = "", *, leader_epoch: int = 0) -> RouterSignals:
        """Nothing."""
        del model, leader_epoch
        raise Refused("signals", ["there is no router"], "give --router")


class Sources:
    """Asks router and actuator, if there are any, and whatever is beyond them.

    `timeout_s` bounds one look.
    """

    def __init__(
        self,
        router: Router,
        actuator: Actuator | None,
        *,
        model: str,
        clock: Clock,
        timeout_s: float,
        beyond: LooksBeyond | None = None,
    ) -> None:
        self._router = router
        self._beyond = beyond
        self._workers: tuple[Worker, ...] = ()
        self._begun_s: float | None = None
        self._actuator = actuator
        self._model = model
        self._clock = clock
        self._timeout_s = timeout_s

    async def look(self, *, leader_epoch: int = 0) -> Look:
        """Both at once; one that hangs costs the bound and nothing else (B06).

        Who looks as the leader fences older ones off, and learns here of a newer one.
        """
        signals, instances, beyond = await asyncio.gather(
            self._signals(leader_epoch), self._instances(leader_epoch), self._look_beyond()
        )
        sample = signals[0]
        if beyond.fleet is not None:
            sample, signals = self._of_targets(beyond.fleet), (None, None)
        if sample is not None:
            self._workers = sample.workers
            sample = replace(sample, engines=beyond.engines)
        return Look(
            sample,
            instances[0],
            _said("router", signals[1]),
            _said("actuator", instances[1]),
            deposed=any(isinstance(found[1], StaleEpoch) for found in (signals, instances)),
            outside=beyond.outside,
        )

    async def _look_beyond(self) -> Beyond:
        return Beyond() if self._beyond is None else await self._beyond.look(self._workers)

    def _of_targets(self, fleet: tuple[Worker, ...]) -> RouterSample:
        """What stands in for the router's answer where the engines are all that is known."""
        now_s = self._clock.monotonic_s()
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        return RouterSample(now_s, "engines", now_s - self._begun_s, workers=fleet, by_targets=True)

    async def _signals(self, leader_epoch: int) -> tuple[RouterSample | None, Exception | None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._router.signals(self._model, leader_epoch=leader_epoch)
        except (ReadyplaneError, OSError, TimeoutError) as error:
            return None, error
        return router_sample(found, self._model, taken_s=self._clock.monotonic_s()), None

    async def _instances(
        self, leader_epoch: int
    ) -> tuple[tuple[Instance, ...] | None, Exception | None]:
        if self._actuator is None:
            return (), None
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._actuator.list_instances(
                    model=self._model, leader_epoch=leader_epoch
                )
        except (ReadyplaneError, OSError, TimeoutError) as error:
            return None, error
        return tuple(i for i in found if i.order.model == self._model), None


def _said(who: str, error: Exception | None) -> str:
    if error is None:
        return ""
    text = f"the {who} does not answer: {str(error) or type(error).__name__}"
    log.warning(text)
    return text


def router_sample(signals: RouterSignals, model: str, *, taken_s: float) -> RouterSample:
    """One model's part of the router's answer, stamped with the planner's clock."""
    found = signals.models.get(model)
    part = found if found is not None else ModelSignals(model)
    return RouterSample(
        taken_s=taken_s,
        incarnation=signals.incarnation,
        uptime_s=signals.uptime_s,
        model_known=found is not None,
        counters={name: getattr(part, name) for name in COUNTERS},
        gauges={name: getattr(part, name) for name in GAUGES},
        latency={name: _latency(getattr(part, name)) for name in LATENCIES},
        length_counts=part.length_counts,
        generations=tuple(
            GenerationEnds(
                g.manifest_digest,
                g.finished_total,
                g.attained_total,
                g.failed_total,
                g.late_requests,
            )
            for g in part.generations
        ),
        clients=tuple(
            ClientCount(c.client, c.life, c.arrivals_total, c.arrival_uncached_tokens_total)
            for c in part.clients
        ),
        workers=tuple(w for w in signals.fleet.workers.values() if w.offer.model == model),
        degraded=signals.fleet.degraded,
        priorities=tuple(
            PriorityWork(
                p.priority, float(p.arrivals_total), float(p.arrival_uncached_tokens_total)
            )
            for p in part.priorities
        ),
        ration=None if part.ration is None else asdict(part.ration),
        routers_missing=signals.routers_missing,
    )


def _latency(window: LatencyWindow) -> Latency:
    return Latency(window.window_s, window.count, window.p50_s, window.p90_s, window.p99_s)


def allocations(
    instances: Sequence[Instance], *, awaited: Container[str]
) -> tuple[Allocation, ...]:
    """Instances in the words of the brain; of the ended, those whose workers are still awaited."""
    return tuple(
        Allocation(
            worker_id=i.order.worker_id,
            role=i.order.role,
            state=i.state,
            worker_class=i.order.worker_class,
            manifest_digest=i.order.manifest_digest,
            generation=i.order.generation,
            mode=str(i.order.mode),
            scale_decision_id=i.order.scale_decision_id,
            node=i.node,
            allocated_ago_s=i.allocated_ago_s,
            running_ago_s=i.running_ago_s,
            exited_ago_s=i.exited_ago_s,
            exit_code=i.exit_code,
            reason=i.reason,
            standby=i.order.standby,
        )
        for i in instances
        if i.state not in ENDED or i.order.worker_id in awaited
    )
