"""What the planner looks at each tick: the router's signals and the actuator's instances.

Owns asking both at once within a bound, and turning port values into those of the signals brain.
A source that does not answer gives nothing, with the reason; never an old value as a new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Sequence
from dataclasses import dataclass

from readyplane.core.errors import ReadyplaneError
from readyplane.kit.clock import Clock
from readyplane.ports import Actuator, Instance, LatencyWindow, ModelSignals, Router, RouterSignals
from readyplane_planner.signals import Allocation, Latency, RouterSample

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
    """What one look gave; None with its reason where a source did not answer."""

    router: RouterSample | None
    instances: tuple[Instance, ...] | None
    router_error: str = ""
    actuator_error: str = ""


class Sources:
    """Asks router and actuator, if there is one. `timeout_s` bounds one look."""

    def __init__(
        self,
        router: Router,
        actuator: Actuator | None,
        *,
        model: str,
        clock: Clock,
        timeout_s: float,
    ) -> None:
        self._router = router
        self._actuator = actuator
        self._model = model
        self._clock = clock
        self._timeout_s = timeout_s

    async def look(self) -> Look:
        """Both at once; one that hangs costs the bound and nothing else (B06)."""
        signals, instances = await asyncio.gather(self._signals(), self._instances())
        return Look(signals[0], instances[0], signals[1], instances[1])

    async def _signals(self) -> tuple[RouterSample | None, str]:
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._router.signals(self._model)
        except (ReadyplaneError, OSError, TimeoutError) as error:
            return None, _said("router", error)
        return router_sample(found, self._model, taken_s=self._clock.monotonic_s()), ""

    async def _instances(self) -> tuple[tuple[Instance, ...] | None, str]:
        if self._actuator is None:
            return (), ""
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._actuator.list_instances()
        except (ReadyplaneError, OSError, TimeoutError) as error:
            return None, _said("actuator", error)
        return tuple(i for i in found if i.order.model == self._model), ""


def _said(who: str, error: Exception) -> str:
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
        workers=tuple(w for w in signals.fleet.workers.values() if w.offer.model == model),
        degraded=signals.fleet.degraded,
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
        )
        for i in instances
        if i.state not in ENDED or i.order.worker_id in awaited
    )
