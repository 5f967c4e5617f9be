"""A fleet that is there before the first request, whoever plans, and what a run comes to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from readyplane.core.errors import NotFound
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.simulator.site import Mishap
from readyplane_lab.simulator.startup import StartUpModel
from tests.simulation.sim_world import Fixed, same, steady, world


def played(brain: Fixed | None, **options: Any) -> RunResult:
    return world(brain, **{"record": True, **options}).run()


def test_the_fleet_of_the_beginning_is_ready_and_nobody_ordered_it() -> None:
    run = played(Fixed((0.0, 2, 2)))
    assert len(run.lives) == 4
    for life in run.lives:
        assert life.decision_id == ""
        assert life.allocated_s < 0
        assert life.ready_s is not None
        assert life.ready_s <= 0
        assert life.drain_s is None
        assert life.released_s > run.span_s
    assert run.targets == ((0.0, 2, 2),)


def test_a_run_has_every_arrival_in_its_columns() -> None:
    run, requests = played(Fixed((0.0, 2, 2))), steady()
    assert len(run.served) == len(requests) == run.outcomes["finished"]
    assert run.served.at_s.tolist() == [r.at_s for r in requests]
    assert run.served.osl.tolist() == [r.osl for r in requests]
    assert run.span_s == requests[-1].at_s  # what is billed begins with the run
    assert np.isfinite(run.served.ttft_s).all()
    assert len(run.planner_s) == run.counts["decisions"] > 30


def test_targets_of_another_brain_are_followed_up_and_down() -> None:
    run = played(Fixed((0.0, 2, 2), (10.0, 3, 2), (25.0, 1, 2)))
    assert [(p, d) for _, p, d in run.targets] == [(2, 2), (3, 2), (1, 2)]
    ordered = [life for life in run.lives if life.decision_id]
    assert [life.pool for life in ordered] == ["prefill"]
    assert ordered[0].allocated_s == pytest.approx(10.0, abs=1.5)
    drained = [life for life in run.lives if life.drain_s is not None]
    assert len(drained) == 2
    assert all(25.0 <= (life.drain_s or 0.0) <= life.released_s for life in drained)


def test_without_a_record_the_run_is_the_same_but_for_what_was_not_kept() -> None:
    brain = ((0.0, 2, 2), (10.0, 3, 2))
    kept = played(Fixed(*brain))
    bare = played(Fixed(*brain), record=False)
    assert kept.series["t_s"]
    assert kept.decisions
    assert (bare.series, bare.decisions) == ({}, ())
    assert (bare.lives, bare.targets, bare.outcomes) == (kept.lives, kept.targets, kept.outcomes)
    assert bare.served.ttft_s.tolist() == kept.served.ttft_s.tolist()


def test_one_seed_gives_one_run() -> None:
    steps = ((0.0, 2, 2), (10.0, 3, 2))
    assert same(played(Fixed(*steps)), played(Fixed(*steps)))
    assert not same(played(Fixed(*steps)), played(Fixed(*steps), seed=2))


def test_a_start_draws_the_same_whoever_ordered_it_and_whatever_it_is_called() -> None:
    """Common random numbers: the k-th start of a pool is the same in every policy's run."""
    startup = StartUpModel(weight_bytes=1.0)

    def starts(*steps: tuple[float, int, int]) -> list[float]:
        run = played(Fixed(*steps), startup=startup)
        mine = [w for w in run.lives if w.pool == "prefill" and w.ready_s is not None]
        return [(w.ready_s or 0.0) - w.allocated_s for w in mine]

    early = starts((0.0, 2, 2), (5.0, 4, 2))
    late = starts((0.0, 2, 2), (20.0, 3, 2), (30.0, 4, 3))
    assert len(early) == len(late) == 4
    assert early == pytest.approx(late)
    assert len({round(s, 3) for s in early}) == 4


def test_convertible_decoders_take_prefill_work_within_their_bound() -> None:
    def slow(convertible: bool) -> RunResult:
        crowd = steady(4.0)
        return world(Fixed((0.0, 1, 3)), crowd, initial=(1, 3), convertible=convertible).run()

    strict, both = slow(False), slow(True)
    assert {w.pool for w in both.lives} == {"prefill", "decode"}
    assert both.targets == strict.targets  # still shown to the planner as decode workers
    # An overload: who cannot be in time steps back, so it is the number in time that shows help.
    in_time = [int(np.sum(run.served.ttft_s <= 2.0)) for run in (strict, both)]
    served = [int(np.sum(np.isfinite(run.served.ttft_s))) for run in (strict, both)]
    assert in_time[1] > in_time[0] and served[1] > served[0]


def test_a_cold_cluster_begins_with_nobody_and_refuses_until_there_is_a_pair() -> None:
    startup = StartUpModel().scaled_to(30.0)
    run = world(Fixed((0.0, 2, 2)), steady(duration_s=90.0), initial=(0, 0), startup=startup).run()
    assert all(life.allocated_s >= 0.0 and life.decision_id for life in run.lives)
    ready_s = max(
        min(w.ready_s or 0.0 for w in run.lives if w.pool == pool) for pool in ("prefill", "decode")
    )
    assert 20.0 < ready_s < 60.0
    served = np.isfinite(run.served.ttft_s)
    assert not served[run.served.at_s < ready_s - 21.0].any()  # the router waits 20 s at most
    assert served[run.served.at_s > ready_s].all()
    assert set(run.outcomes) == {"finished", "refused"}


def test_a_large_fleet_of_the_beginning_takes_as_long_as_one_lone_start() -> None:
    startup = StartUpModel().scaled_to(60.0)
    run = world(Fixed((0.0, 6, 4)), steady(duration_s=5.0), initial=(6, 4), startup=startup).run()
    took = [(w.ready_s or 0.0) - w.allocated_s for w in run.lives]
    assert np.median(took) == pytest.approx(60.0, rel=0.15)
    assert {w.tier for w in run.lives} == {"L4"}


def test_a_beginning_that_fails_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "readyplane_lab.simulator.script.Mishaps.take", lambda _self, _role: Mishap.FAILS
    )
    with pytest.raises(NotFound, match="did not come up"):
        world(Fixed((0.0, 2, 2)))
