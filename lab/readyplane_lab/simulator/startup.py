"""How long a start takes on virtual time: each segment drawn, common random numbers for everybody.

Owns the numbers of a start and their draws; `sources` owns who gives the weights to whom. The k-th
start of a pool draws the same in every run of one seed, whoever ordered it and whatever it is
called, so that two policies are compared on the same luck.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from readyplane.core.startup import SegmentName

Quantiles = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class StartUpModel:
    """Medians in seconds, and how they spread.

    Attributes:
        provision_s: order to agent running. segments: medians of what is not the weights, in order.
        sigma: of the lognormal factor of each segment.
        spread: measured quantiles in place of the lognormal, by segment: (share, factor over the
            median), ascending; between two of them the logarithm is interpolated.
        weight_bytes: moved at every start. store_bytes_per_s: shared by all readers of the object
            store. peer_bytes_per_s: of one peer, shared by its readers. peer_readers_max: per peer.
        cached_share: of starts whose node holds the weights already, read at `disk_bytes_per_s`.
        compiled_share: of starts that find the compile cache warm: compiling takes `compiled_s`.
        activate_s: a standby that is to serve. flip_s: a drained worker that changes its stage.
        graph_kv_tokens: KV that the graphs of a start in stages take when they come; before, it is
            served with. 0 as of an engine that has no account of its device.
    """

    provision_s: float = 0.3
    segments: Mapping[SegmentName, float] = field(
        default_factory=lambda: {
            SegmentName.RUNTIME_IMPORT: 1.0,
            SegmentName.ARTIFACT_DISCOVERY: 0.05,
            SegmentName.PARALLEL_INIT: 0.2,
            SegmentName.COMPILE: 1.2,
            SegmentName.CUDA_GRAPH: 0.8,
            SegmentName.KV_PROFILE: 0.3,
            SegmentName.WARMUP: 0.2,
            SegmentName.CANARY: 0.3,
        }
    )
    sigma: float = 0.3
    spread: Mapping[SegmentName, Quantiles] = field(default_factory=dict)
    weight_bytes: float = 300e6
    store_bytes_per_s: float = 500e6
    peer_bytes_per_s: float = 1000e6
    peer_readers_max: int = 2
    cached_share: float = 0.0
    disk_bytes_per_s: float = 2000e6
    compiled_share: float = 0.0
    compiled_s: float = 0.1
    activate_s: float = 1.0
    flip_s: float = 1.0
    graph_kv_tokens: int = 0

    def seconds(self, name: SegmentName, draws: Draws, *start: object) -> float:
        """One segment of one start; `start` names it, so that every run draws alike."""
        median_s = self.segments.get(name, 0.0)
        if name is SegmentName.SCHEDULE:
            median_s = self.provision_s
        elif name is SegmentName.COMPILE and self._is_warm(
            self.compiled_share, draws, *start, name
        ):
            median_s = self.compiled_s
        return self._drawn(median_s, name, draws, *start, name)

    def activation_s(self, draws: Draws, *start: object) -> float:
        """From being told to passing the gate, of a standby."""
        return self._drawn(self.activate_s, None, draws, *start, "activate")

    def flipping_s(self, draws: Draws, *start: object) -> float:
        """From having drained one stage to passing the gate of the other."""
        return self._drawn(self.flip_s, None, draws, *start, "flip")

    def is_cached(self, draws: Draws, *start: object) -> bool:
        """Whether the node of this start holds the weights."""
        return self._is_warm(self.cached_share, draws, *start, "weights")

    def _is_warm(self, share: float, draws: Draws, *start: object) -> bool:
        return share > 0 and draws.share(*start, "cache") < share

    def _drawn(
        self, median_s: float, name: SegmentName | None, draws: Draws, *key: object
    ) -> float:
        quantiles = self.spread.get(name) if name is not None else None
        if quantiles is None:
            return median_s * draws.factor(self.sigma, *key)
        shares = [share for share, _ in quantiles]
        logs = [math.log(factor) for _, factor in quantiles]
        return median_s * math.exp(float(np.interp(draws.share(*key), shares, logs)))

    def scaled_to(self, t_ready_s: float) -> StartUpModel:
        """The same start stretched so that a lone cold start takes about `t_ready_s`."""
        alone = sum(self.segments.values()) + self.weight_bytes / self.store_bytes_per_s
        factor = t_ready_s / (alone + self.provision_s)
        return replace(
            self,
            provision_s=self.provision_s * factor,
            segments={name: s * factor for name, s in self.segments.items()},
            store_bytes_per_s=self.store_bytes_per_s / factor,
            peer_bytes_per_s=self.peer_bytes_per_s / factor,
            disk_bytes_per_s=self.disk_bytes_per_s / factor,
            compiled_s=self.compiled_s * factor,
        )


class Draws:
    """Seeded draws, one stream per purpose, independent of the order of tasks."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def factor(self, sigma: float, *names: object) -> float:
        """exp(sigma * z) with z from (seed, names)."""
        if sigma <= 0:
            return 1.0
        return float(np.exp(sigma * self._generator(*names).standard_normal()))

    def share(self, *names: object) -> float:
        """Uniform in [0, 1) from (seed, names)."""
        return float(self._generator(*names).random())

    def _generator(self, *names: object) -> np.random.Generator:
        key = [self._seed & 0xFFFFFFFF, *(c for n in names for c in f"{n}/".encode())]
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


__all__ = ["Draws", "StartUpModel"]
