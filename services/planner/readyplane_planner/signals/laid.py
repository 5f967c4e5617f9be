"""Readings of queries laid over what the router told: one signal has one source, the declared one.

Owns what a reading is worth now, and the queue that waiting implies. Handed to `observe`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from readyplane.core.worker import Role, WorkerState
from readyplane_planner.signals.outside import GAUGES, LATENCIES, RATES, Reading
from readyplane_planner.signals.values import Kind, Latency, Lengths, Signal, WorkerView

OWN = frozenset({*RATES, *GAUGES} - {"waiting"})
"""Signals that are fields of an Observation; the others stand beside them."""


def signals(
    readings: Sequence[Reading], *, now_s: float, stale_after_s: float, bad: list[str]
) -> dict[str, Signal]:
    """What each reading is worth, by name; what was refused is added to `bad`."""
    counts = {r.signal: r.value for r in readings if r.signal.endswith("_count")}
    found: dict[str, Signal] = {}
    for reading in readings:
        if reading.bad:
            bad.append(reading.bad)
        age_s = max(0.0, now_s - reading.asked_s)
        kind, why = Kind.FRESH, reading.why
        if reading.empty:
            # Undefined over no samples (B04), broken over some (B01).
            some = counts.get(f"{reading.signal.rpartition('_')[0]}_count") or 0.0
            kind = Kind.MISSING if some > 0 else Kind.IDLE
            if some > 0:
                bad.append(f"{reading.signal}=nan over {some:.0f} samples")
        elif reading.value is None:
            kind = Kind.MISSING
        elif age_s > stale_after_s:
            kind, why = Kind.STALE, f"last answer of the query is {age_s:.1f} s old"
        elif reading.value == 0:
            kind = Kind.IDLE
        known = reading.value if kind in (Kind.FRESH, Kind.IDLE) else None
        found[reading.signal] = Signal(kind, known, reading.unit, age_s, why)
    return found


def lengths(read: Mapping[str, Signal], otherwise: Lengths) -> Lengths:
    """Mean lengths of what queries tell of, where they do: tokens over requests of the same span."""

    def mean(tokens: str, requests: str, known: float) -> float:
        top, bottom = read.get(tokens), read.get(requests)
        if top is None or bottom is None or not (top.known and bottom.known and bottom.get() > 0):
            return known
        return max(1.0, top.get() / bottom.get())

    isl = mean("prompt_work", "arrivals", otherwise.isl)
    uncached = mean("prefill_work", "arrivals", min(isl, otherwise.uncached))
    osl = mean("generated", "finished", otherwise.osl)
    return replace(otherwise, isl=max(isl, uncached), uncached=uncached, osl=osl)


def over(
    told: Mapping[str, Signal], read: Mapping[str, Signal], lengths: Lengths
) -> dict[str, Signal]:
    """The fields of an Observation: a reading takes the router's place, known or not.

    Where nobody counts queued tokens, the waiting requests stand for them with the mean uncached
    prompt, and a wait that was measured stands for the queue that makes it (Little: arrivals x
    wait). Waiting is part of TTFT, wherever it happens (R4.2, B07).
    """
    out = {**told, **{name: signal for name, signal in read.items() if name in OWN}}
    waiting, queue = read.get("waiting"), out["queue"]
    if "queue" not in read and waiting is not None and waiting.known:
        implied = waiting.get() * lengths.uncached
        if not queue.known or implied > queue.get():
            why = f"{waiting.get():.0f} waiting requests of {lengths.uncached:.0f} tokens"
            queue = replace(waiting, value=implied, unit="tokens", why=why)
    wait, work = read.get("wait_p50"), out["prefill_work"]
    if wait is not None and wait.known and work.known:
        implied = work.get() * wait.get()
        if queue.known and implied > queue.get():
            why = f"a wait of {wait.get():.1f} s at {work.get():,.0f} tokens/s"
            queue = replace(queue, kind=Kind.FRESH, value=implied, why=why)
    out["queue"] = queue
    return out


def latencies(read: Mapping[str, Signal], readings: Sequence[Reading]) -> dict[str, Latency]:
    """Latency windows that were read, by the names of an Observation; empty where any is unknown."""
    windows = {r.signal: r.window_s for r in readings}
    out: dict[str, Latency] = {}
    for stem in LATENCIES:
        if f"{stem}_p90" not in read:
            continue
        parts = [read.get(f"{stem}_{part}") for part in ("p50", "p90", "p99", "count")]
        values = [p.value if p is not None and p.known else None for p in parts]
        window_s = windows[f"{stem}_p90"]
        p50, p90, p99, count = values
        if p50 is None or p90 is None or p99 is None or not count:
            out[f"{stem}_actual"] = Latency(window_s)
        else:
            out[f"{stem}_actual"] = Latency(window_s, round(count), p50, p90, p99)
    return out


def of_engines(views: Sequence[WorkerView]) -> dict[str, float | None]:
    """Gauges of a fleet without a router, from its engines alone; None where one does not tell.

    What is queued before the engines is in none of them (B07): that needs a query.
    """
    serving = [w for w in views if w.state in (WorkerState.READY, WorkerState.STALLED)]
    decoding = [w for w in serving if w.role.serves(Role.DECODE)]
    filling = [w for w in serving if w.role.serves(Role.PREFILL)]
    return {
        "decoding": _total([w.running for w in decoding]),
        "kv": _total([w.kv_tokens for w in decoding]),
        "queue": _total([w.waiting_prefill_tokens for w in filling]),
        "in_flight": _total([n for w in serving for n in (w.running, w.waiting)]),
    }


def _total(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(sum(known)) if known and len(known) == len(values) else None
