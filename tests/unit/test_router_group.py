"""The group barrier: no partial ready, in whatever order and however often reports come (R17)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane_router.group import (
    FAILED,
    FORMING,
    PUBLISHED,
    RESTARTS_MAX,
    STEPS,
    TRANSITIONS,
    Group,
    publish,
    report,
)

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def told(group: Group, *reports: tuple[int, str]) -> Group:
    for rank, step in reports:
        group = report(group, rank=rank, step=step, manifest_digest=A)
    return group


@given(st.integers(1, 4), st.data())
def test_any_order_with_doubles_and_losses_publishes_only_when_all_have_passed(
    ranks: int, data: st.DataObject
) -> None:
    reports = [(rank, step) for rank in range(ranks) for step in STEPS]
    stream = data.draw(st.permutations(reports + reports))
    lost = data.draw(st.sets(st.sampled_from(reports)))
    group = Group(ranks, A)
    reached: dict[int, int] = {}
    for rank, step in stream:
        if (rank, step) in lost:
            continue
        reached[rank] = max(reached.get(rank, -1), STEPS.index(step))
        group = publish(report(group, rank=rank, step=step, manifest_digest=A), 42)
        assert not group.failure
        complete = all(reached.get(r, -1) == len(STEPS) - 1 for r in range(ranks))
        assert (group.state == PUBLISHED) == complete
        assert (group.epoch == 42) == complete
        assert bool(group.waiting_for()) is not complete


@given(
    st.lists(
        st.tuples(
            st.integers(-1, 3),
            st.sampled_from([*STEPS, FAILED, "nonsense"]),
            st.sampled_from([A, B, ""]),
        ),
        max_size=30,
    )
)
def test_states_move_along_the_table_and_an_epoch_never_changes(
    reports: list[tuple[int, str, str]],
) -> None:
    group, epochs = Group(3), iter(range(1, 100))
    for rank, step, manifest in reports:
        after = report(group, rank=rank, step=step, manifest_digest=manifest)
        after = publish(after, next(epochs))
        assert after.state in TRANSITIONS[group.state]
        if group.epoch:
            assert after.epoch == group.epoch
        group = after


def test_one_failed_rank_fails_the_generation_for_good() -> None:
    group = told(Group(2, A), (0, "canary_passed"))
    group = report(group, rank=1, step=FAILED, detail="out of memory")
    assert group.state == FAILED
    assert group.failure == "rank 1: out of memory"
    assert told(group, (1, "canary_passed")) == group
    assert publish(group, 9).epoch == 0


def test_ranks_with_different_manifests_never_form_a_group() -> None:
    group = report(Group(2), rank=0, step="verified", manifest_digest=A)
    group = report(group, rank=1, step="verified", manifest_digest=B)
    assert group.state == FAILED
    assert A in group.failure and B in group.failure


def test_the_manifest_ordered_is_the_one_that_counts() -> None:
    assert report(Group(1, A), rank=0, step="verified", manifest_digest=B).state == FAILED


def test_a_rank_that_starts_again_before_the_barrier_voids_every_communicator() -> None:
    group = told(Group(2, A), (0, "canary_passed"), (1, "connected"))
    group = report(group, rank=1, step="scheduled", life=1)
    assert group.state == FORMING
    assert group.waiting_for() == ("rank 0: connected", "rank 1: verified")
    again = report(group, rank=1, step="canary_passed", manifest_digest=A, life=1, communicator=1)
    assert told(again, (0, "canary_passed")).waiting_for() == ("rank 0: connected",)
    done = report(again, rank=0, step="canary_passed", manifest_digest=A, communicator=1)
    assert publish(done, 7).epoch == 7


def test_a_rank_that_starts_again_after_the_barrier_fails_the_group() -> None:
    group = publish(told(Group(1, A), (0, "canary_passed")), 7)
    assert report(group, rank=0, step="scheduled", life=1).state == FAILED


def test_a_late_report_of_the_same_life_changes_nothing() -> None:
    group = publish(told(Group(1, A), (0, "canary_passed")), 7)
    assert told(group, (0, "scheduled")) == group


def test_the_ranks_do_not_start_again_for_ever() -> None:
    group = Group(2, A)
    for life in range(1, RESTARTS_MAX + 1):
        group = report(group, rank=1, step="scheduled", life=life)
        assert group.state == FORMING
    group = report(group, rank=0, step="scheduled", life=1)
    assert group.failure == f"rank 0: the ranks started again more than {RESTARTS_MAX} times"


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_group_fails_it(rank: int) -> None:
    assert report(Group(2, A), rank=rank, step="scheduled").state == FAILED


def test_a_step_past_verification_must_say_which_manifest() -> None:
    assert report(Group(1), rank=0, step="connected").state == FAILED
    assert report(Group(1), rank=0, step="scheduled").state == FORMING
