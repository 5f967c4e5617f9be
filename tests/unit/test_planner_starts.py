"""Starts that were measured become the T_ready that the planner plans with (R1.2, R6.2)."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from readyplane.core.startup import Segment, SegmentName, StartMode, StartQuantiles, WeightTier
from readyplane.core.worker import Role, StartProgress, Worker, WorkerState
from readyplane_planner.outcomes import Follower
from readyplane_planner.starts import TIER_SAMPLES_MIN, StartBook, start_document
from tests.unit.cli_world import worker

PRIOR = StartQuantiles(60.0, 90.0, 120.0, 0, 0.0)
SEGMENTS = (SegmentName.SCHEDULE, SegmentName.WEIGHT_TRANSFER, SegmentName.CANARY)


def started(
    name: str,
    took_s: float,
    *,
    worker_class: str = "h200",
    tier: WeightTier = WeightTier.L4_OBJECT,
    mode: StartMode = StartMode.JIT,
    state: WorkerState = WorkerState.READY,
) -> Worker:
    """A worker whose order lay 1 s before its agent, and whose start took so long in all."""
    found = worker(name, state)
    assert found.serving is not None
    ends = (101.0, 100.0 + took_s / 2, 100.0 + took_s)
    segments = tuple(
        Segment(segment, begin_s, end_s)
        for segment, begin_s, end_s in zip(SEGMENTS, (100.0, *ends), ends, strict=False)
    )
    return replace(
        found,
        offer=replace(found.offer, worker_class=worker_class, mode=mode),
        serving=replace(found.serving, tier=tier),
        progress=StartProgress(start_s=101.0, now_s=100.0 + took_s, segments=segments),
    )


def followed(workers: Iterable[Worker]) -> tuple[Follower, StartBook]:
    """What a planner that sees them one after another has learned."""
    book = StartBook()
    follower = Follower(book)
    for at, each in enumerate(workers):
        follower.look([each], (), fleet_known=True, now_s=200.0 + at, wall_s=1_000.0 + at)
    return follower, book


def p50_s(book: StartBook, *, worker_class: str = "h200", mode: str = "jit") -> float:
    role, now_s = Role.PREFILL, 300.0
    found = book.quantiles(role, worker_class=worker_class, mode=mode, prior=PRIOR, now_s=now_s)
    return found.p50_s


def test_a_worker_that_became_ready_is_a_sample_of_its_class_and_mode() -> None:
    _, book = followed(
        [
            started("a", 20.0),
            started("b", 6.0, mode=StartMode.AOT),
            started("c", 40.0, worker_class="h100"),
        ]
    )
    assert p50_s(book) == pytest.approx(20.0)
    assert p50_s(book, mode="aot") == pytest.approx(6.0)
    assert p50_s(book, worker_class="h100") == pytest.approx(40.0)
    assert p50_s(book, mode="eager") == PRIOR.p50_s  # nobody has tried it


def test_the_tier_of_late_starts_counts_once_it_has_enough_of_them() -> None:
    cold = [started(f"c{n}", 60.0) for n in range(8)]
    warm = [started(f"w{n}", 5.0, tier=WeightTier.L2_NVME) for n in range(TIER_SAMPLES_MIN)]
    few = followed([*cold, *warm[:-1]])[1]
    assert p50_s(few) == pytest.approx(60.0)  # too few to speak for their tier
    assert p50_s(followed([*cold, *warm])[1]) == pytest.approx(5.0)


def test_a_start_counts_once_and_one_that_failed_never() -> None:
    once = started("a", 20.0)
    progress = once.progress
    assert progress is not None
    broken = replace(
        started("b", 900.0, state=WorkerState.GONE),
        progress=replace(
            progress,
            segments=(*progress.segments[:2], Segment(SegmentName.CANARY, 110.0, None)),
            failure="the canary was wrong",
        ),
    )
    follower, book = followed([once, once, broken])
    found = book.quantiles(Role.PREFILL, worker_class="h200", mode="jit", prior=PRIOR, now_s=300.0)
    assert found.count == 1 and found.p50_s == pytest.approx(20.0)
    assert [o.subject for o in follower.collect() if o.kind == "ready"] == ["a"]
    document = start_document(broken)
    assert (document["ended_in"], document["failure"]) == ("canary", "the canary was wrong")
    assert start_document(once)["ended_in"] is None


def test_a_successor_learns_from_the_journal_what_its_predecessor_saw() -> None:
    follower, _ = followed([started("a", 20.0, tier=WeightTier.L2_NVME, mode=StartMode.AOT)])
    kept = [o for o in follower.collect() if o.kind == "ready"]
    successor = StartBook()
    successor.recall((o.document, 250.0) for o in kept)
    assert p50_s(successor, mode="aot") == pytest.approx(20.0)
    (sample,) = (o.document["sample"] for o in kept)
    assert (sample["tier"], sample["mode"], sample["worker_class"]) == ("L2", "aot", "h200")
    assert sample["provision_s"] + sample["ready_s"] == pytest.approx(sample["capacity_s"])
