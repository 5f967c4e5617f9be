"""Leases and circuits: fencing, expiry by one clock, and what the store's absence means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.worker import WorkerState
from readyplane_router import circuit, lease
from readyplane_router.circuit import CLOSED, HALF_OPEN, OPEN, Circuit
from readyplane_router.lease import Granted, Held, Lost, Stale, Standing


def granted(current: Held | None, incarnation: str, epoch: int, now_s: float = 0.0) -> Held:
    verdict = lease.grant(
        current, worker_id="w", incarnation=incarnation, epoch=epoch, ttl_s=6.0, now_s=now_s
    )
    assert isinstance(verdict, Granted), verdict
    return verdict.held


def test_the_same_incarnation_gets_the_same_epoch_again() -> None:
    first = granted(None, "a", 1)
    again = lease.grant(first, worker_id="w", incarnation="a", epoch=2, ttl_s=6.0, now_s=3.0)
    assert isinstance(again, Granted)
    assert again.repeated and again.held.epoch == 1 and again.held.expires_s == 9.0


def test_a_newer_incarnation_fences_the_older_one_for_good() -> None:
    """B72, B146: a process that was paused through its successor's start never acts again."""
    first = granted(None, "a", 1)
    second = granted(first, "b", 2)
    assert isinstance(lease.renew(second, incarnation="a", epoch=1, now_s=1.0), Stale)
    back = lease.grant(second, worker_id="w", incarnation="a", epoch=3, ttl_s=6.0, now_s=1.0)
    assert isinstance(back, Lost)
    assert "taken over" in back.why


def test_an_epoch_never_goes_back() -> None:
    held = granted(None, "a", 5)
    verdict = lease.grant(held, worker_id="w", incarnation="b", epoch=5, ttl_s=6.0, now_s=0.0)
    assert isinstance(verdict, Stale)


def test_an_expired_incarnation_may_come_back_with_a_new_epoch() -> None:
    ended = Held("w", "a", 1, 6.0, 6.0, ended=True)
    back = granted(ended, "a", 2, now_s=20.0)
    assert back.epoch == 2 and not back.ended
    assert isinstance(lease.renew(back, incarnation="a", epoch=1, now_s=21.0), Stale)


def test_renewal_moves_the_end_and_an_ended_lease_stays_ended() -> None:
    held = lease.renew(granted(None, "a", 1), incarnation="a", epoch=1, now_s=5.0)
    assert isinstance(held, Held) and held.expires_s == 11.0
    ended = Held("w", "a", 1, 6.0, 6.0, ended=True)
    assert isinstance(lease.renew(ended, incarnation="a", epoch=1, now_s=7.0), Lost)
    assert isinstance(lease.renew(None, incarnation="a", epoch=1, now_s=7.0), Lost)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 20)), max_size=20))
def test_of_all_incarnations_one_at_most_can_renew(calls: list[tuple[str, float]]) -> None:
    current: Held | None = None
    epochs: dict[str, int] = {}
    for number, (incarnation, now_s) in enumerate(calls, start=1):
        verdict = lease.grant(
            current, worker_id="w", incarnation=incarnation, epoch=number, ttl_s=6.0, now_s=now_s
        )
        if isinstance(verdict, Granted):
            assert current is None or verdict.held.epoch >= current.epoch
            current = verdict.held
            epochs[incarnation] = current.epoch
        able = [
            name
            for name, epoch in epochs.items()
            if isinstance(lease.renew(current, incarnation=name, epoch=epoch, now_s=now_s), Held)
        ]
        assert len(able) <= 1


def test_expired_names_those_past_their_end_only() -> None:
    leases = [Held("a", "i", 1, 6, 10.0), Held("b", "i", 2, 6, 10.1), Held("c", "i", 3, 6, 1, True)]
    assert [h.worker_id for h in lease.expired(leases, now_s=10.0)] == ["a"]


@pytest.mark.parametrize(
    ("away_since_s", "now_s", "want"),
    [(None, 5.0, Standing.FRESH), (0.0, 60.0, Standing.DEGRADED), (0.0, 60.1, Standing.CUT_OFF)],
)
def test_standing(away_since_s: float | None, now_s: float, want: Standing) -> None:
    assert lease.standing(away_since_s=away_since_s, now_s=now_s, absence_max_s=60.0) is want


@pytest.mark.parametrize(
    ("away_since_s", "answering_since_s", "want"),
    [(None, 0.0, True), (99.0, 0.0, False), (None, 95.0, False), (None, 93.9, True)],
)
def test_absence_of_the_store_is_not_death(
    away_since_s: float | None, answering_since_s: float, want: bool
) -> None:
    """Not while it is away, and not within one ttl of its return or of this router's start."""
    may = lease.may_judge_expiry(
        away_since_s=away_since_s, answering_since_s=answering_since_s, now_s=100.0, ttl_s=6.0
    )
    assert may is want


def test_a_worker_that_is_gone_stays_gone_and_a_draining_one_never_serves_again() -> None:
    for state in WorkerState:
        assert lease.may_become(WorkerState.GONE, state) is (state is WorkerState.GONE)
    assert not lease.may_become(WorkerState.DRAINING, WorkerState.READY)
    assert not lease.may_become(WorkerState.PROVISIONED, WorkerState.STALLED)


def failed(state: Circuit, now_s: float) -> Circuit:
    return circuit.failed(state, now_s=now_s, failures_max=3, window_s=10.0)


def test_a_circuit_opens_after_failures_in_a_row_and_one_good_probe_closes_it() -> None:
    """B68: half open never stays for ever."""
    state = Circuit()
    for now_s in (0.0, 1.0, 2.0):
        assert circuit.passes(state)
        state = failed(state, now_s)
    assert state.state == OPEN and not circuit.passes(state)
    assert circuit.looked_at(state, now_s=6.9, open_s=5.0).state == OPEN
    state = circuit.looked_at(state, now_s=7.0, open_s=5.0)
    assert state.state == HALF_OPEN and circuit.passes(state)
    assert circuit.succeeded(state) == Circuit()
    assert failed(state, 7.5).state == OPEN


def test_failures_far_apart_or_with_a_success_between_do_not_add_up() -> None:
    state = failed(failed(Circuit(), 0.0), 1.0)
    assert failed(state, 20.0).state == CLOSED
    assert circuit.succeeded(state).failures == 0


def test_a_late_success_does_not_close_an_open_circuit() -> None:
    state = failed(failed(failed(Circuit(), 0.0), 0.1), 0.2)
    assert circuit.succeeded(state).state == OPEN
