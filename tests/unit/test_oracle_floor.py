"""The floor: below every schedule that misses nothing, and below the plan by layers."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from readyplane import profiles
from readyplane.core.errors import InvalidField
from readyplane.core.startup import StartQuantiles
from readyplane_lab.proof.oracle import lower_bound, lowest_bill
from readyplane_lab.proof.oracle.demand import Work, hindsight, request_work
from readyplane_lab.proof.oracle.floor import (
    Demand,
    decode_demand,
    floor,
    prefill_demand,
    together,
)
from readyplane_lab.proof.port import SLO_DEFAULT, Setting
from readyplane_lab.workload.request import WorkloadRequest

PROFILE = profiles.load("h100-tp4-llama70b")


def demand(*rows: tuple[float, float, float]) -> Demand:
    return Demand(*(np.array(column, dtype=float) for column in zip(*rows, strict=True)))


def test_work_may_be_carried_over_within_its_slack() -> None:
    """2.5 seconds of work in the first second, to be done within two: two workers will do."""
    found = floor(demand((0.0, 2.0, 2.5)), span_s=2.0, start_s=0.0, initial=0, cells=2)
    assert found.cost_s == pytest.approx(2.5)
    late = floor(demand((0.0, 1.0, 2.5)), span_s=2.0, start_s=0.0, initial=0, cells=2)
    assert late.workers == pytest.approx([2.5, 0.0])


def test_a_start_is_paid_or_avoided() -> None:
    rows = demand((0.0, 1.0, 1.0), (3.0, 4.0, 1.0))
    kept = floor(rows, span_s=4.0, start_s=5.0, initial=1, cells=4)
    assert kept.cost_s == pytest.approx(4.0) and kept.starts == pytest.approx(0.0)
    again = floor(rows, span_s=4.0, start_s=0.5, initial=1, cells=4)
    assert again.cost_s == pytest.approx(2.5) and again.starts == pytest.approx(1.0)


def test_a_least_fleet_is_paid_and_late_work_is_not() -> None:
    found = floor(demand((0.0, 9.0, 7.0)), span_s=4.0, start_s=1.0, initial=1, low=1, cells=4)
    assert found.cost_s == pytest.approx(4.0)


def served_in_time(rows: list[tuple[int, int, int]], fleet: list[int], grain: int) -> bool:
    """Whether a fleet, given per fine step, does everything in time: earliest due first."""
    waiting: list[list[float]] = []
    for k, workers in enumerate(fleet):
        for begin, length, work in rows:
            if begin * grain == k:
                heapq.heappush(waiting, [(begin + length) * grain, work * grain / 2])
        left = float(workers)
        while waiting and left > 1e-9:
            done = min(left, waiting[0][1])
            waiting[0][1] -= done
            left -= done
            if waiting[0][1] <= 1e-9:
                heapq.heappop(waiting)
        if waiting and waiting[0][0] <= k + 1:
            return False
    return not any(due <= len(fleet) for due, _ in waiting)


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=6
    ),
    fleet=st.lists(st.integers(0, 4), min_size=24, max_size=24),
    initial=st.integers(0, 3),
    start_s=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    cells=st.sampled_from([3, 8, 16]),
)
@settings(max_examples=300, deadline=None)
def test_no_schedule_without_a_miss_is_below(
    rows: list[tuple[int, int, int]],
    fleet: list[int],
    initial: int,
    start_s: float,
    cells: int,
) -> None:
    """Fleets that change three times in a unit of time, and more workers until nothing is late."""
    grain, span = 3, 8
    while not served_in_time(rows, fleet, grain):
        fleet = [workers + 1 for workers in fleet]
        assume(max(fleet) < 40)
    rises = np.maximum(0, np.diff([initial, *fleet])).sum()
    bill = sum(fleet) / grain + start_s * float(rises)
    found = floor(
        demand(*[(float(b), float(b + n), w / 2) for b, n, w in rows]),
        span_s=float(span),
        start_s=start_s,
        initial=initial,
        cells=cells,
    )
    assert found.cost_s <= bill + 1e-6


def setting(requests: list[WorkloadRequest], span_s: float, step_s: float = 2.0) -> Setting:
    work = request_work(requests, prefill=PROFILE, decode=PROFILE, slo=SLO_DEFAULT)
    return Setting(
        prefill=PROFILE,
        decode=PROFILE,
        slo=SLO_DEFAULT,
        t_ready=StartQuantiles(20.0, 25.0, 30.0, 9, 0.0),
        drain_s=(2.0, 8.0),
        low=(1, 1),
        high=(9, 9),
        initial=(1, 1),
        hindsight=hindsight(work, slo=SLO_DEFAULT, step_s=step_s, span_s=span_s),
    )


requests_of = st.lists(
    st.tuples(st.floats(0, 38), st.integers(1, 8000), st.integers(1, 800)), min_size=1, max_size=60
)


def made(rows: list[tuple[float, int, int]]) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(i, at_s, isl, osl, ((99 + i, isl),))
        for i, (at_s, isl, osl) in enumerate(sorted(rows))
    ]


@given(requests_of)
@settings(max_examples=60, deadline=None)
def test_it_is_below_the_plan_by_layers(rows: list[tuple[float, int, int]]) -> None:
    requests, span_s = made(rows), 40.0
    given_ = setting(requests, span_s)
    strict = request_work(requests, prefill=PROFILE, decode=PROFILE, slo=SLO_DEFAULT, strict=True)
    low = lowest_bill(strict, given_, span_s=span_s, start_s=15.0, cells=60)
    assert low.gpu_hours <= lower_bound(given_, span_s=span_s).gpu_hours + 1e-6


@given(requests_of)
@settings(max_examples=30, deadline=None)
def test_workers_that_do_both_need_no_more(rows: list[tuple[float, int, int]]) -> None:
    requests = made(rows)
    given_ = setting(requests, 40.0)
    work = request_work(requests, prefill=PROFILE, decode=PROFILE, slo=SLO_DEFAULT, strict=True)
    apart = lowest_bill(work, given_, span_s=40.0, start_s=15.0, cells=40)
    both = lowest_bill(work, given_, span_s=40.0, start_s=15.0, cells=40, convertible=True)
    assert both.gpu_hours <= apart.gpu_hours + 1e-6 and len(both.pools) == 1


def test_one_kind_of_work_needs_one_class() -> None:
    given_ = setting(made([(0.0, 100, 10)]), 40.0)
    other = replace(given_, decode=profiles.load("h200-llama8b-fp8"))
    work = request_work(
        made([(0.0, 100, 10)]), prefill=PROFILE, decode=PROFILE, slo=SLO_DEFAULT, strict=True
    )
    with pytest.raises(InvalidField):
        lowest_bill(work, other, span_s=40.0, start_s=1.0, convertible=True)


def test_when_work_is_due() -> None:
    """A prompt that one worker cannot compute within TTFT is due as soon as it could be."""
    work = Work(
        *(np.array(v) for v in ([1.0, 5.0], [0.5, 3.0], [0.2, 0.2], [0.1, 0.1], [5.0, 1.0]))
    )
    assert prefill_demand(work, SLO_DEFAULT).due_s == pytest.approx([3.0, 8.0])
    # Till the last token: 100 or 20 tokens at 50 ms, the first of them within TTFT.
    decode = decode_demand(work, SLO_DEFAULT)
    assert decode.due_s == pytest.approx([1.0 + 2.0 + 4.95, 5.0 + 3.05 + 0.95])
    both = together([prefill_demand(work, SLO_DEFAULT), decode])
    assert both.work_s.tolist() == [0.5, 3.0, 0.2, 0.2]
    instants = np.array([0.5, 1.0, 3.0, 20.0])
    assert both.arrived(instants) == pytest.approx([0.0, 0.0, 0.7, 3.9])
    assert both.due(instants) == pytest.approx([0.0, 0.0, 0.5, 3.9])
