"""Two samples and the actuator's list become an Observation: what each number is worth now.

Owns freshness, and telling idle from no data. Handed to decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from readyplane.core.startup import StartQuantiles
from readyplane.core.worker import Role
from readyplane_planner.signals import clients, fleet, laid, samples
from readyplane_planner.signals.outside import EngineSample, Outside
from readyplane_planner.signals.values import (
    Allocation,
    Kind,
    NodeView,
    Observation,
    Priors,
    Refusal,
    RouterSample,
    Signal,
)

ROUTERS = "routers"
"""A signal that is there, and not known, while routers beside the one that answers are not heard."""
_UNKNOWN = (Kind.MISSING, Kind.STALE, Kind.WARMING)


def observe(
    *,
    model: str,
    previous: RouterSample | None,
    current: RouterSample | None,
    allocations: Sequence[Allocation] | None,
    refused: Sequence[Refusal] = (),
    nodes: Sequence[NodeView] = (),
    t_ready: Mapping[str, StartQuantiles],
    priors: Priors,
    now_s: float,
    outside: Outside | None = None,
) -> Observation:
    """Turn two consecutive samples of the router and the actuator's list into an Observation.

    Args:
        previous, current: the last two answers; None when there never was one.
        allocations: None when the actuator could not be asked.
        refused: orders since the last observation that were not taken.
        outside: what sources beyond the router gave in this look.
    """
    outside = outside or Outside()
    bad: list[str] = []
    age_s = 0.0 if current is None else max(0.0, now_s - current.taken_s)
    kind, why = _freshness(previous, current, age_s, priors)
    dt_s = 0.0
    if current is not None and previous is not None:
        dt_s = max(0.0, current.taken_s - previous.taken_s)
    lengths = samples.lengths(current, priors)
    rates = samples.rates(previous, current, dt_s, bad)

    def rate(name: str, unit: str) -> Signal:
        value = rates.get(name)
        return _signal(kind, value, unit, age_s, why)

    def one_of(value: float | None, unit: str) -> Signal:
        return _signal(kind, value, unit, age_s, why)

    gauge_kind = kind if kind in (Kind.MISSING, Kind.STALE) else Kind.FRESH
    gauges = {name: samples.gauge(current, name, bad) for name in samples.GAUGES}

    def gauge(value: float | None, unit: str) -> Signal:
        return _signal(gauge_kind, value, unit, age_s, why)

    workers, dead = fleet.workers(previous, current)
    engine = [
        w.waiting_prefill_tokens for w in workers if w.role.serves(Role.PREFILL) or w.convertible
    ]
    queued, promised = gauges["queued_tokens"], gauges["prefilling_tokens"]
    queue = None
    if queued is not None and promised is not None:
        # The router's promises and the engines' own queues tell of the same prompts: the larger.
        queue = queued + max(promised, float(sum(tokens or 0 for tokens in engine)))
    in_flight, decoding, kv = None, gauges["decoding_requests"], gauges["decoding_kv_tokens"]
    counts = [gauges[n] for n in ("queued_requests", "prefilling_requests", "decoding_requests")]
    if None not in counts:
        in_flight = sum(c for c in counts if c is not None)
    if current is not None and current.by_targets:
        by_engines = laid.of_engines(workers)
        queue, in_flight = by_engines["queue"], by_engines["in_flight"]
        decoding, kv = by_engines["decoding"], by_engines["kv"]
    told = {
        "arrivals": rate("arrivals_total", "requests/s"),
        "prompt_work": rate("arrival_tokens_total", "tokens/s"),
        "prefill_work": rate("arrival_uncached_tokens_total", "tokens/s"),
        "finished": rate("finished_total", "requests/s"),
        "generated": gauge(fleet.generated(workers), "tokens/s"),
        "queue": gauge(queue, "tokens"),
        "in_flight": gauge(in_flight, "requests"),
        "decoding": gauge(decoding, "sequences"),
        "remaining": gauge(gauges["decoding_remaining_tokens"], "tokens"),
        "kv": gauge(kv, "tokens"),
    }
    read = laid.signals(outside.readings, now_s=now_s, stale_after_s=priors.stale_after_s, bad=bad)
    lengths = laid.lengths(read, lengths)
    bad.extend(f"{e.worker_id}: {name}" for e in _engines(current) for name in e.bad)
    latency = {} if current is None else samples.latencies(current, bad)
    # Clients are parts of what the router counts, and of no other source's rates.
    own = not ({"arrivals", "prefill_work"} & read.keys())
    by_client = clients.rates(previous, current, dt_s, one_of, bad) if own else ()
    signals = laid.over(told, read, lengths)
    rated = kind is Kind.FRESH or all(
        name in read and read[name].known for name in ("arrivals", "prefill_work")
    )
    return Observation(
        model=model,
        taken_s=now_s,
        **signals,
        lengths=lengths,
        missed=_signal(kind, samples.missed(previous, current, dt_s), "requests/s", age_s, why),
        latency={**latency, **laid.latencies(read, outside.readings)},
        workers=workers,
        allocations=tuple(allocations or ()),
        fleet_known=current is not None and age_s <= priors.stale_after_s,
        allocations_known=allocations is not None,
        refused=tuple(refused),
        nodes=tuple(nodes),
        t_ready=dict(t_ready),
        bad=tuple(bad),
        dead_series=dead,
        generations=samples.generations(previous, current),
        priorities=samples.priorities(previous, current) if kind is Kind.FRESH else (),
        degraded="" if current is None else current.degraded,
        dt_s=dt_s if rated else 0.0,
        extra={name: signal for name, signal in read.items() if name not in laid.OWN}
        | _others(current, age_s),
        silent=tuple(f"{s.source}: {s.why}" for s in outside.silent),
        clients=by_client,
        dead_ends=() if current is None else fleet.ended(current.workers),
    )


def _others(current: RouterSample | None, age_s: float) -> dict[str, Signal]:
    """What holds the pools while other routers are not heard: their part may be much."""
    if current is None or not current.routers_missing:
        return {}
    why = f"{current.routers_missing} other routers are not heard: their part is not known"
    return {ROUTERS: Signal(Kind.MISSING, None, "routers", age_s, why)}


def _engines(current: RouterSample | None) -> Sequence[EngineSample]:
    """Readings of engines that live; the dead have no say, not even with broken numbers."""
    if current is None:
        return ()
    living = {w.key for w in current.workers}
    return [e for e in current.engines if e.key in living]


def stands_still(before: RouterSample, now: RouterSample) -> str:
    """Why an answer tells nothing new, empty when it does.

    A router counts its own uptime, so an answer of one life without more of it is an old one that
    somebody hands out again (a cache, a proxy, a stuck task). Taken for new it would say that
    nothing arrives, and a loaded pool would be shrunk.
    """
    if now.incarnation != before.incarnation or now.uptime_s > before.uptime_s:
        return ""
    return f"the router's answer stands still at {now.uptime_s:.1f} s of its life"


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
    if kind in _UNKNOWN:
        return Signal(kind, None, unit, age_s, why)
    if value is None:
        return Signal(Kind.MISSING, None, unit, age_s, "absent or refused")
    return Signal(Kind.IDLE if value == 0 else Kind.FRESH, value, unit, age_s)
