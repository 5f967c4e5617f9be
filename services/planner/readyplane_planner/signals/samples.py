"""One sample as it came: which of its numbers are sound, what a counter grew by, mean lengths.

Owns refusing NaN, infinities and absurd values, and differencing by incarnation. Hands numbers to
`observe`; None is not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from readyplane.core.work import ISL_EDGES, OSL_EDGES
from readyplane_planner.signals.values import (
    GenerationEnds,
    Latency,
    Lengths,
    PriorityWork,
    Priors,
    RouterSample,
)

HUGE = 1e15
"""No counter, gauge or latency of one model is larger; what is larger is a broken sample (B01)."""
KNOWN_LENGTHS_MIN = 20.0
COUNTERS = (
    "arrivals_total",
    "arrival_tokens_total",
    "arrival_uncached_tokens_total",
    "finished_total",
)
ENDS = ("finished", "attained", "refused", "aborted")
GAUGES = (
    "queued_requests",
    "queued_tokens",
    "prefilling_requests",
    "prefilling_tokens",
    "decoding_requests",
    "decoding_remaining_tokens",
    "decoding_kv_tokens",
)
_OSL_MIDDLES = [(a + b) / 2 for a, b in zip(OSL_EDGES, (*OSL_EDGES[1:], 8192), strict=True)]
_ISL_MIDDLES = [(a + b) / 2 for a, b in zip(ISL_EDGES, (*ISL_EDGES[1:], 65536), strict=True)]


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

    A new incarnation began at zero, so its whole value is growth. A dip within one incarnation is
    no restart (B15) and no standstill either: what grew meanwhile is not known.
    """
    value = check(name, now.counters.get(name), bad)
    if value is None or before is None:
        return None
    if before.incarnation != now.incarnation:
        return value
    base = check(name, before.counters.get(name), [])
    if base is not None and value < base:
        bad.append(f"{name}={value:.0f} after {base:.0f} in one life")
        return None
    return None if base is None else value - base


def generations(
    previous: RouterSample | None, current: RouterSample | None
) -> tuple[GenerationEnds, ...] | None:
    """How requests of each generation ended between two samples of one life; None if not known."""
    if previous is None or current is None or previous.incarnation != current.incarnation:
        return None
    if previous.generations is None or current.generations is None:
        return None
    before = {g.digest: g for g in previous.generations}
    found = []
    for now in current.generations:
        old = before.get(now.digest, GenerationEnds(now.digest))
        grown = (
            now.finished - old.finished,
            now.attained - old.attained,
            now.failed - old.failed,
        )
        if min(grown) < 0:
            return None  # a counter that went back tells nothing (B15)
        if any(grown) or now.late:
            found.append(GenerationEnds(now.digest, *grown, now.late))
    return tuple(found)


def priorities(
    previous: RouterSample | None, current: RouterSample | None
) -> tuple[PriorityWork, ...]:
    """What came by priority between two samples of one life; empty where that is not known.

    A counter that went back began anew, for another of too many priorities: it tells nothing.
    """
    if previous is None or current is None or previous.incarnation != current.incarnation:
        return ()
    before = {p.priority: p for p in previous.priorities}
    found = []
    for now in current.priorities:
        old = before.get(now.priority, PriorityWork(now.priority, 0.0, 0.0))
        requests, tokens = now.requests - old.requests, now.tokens - old.tokens
        if 0 < requests < HUGE and 0 <= tokens < HUGE:
            found.append(PriorityWork(now.priority, requests, tokens))
    return tuple(found)


def rates(
    previous: RouterSample | None, current: RouterSample | None, dt_s: float, bad: list[str]
) -> dict[str, float | None]:
    """Growth of each counter a second; None where it is not known."""
    out: dict[str, float | None] = {}
    for name in COUNTERS:
        grown = None if current is None else difference(name, previous, current, bad)
        out[name] = grown / dt_s if grown is not None and dt_s > 0 else None
    return out


def missed(
    previous: RouterSample | None, current: RouterSample | None, dt_s: float
) -> float | None:
    """Requests/s that ended without both targets met; None where one of the counters is not known."""
    if current is None or dt_s <= 0:
        return None
    grown = [difference(f"{name}_total", previous, current, []) for name in ENDS]
    finished, attained, refused, aborted = grown
    if finished is None or attained is None or refused is None or aborted is None:
        return None
    return max(0.0, finished - attained + refused + aborted) / dt_s


def gauge(current: RouterSample | None, name: str, bad: list[str]) -> float | None:
    """One gauge of the sample."""
    return None if current is None else check(name, current.gauges.get(name), bad)


def latencies(current: RouterSample, bad: list[str]) -> dict[str, Latency]:
    """Latency windows by name; what is empty or broken has a count of 0."""
    out: dict[str, Latency] = {}
    for name, window in current.latency.items():
        values = (window.p50_s, window.p90_s, window.p99_s)
        sound = [check(f"{name}.p", value, bad) for value in values]
        # An empty window's quantiles are undefined, not zero (B04); a bad one is no sample at all.
        out[name] = window if window.count > 0 and None not in sound else Latency(window.window_s)
    return out


def lengths(current: RouterSample | None, priors: Priors) -> Lengths:
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
    total = weighted = 0.0
    for row in counts:
        if any(row):
            for middle, count in zip(_OSL_MIDDLES, row, strict=False):
                total += count
                weighted += count * middle
    return max(1.0, weighted / total) if total > 0 else prior


def _spread(counts: Sequence[Sequence[float]]) -> float:
    """Squared coefficient of variation of prompt lengths, between 0.1 and 4."""
    weights = [sum(row) for row in counts]
    total = sum(weights)
    mean = sum(m * w for m, w in zip(_ISL_MIDDLES, weights, strict=False)) / total
    square = sum((m - mean) ** 2 * w for m, w in zip(_ISL_MIDDLES, weights, strict=False)) / total
    return min(4.0, max(0.1, square / (mean * mean)))
