"""The built-in conversation workload: our own draw, fitted to published figures.

Lengths follow the published quantiles of the Azure 2023 conversation trace (ISL p50/p90/p99
1020/2735/4142, OSL 129/424/601), arrivals its rate and burstiness (Poisson within a minute, peak
minute 1.5 times the mean). Prefix sharing is that of multi-turn chat: a request either opens a
session with one of a few system prompts or continues a session, repeating its history.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from readyplane.core.errors import InvalidField
from readyplane_lab.workload.request import WorkloadRequest

ISL_QUANTILES = (
    (0.0, 60.0),
    (0.25, 460.0),
    (0.5, 1020.0),
    (0.9, 2735.0),
    (0.99, 4142.0),
    (1.0, 6000.0),
)
OSL_QUANTILES = (
    (0.0, 12.0),
    (0.5, 129.0),
    (0.75, 360.0),
    (0.9, 424.0),
    (0.99, 601.0),
    (1.0, 900.0),
)
OSL_MAX = 1_000_000
SYSTEM_PROMPTS = 6
SYSTEM_TOKENS = 160
TURN_TOKENS_MIN = 24
SESSIONS_MAX = 256
_SESSION = 1 << 41
_SYSTEM = 1 << 42


@dataclass(frozen=True, slots=True)
class Wave:
    """Request rate over time: mean, relative swing of a sine, and its period.

    `bursts` are (start_s, length_s, factor): the rate is multiplied by the factor meanwhile.
    """

    mean_rps: float = 5.5
    swing: float = 0.5
    period_s: float = 240.0
    bursts: tuple[tuple[float, float, float], ...] = ()

    def rate_rps(self, at_s: float) -> float:
        """Requests per second at a moment."""
        rate = self.mean_rps * (1.0 + self.swing * math.sin(2 * math.pi * at_s / self.period_s))
        for start_s, length_s, factor in self.bursts:
            if start_s <= at_s < start_s + length_s:
                rate *= factor
        return max(0.0, rate)

    @property
    def peak_rps(self) -> float:
        """An upper bound of the rate."""
        factor = max([1.0, *(f for _, _, f in self.bursts)])
        return self.mean_rps * (1.0 + abs(self.swing)) * factor


def conversation(
    wave: Wave,
    *,
    seed: int,
    duration_s: float = math.inf,
    continue_probability: float = 0.6,
    isl_factor: float = 1.0,
    osl_factor: float = 1.0,
    osl_max: int = OSL_MAX,
) -> Iterator[WorkloadRequest]:
    """Requests of the built-in workload, in order of arrival; endless without a duration.

    Args:
        wave: rate over time. seed: of every draw. duration_s: last arrival.
        continue_probability: share of requests that continue a session, 0 to 1.
        isl_factor, osl_factor: multiply the drawn lengths (ISL or OSL bursts).
        osl_max: longer outputs are cut to it.

    Raises:
        InvalidField: a rate that is not above 0, or a share outside 0 to 1.
    """
    if not (math.isfinite(wave.peak_rps) and wave.peak_rps > 0):
        raise InvalidField("rate", wave.mean_rps, "use requests per second above 0")
    if not 0.0 <= continue_probability <= 1.0:
        raise InvalidField("continue_probability", continue_probability, "use 0 to 1")
    drawn = _draw(wave, seed, duration_s, continue_probability, isl_factor, osl_factor)
    return (replace(r, osl=min(r.osl, osl_max)) for r in drawn)


def _draw(
    wave: Wave,
    seed: int,
    duration_s: float,
    continue_probability: float,
    isl_factor: float,
    osl_factor: float,
) -> Iterator[WorkloadRequest]:
    generator = np.random.Generator(np.random.Philox(key=seed))
    sessions: list[tuple[int, int, int]] = []
    at_s, index = 0.0, 0
    while True:
        at_s += float(generator.exponential(1.0 / wave.peak_rps))
        if at_s > duration_s:
            return
        if generator.random() * wave.peak_rps > wave.rate_rps(at_s):
            continue
        isl = max(1, round(_quantile(ISL_QUANTILES, generator.random()) * isl_factor))
        osl = max(1, round(_quantile(OSL_QUANTILES, generator.random()) * osl_factor))
        going_on = generator.random() < continue_probability
        fits = [s for s in sessions if s[2] + TURN_TOKENS_MIN <= isl] if going_on else []
        if fits:
            chosen = fits[int(generator.integers(len(fits)))]
            sessions.remove(chosen)
        else:
            number = int(generator.integers(1 << 40))
            chosen = (int(generator.integers(SYSTEM_PROMPTS)), _SESSION + number, 0)
        system, session, _ = chosen
        shared = min(isl, SYSTEM_TOKENS)
        parts = [(_SYSTEM + system, shared)]
        if isl > shared:
            parts.append((session, isl - shared))
        sessions.append((system, session, isl + osl))
        if len(sessions) > SESSIONS_MAX:
            sessions.pop(0)
        yield WorkloadRequest(index, at_s, isl, osl, tuple(parts))
        index += 1


def _quantile(points: tuple[tuple[float, float], ...], u: float) -> float:
    shares = [share for share, _ in points]
    logs = [math.log(value) for _, value in points]
    return math.exp(float(np.interp(u, shares, logs)))
