"""Drawn workloads follow their curves: rates, lengths and prefix hits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.errors import InvalidField
from readyplane_lab.workload.request import WorkloadRequest, prompt_hashes
from readyplane_lab.workload.shapes import (
    Curve,
    Mix,
    burst,
    constant,
    daily,
    drawn,
    product,
    ramp,
    sine,
    square,
    step,
    until,
)


def at(curve: Curve, *moments: float) -> list[float]:
    return [float(value) for value in curve(np.array(moments))]


def test_curves_have_the_values_they_say() -> None:
    assert at(constant(3), 0, 9) == [3, 3]
    assert at(ramp(10, 20, 1, 3), 0, 10, 15, 20, 99) == [1, 1, 2, 3, 3]
    assert at(step(10, 1, 4), 9.99, 10.01) == [1, 4]
    assert at(burst(10, 5, 4), 9.99, 10.01, 14.99, 15.01) == [1, 4, 4, 1]
    assert at(burst(10, 5, 3, ramp_s=2), 7, 9, 10, 15, 16, 18) == [1, 2, 3, 3, 2, 1]
    assert at(square(10, 5, 1), 0, 4.9, 5.1, 9.9, 10.1) == [5, 5, 1, 1, 5]
    assert at(square(10, 5, 1, phase=0.5), 0, 5.1) == [1, 5]
    assert at(sine(40, 0.5), 0, 10, 30) == pytest.approx([1, 1.5, 0.5])
    assert at(daily(100, 1, 9), 50, 0, 100) == pytest.approx([9, 1, 1])
    assert at(daily(100, 0, 1), 25)[0] < 0.2, "a hump, not a sine"
    assert at(until(10, constant(1), constant(2)), 9, 10) == [1, 2]
    assert at(product(constant(2), step(5, 1, 3)), 0, 6) == [2, 6]


def counts(requests: Sequence[WorkloadRequest], begin_s: float, end_s: float) -> int:
    return sum(begin_s <= r.at_s < end_s for r in requests)


def test_arrivals_follow_the_rate() -> None:
    rate = product(constant(20.0), burst(100, 50, 5), step(250, 1.0, 0.0))
    requests = drawn(rate, Mix(), span_s=300, seed=1)
    assert counts(requests, 0, 99) / 99 == pytest.approx(20, rel=0.1)
    assert counts(requests, 100, 149) / 49 == pytest.approx(100, rel=0.06)
    assert counts(requests, 150, 249) / 99 == pytest.approx(20, rel=0.1)
    assert requests[-1].at_s < 250.1


def test_arrivals_are_poisson() -> None:
    times = np.array([r.at_s for r in drawn(constant(50), Mix(), span_s=400, seed=2)])
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.03)
    per_second = np.bincount(times.astype(int))
    assert per_second.var() / per_second.mean() == pytest.approx(1.0, abs=0.2)


def test_lengths_are_lognormal_and_follow_their_factors() -> None:
    mix = Mix(isl_factor=step(200, 1.0, 4.0), osl_factor=step(100, 1.0, 2.0))
    requests = drawn(constant(40), mix, span_s=400, seed=3)
    before = np.array([r.isl for r in requests if r.at_s < 200])
    after = np.array([r.isl for r in requests if r.at_s >= 200])
    assert np.median(before) == pytest.approx(1020, rel=0.05)
    assert np.quantile(before, 0.9) == pytest.approx(1020 * np.exp(0.75 * 1.2816), rel=0.07)
    assert np.median(after) == pytest.approx(4080, rel=0.05)
    assert before.max() <= 6000 and after.max() <= 24_000
    short, long = ([r.osl for r in requests if (r.at_s >= 100) == x] for x in (False, True))
    assert np.median(long) / np.median(short) == pytest.approx(2.0, rel=0.1)


def test_some_outputs_are_long() -> None:
    mix = Mix(long_share=0.05, long_osl=(8000, 16_000))
    osl = np.array([r.osl for r in drawn(constant(20), mix, span_s=400, seed=4)])
    assert (osl >= 8000).mean() == pytest.approx(0.05, abs=0.01)
    assert osl.max() <= 16_000


def hit(requests: Sequence[WorkloadRequest], begin_s: float, end_s: float) -> float:
    seen: set[int] = set()
    hits = total = 0
    for request in requests:
        hashes = prompt_hashes(request, 64)
        held = 64 * sum(1 for _ in takewhile(seen.__contains__, hashes))
        if begin_s <= request.at_s < end_s:
            hits += held
            total += request.isl
        seen.update(hashes)
    return hits / total


@pytest.mark.parametrize("wanted", [0.0, 0.2, 0.6, 0.8])
def test_the_hit_rate_is_what_was_asked_for(wanted: float) -> None:
    requests = drawn(constant(10), Mix(hit=constant(wanted)), span_s=400, seed=5)
    assert hit(requests, 30, 400) == pytest.approx(wanted, abs=0.05)


def test_a_shift_of_the_hit_rate_leaves_arrivals_and_lengths_alone() -> None:
    one, other = (
        drawn(constant(10), Mix(hit=curve), span_s=400, seed=6)
        for curve in (constant(0.6), step(200, 0.6, 0.1))
    )
    assert [(r.at_s, r.isl, r.osl) for r in one] == [(r.at_s, r.isl, r.osl) for r in other]
    assert hit(other, 30, 199) == pytest.approx(0.6, abs=0.05)
    assert hit(other, 200, 400) == pytest.approx(0.1, abs=0.05)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**31),
    st.floats(0.5, 20.0),
    st.floats(0.0, 0.8),
    st.floats(1.0, 60.0),
)
def test_any_workload_is_valid_and_a_function_of_its_seed(
    seed: int, rate: float, share: float, span_s: float
) -> None:
    def draw() -> tuple[WorkloadRequest, ...]:
        mix = Mix(hit=constant(share), isl_factor=sine(20, 0.9))
        return drawn(ramp(0, span_s, rate, 4 * rate), mix, span_s=span_s + 20 / rate, seed=seed)

    requests = draw()
    assert requests == draw()
    assert requests[0].at_s == 0.0
    assert [r.index for r in requests] == list(range(len(requests)))
    assert all(a.at_s <= b.at_s for a, b in pairwise(requests))
    assert all(sum(n for _, n in r.parts) == r.isl >= 1 <= r.osl for r in requests)
    assert all(n > 0 for r in requests for _, n in r.parts)


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), 0.0, 1e9])
def test_an_impossible_rate_is_refused(rate: float) -> None:
    with pytest.raises(InvalidField, match="rate"):
        drawn(constant(rate), Mix(), span_s=100, seed=1)
