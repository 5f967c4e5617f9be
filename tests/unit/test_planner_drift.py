"""Drift of forecast, model and actuation: entered late, left later, and what follows from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from readyplane_planner.decide import Memory, stances
from readyplane_planner.decide import drift as judged
from readyplane_planner.decide.drift import (
    DriftMemory,
    Evidence,
    Patience,
    PoolDrift,
    Stance,
    Watch,
)
from readyplane_planner.decide.stances import Care
from readyplane_planner.guard import Counts, Limits, Trust, Verdict
from tests.unit.planner_world import HandClock, World, planner, policy

GOOD = Evidence(coverage=0.9, judged=100, actual=0.5, predicted=0.5, count=50)
PATIENCE = Patience(enter_s=60.0, forecast_s=240.0, leave_s=120.0, band=0.1)


@pytest.mark.parametrize(
    ("evidence", "forecast", "model", "actuation"),
    [
        (GOOD, False, False, False),
        (replace(GOOD, coverage=0.5), True, False, False),
        (replace(GOOD, coverage=0.7), False, False, False),
        (replace(GOOD, coverage=0.1, judged=5), None, False, False),
        (replace(GOOD, coverage=None), None, False, False),
        (replace(GOOD, actual=1.5, predicted=0.5), False, True, False),
        (replace(GOOD, actual=1.5, predicted=1.2), False, False, False),  # it knows
        (replace(GOOD, actual=0.3, predicted=2.0), False, False, False),  # costs, misses nothing
        (replace(GOOD, actual=1.05, predicted=0.5), False, False, False),  # within the band
        (replace(GOOD, actual=1.5, predicted=0.5, count=3), False, None, False),
        (replace(GOOD, actual=1.5, predicted=0.5, coming=True), False, None, False),
        (replace(GOOD, actual=None), False, None, False),
        (replace(GOOD, losses=3), False, False, True),
        (replace(GOOD, missing=1), False, False, True),
        (replace(GOOD, losses=2), False, False, False),
    ],
)
def test_what_is_drift(
    evidence: Evidence, forecast: bool | None, model: bool | None, actuation: bool
) -> None:
    assert judged.forecast_is_off(evidence) is forecast
    assert judged.model_is_off(evidence, 0.1) is model
    assert judged.actuation_is_off(evidence) is actuation


def test_entered_after_a_while_and_left_after_longer() -> None:
    seen, active = Watch(), []
    for tick in range(60):
        bad = 5 <= tick < 20 or tick == 25
        seen = judged.watch(seen, bad, PATIENCE, now_s=tick * 10.0)
        active.append(seen.active)
    assert active.index(True) == 5 + 6, "60 s of bad evidence"
    assert all(active[11:38]), "a bad look on the way out begins the way out anew"
    assert not any(active[38:]) and seen.entered == 1
    assert judged.watch(seen, None, PATIENCE, now_s=1e6) == seen, "unknown changes nothing"


def test_a_moment_is_no_drift() -> None:
    seen = Watch()
    for tick in range(100):
        seen = judged.watch(seen, tick % 6 != 0, PATIENCE, now_s=tick * 10.0)
    assert not seen.active and seen.entered == 0


@pytest.mark.parametrize("kind", judged.KINDS)
def test_drift_is_said_and_nothing_shrinks(kind: str) -> None:
    before = PoolDrift(**{kind: Watch(active=True, bad_since_s=0.0)})
    after, stance = judged.look(before, GOOD, PATIENCE, now_s=100.0)
    assert getattr(after, kind).active, "good for no time yet"
    assert [code for code, _text in stance.reasons] == [f"drift_{kind}", "fallback"]
    limits = Limits(1, 10)
    care = Care(stance, load=1.6)
    wanted, trust = stances.careful(care, 2, Counts(5, 0), limits, Trust())
    assert (wanted, trust.grow, trust.shrink) == (6, True, False)
    waiting, _trust = stances.careful(care, 2, Counts(4, 1), limits, Trust())
    assert waiting == 2, "one at a time"
    assert "drift" not in trust.why and trust.why
    calm = Care(Stance(), load=1.6)
    assert stances.careful(calm, 2, Counts(5, 0), limits, Trust()) == (2, Trust())


def test_a_hold_is_within_the_bounds_and_a_conflict_is_not() -> None:
    limits, verdict = Limits(2, 4), Verdict(3, grow=1)
    hand, conflict = ("manual_hold", "x"), ("ownership_conflict", "x")
    for held, live, want in (
        (hand, 3, Verdict(3, reasons=(hand,))),
        (hand, 1, verdict),
        (conflict, 1, Verdict(2, reasons=(conflict,))),
        (None, 3, verdict),
    ):
        assert stances.held(Care(held=held), verdict, Counts(live, 0), limits) == want


def test_memory_moves_to_another_clock() -> None:
    was = DriftMemory(PoolDrift(model=Watch(True, 5.0, None, 2)), PoolDrift())
    now = judged.moved(was, 10.0)
    assert now.prefill.model == Watch(True, 15.0, None, 2)
    assert now.decode == PoolDrift()
    assert Memory().drift == DriftMemory()


async def test_workers_slower_than_their_profile_are_no_reason_to_shrink() -> None:
    """TTFT misses its target while the profile says 0.3 of it: held, and followed upwards."""
    w = World(HandClock(), rps=lambda _t: 1.0)
    run = await planner(w, policy(prefill={"max": 6}, load={"combine": "predicted"}))
    await run.step(40)
    w.overrides = {}
    advance = w.advance

    def slow(dt_s: float) -> None:
        advance(dt_s)
        w.ttft_s = 4.0

    w.advance = slow  # type: ignore[method-assign]
    await run.step(150)
    drift = run.service._memory.drift
    assert drift.prefill.model.active and not drift.decode.model.active
    assert {"drift_model", "fallback"} <= run.codes()
    drained = len(w.drains)
    w.advance = advance  # type: ignore[method-assign]
    await run.step(100)
    assert run.service._memory.drift.prefill.model.active, "not left at once"
    assert len(w.drains) == drained
    await run.step(60)
    assert not run.service._memory.drift.prefill.model.active
