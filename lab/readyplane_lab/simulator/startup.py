"""Start-ups on virtual time: each segment drawn from quantiles, the weights over shared links.

Owns the numbers of a start and who gives the bytes: the object store has one bandwidth that its
readers share, and every ready worker is a peer that gives to a bounded number of readers. So a
second start is faster than a first, and ten at once fan out instead of queueing at one source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from readyplane.core.startup import SegmentName, WeightTier
from readyplane.kit.clock import Clock

MARKS = 8


@dataclass(frozen=True, slots=True)
class StartUpModel:
    """Medians in seconds, and how they spread.

    Attributes:
        provision_s: order to agent running. segments: medians of what is not the weights, in order.
        sigma: of the lognormal factor of each segment. weight_bytes: moved at every start.
        store_bytes_per_s: shared by all readers of the object store.
        peer_bytes_per_s: of one peer, shared by its readers. peer_readers_max: per peer.
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
    weight_bytes: float = 300e6
    store_bytes_per_s: float = 500e6
    peer_bytes_per_s: float = 1000e6
    peer_readers_max: int = 2

    def seconds(self, name: SegmentName, draws: Draws, *start: object) -> float:
        """One segment of one start; `start` names it, so that every run draws alike."""
        median_s = self.segments.get(name, 0.0)
        if name is SegmentName.SCHEDULE:
            median_s = self.provision_s
        return median_s * draws.factor(self.sigma, *start, name)

    def scaled_to(self, t_ready_s: float) -> StartUpModel:
        """The same start stretched so that a lone cold start takes about `t_ready_s`."""
        alone = sum(self.segments.values()) + self.weight_bytes / self.store_bytes_per_s
        factor = t_ready_s / (alone + self.provision_s)
        return StartUpModel(
            provision_s=self.provision_s * factor,
            segments={name: s * factor for name, s in self.segments.items()},
            sigma=self.sigma,
            weight_bytes=self.weight_bytes,
            store_bytes_per_s=self.store_bytes_per_s / factor,
            peer_bytes_per_s=self.peer_bytes_per_s / factor,
            peer_readers_max=self.peer_readers_max,
        )


class WeightSources:
    """Who gives weights to whom, on virtual time."""

    def __init__(self, model: StartUpModel, *, clock: Clock) -> None:
        self._model = model
        self._clock = clock
        self._store_readers = 0
        self._peers: dict[str, int] = {}

    def add_peer(self, worker_id: str) -> None:
        """A ready worker gives its weights from now on."""
        self._peers.setdefault(worker_id, 0)

    def remove_peer(self, worker_id: str) -> None:
        """It gives no more; readers under way go on from the store."""
        self._peers.pop(worker_id, None)

    async def fetch(self) -> WeightTier:
        """Move the weights of one start; returns the tier that gave the last byte."""
        left = self._model.weight_bytes
        peer = self._free_peer()
        if peer is not None:
            self._peers[peer] += 1
            while left > 0 and peer in self._peers:
                left -= await self._piece(self._model.peer_bytes_per_s / self._peers[peer])
            if peer in self._peers:
                self._peers[peer] -= 1
                return WeightTier.L1_HOST
        self._store_readers += 1
        try:
            while left > 0:
                left -= await self._piece(self._model.store_bytes_per_s / self._store_readers)
        finally:
            self._store_readers -= 1
        return WeightTier.L4_OBJECT

    def _free_peer(self) -> str | None:
        free = [(n, w) for w, n in self._peers.items() if n < self._model.peer_readers_max]
        return min(free)[1] if free else None

    async def _piece(self, bytes_per_s: float) -> float:
        size = self._model.weight_bytes / MARKS
        await self._clock.sleep(size / bytes_per_s)
        return size


class Draws:
    """Seeded lognormal factors, one stream per purpose, independent of the order of tasks."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def factor(self, sigma: float, *names: object) -> float:
        """exp(sigma * z) with z from (seed, names)."""
        if sigma <= 0:
            return 1.0
        key = [self._seed & 0xFFFFFFFF, *(c for n in names for c in str(n).encode())]
        z = np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).standard_normal()
        return float(np.exp(sigma * z))


__all__ = ["Draws", "StartUpModel", "WeightSources"]
