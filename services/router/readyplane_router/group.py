"""The group barrier: rank reports to group state and epoch (R17).

Owns one group's progress as a value; the service keeps the value and asks for an epoch when the
barrier falls. Reports may come in any order, twice, or from a rank that started again. All ranks
must have passed every step with one manifest; one failed rank fails the generation, for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

STEPS: tuple[str, ...] = ("scheduled", "verified", "connected", "placed", "canary_passed")
FAILED = "failed"
PUBLISHED = "published"
FORMING = "forming"
# From this step on a rank must say which manifest it verified.
MANIFEST_FROM = STEPS.index("verified")

# The only moves of a group; `published` and `failed` are final for an incarnation.
TRANSITIONS: Mapping[str, frozenset[str]] = {
    FORMING: frozenset({FORMING, PUBLISHED, FAILED}),
    PUBLISHED: frozenset({PUBLISHED, FAILED}),
    FAILED: frozenset({FAILED}),
}


@dataclass(frozen=True, slots=True)
class Group:
    """One generation of a parallel group.

    Attributes:
        ranks: how many must come up together. manifest_digest: what all must have verified
            (empty: whatever the first one says).
        reached: per rank, the furthest step passed (index into STEPS).
        epoch: published group epoch, 0 before. failure: why it failed.
    """

    ranks: int
    manifest_digest: str = ""
    reached: Mapping[int, int] = field(default_factory=dict)
    epoch: int = 0
    failure: str = ""

    @property
    def state(self) -> str:
        """forming, published or failed."""
        if self.failure:
            return FAILED
        return PUBLISHED if self.epoch else FORMING

    @property
    def complete(self) -> bool:
        """Whether every rank has passed every step."""
        last = len(STEPS) - 1
        return all(self.reached.get(rank, -1) == last for rank in range(self.ranks))

    def waiting_for(self) -> tuple[str, ...]:
        """`rank 3: verified` for each rank's next step; empty when nothing is awaited."""
        if self.failure or self.epoch:
            return ()
        last = len(STEPS) - 1
        return tuple(
            f"rank {rank}: {STEPS[self.reached.get(rank, -1) + 1]}"
            for rank in range(self.ranks)
            if self.reached.get(rank, -1) < last
        )


def report(
    group: Group, *, rank: int, step: str, manifest_digest: str = "", detail: str = ""
) -> Group:
    """The group after one report; a report that makes no sense fails the generation.

    A step implies the ones before it (a lost report is repaired by the next). An earlier step than
    the one reached is an old or doubled report and changes nothing, except `scheduled` after
    `verified`: that rank started again, and what it had passed is void.
    """
    if group.failure:
        return group
    if not 0 <= rank < group.ranks:
        return replace(group, failure=f"rank {rank} is not one of 0 to {group.ranks - 1}")
    if step == FAILED:
        return replace(group, failure=f"rank {rank}: {detail or 'failed'}")
    if step not in STEPS:
        known = ", ".join((*STEPS, FAILED))
        return replace(group, failure=f"rank {rank}: step {step!r} is not one of {known}")
    index = STEPS.index(step)
    wanted = group.manifest_digest
    if manifest_digest and wanted and manifest_digest != wanted:
        return replace(group, failure=f"rank {rank}: manifest {manifest_digest}, group {wanted}")
    if index >= MANIFEST_FROM and not (manifest_digest or wanted):
        return replace(group, failure=f"rank {rank}: {step} without saying which manifest")
    had = group.reached.get(rank, -1)
    if index == 0 and had >= MANIFEST_FROM:
        if group.epoch:
            return replace(
                group, failure=f"rank {rank} started again after the group was published"
            )
        return replace(group, reached={**group.reached, rank: 0})
    return replace(
        group,
        manifest_digest=wanted or manifest_digest,
        reached={**group.reached, rank: max(had, index)},
    )


def publish(group: Group, epoch: int) -> Group:
    """The group with its epoch, once complete; otherwise unchanged. Never published twice."""
    if group.failure or group.epoch or not group.complete:
        return group
    return replace(group, epoch=epoch)
