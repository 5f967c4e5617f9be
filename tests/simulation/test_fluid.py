"""The fluid mode against the event mode: the same policy on the same requests, figure by figure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import kendalltau

from readyplane.core.errors import InvalidField
from readyplane.core.worker import Role
from readyplane_lab.demo import DEMO_POLICY
from readyplane_lab.proof.measure import _bill
from readyplane_lab.simulator import faults
from readyplane_lab.simulator.fluid import FluidOptions, arrivals_of, binned, run_fluid
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.simulator.startup import StartUpModel
from readyplane_lab.simulator.world import WorldOptions, run_world
from readyplane_lab.workload.conversation import Wave, conversation
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_lab.workload.trace import read_trace
from readyplane_planner.policy import overlay
from tests.simulation.sim_world import Fixed

SHARED = Path(os.environ.get("READYPLANE_DATA", Path(__file__).parents[3] / "shared" / "data"))
CONV = SHARED / "traces" / "azure2023_conv.csv.zst"
CLASSES = {"h100-tp4-llama70b": ("h100-tp4", 0.05), "h200-slow10": ("h200-slow10", 0.1)}


def policy(profile: str, low: tuple[int, int], high: tuple[int, int]) -> dict[str, Any]:
    worker_class, tpot_s = CLASSES[profile]
    pools = {
        name: {"min": low[i], "max": high[i], "worker_class": worker_class, "profile": profile}
        for i, name in enumerate(("prefill", "decode"))
    }
    pools["decode"]["convertible"] = False
    return {"model": "m", "slo": {"ttft_s": 2.0, "tpot_s": tpot_s}, "tick_s": 2.0, **pools}


@lru_cache
def azure(span_s: float) -> tuple[WorkloadRequest, ...]:
    if not CONV.exists():
        pytest.skip(f"the trace is not there: {CONV}")
    return tuple(r for r in read_trace(CONV).requests if r.at_s < span_s)


def burst() -> list[WorkloadRequest]:
    wave = Wave(1.0, swing=0.0, bursts=((10.0, 50.0, 6.0),))
    return list(conversation(wave, seed=1, duration_s=150.0))


def attainment(result: RunResult, tpot_s: float) -> float:
    served = result.served
    met = (served.ttft_s <= 2.0) & (served.tpot_s <= tpot_s)
    return float((met * served.weight).sum() / served.weight.sum())


def worker_s(result: RunResult) -> float:
    spans = (
        min(life.released_s, result.span_s) - max(0.0, life.allocated_s) for life in result.lives
    )
    return sum(max(0.0, span) for span in spans)


def ttft_p50_s(result: RunResult) -> float:
    return float(np.median(result.served.ttft_s[np.isfinite(result.served.ttft_s)]))


def both(
    asked: Mapping[str, Any],
    requests: Sequence[WorkloadRequest],
    *,
    initial: tuple[int, int],
    t_ready_s: float,
    block_size: int = 64,
    **more: Any,
) -> tuple[RunResult, RunResult]:
    """(events, fluid)."""
    options = {
        "policy": asked,
        "startup": StartUpModel().scaled_to(t_ready_s),
        "initial": initial,
        "block_size": block_size,
        "record": False,
        **more,
    }
    events = run_world(WorldOptions(**options), requests).run()
    return events, run_fluid(FluidOptions(**options), requests)


def assert_agree(events: RunResult, fluid: RunResult, tpot_s: float) -> None:
    assert attainment(fluid, tpot_s) == pytest.approx(attainment(events, tpot_s), abs=0.02)
    assert worker_s(fluid) == pytest.approx(worker_s(events), rel=0.15)
    bound_s = max(0.05, 0.25 * ttft_p50_s(events))
    assert ttft_p50_s(fluid) == pytest.approx(ttft_p50_s(events), abs=bound_s)
    assert sum(fluid.outcomes.values()) == len(fluid.served)


@pytest.mark.parametrize(
    ("profile", "initial", "t_ready_s"),
    [("h100-tp4-llama70b", (2, 2), 60.0), ("h200-slow10", (3, 3), 30.0)],
)
def test_the_planner_on_a_trace_does_the_same_in_both(
    profile: str, initial: tuple[int, int], t_ready_s: float
) -> None:
    asked = policy(profile, (1, 1), (6, 6))
    events, fluid = both(asked, azure(400.0), initial=initial, t_ready_s=t_ready_s)
    assert_agree(events, fluid, CLASSES[profile][1])
    for ours, theirs in zip(fluid.targets[-1][1:], events.targets[-1][1:], strict=True):
        assert abs(ours - theirs) <= 1, "one decision more or less, the same fleet in the end"


def test_a_burst_is_the_same_in_both() -> None:
    strict = overlay(DEMO_POLICY, {"decode": {"convertible": False}})
    events, fluid = both(strict, burst(), initial=(1, 1), t_ready_s=5.0, block_size=16)
    assert_agree(events, fluid, 0.1)


def test_starts_take_as_long_in_both() -> None:
    events, fluid = both(DEMO_POLICY, burst(), initial=(2, 1), t_ready_s=12.0, block_size=16)
    found = [
        sorted(
            (life.pool, life.ready_s - life.allocated_s)
            for life in result.lives
            if life.ready_s is not None and life.allocated_s < 30.0
        )
        for result in (events, fluid)
    ]
    assert len(found[0]) >= 4
    assert [pool for pool, _ in found[0]] == [pool for pool, _ in found[1]]
    assert [s for _, s in found[1]] == pytest.approx([s for _, s in found[0]], abs=0.15)


@pytest.mark.parametrize("profile", CLASSES)
def test_static_fleets_rank_alike(profile: str) -> None:
    requests = azure(75.0)
    marks: tuple[list[float], list[float]] = ([], [])
    for prefill in (1, 2, 3):
        for decode in (1, 2, 3):
            fleet = (prefill, decode)
            asked = policy(profile, fleet, fleet)
            pair = both(asked, requests, initial=fleet, t_ready_s=10.0)
            for mark, result in zip(marks, pair, strict=True):
                mark.append(attainment(result, CLASSES[profile][1]))
    assert marks[1] == pytest.approx(marks[0], abs=0.02)
    assert kendalltau(marks[0], marks[1]).statistic >= 0.7


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_crash_costs_about_the_same_in_both(role: Role) -> None:
    asked = policy("h100-tp4-llama70b", (1, 1), (4, 4))
    crash = (faults.Crash(60.0, role),)
    events, fluid = both(asked, azure(200.0), initial=(2, 2), t_ready_s=20.0, faults=crash)
    assert attainment(fluid, 0.05) == pytest.approx(attainment(events, 0.05), abs=0.02)
    lost = [result.outcomes.get("failed", 0) for result in (events, fluid)]
    assert lost[1] == pytest.approx(lost[0], abs=8)
    assert sum(bool(life.failure) for life in fluid.lives) == 1
    if role is Role.PREFILL:
        assert lost[1] == 0


EVERY_FAULT = [
    faults.Stall(20.0, Role.DECODE, 10.0),
    faults.Stall(20.0, Role.PREFILL, 10.0),
    faults.Partition(20.0, Role.DECODE, 15.0),
    faults.Partition(20.0, Role.PREFILL, 15.0),
    faults.SourceDies(5.0),
    faults.SourceLies(5.0),
    faults.SpotReclaim(20.0, Role.DECODE, 5.0),
    faults.QuotaDenied(0.0, 60.0),
    faults.StartsHang(5.0, Role.PREFILL),
    faults.StartsFail(5.0, Role.DECODE, 2),
    faults.SignalsStale(20.0, 15.0),
    faults.SignalsMissing(20.0, 15.0),
    faults.SignalOutlier(30.0),
    faults.ClockStep(30.0, 100.0),
    faults.PlannerRestart(30.0, 5.0),
]


def shaken(fault: faults.Fault | None) -> RunResult:
    options = FluidOptions(
        policy=DEMO_POLICY,
        startup=StartUpModel().scaled_to(8.0),
        initial=(2, 2),
        block_size=16,
        faults=() if fault is None else (fault,),
    )
    return run_fluid(options, burst())


@pytest.mark.parametrize("fault", EVERY_FAULT, ids=lambda fault: type(fault).__name__)
def test_every_request_ends_once_whatever_goes_wrong(fault: faults.Fault) -> None:
    result = shaken(fault)
    assert sum(result.outcomes.values()) == len(burst())
    finished = np.isfinite(result.served.ttft_s) & np.isfinite(result.served.tpot_s)
    assert finished.sum() == result.outcomes["finished"]
    assert all(life.released_s >= life.allocated_s for life in result.lives)


def test_what_goes_wrong_is_felt() -> None:
    calm = attainment(shaken(None), 0.1)
    for fault in (
        faults.Stall(20.0, Role.DECODE, 10.0),
        faults.SpotReclaim(20.0, Role.DECODE, 5.0),
        faults.QuotaDenied(0.0, 60.0),
    ):
        assert attainment(shaken(fault), 0.1) < calm


def test_two_runs_are_equal() -> None:
    one, other = shaken(None), shaken(None)
    assert one.lives == other.lives
    assert one.targets == other.targets
    assert np.array_equal(one.served.ttft_s, other.served.ttft_s)
    assert one.decisions == other.decisions
    assert one.decisions
    assert len(one.series["t_s"]) > 20


def test_decode_workers_that_lend_their_time_help_a_small_prefill_pool() -> None:
    asked = policy("h200-slow10", (1, 3), (1, 3))
    found = []
    for convertible in (False, True):
        lent = overlay(asked, {"decode": {"convertible": convertible}})
        events, fluid = both(lent, azure(120.0), initial=(1, 3), t_ready_s=10.0)
        assert attainment(fluid, 0.1) == pytest.approx(attainment(events, 0.1), abs=0.07)
        found.append(attainment(fluid, 0.1))
    assert found[1] > found[0] + 0.02


def test_what_a_fluid_has_not_is_refused_by_name() -> None:
    options = FluidOptions(overlay(DEMO_POLICY, {"flip": True}))
    with pytest.raises(InvalidField, match="flip"):
        run_fluid(options, [WorkloadRequest(0, 1.0, 100, 10, ())])


def test_standbys_serve_and_are_billed_as_by_events() -> None:
    """A pool that grows takes them: the same few seconds, and the same GPUs for waiting."""
    pools = policy("h200-slow10", (2, 2), (2, 4))
    wanted = overlay(pools, {"decode": {"standby": 1}, "prefill": {"standby": 1}})

    def options() -> dict[str, Any]:
        return {
            "policy": wanted,
            "startup": StartUpModel().scaled_to(20.0),
            "initial": (2, 2),
            "block_size": 64,
            "record": False,
            "brain": Fixed((0.0, 2, 2), (40.0, 2, 3)),
        }

    events = run_world(WorldOptions(**options()), azure(90.0)).run()
    fluid = run_fluid(FluidOptions(**options()), azure(90.0))
    assert worker_s(fluid) == pytest.approx(worker_s(events), rel=0.05)
    served, bills = [], []
    for run in (events, fluid):
        ordered = [w for w in run.lives if w.decision_id]
        (came,) = [w.ready_s for w in ordered if w.ready_s is not None]
        (took,) = [w.took_s for w in ordered if w.took_s is not None]
        assert 0.0 < took < 7.0, "from the word; it had waited for half a minute and more"
        assert len(ordered) == 3, "one for each pool, and one in place of the one that serves"
        bill = _bill(run.lives, run.span_s)
        assert bill["standby"] > bill["boot"] > 0.0
        bills.append(bill)
        served.append(came)
    assert all(40.0 < came < 47.0 for came in served)
    assert served[0] == pytest.approx(served[1], abs=2.5)
    assert bills[1]["standby"] == pytest.approx(bills[0]["standby"], rel=0.15)


def test_a_decode_worker_that_does_not_lend_its_time_keeps_no_promise() -> None:
    """Rows of many requests: after a burst that was too much, the pool is as free as before it."""
    times = [i / 80 for i in range(2400)] + [30 + i / 15 for i in range(1800)]
    crowd = [WorkloadRequest(i, at, 60, 9, ((i, 60),)) for i, at in enumerate(times)]
    fleet = (1, 1)
    asked = overlay(policy("h100-tp4-llama70b", fleet, fleet), {"decode": {"convertible": True}})
    options = FluidOptions(policy=asked, initial=fleet, record=False, step_s=0.5)
    served = run_fluid(options, binned(arrivals_of(crowd), bin_s=2.0, rows=16)).served
    later = served.at_s > 90.0
    assert np.all(served.ttft_s[later] <= 2.0)
    assert np.all(served.tpot_s[later] <= 0.05)


IN_ORDER = pytest.mark.xfail(
    strict=True,
    reason="rows of many requests are served in order: nobody steps back in an overload",
)


@pytest.mark.parametrize(
    "fleet",
    [(5, 7), pytest.param((4, 6), marks=IN_ORDER), pytest.param((3, 9), marks=IN_ORDER)],
)
def test_rows_of_many_requests_come_to_the_same_as_single_ones(fleet: tuple[int, int]) -> None:
    crowd = [
        WorkloadRequest(0, r.at_s + 0.7 * k, r.isl, r.osl, ((r.index * 8 + k, r.isl),))
        for r in azure(300.0)
        for k in range(4)
    ]
    single = arrivals_of(sorted(crowd, key=lambda r: r.at_s))
    options = FluidOptions(
        policy=policy("h100-tp4-llama70b", fleet, fleet), initial=fleet, record=False
    )
    fine = run_fluid(options, single)
    coarse = run_fluid(options, binned(single, bin_s=2.0, rows=12))
    assert len(coarse.served) < len(fine.served) / 1.5
    assert attainment(coarse, 0.05) == pytest.approx(attainment(fine, 0.05), abs=0.03)
    assert worker_s(coarse) == pytest.approx(worker_s(fine), rel=0.01)
    shares = [np.quantile(r.served.ttft_s, (0.25, 0.75)) for r in (coarse, fine)]
    assert shares[0] == pytest.approx(shares[1], rel=0.25, abs=0.1)
