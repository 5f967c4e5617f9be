"""The group barrier: rank reports to group state and epoch (R17).

Owns one group's progress as a value; the service keeps the value and asks for an epoch when the
barrier falls. Reports may come in any order, twice, late, or from a rank that started again. All
ranks must have passed every step with one manifest and in one communicator; one failed rank fails
the generation, for good.
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
# From this step on a rank must say in which communicator it is.
COMMUNICATOR_FROM = STEPS.index("connected")
# Starts anew of all ranks together, before the generation is given up.
RESTARTS_MAX = 8

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
        lives: per rank, how often it started anew (absent: it never did).
        progress: per rank, the largest number it has told. moved_s: per rank, when it last got on.
        began_s: when the generation began, on the clock of `moved_s`.
        epoch: published group epoch, 0 before. failure: why it failed.
    """

    ranks: int
    manifest_digest: str = ""
    reached: Mapping[int, int] = field(default_factory=dict)
    lives: Mapping[int, int] = field(default_factory=dict)
    progress: Mapping[int, int] = field(default_factory=dict)
    moved_s: Mapping[int, float] = field(default_factory=dict)
    began_s: float = 0.0
    epoch: int = 0
    failure: str = ""

    @property
    def state(self) -> str:
        """forming, published or failed."""
        if self.failure:
            return FAILED
        return PUBLISHED if self.epoch else FORMING

    @property
    def communicator(self) -> int:
        """Which communicator counts: the sum of all lives, so that any start anew makes another."""
        return sum(self.lives.values())

    @property
    def complete(self) -> bool:
        """Whether every rank has passed every step."""
        last = len(STEPS) - 1
        return all(self.reached.get(rank, -1) == last for rank in range(self.ranks))

    def steps(self) -> tuple[str, ...]:
        """The last step that each rank has passed, by its number; an empty text for none."""
        last = len(STEPS) - 1
        reached = (last if self.epoch else self.reached.get(r, -1) for r in range(self.ranks))
        return tuple(STEPS[at] if at >= 0 else "" for at in reached)

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
    group: Group,
    *,
    rank: int,
    step: str,
    manifest_digest: str = "",
    detail: str = "",
    life: int = 0,
    communicator: int = 0,
    progress: int = 0,
    now_s: float = 0.0,
) -> Group:
    """The group after one report; a report that makes no sense fails the generation.

    A step implies the ones before it (a lost report is repaired by the next). An earlier step than
    the one reached, and whatever an earlier life of the rank says, is late or doubled and changes
    nothing; only that it failed counts from every life.

    Args:
        life: how often this rank has started anew in this generation.
        communicator: sum of the lives of the ranks that it is connected with, its own included.
            What was passed in another communicator than the present one is void.
        progress: any number that grows while the rank gets on (bytes, say).
        now_s: any clock, the same for all calls.
    """
    if group.failure:
        return group
    wrong = _wrong(group, rank, step, manifest_digest, detail)
    if wrong:
        return replace(group, failure=f"rank {rank}{wrong}")
    known = group.lives.get(rank, 0)
    if life < known:
        return group
    if life > known:
        group = _restarted(group, rank, life, now_s)
        if group.failure:
            return group
    index = STEPS.index(step)
    if index >= COMMUNICATOR_FROM and communicator != group.communicator:
        index = COMMUNICATOR_FROM - 1
    had = group.reached.get(rank, -1)
    moved = index > had or progress > group.progress.get(rank, 0)
    return replace(
        group,
        manifest_digest=group.manifest_digest or manifest_digest,
        reached={**group.reached, rank: max(had, index)},
        progress={**group.progress, rank: max(progress, group.progress.get(rank, 0))},
        moved_s={**group.moved_s, rank: now_s} if moved else group.moved_s,
    )


def _wrong(group: Group, rank: int, step: str, manifest_digest: str, detail: str) -> str:
    """Why a report fails the generation, empty when it does not."""
    if not 0 <= rank < group.ranks:
        return f" is not one of 0 to {group.ranks - 1}"
    if step == FAILED:
        return f": {detail or 'failed'}"
    if step not in STEPS:
        return f": step {step!r} is not one of {', '.join((*STEPS, FAILED))}"
    wanted = group.manifest_digest
    if manifest_digest and wanted and manifest_digest != wanted:
        return f": manifest {manifest_digest}, group {wanted}"
    if STEPS.index(step) >= MANIFEST_FROM and not (manifest_digest or wanted):
        return f": {step} without saying which manifest"
    return ""


def _restarted(group: Group, rank: int, life: int, now_s: float) -> Group:
    """One rank is in a new life: what it passed is void, and so is every communicator with it."""
    if group.epoch:
        return replace(group, failure=f"rank {rank} started again after the group was published")
    lives = {**group.lives, rank: life}
    if sum(lives.values()) > RESTARTS_MAX:
        why = f"rank {rank}: the ranks started again more than {RESTARTS_MAX} times"
        return replace(group, failure=why)
    reached = {r: min(at, COMMUNICATOR_FROM - 1) for r, at in group.reached.items() if r != rank}
    # Those thrown back get a whole `stall_s` for the new communicator.
    moved_s = {**dict.fromkeys(reached, now_s), rank: now_s}
    progress = {r: told for r, told in group.progress.items() if r != rank}
    return replace(group, lives=lives, reached=reached, moved_s=moved_s, progress=progress)


def overdue(group: Group, *, now_s: float, stall_s: float) -> Group:
    """The group as it stands now: failed when a rank that is awaited does not get on.

    There is no limit on how long a rank takes while its progress grows: ranks that are done wait
    for the slowest (field report B58). One rank alone keeps nobody waiting; its agent's own limits
    hold.

    Args:
        stall_s: longest time without a step or progress; at least the longest step that tells none.
    """
    if group.ranks == 1 or group.state != FORMING:
        return group
    last = len(STEPS) - 1
    for rank in range(group.ranks):
        reached = group.reached.get(rank, -1)
        meets = reached >= COMMUNICATOR_FROM - 1
        if reached == last or (meets and not _met(group, reached)):
            continue  # it waits for others itself: they are to blame, not it
        since_s = group.moved_s.get(rank, group.began_s)
        # Whoever had to wait for the last one has a whole `stall_s` from then on.
        still_s = now_s - (max(since_s, *group.moved_s.values()) if meets else since_s)
        if still_s <= stall_s:
            continue
        after = STEPS[reached] if reached >= 0 else "the order"
        told = group.progress.get(rank, 0)
        why = f"rank {rank}: no progress for {still_s:.0f} s after {after} (told {told})"
        return replace(group, failure=f"{why}, {stall_s:g} s are allowed")
    return group


def _met(group: Group, reached: int) -> bool:
    """Whether all ranks are where this one is, so that nothing of the others holds it up."""
    return all(group.reached.get(rank, -1) >= reached for rank in range(group.ranks))


def publish(group: Group, epoch: int) -> Group:
    """The group with its epoch, once complete; otherwise unchanged. Never published twice."""
    if group.failure or group.epoch or not group.complete:
        return group
    return replace(group, epoch=epoch)
