"""A scaled workload has more or less of everything and the shape that it had."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.errors import InvalidField
from readyplane_lab.workload.conversation import Wave, conversation
from readyplane_lab.workload.request import WorkloadRequest, prompt_hashes
from readyplane_lab.workload.scaling import families, scaled


@lru_cache
def chat(seconds: float = 1800.0) -> tuple[WorkloadRequest, ...]:
    return tuple(conversation(Wave(2.0, swing=0.8), seed=1, duration_s=seconds))


def per_minute(requests: Sequence[WorkloadRequest]) -> np.ndarray:
    return np.bincount([int(r.at_s // 60) for r in requests], minlength=30)[:30]


def hit(requests: Sequence[WorkloadRequest], block: int = 64) -> float:
    """Share of the prompt tokens that an endless prefix cache would hold."""
    seen: set[int] = set()
    hits = total = 0
    for request in requests:
        hashes = prompt_hashes(request, block)
        hits += block * sum(1 for _ in takewhile(seen.__contains__, hashes))
        total += request.isl
        seen.update(hashes)
    return hits / total


def in_order(requests: Sequence[WorkloadRequest]) -> bool:
    return (
        requests[0].at_s == 0.0
        and all(a.at_s <= b.at_s for a, b in pairwise(requests))
        and [r.index for r in requests] == list(range(len(requests)))
        and all(sum(n for _, n in r.parts) == r.isl for r in requests)
    )


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.0, 3.4, 6.0])
def test_every_minute_gets_its_share_of_more_or_less(factor: float) -> None:
    requests = chat()
    made = scaled(requests, factor, seed=7)
    assert in_order(made)
    assert len(made) / len(requests) == pytest.approx(factor, rel=0.06)
    before, after = per_minute(requests), per_minute(made)
    assert np.corrcoef(before, after)[0, 1] > (0.97 if factor >= 1 else 0.85)
    assert after.std() / after.mean() == pytest.approx(before.std() / before.mean(), rel=0.25)


@pytest.mark.parametrize("factor", [0.3, 2.0, 2.5])
def test_the_prefix_hits_stay_what_they_were(factor: float) -> None:
    requests = chat()
    assert hit(requests) > 0.2
    assert hit(scaled(requests, factor, seed=7)) == pytest.approx(hit(requests), abs=0.03)


def test_copies_have_no_prefix_in_common_with_copies_of_another_number() -> None:
    one = [WorkloadRequest(0, 0.0, 200, 5, ((9, 128), (10, 72)))]
    made = scaled(one, 3.0, seed=1)
    firsts = {prompt_hashes(r, 64)[0] for r in made}
    assert len(made) == len(firsts) == 3


def test_bursts_are_not_smoothed_by_growing() -> None:
    at_once = [WorkloadRequest(i, 60.0 * (i // 50), 10, 5, ((i, 10),)) for i in range(500)]
    grown = scaled(at_once, 4.0, seed=3, jitter_s=5.0)
    assert all(r.at_s % 60 <= 5.0 for r in grown)


def test_the_first_copies_stay_where_they_are() -> None:
    requests = chat(seconds=120.0)
    made = scaled(requests, 3.0, seed=2)
    begin = requests[0].at_s
    there = {(round(r.at_s, 9), r.parts) for r in made}
    assert all((round(r.at_s - begin, 9), r.parts) for r in requests)
    assert {(round(r.at_s - begin, 9), r.parts) for r in requests} <= there


def test_thinning_keeps_whole_families() -> None:
    requests = chat()
    kept = scaled(requests, 0.25, seed=5)
    sessions = {r.parts[1][0] for r in kept if len(r.parts) > 1}
    whole = sum(r.parts[1][0] in sessions for r in requests if len(r.parts) > 1)
    assert sum(len(r.parts) > 1 for r in kept) == whole < len(requests) / 2


def test_a_family_is_what_is_not_common_to_all() -> None:
    parts = [((1, 64), (100 + i // 2, 64), (1000 + i, 64)) for i in range(100)]
    requests = [WorkloadRequest(i, i, 192, 1, p) for i, p in enumerate(parts)]
    assert families(requests).tolist() == [i // 2 for i in range(100)]
    only_common = [WorkloadRequest(i, i, 64, 1, ((1, 64),)) for i in range(100)]
    assert len(set(families(only_common).tolist())) == 100


@settings(max_examples=30, deadline=None)
@given(st.floats(0.2, 5.0), st.integers(0, 2**31))
def test_it_is_a_function_of_the_seed(factor: float, seed: int) -> None:
    requests = chat(seconds=60.0)
    made = scaled(requests, factor, seed)
    assert made == scaled(requests, factor, seed)
    assert in_order(made)


def test_seeds_differ() -> None:
    requests = chat(seconds=60.0)
    assert scaled(requests, 1.5, 1) != scaled(requests, 1.5, 2)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_an_impossible_factor_is_refused(factor: float) -> None:
    with pytest.raises(InvalidField, match="scale"):
        scaled(chat(seconds=10.0), factor, 1)


def test_nothing_left_is_refused() -> None:
    with pytest.raises(InvalidField, match="none are left"):
        scaled([WorkloadRequest(0, 0.0, 1, 1, ((1, 1),))], 1e-9, 1)


def test_a_hundred_thousand_requests_take_a_second() -> None:
    requests = [WorkloadRequest(i, i * 0.1, 100, 5, ((i, 100),)) for i in range(10_000)]
    began = time.process_time()
    assert len(scaled(requests, 10.0, 1)) == 100_000
    assert time.process_time() - began < 3.0
