"""How fast sources give: what is assumed, what transfers have shown, and what serving leaves. Pure.

Owns the policy of ranking and judging, the moving averages of measured bandwidth, and the share of
a serving source's rate that may be given away (R9.1). Handed to `sources`, `reports` and `live`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from readyplane.core.startup import WeightTier

HEADROOM_MIN = 0.05


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """A measured rate: moving average, best seen, and how many transfers speak for it."""

    mean_bytes_per_s: float = 0.0
    best_bytes_per_s: float = 0.0
    samples: int = 0


UNMEASURED = Bandwidth()


@dataclass(frozen=True, slots=True)
class SourcePolicy:
    """What the ranking assumes and bounds.

    Attributes:
        prior_bytes_per_s: assumed rate of a tier until a transfer has measured it. Deliberately
            modest and alike: nothing is assumed fast because of its name, it is measured.
        same_node_factor: how much faster a source on the target's own node is assumed to be.
        slower_than_storage_max: a measured peer slower than storage by more than this is left out.
        sample_bytes_min: shorter transfers say more about latency than about bandwidth.
        weight: share of a new sample in the moving average.
        quarantine_s: how long a source that gave wrong bytes is not offered.
        dead_s: how long a source that did not answer is not offered.
        slow_s: how long a source that its reader found too slow is not offered.
        accusations_max: a reader that accuses more sources than this is itself the suspect.
        same_rack_factor: as `same_node_factor`, for a source in the target's rack.
        slo_share_free: a source whose requests take less of their target than this gives at full
            rate; from there its rate falls to none at `slo_share_max` (R9.1).
        behind_max: how many may be behind one another in a chain of starters.
        behind_storage_factor: a source that still loads is left out when waiting for it takes
            longer than storage by more than this.
    """

    prior_bytes_per_s: Mapping[WeightTier, float]
    same_node_factor: float = 1.5
    slower_than_storage_max: float = 4.0
    sample_bytes_min: int = 1024 * 1024
    weight: float = 0.3
    quarantine_s: float = 120.0
    dead_s: float = 10.0
    slow_s: float = 10.0
    accusations_max: int = 2
    same_rack_factor: float = 1.2
    slo_share_free: float = 0.7
    slo_share_max: float = 0.95
    behind_max: int = 32
    behind_storage_factor: float = 1.5


PRIOR_BYTES_PER_S: Mapping[WeightTier, float] = {
    WeightTier.L0_PEER_GPU: 1.0e9,
    WeightTier.L1_HOST: 1.0e9,
    WeightTier.L2_NVME: 1.0e9,
    WeightTier.L3_RACK: 0.5e9,
    WeightTier.L4_OBJECT: 0.3e9,
    WeightTier.UNKNOWN: 0.1e9,
}
DEFAULT_POLICY = SourcePolicy(prior_bytes_per_s=PRIOR_BYTES_PER_S)


def sample(
    *,
    transferred_bytes: int,
    elapsed_s: float,
    readers_before: int,
    readers_after: int,
    policy: SourcePolicy = DEFAULT_POLICY,
) -> float | None:
    """The source's whole rate in bytes/s that one transfer shows; None when it shows nothing.

    A reader that shared the source saw its share only, so its rate counts times the readers there
    were on average (itself included).
    """
    if transferred_bytes < policy.sample_bytes_min or elapsed_s <= 0:
        return None
    readers = max(1.0, (readers_before + readers_after) / 2)
    rate = transferred_bytes / elapsed_s * readers
    return rate if math.isfinite(rate) else None


def learn(known: Bandwidth, rate_bytes_per_s: float, *, weight: float) -> Bandwidth:
    """The bandwidth after one more sample; the live store's scripts do the same arithmetic."""
    if known.samples == 0:
        return Bandwidth(rate_bytes_per_s, rate_bytes_per_s, 1)
    return Bandwidth(
        known.mean_bytes_per_s + weight * (rate_bytes_per_s - known.mean_bytes_per_s),
        max(known.best_bytes_per_s, rate_bytes_per_s),
        known.samples + 1,
    )


def headroom(slo_share: float | None, policy: SourcePolicy = DEFAULT_POLICY) -> float:
    """The share of a source's rate that its own requests leave for giving weights, 0 to 1."""
    if slo_share is None:
        return 1.0
    span = policy.slo_share_max - policy.slo_share_free
    return min(1.0, max(0.0, (policy.slo_share_max - slo_share) / span))


def allowance(
    bytes_per_s: float, slo_share: float | None, readers: int, policy: SourcePolicy = DEFAULT_POLICY
) -> float:
    """How fast one of `readers` may read from a serving source, bytes/s; 0: no bound.

    Args:
        bytes_per_s: what the source says it can give in all; 0: it says nothing.

    A reader that is there already is slowed, not stopped, when the source nears its target: its
    next plan leads elsewhere (R9.1).
    """
    left = headroom(slo_share, policy)
    if left >= 1 or bytes_per_s <= 0:
        return 0.0
    return max(left, HEADROOM_MIN) * bytes_per_s / max(1, readers)
