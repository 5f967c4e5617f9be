"""Workloads as columns: nothing is lost in a bin, and a cache holds what it has room for."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from readyplane import profiles
from readyplane.core.errors import InvalidField
from readyplane_lab.simulator.fluid import Arrivals, arrivals_of, binned
from readyplane_lab.simulator.fluid.prefill import prefill_seconds
from readyplane_lab.workload.conversation import Wave, conversation
from readyplane_lab.workload.request import WorkloadRequest

PROFILE = profiles.load("h100-tp4-llama70b")


@lru_cache
def chat() -> Arrivals:
    return arrivals_of(list(conversation(Wave(4.0), seed=2, duration_s=200.0)), block_size=16)


def test_a_bin_keeps_requests_tokens_and_nearly_all_of_the_work() -> None:
    fine = chat()
    coarse = binned(fine, bin_s=5.0, rows=6)
    assert len(coarse) < len(fine) / 2
    assert coarse.weight.sum() == pytest.approx(len(fine))
    for name in ("isl", "osl", "cached"):
        tokens = [(getattr(a, name) * a.weight).sum() for a in (fine, coarse)]
        assert tokens[1] == pytest.approx(tokens[0])
    work = [(prefill_seconds(PROFILE, a) * a.weight).sum() for a in (fine, coarse)]
    assert work[1] == pytest.approx(work[0], rel=0.03)
    counts = [np.bincount((a.at_s // 5).astype(int), a.weight) for a in (fine, coarse)]
    assert counts[1] == pytest.approx(counts[0])


def test_one_row_a_request_is_what_comes_of_many_rows_a_bin() -> None:
    assert chat().single
    assert binned(chat(), bin_s=1.0, rows=64).weight.max() == 1.0
    assert not binned(chat(), bin_s=10.0, rows=2).single


def test_work_of_all_rows_is_that_of_each() -> None:
    arrivals = chat()
    each = [
        PROFILE.prefill_s(isl - cached, cached)
        for isl, cached in zip(arrivals.isl, arrivals.cached, strict=True)
    ]
    assert prefill_seconds(PROFILE, arrivals) == pytest.approx(np.array(each))


def request(index: int, *parts: tuple[int, int]) -> WorkloadRequest:
    return WorkloadRequest(index, float(index), sum(n for _, n in parts), 10, parts)


def test_a_prefix_is_found_again_while_there_is_room_for_it() -> None:
    system, other = (1, 1024), (9, 4096)
    requests = [
        request(0, system, (2, 100)),
        request(1, system, (3, 300)),
        request(2, other),
        request(3, system, (4, 200)),
    ]
    assert arrivals_of(requests, block_size=64).cached.tolist() == [0.0, 1024.0, 0.0, 1024.0]
    chains = arrivals_of(requests, block_size=64).chains
    assert [[tokens for _, tokens in chain] for chain in chains] == [
        [1024.0],
        [1024.0],
        [],
        [1024.0],
    ]
    small = arrivals_of(requests, block_size=64, cache_tokens=4096)
    assert small.cached.tolist() == [0.0, 1024.0, 0.0, 0.0]
    assert not arrivals_of(requests, block_size=64, cache_tokens=0.0).cached.any()


def test_the_same_prompt_still_computes_its_last_block() -> None:
    again = arrivals_of([request(0, (1, 640)), request(1, (1, 640))], block_size=64)
    assert again.cached.tolist() == [0.0, 576.0]


@pytest.mark.parametrize(
    "column", [{"at_s": [1.0, 0.0]}, {"isl": [0.0, 1.0]}, {"weight": [1.0, 0.0]}, {"osl": [1.0]}]
)
def test_columns_that_make_no_sense_are_refused(column: dict[str, list[float]]) -> None:
    sound = {name: np.ones(2) for name in ("at_s", "isl", "osl", "cached", "weight")}
    columns: dict[str, Any] = {**sound, **{name: np.array(v) for name, v in column.items()}}
    with pytest.raises(InvalidField):
        Arrivals(**columns)
