"""Who steps back: as few as can be, never for a less important one, and everybody without workers."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from readyplane_router.triage import Job, too_late


def in_time(jobs: list[Job], *, workers: float, busy_s: float) -> list[bool]:
    """Whether each ends in time when all of them are served in that order."""
    ahead_s, out = 0.0, []
    for job in jobs:
        out.append(busy_s + ahead_s / workers + job.work_s <= job.left_s)
        ahead_s += job.work_s
    return out


def kept(jobs: list[Job], late: set[int]) -> list[Job]:
    return [job for place, job in enumerate(jobs) if place not in late]


def most_in_time(jobs: list[Job], busy_s: float) -> int:
    """By trying every choice: the largest that is in time when served by deadline."""
    for count in range(len(jobs), 0, -1):
        for chosen in itertools.combinations(jobs, count):
            if all(in_time(list(chosen), workers=1.0, busy_s=busy_s)):
                return count
    return 0


# Whole tenths: what ends exactly at its deadline is in time in both reckonings.
seconds = st.integers(1, 40).map(lambda tenths: tenths / 8.0)


@st.composite
def queues(draw: st.DrawFn, priorities: int = 1, size: int = 8) -> list[Job]:
    """In the order in which they are served."""
    jobs = draw(
        st.lists(st.builds(Job, st.integers(1 - priorities, 0), seconds, seconds), max_size=size)
    )
    return sorted(jobs, key=lambda job: (job.priority, job.left_s))


@given(queues(), st.integers(0, 16).map(lambda n: n / 8.0))
def test_no_choice_keeps_more_in_time(jobs: list[Job], busy_s: float) -> None:
    late = too_late(jobs, workers=1.0, busy_s=busy_s)
    assert all(in_time(kept(jobs, late), workers=1.0, busy_s=busy_s))
    assert len(jobs) - len(late) == most_in_time(jobs, busy_s)


@given(queues(priorities=3), st.sampled_from([1.0, 2.5, 6.0]))
def test_nobody_steps_back_for_a_less_important_one(jobs: list[Job], workers: float) -> None:
    late = too_late(jobs, workers=workers, busy_s=0.5)
    for priority in (-2, -1, 0):
        above = [job for job in jobs if job.priority <= priority]
        alone = too_late(above, workers=workers, busy_s=0.5)
        assert {place for place in late if place < len(above)} == alone


@given(queues(priorities=2), st.floats(0.0, 5.0))
def test_all_step_back_where_nobody_serves(jobs: list[Job], busy_s: float) -> None:
    assert too_late(jobs, workers=0.0, busy_s=busy_s) == set(range(len(jobs)))


@given(queues(priorities=2), st.sampled_from([1.0, 2.0, 8.0]))
def test_nobody_steps_back_from_a_queue_that_is_in_time(jobs: list[Job], workers: float) -> None:
    if all(in_time(jobs, workers=workers, busy_s=0.25)):
        assert too_late(jobs, workers=workers, busy_s=0.25) == set()


@given(queues())
def test_who_was_kept_is_kept_when_asked_again(jobs: list[Job]) -> None:
    stay = kept(jobs, too_late(jobs, workers=1.0, busy_s=0.5))
    assert too_late(stay, workers=1.0, busy_s=0.5) == set()


@given(queues(priorities=2), st.sampled_from([1.0, 3.0]))
def test_more_workers_make_nobody_late_who_was_not_alone(jobs: list[Job], workers: float) -> None:
    few = too_late(jobs, workers=workers, busy_s=0.5)
    many = too_late(jobs, workers=1e6, busy_s=0.0)
    assert many == {place for place, job in enumerate(jobs) if job.work_s > job.left_s} or few
    assert len(many) <= len(few)


def test_the_longest_goes_and_the_rest_is_in_time() -> None:
    jobs = [Job(0, 1.0, 2.0), Job(0, 5.0, 6.0), Job(0, 1.0, 6.5), Job(0, 1.0, 7.0)]
    assert too_late(jobs, workers=1.0, busy_s=0.0) == {1}
    assert too_late(jobs, workers=2.0, busy_s=0.0) == set()
    important = [Job(-1, 5.0, 6.0), Job(0, 1.0, 2.0), Job(0, 1.0, 7.0)]
    assert too_late(important, workers=1.0, busy_s=0.0) == {1}
