"""The event simulator against queues whose answer is known: how far each may be off, and why.

Two kinds of checks. Where a recursion gives the wait of every single request, each must agree to
the microseconds that the free stage costs; that has no statistical tolerance. Where a formula gives
a mean, it must lie within the 99.9 % confidence interval of the run (batch means), so that a right
simulator fails one seed in a thousand, and the seeds are fixed. Tables with longer runs stand in
docs/simulator-validity.md.
"""

from __future__ import annotations

import numpy as np
import pytest

from bench.closed_forms import (
    batch_means,
    fair_shares_s,
    first_come_waits_s,
    md1_wait_s,
    md1_wait_tail,
    mmc_wait_s,
    poisson,
    shared_residence_s,
    stream,
)
from bench.queue_cases import Case, handovers, sharing, station

FREE_S = 1e-5  # the stage that costs next to nothing, and the rounding of its iterations


def in_interval(case: Case, slack_s: float = 0.0) -> None:
    assert case.formula_s is not None
    assert case.estimate.holds(case.formula_s, slack_s), (case.estimate, case.formula_s)


def test_one_prefill_worker_is_md1() -> None:
    case = station(1, drawn=False, load=0.7, count=1500)
    assert case.path_error_s < FREE_S
    in_interval(case)
    assert case.estimate.half_s < 0.6 * (case.formula_s or 0)  # the interval says something


@pytest.mark.parametrize("drawn", [False, True])
def test_several_prefill_workers_are_one_queue(drawn: bool) -> None:
    """The router holds what would wait and gives it to who is free first: no queue per worker."""
    case = station(3, drawn=drawn, load=0.8, count=1000)
    assert case.path_error_s < FREE_S
    if drawn:
        in_interval(case)


@pytest.mark.parametrize("lengths", ["M", "H"])
def test_decode_that_slows_with_every_sequence_is_processor_sharing(lengths: str) -> None:
    each_s = 0.001
    case = sharing(0.0, each_s, lengths=lengths, rate_rps=3.0, count=1000)
    assert case.recursion is not None
    # Sharing goes by whole iterations of up to some 20 sequences, and one joins between them.
    off_s = case.simulated - case.recursion
    assert abs(off_s.mean()) < each_s
    assert np.abs(off_s).max() < 60 * each_s
    in_interval(case, slack_s=each_s)


def test_decode_that_never_slows_is_an_endless_station() -> None:
    base_s = 0.02
    case = sharing(base_s, 0.0, lengths="M", count=800)
    assert case.recursion is not None
    off_s = case.simulated - case.recursion
    assert off_s.min() > -1e-6
    # One iteration ends before it gets its blocks, one more before it joins with its KV.
    assert off_s.max() < 2 * base_s + FREE_S
    in_interval(case, slack_s=2 * base_s)


@pytest.mark.parametrize("lengths", ["D", "M"])
def test_decode_with_a_base_and_a_share_has_the_product_form(lengths: str) -> None:
    case = sharing(0.02, 0.001, lengths=lengths, count=1000)
    in_interval(case, slack_s=0.04)
    assert case.estimate.half_s < 0.25 * (case.formula_s or 0)


@pytest.mark.parametrize(
    "at_s, tokens, fleet",
    [
        ([0.0] * 4, [1600] * 4, (4, 1)),  # into one decode worker
        ([0.0] * 4, [1600] * 4, (1, 4)),  # out of one prefill worker
        ([0.0, 0.8, 1.6], [1600] * 3, (4, 1)),  # one joins while others are under way
        ([0.0, 0.1, 0.2], [1600, 160, 160], (4, 1)),  # short ones slow a long one, and leave
    ],
)
def test_hand_overs_share_the_link_of_a_worker(
    at_s: list[float], tokens: list[int], fleet: tuple[int, int]
) -> None:
    case = handovers(at_s, tokens, fleet)
    assert case.path_error_s < 1e-4


# ------------------------------------------------------------------------- the theory itself


def test_recursions_and_formulas_are_the_same_theory() -> None:
    count, service_s = 200_000, 0.2
    at_s = poisson(stream(9, 1), 0.7 / service_s, count)
    waits = first_come_waits_s(at_s, np.full(count, service_s), 1)
    assert waits.mean() == pytest.approx(md1_wait_s(0.7 / service_s, service_s), rel=0.03)
    for wait_s in (0.1, 0.5, 1.0):
        tail = md1_wait_tail(0.7 / service_s, service_s, wait_s)
        assert (waits > wait_s).mean() == pytest.approx(tail, rel=0.1)
    at_s = poisson(stream(9, 2), 2.4 / service_s, count)
    waits = first_come_waits_s(at_s, stream(9, 3).exponential(service_s, count), 3)
    assert waits.mean() == pytest.approx(mmc_wait_s(2.4 / service_s, service_s, 3), rel=0.05)


def test_sharing_by_recursion_and_by_formula() -> None:
    count, rate, each_s = 20_000, 3.0, 0.001
    tokens = stream(9, 4).geometric(1 / 200, count).astype(float)
    at_s = poisson(stream(9, 5), rate, count)
    took = batch_means(np.array(fair_shares_s(at_s.tolist(), tokens.tolist(), 1 / each_s)))
    theory_s = shared_residence_s(rate, tokens.mean(), 0.0, each_s)
    assert theory_s == pytest.approx(0.2 / (1 - 0.6), rel=0.03)
    assert took.holds(theory_s)
    assert shared_residence_s(2.0, 200.0, 0.02, 0.0) == pytest.approx(4.0)
