"""Trying again: bounded for each call, and for all together, so that an outage is not multiplied."""

from hypothesis import given
from hypothesis import strategies as st

from readyplane_registry.retrying import RetryPolicy, called, full, retried, wait_s

POLICY = RetryPolicy(budget_retries_max=5.0, per_call=0.1, per_second=0.5)


def test_the_waits_double_up_to_a_bound_and_are_drawn_from_the_whole_span() -> None:
    most = [wait_s(POLICY, tries=tries, share=1.0) for tries in range(1, 9)]
    assert most[:4] == [0.1, 0.2, 0.4, 0.8] and most[-1] == POLICY.wait_max_s
    assert wait_s(POLICY, tries=3, share=0.0) == 0.0
    assert wait_s(POLICY, tries=3, share=0.25) == 0.1


def test_an_empty_budget_lets_no_call_try_again_until_time_and_calls_fill_it() -> None:
    budget = full(POLICY, now_s=0.0)
    for _ in range(5):
        left = retried(budget, POLICY, now_s=0.0)
        assert left is not None
        budget = left
    assert retried(budget, POLICY, now_s=0.0) is None
    assert retried(budget, POLICY, now_s=1.9) is None
    assert retried(budget, POLICY, now_s=2.1) is not None
    for _ in range(11):
        budget = called(budget, POLICY, now_s=0.0)
    assert retried(budget, POLICY, now_s=0.0) is not None


@given(st.integers(1, 2000), st.floats(0.0, 600.0))
def test_in_an_outage_retries_are_a_small_share_of_calls(calls: int, lasts_s: float) -> None:
    budget, retries = full(POLICY, now_s=0.0), 0
    for number in range(calls):
        now_s = lasts_s * number / calls
        budget = called(budget, POLICY, now_s=now_s)
        for _try in range(POLICY.tries_max - 1):
            left = retried(budget, POLICY, now_s=now_s)
            if left is None:
                break
            budget, retries = left, retries + 1
    bound = POLICY.budget_retries_max + POLICY.per_call * calls + POLICY.per_second * lasts_s
    assert retries <= bound + 1e-6
