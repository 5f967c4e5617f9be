"""Each fault does what it says to the world, and every request still has exactly one end.

That each request ends once is an invariant of every run: `world` raises where it does not.
"""

from __future__ import annotations

from collections import Counter

import pytest

from readyplane.core.worker import Role
from readyplane_lab.simulator.faults import (
    ClockStep,
    Crash,
    NewArtifact,
    Partition,
    PlannerRestart,
    QuotaDenied,
    SignalOutlier,
    SignalsMissing,
    SignalsStale,
    SourceDies,
    SourceLies,
    SpotReclaim,
    Stall,
    StartsFail,
    StartsHang,
)
from readyplane_lab.simulator.gateway import Record
from readyplane_lab.simulator.outcome import Life
from readyplane_lab.simulator.startup import StartUpModel
from readyplane_lab.simulator.world_result import WorldResult
from readyplane_planner.signals import Observation
from tests.simulation.sim_world import Fixed, Recorder, steady, world

KEEP = ((0.0, 2, 2),)


def ends(result: WorldResult) -> Counter[str]:
    return Counter(r.outcome for r in result.records)


def end_s(record: Record) -> float:
    return record.at_s + (record.ttft_s or 0.0) + (record.tpot_s or 0.0) * (record.osl - 1)


def ordered(result: WorldResult, pool: str = "") -> list[Life]:
    return [w for w in result.lives if w.decision_id and pool in ("", w.pool)]


def test_a_crash_ends_lives_and_is_made_up_for() -> None:
    result = world(Fixed(*KEEP), faults=(Crash(10.0, Role.DECODE, count=2),))
    crashed = [w for w in result.lives if w.failure == "crashed"]
    assert [w.pool for w in crashed] == ["decode", "decode"]
    assert all(w.released_s == pytest.approx(10.0) for w in crashed)
    assert len(ordered(result, "decode")) == 2
    assert ends(result)["finished"] > len(result.records) / 2


def test_a_stalled_engine_keeps_its_requests_and_goes_on_where_it_stood() -> None:
    one = Fixed((0.0, 1, 1))
    calm = world(one, initial=(1, 1)).records
    stalled = world(one, initial=(1, 1), faults=(Stall(10.0, Role.DECODE, 6.0),)).records
    assert Counter(r.outcome for r in stalled) == {"finished": len(steady())}
    longer = [end_s(after) - end_s(before) for before, after in zip(calm, stalled, strict=True)]
    for before, more_s in zip(calm, longer, strict=True):
        if end_s(before) < 10.0:
            assert more_s == 0.0
        elif before.at_s + (before.ttft_s or 0.0) < 10.0:  # it was decoding
            assert more_s == pytest.approx(6.0, abs=1.5)


def test_a_long_stall_shuts_the_worker_and_it_comes_back() -> None:
    """The router takes it for stalled after 10 s; what it holds goes on when it moves again."""
    stall = Stall(5.0, Role.PREFILL, 18.0)
    result = world(Fixed(*KEEP), faults=(stall,), policy={"orphan_s": 60.0})
    assert ends(result)["finished"] == len(steady())
    slow = [r for r in result.records if (r.ttft_s or 0.0) > 5.0]
    assert 0 < len(slow) < len(result.records) / 2
    assert not [w for w in result.lives if w.failure]


def test_a_partition_shorter_than_a_lease_is_not_noticed() -> None:
    result = world(Fixed(*KEEP), faults=(Partition(10.0, Role.DECODE, 3.0),))
    assert result.counts["leases_expired"] == 0
    assert ends(result) == {"finished": len(steady())}


def test_a_partition_longer_than_a_lease_takes_it_and_the_gate_is_passed_again() -> None:
    result = world(Fixed(*KEEP), faults=(Partition(10.0, Role.DECODE, 12.0),))
    assert result.counts["leases_expired"] == 1
    assert not [w for w in result.lives if w.failure]
    assert ends(result) == {"finished": len(steady())}


def test_a_partition_beyond_the_planners_patience_is_given_up() -> None:
    result = world(Fixed(*KEEP), faults=(Partition(5.0, Role.PREFILL, 300.0),))
    given_up = [w for w in result.lives if w.released_s < 39.0]
    assert [w.pool for w in given_up] == ["prefill"]
    assert given_up[0].released_s == pytest.approx(5.0 + 6.0 + 15.0, abs=5.0)
    assert len(ordered(result, "prefill")) == 1


GROW = ((0.0, 2, 2), (5.0, 4, 2))
SLOW_PEERS = StartUpModel(peer_bytes_per_s=100e6, store_bytes_per_s=50e6)


def test_a_source_that_dies_half_way_costs_nothing_that_had_arrived() -> None:
    """Two fetch from two peers when one dies: its reader goes on at the mark that is missing."""
    result = world(Fixed(*GROW), startup=SLOW_PEERS, faults=(SourceDies(4.0),))
    counts = result.counts
    dead = [w for w in result.lives if w.failure == "died while giving its weights"]
    assert len(dead) == 1
    assert counts["sources.resumed"] >= 1
    arrived = sum(n for name, n in counts.items() if name.startswith("sources.marks."))
    fetched = [w for w in ordered(result) if w.ready_s is not None]
    assert arrived == 8 * len(fetched) == 24  # none twice, though one came from two sources
    assert ends(result)["finished"] >= len(steady()) - 6  # what the dead worker decoded


def test_a_source_that_lies_is_found_out_and_left() -> None:
    result = world(Fixed(*GROW), startup=SLOW_PEERS, faults=(SourceLies(4.0),))
    assert result.counts["sources.lies"] >= 1
    assert result.counts["sources.resumed"] >= 1
    assert not [w for w in result.lives if w.failure]
    assert len([w for w in ordered(result) if w.ready_s is not None]) == 2
    assert ends(result) == {"finished": len(steady())}


def test_a_reclaimed_worker_drains_within_its_notice() -> None:
    result = world(Fixed(*KEEP), faults=(SpotReclaim(10.0, Role.PREFILL, notice_s=20.0),))
    gone = [w for w in result.lives if w.drain_s == pytest.approx(10.0)]
    assert len(gone) == 1
    assert gone[0].failure == ""
    assert gone[0].released_s < 20.0
    assert len(ordered(result, "prefill")) == 1
    assert ends(result) == {"finished": len(steady())}


def test_a_notice_that_is_too_short_cuts_streams() -> None:
    result = world(Fixed(*KEEP), faults=(SpotReclaim(10.0, Role.DECODE, notice_s=2.0),))
    gone = [w for w in result.lives if w.failure == "reclaimed"]
    assert [w.released_s for w in gone] == [pytest.approx(12.0)]
    assert 0 < ends(result)["failed"] < len(steady()) / 4


def test_denied_orders_are_told_and_a_partial_grant_is_taken() -> None:
    steps = ((0.0, 2, 2), (5.0, 5, 2))
    faults = (QuotaDenied(0.0, 20.0, granted=1, role=Role.PREFILL),)
    result = world(Fixed(*steps), faults=faults, policy={"backoff_s": 1.0})
    early = [w for w in ordered(result) if w.allocated_s < 20.0]
    assert len(early) == 1
    assert len(ordered(result)) == 3
    assert result.counts["orders_refused"] > 0


def test_a_start_that_hangs_is_given_up_and_another_ordered() -> None:
    steps = ((0.0, 2, 2), (2.0, 3, 2))
    short = {"t_ready_prior": {"p50_s": 3.0, "p90_s": 4.0, "p99_s": 5.0}}
    result = world(Fixed(*steps), faults=(StartsHang(1.0, Role.PREFILL),), policy=short)
    hung = [w for w in ordered(result) if w.ready_s is None]
    assert len(hung) == 1
    assert hung[0].released_s - hung[0].allocated_s == pytest.approx(17.5, abs=5.0)
    assert len([w for w in ordered(result) if w.ready_s is not None]) == 1


def test_a_start_that_fails_is_ordered_again() -> None:
    steps = ((0.0, 2, 2), (2.0, 3, 2))
    result = world(Fixed(*steps), faults=(StartsFail(1.0, Role.PREFILL, count=2),))
    failed = [w for w in ordered(result) if "did not come up" in w.failure]
    assert len(failed) == 2
    assert all(w.ready_s is None for w in failed)
    assert len([w for w in ordered(result) if w.ready_s is not None]) == 1


# --------------------------------------------------------------------------- observation alone


def seen(fault: object) -> tuple[list[tuple[float, Observation]], WorldResult]:
    """What the planner saw, on the clock of the run."""
    brain = Recorder(Fixed(*KEEP))
    result = world(brain, faults=(fault,))
    first_s = brain.seen[0][0]
    return [(at_s - first_s, observation) for at_s, observation in brain.seen], result


def test_stale_signals_stand_still() -> None:
    during = [o for t, o in seen(SignalsStale(10.0, 15.0))[0] if 12.0 < t < 24.0]
    assert len({o.in_flight.value for o in during}) == 1
    calm = [o for t, o in seen(ClockStep(10.0, 0.0))[0] if 12.0 < t < 24.0]
    assert len({o.in_flight.value for o in calm}) > 1


def test_missing_signals_are_missed() -> None:
    looked, _ = seen(SignalsMissing(10.0, 15.0))
    assert all(o.in_flight.known for t, o in looked if 5.0 < t < 10.0)
    assert not any(o.arrivals.known for t, o in looked if 12.0 < t < 24.0)
    assert all(o.in_flight.known for t, o in looked if t > 28.0)


def test_an_outlier_is_one_answer() -> None:
    def rates(fault: object) -> list[float]:
        return [o.prompt_work.get() for t, o in seen(fault)[0] if 5.0 < t < 20.0]

    calm, wild = rates(ClockStep(10.0, 0.0)), rates(SignalOutlier(10.0))
    assert len(calm) == len(wild)
    changed = [(a, b) for a, b in zip(calm, wild, strict=True) if a != b]
    assert 1 <= len(changed) <= 2
    assert max(b / a for a, b in changed if a) == pytest.approx(10.0)


def test_a_step_of_the_wall_clock_changes_dates_and_nothing_else() -> None:
    steps = ((0.0, 2, 2), (5.0, 3, 2), (20.0, 2, 2))
    calm = world(Fixed(*steps), record=True)
    stepped = world(Fixed(*steps), record=True, faults=(ClockStep(10.0, -3600.0),))
    assert stepped.records == calm.records
    assert [w.pool for w in stepped.lives] == [w.pool for w in calm.lives]
    dates = sorted(d["at_s"] - stepped.began_wall_s for d in stepped.decisions)
    assert dates[0] < -3500.0


def test_a_planner_that_dies_is_succeeded_under_a_newer_epoch() -> None:
    steps = ((0.0, 2, 2), (20.0, 3, 2))
    result = world(Fixed(*steps), record=True, faults=(PlannerRestart(5.0, 2.0),))
    epochs = {d["leader_epoch"] for d in result.decisions}
    assert max(epochs) == 2
    later = ordered(result)
    assert len(later) == 1
    assert later[0].allocated_s == pytest.approx(20.0, abs=2.5)
    assert ends(result) == {"finished": len(steady())}


def test_whatever_breaks_beside_the_requests_ends_the_run() -> None:
    """A planner that died of a bug must not look like one that wanted nothing."""

    class Bug:
        def __call__(self, *_: object, **__: object) -> None:
            raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        world(Bug())  # type: ignore[arg-type]


def test_a_roll_out_keeps_generations_apart_and_loses_nothing() -> None:
    """Surge, move, retire: P and D of the new revision pair with each other alone."""
    quick = {
        "up": {"cooldown_s": 1.0},
        "min_ready_s": 1.0,
        "drain_deadline_s": 60.0,
        "rollout": {"samples_min": 5, "verify_s": 5.0},
    }
    long = steady(1.0, 90.0)
    result = world(None, long, policy=quick, faults=(NewArtifact(5.0),))
    assert ends(result) == {"finished": len(long)}
    old = [w for w in result.lives if not w.decision_id]
    new = [w for w in result.lives if w.decision_id]
    assert len(old) == 4
    assert all(w.drain_s is not None for w in old)
    assert {w.pool for w in new if w.ready_s is not None} == {"prefill", "decode"}
    # nobody goes before one of the new revision serves in each stage
    assert min(w.drain_s or 0.0 for w in old) > max(w.ready_s or 0.0 for w in new[:2])
