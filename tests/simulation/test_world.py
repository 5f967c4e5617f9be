"""The production router and planner in a modelled world: it scales, loses nothing, repeats."""

from __future__ import annotations

from functools import lru_cache

import pytest

from readyplane.core.worker import Role
from readyplane_lab.demo import DEMO_POLICY
from readyplane_lab.simulator.faults import Crash
from readyplane_lab.simulator.replay import Replay, run_replay
from readyplane_lab.simulator.startup import StartUpModel
from readyplane_lab.simulator.world import WorldOptions, run_world
from readyplane_lab.simulator.world_result import WorldResult
from readyplane_lab.workload.conversation import Wave, conversation
from readyplane_lab.workload.request import WorkloadRequest
from tests.simulation.sim_world import Fixed, Recorder


def burst(seed: int = 1) -> list[WorkloadRequest]:
    wave = Wave(1.0, swing=0.0, bursts=((10.0, 50.0, 6.0),))
    return list(conversation(wave, seed=seed, duration_s=150.0))


@lru_cache
def after_burst() -> WorldResult:
    return run_world(WorldOptions(DEMO_POLICY), burst())


def peak(result: WorldResult, pool: str) -> int:
    return max(int(v) for v in result.series[f"{pool}.ready"] if v is not None)


def test_both_pools_grow_and_shrink_within_their_bounds() -> None:
    result = after_burst()
    for pool, most in (("prefill", 6), ("decode", 4)):
        assert 1 < peak(result, pool) <= most
        ready = [v for v in result.series[f"{pool}.ready"] if v is not None]
        assert ready[-1] < peak(result, pool)
        desired = [v for v in result.series[f"{pool}.desired"] if v is not None]
        assert all(1 <= v <= most for v in desired[1:])


def test_every_request_has_one_end_and_all_tokens() -> None:
    result = after_burst()
    requests = burst()
    assert [r.index for r in result.records] == [r.index for r in requests]
    assert {r.outcome for r in result.records} == {"finished"}
    assert [r.osl for r in result.records] == [r.osl for r in requests]
    attained = sum(r.attained for r in result.records) / len(result.records)
    assert attained > 0.6
    assert all(r.ttft_s is not None and r.ttft_s > 0 for r in result.records)


def test_time_per_token_is_never_below_what_the_profile_allows() -> None:
    fastest_s = 0.0609
    tpots = [r.tpot_s for r in after_burst().records if r.osl > 1 and r.tpot_s is not None]
    assert min(tpots) > fastest_s


def test_prefixes_are_found_again() -> None:
    result = after_burst()
    hit = sum(r.cached_tokens for r in result.records) / sum(r.isl for r in result.records)
    assert 0.05 < hit < 0.6


def test_the_same_seed_gives_the_same_run() -> None:
    again = run_world(WorldOptions(DEMO_POLICY), burst())
    assert again == after_burst()
    other = run_world(WorldOptions(DEMO_POLICY, seed=2, record=False), burst())
    assert other.lives != again.lives


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_crash_costs_no_request_that_had_no_token_yet(role: Role) -> None:
    result = run_world(
        WorldOptions(DEMO_POLICY, faults=(Crash(40.0, role),), record=False), burst()
    )
    ends = {r.outcome for r in result.records}
    cut = [r for r in result.records if r.outcome == "failed"]
    assert len(result.records) == len(burst())
    assert ends <= {"finished", "failed"}
    # a stream that was cut had a token already: it cannot be repaired without repeating text
    assert all(r.detail == "crashed" for r in cut)
    if role is Role.PREFILL:
        assert cut == []
    crashed = [w for w in result.lives if w.failure == "crashed"]
    assert len(crashed) == 1
    assert sum(w.ready_s is not None for w in result.lives if w.pool == role) > 1


def test_a_longer_start_costs_more_misses() -> None:
    def attained(t_ready_s: float) -> int:
        startup = StartUpModel().scaled_to(t_ready_s)
        result = run_world(WorldOptions(DEMO_POLICY, startup=startup, record=False), burst())
        return sum(r.attained for r in result.records)

    assert attained(3.0) > attained(40.0)


def test_the_report_adds_up() -> None:
    requests = burst()
    report, result = run_replay(Replay("burst", requests))
    assert sum(report["outcomes"].values()) == report["requests"] == len(requests)
    assert report["worker_hours"]["prefill"] == pytest.approx(
        sum(w.released_s - w.allocated_s for w in result.lives if w.pool == "prefill") / 3600
    )
    assert report["decisions"]
    assert all(d["reasons"] for d in report["decisions"])


def test_an_answer_may_take_as_long_as_it_is() -> None:
    """12,000 tokens at 60 ms take twelve minutes: nobody times a stream out that goes on."""
    long = (WorkloadRequest(0, 0.0, 200, 12_000, ((7, 200),)),)
    result = run_world(WorldOptions(DEMO_POLICY, initial=(1, 1), record=False), long)
    assert [(r.outcome, r.osl) for r in result.records] == [("finished", 12_000)]
    assert result.seconds > 600.0


def test_the_router_does_not_forget_a_stream_that_goes_on() -> None:
    """A reservation of which nobody speaks for 60 s is given up; of these somebody does."""
    long = tuple(WorkloadRequest(k, 0.1 * k, 200, 4_000, ((k, 200),)) for k in range(4))
    late = WorkloadRequest(4, 150.0, 200, 20, ((9, 200),))
    brain = Recorder(Fixed((0.0, 1, 1)))
    options = WorldOptions(DEMO_POLICY, initial=(1, 1), brain=brain, record=False)
    result = run_world(options, (*long, late))
    assert {r.outcome for r in result.records} == {"finished"}
    began_s = brain.seen[0][0]
    decoding = {round(t - began_s): o.decoding.get() for t, o in brain.seen}
    assert decoding[100] == decoding[140] == 4
    kv = {round(t - began_s): o.kv.get() for t, o in brain.seen}
    assert kv[140] - kv[100] == pytest.approx(4 * 40.0 / 0.062, rel=0.35)
