"""Drawn workloads whose rate, lengths and prefix hits change over time as a scenario wants it.

Owns the curves that scenarios are put together from, and the drawing: arrivals of a
non-homogeneous Poisson process (unit exponentials, moved to where the integrated rate reaches
their sum), lognormal prompt and output lengths, and prompts that go on from earlier prompts. All of
it is a function of the seed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from readyplane.core.errors import InvalidField
from readyplane_lab.workload.request import WorkloadRequest

Floats = NDArray[np.float64]
Curve = Callable[[Floats], Floats]
"""Values at times, in seconds since the workload began."""

GRID_S = 0.05
REQUESTS_MAX = 20_000_000
# A turn repeats this share of its prompt at most: what is new is at least a question.
REPEATED_SHARE = 0.8
CANDIDATES = 12
REMEMBERED_S = 60.0
REMEMBERED_MIN = 16
# Repeated heads end with a KV block: what a block holds of two prompts is nobody's hit.
BLOCK_TOKENS = 64
_SESSION = 1 << 44


def constant(value: float) -> Curve:
    """The same at all times."""
    return lambda at_s: np.full(len(at_s), float(value))


ONE, NONE = constant(1.0), constant(0.0)


def ramp(begin_s: float, end_s: float, before: float, after: float) -> Curve:
    """Linear from `before` at `begin_s` to `after` at `end_s`; level outside; a step if they meet."""

    def values(at_s: Floats) -> Floats:
        share = np.clip((at_s - begin_s) / max(end_s - begin_s, 1e-9), 0.0, 1.0)
        return np.asarray(before + (after - before) * share)

    return values


def step(at_s: float, before: float, after: float) -> Curve:
    """One value until `at_s`, the other from then on."""
    return ramp(at_s, at_s, before, after)


def burst(begin_s: float, length_s: float, factor: float, *, ramp_s: float = 0.0) -> Curve:
    """1, but `factor` for `length_s` from `begin_s`, reached and left within `ramp_s` outside it."""
    rise = ramp(begin_s - ramp_s, begin_s, 1.0, factor)
    fall = ramp(begin_s + length_s, begin_s + length_s + ramp_s, factor, 1.0)
    return lambda at_s: np.where(at_s < begin_s + length_s, rise(at_s), fall(at_s))


def square(period_s: float, high: float, low: float, *, phase: float = 0.0) -> Curve:
    """`high` for the first half of each period, `low` for the second; `phase` in periods."""
    return lambda at_s: np.where((at_s / period_s + phase) % 1.0 < 0.5, high, low)


def sine(period_s: float, swing: float, *, phase: float = 0.0) -> Curve:
    """Around 1 by `swing`, rising at the beginning; `phase` in periods."""
    return lambda at_s: np.asarray(
        1.0 + swing * np.sin(2 * math.pi * (at_s / period_s + phase)), dtype=np.float64
    )


def daily(day_s: float, low: float, high: float, *, noon: float = 0.5) -> Curve:
    """A day that repeats: `low` for most of the night, `high` around `noon` (a share of the day).

    The third power of a raised cosine: a working day is a hump, not a sine.
    """

    def values(at_s: Floats) -> Floats:
        wave = 0.5 + 0.5 * np.cos(2 * math.pi * (at_s / day_s - noon))
        return np.asarray(low + (high - low) * wave**3)

    return values


def until(at_s: float, before: Curve, after: Curve) -> Curve:
    """One curve until `at_s`, another from then on: a change of regime."""
    return lambda t_s: np.where(t_s < at_s, before(t_s), after(t_s))


def product(*curves: Curve) -> Curve:
    """All of them multiplied."""
    return lambda at_s: np.prod([curve(at_s) for curve in curves], axis=0)


@dataclass(frozen=True, slots=True)
class Mix:
    """What is asked for.

    Attributes:
        isl_median, isl_sigma, isl_max: lognormal prompt tokens, cut at the last (before factors).
        osl_median, osl_sigma, osl_max: lognormal output tokens, likewise. The defaults are near the
            Azure 2023 conversation trace.
        isl_factor, osl_factor: multiply the lengths over time.
        hit: share of prompt tokens over time that an endless prefix cache would hold, 0 to 0.8.
        long_share, long_osl: share of the requests whose output is U(long_osl) instead.
    """

    isl_median: float = 1020.0
    isl_sigma: float = 0.75
    isl_max: float = 6000.0
    osl_median: float = 129.0
    osl_sigma: float = 0.9
    osl_max: float = 1000.0
    isl_factor: Curve = ONE
    osl_factor: Curve = ONE
    hit: Curve = NONE
    long_share: float = 0.0
    long_osl: tuple[float, float] = (8_000.0, 16_000.0)


def drawn(rate_rps: Curve, mix: Mix, *, span_s: float, seed: int) -> tuple[WorkloadRequest, ...]:
    """A workload of `span_s` seconds, in order of arrival, the first at 0.

    Args:
        rate_rps: requests per second over time. mix: lengths and prefixes. seed: of every draw.

    Raises:
        InvalidField: a rate below 0, or one that gives no request or more than 20 million.
    """
    draws = np.random.Generator(np.random.Philox(key=seed & (2**63 - 1)))
    at_s = arrivals(rate_rps, span_s=span_s, draws=draws)
    count = len(at_s)
    isl = _lengths(draws, count, mix.isl_median, mix.isl_sigma, mix.isl_max, mix.isl_factor(at_s))
    osl = _lengths(draws, count, mix.osl_median, mix.osl_sigma, mix.osl_max, mix.osl_factor(at_s))
    is_long = draws.random(count) < mix.long_share
    osl = np.where(is_long, np.rint(draws.uniform(*mix.long_osl, count)).astype(np.int64), osl)
    parts = _prompts(draws, at_s, isl, np.clip(mix.hit(at_s), 0.0, REPEATED_SHARE))
    begin_s = float(at_s[0])
    rows = zip((at_s - begin_s).tolist(), isl.tolist(), osl.tolist(), parts, strict=True)
    return tuple(WorkloadRequest(i, t, n, m, p) for i, (t, n, m, p) in enumerate(rows))


def arrivals(rate_rps: Curve, *, span_s: float, draws: np.random.Generator) -> Floats:
    """Times of a non-homogeneous Poisson process from 0 to `span_s`, ascending, at least one.

    Raises:
        InvalidField: a rate below 0 or not finite, or one that gives no or too many requests.
    """
    grid: Floats = np.linspace(0.0, span_s, max(2, math.ceil(span_s / GRID_S) + 1))
    middle = (grid[1:] + grid[:-1]) / 2
    rates = rate_rps(middle)
    if not (np.isfinite(rates).all() and (rates >= 0).all()):
        raise InvalidField("rate", float(rates.min()), "use requests per second of at least 0")
    integral = np.concatenate([[0.0], np.cumsum(rates * np.diff(grid))])
    total = float(integral[-1])
    if total > REQUESTS_MAX:
        raise InvalidField("rate", total / span_s, f"give {REQUESTS_MAX:,} requests at most")
    enough = math.ceil(total + 6 * math.sqrt(total) + 10)
    reached = np.cumsum(draws.exponential(1.0, enough))
    reached = reached[reached <= total]
    if not len(reached):
        raise InvalidField("rate", total / span_s, "give a rate that brings at least one request")
    return np.interp(reached, integral, grid)


def _lengths(
    draws: np.random.Generator,
    count: int,
    median: float,
    sigma: float,
    most: float,
    factor: Floats,
) -> NDArray[np.int64]:
    tokens = np.minimum(median * np.exp(sigma * draws.standard_normal(count)), most) * factor
    return np.maximum(1, np.rint(tokens)).astype(np.int64)


def _prompts(
    draws: np.random.Generator, at_s: Floats, isl: NDArray[np.int64], hit: Floats
) -> list[tuple[tuple[int, int], ...]]:
    """Prompts as parts. A continuing one repeats 80 % of itself from an earlier prompt.

    So the share of those that continue makes the hit rate, and a drop of it is a drop of turns that
    go on. Earlier prompts are remembered for about a minute of arrivals; of twelve drawn ones the
    first that is long enough is taken, else the longest.
    """
    goes_on = draws.random(len(at_s)) < hit / REPEATED_SHARE
    picks = draws.random((len(at_s), CANDIDATES))
    if not goes_on.any():
        return [((_SESSION + i, n),) for i, n in enumerate(isl.tolist())]
    mean_rps = len(at_s) / max(1.0, float(at_s[-1] - at_s[0]))
    remembered: deque[tuple[int, tuple[tuple[int, int], ...]]] = deque(
        maxlen=max(REMEMBERED_MIN, round(mean_rps * REMEMBERED_S))
    )
    out: list[tuple[tuple[int, int], ...]] = []
    for i, tokens in enumerate(isl.tolist()):
        head: tuple[tuple[int, int], ...] = ()
        if goes_on[i] and remembered:
            blocks = min(round(REPEATED_SHARE * tokens / BLOCK_TOKENS), tokens // BLOCK_TOKENS)
            wanted = blocks * BLOCK_TOKENS
            head = _repeated(remembered, picks[i], wanted)
        new = tokens - sum(n for _, n in head)
        parts = (*head, (_SESSION + i, new)) if new else head
        remembered.append((tokens, parts))
        out.append(parts)
    return out


def _repeated(
    remembered: Sequence[tuple[int, tuple[tuple[int, int], ...]]], picks: Floats, wanted: int
) -> tuple[tuple[int, int], ...]:
    """The first `wanted` tokens of an earlier prompt, whole blocks if it is shorter."""
    longest: tuple[int, tuple[tuple[int, int], ...]] = (0, ())
    for pick in picks.tolist():
        candidate = remembered[int(pick * len(remembered))]
        if candidate[0] > longest[0]:
            longest = candidate
        if longest[0] >= wanted:
            break
    head: list[tuple[int, int]] = []
    left = min(wanted, longest[0] // BLOCK_TOKENS * BLOCK_TOKENS)
    for seed, tokens in longest[1]:
        if left <= 0:
            break
        head.append((seed, min(tokens, left)))
        left -= tokens
    return tuple(head)


@dataclass(frozen=True, slots=True)
class Shaped:
    """A drawn workload that can be had at any scale: called with (scale, seed)."""

    rate_rps: Curve
    mix: Mix
    span_s: float

    def __call__(self, scale: float, seed: int) -> tuple[WorkloadRequest, ...]:
        rate = product(constant(scale), self.rate_rps)
        return drawn(rate, self.mix, span_s=self.span_s, seed=seed)
