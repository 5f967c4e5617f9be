"""How fast workers and links really are, over what their class says: corrected while they serve.

Owns factors of time, each a smoothed mean of log(measured / predicted), so that twice as slow and
twice as fast weigh the same; each bounded, none applied before there are enough samples, and none
of one worker or link within what chance does. A class stands for what its profile got wrong, a
worker's own factor for what that worker does beside its class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from readyplane.core.profile import LinkClass
from readyplane.core.worker import Role
from readyplane_router.pair import PairPolicy, Seat

FACTOR_MAX = 2.0
OWN_FACTOR_MAX = 4.0
LINK_FACTOR_MAX = 16.0
OWN_BAND, LINK_BAND = math.log(1.15), math.log(1.5)
"""For chance; a link's holds transfers that began after the one that is measured, too."""
TRANSFER_S_MIN = 0.02
"""Shorter hand-overs say nothing of a link."""
OUTPUT_TOKENS_MIN = 16
MOVED_SHARE = 0.02


@dataclass(slots=True)
class Correction:
    """One factor of time.

    Attributes:
        factor_max: no more than this and no less than its inverse. band: logarithm that is taken
            for chance; only what is beyond it is applied.
    """

    factor_max: float = FACTOR_MAX
    band: float = 0.0
    smoothing: float = 0.05
    samples_min: int = 10
    log: float = 0.0
    count: int = 0
    frozen_until_s: float = 0.0

    def freeze(self, until_s: float) -> None:
        """Take no samples for a while: capacity has just changed."""
        self.frozen_until_s = max(self.frozen_until_s, until_s)

    def add(self, *, predicted_s: float, measured_s: float, now_s: float) -> None:
        """One prediction and what came of it; what cannot be is left out."""
        if not (predicted_s > 0.0 and 0.0 < measured_s < math.inf) or now_s < self.frozen_until_s:
            return
        most = math.log(self.factor_max)
        found = min(most, max(-most, math.log(measured_s / predicted_s)))
        self.count += 1
        self.log += self.smoothing * (found - self.log)

    @property
    def factor(self) -> float:
        """What predictions are multiplied by; 1 until there are enough samples."""
        beyond = abs(self.log) - self.band
        if self.count < self.samples_min or beyond <= 0.0:
            return 1.0
        return math.exp(math.copysign(beyond, self.log))


def _own() -> Correction:
    return Correction(OWN_FACTOR_MAX, OWN_BAND, samples_min=20)


@dataclass(slots=True)
class WorkerRates:
    """What one worker does beside its class."""

    prefill: Correction = field(default_factory=_own)
    decode: Correction = field(default_factory=_own)


class Rates:
    """The factors of one model's classes, workers and links."""

    def __init__(self) -> None:
        """Nothing has been measured."""
        self.classes: dict[str, Correction] = {}
        self.workers: dict[str, WorkerRates] = {}
        self.links: dict[str, Correction] = {}
        self._corrected: tuple[PairPolicy, tuple[float, float], PairPolicy] | None = None

    def freeze(self, until_s: float) -> None:
        """Capacity has just changed: what is measured now is not what is usual."""
        for correction in self.classes.values():
            correction.freeze(until_s)

    def beginning(self, profile: str) -> tuple[float, float]:
        """Factors (prefill, decode) of a worker of which nothing was measured with that profile."""
        of_class = self.classes.get(profile)
        return (1.0 if of_class is None else of_class.factor), 1.0

    def forget(self, key: str) -> None:
        """A worker is gone."""
        self.workers.pop(key, None)

    def prefilled(
        self,
        seat: Seat,
        *,
        predicted_s: float,
        measured_s: float,
        now_s: float,
        queued: bool = False,
    ) -> None:
        """A prompt has been prefilled; `predicted_s` by the profile alone.

        `queued`: most of that was other prompts, whose lengths tell more than the worker's speed.
        """
        if not seat.role.serves(Role.PREFILL):
            return  # what a decode worker completes by itself is an iteration, not a prompt
        of_class = self.classes.setdefault(seat.times.name, Correction())
        of_class.add(predicted_s=predicted_s, measured_s=measured_s, now_s=now_s)
        own = self.workers.setdefault(seat.key, WorkerRates()).prefill
        if now_s >= of_class.frozen_until_s and not queued:
            usual_s = predicted_s * of_class.factor
            own.add(predicted_s=usual_s, measured_s=measured_s, now_s=now_s)
        seat.prefill_factor = of_class.factor * own.factor

    def decoded(
        self, seat: Seat, *, predicted_s: float, measured_s: float, tokens: int, now_s: float
    ) -> None:
        """An answer has ended; times are those of an iteration, `predicted_s` by the profile alone."""
        if tokens < OUTPUT_TOKENS_MIN or seat.role is not Role.DECODE or seat.works:
            return  # prompts between its iterations are no fault of theirs
        own = self.workers.setdefault(seat.key, WorkerRates()).decode
        own.add(predicted_s=predicted_s, measured_s=measured_s, now_s=now_s)
        seat.decode_factor = own.factor

    def moved(
        self, link: LinkClass, *, predicted_s: float, rest_s: float, measured_s: float, now_s: float
    ) -> None:
        """KV has arrived and a first token was made of it in `measured_s`, of which `rest_s` is not
        the link's. `predicted_s` by the link class alone.
        """
        if predicted_s < max(TRANSFER_S_MIN, 2.0 * rest_s):
            return
        of_link = self.links.setdefault(link.name, Correction(LINK_FACTOR_MAX, LINK_BAND))
        moving_s = max(predicted_s / LINK_FACTOR_MAX, measured_s - rest_s)
        of_link.add(predicted_s=predicted_s, measured_s=moving_s, now_s=now_s)

    def own_of(self, key: str) -> list[tuple[str, float]]:
        """(stage, factor) of a worker where it differs from its class."""
        own = self.workers.get(key)
        if own is None:
            return []
        both = (("prefill", own.prefill.factor), ("decode", own.decode.factor))
        return [(stage, factor) for stage, factor in both if factor != 1.0]

    def factor_of(self, link: LinkClass) -> float:
        """Measured over predicted time of a link class."""
        found = self.links.get(link.name)
        return 1.0 if found is None else found.factor

    def corrected(self, policy: PairPolicy) -> PairPolicy:
        """The policy with the links as they are; the same value while they hardly change."""
        if not self.links:
            return policy
        factors = (self.factor_of(policy.local_link), self.factor_of(policy.network_link))
        kept = self._corrected
        if kept is not None and kept[0] is policy:
            moved = (abs(math.log(new / old)) for new, old in zip(factors, kept[1], strict=True))
            if max(moved) < MOVED_SHARE:
                return kept[2]
        network = _slowed(policy.network_link, factors[1])
        local = _slowed(policy.local_link, factors[0])
        # The argmin rests on it: within a machine is never slower than between machines.
        local = replace(
            local,
            bandwidth_bytes_per_s=max(local.bandwidth_bytes_per_s, network.bandwidth_bytes_per_s),
            setup_s=min(local.setup_s, network.setup_s),
        )
        made = replace(policy, local_link=local, network_link=network)
        self._corrected = policy, factors, made
        return made


def _slowed(link: LinkClass, factor: float) -> LinkClass:
    if factor == 1.0:
        return link
    return replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor,
        setup_s=link.setup_s * factor,
    )
