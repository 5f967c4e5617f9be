"""Workers ahead of a rise that the days before had: earlier, bounded, told, and never fewer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from readyplane.core.worker import Role, WorkerState
from readyplane_planner import forecast, takeover
from readyplane_planner.decide import Decision, Memory
from readyplane_planner.forecast import DAY_BINS, Series
from readyplane_planner.recall import recall
from tests.unit.planner_world import HandClock, Run, World, planner, policy

P, D = Role.PREFILL, Role.DECODE
HOUR_S, DAY_S = 3600.0, 86_400.0
TICK_S = 300.0
T_READY_S = 1200.0
RISE_H, FALL_H = 8.0, 20.0
DAY = [1000.0] * 16 + [5000.0] * 16 + [1000.0] * 16
KNOBS = forecast.Knobs(window_s=600.0)


def days_of(profile: list[float], count: int, series: Series | None = None) -> Series:
    """Half-hours in steps of ten minutes, from the clock's midnight."""
    series = series or Series()
    now_s = series.updated_s
    for rate in [rate for rate in profile for _ in range(3)] * count:
        now_s += 600.0
        series = forecast.update(series, rate, dt_s=600.0, now_s=now_s, knobs=KNOBS)
    return series


# --------------------------------------------------------------------------- what the days say


def test_what_is_coming_is_the_largest_of_that_time_and_how_far_it_is() -> None:
    series = days_of(DAY, 3)  # from 8:00 to 16:00 five times as much
    at_s = series.updated_s + 7.0 * HOUR_S
    far = forecast.coming(series, from_s=600.0, to_s=1.5 * HOUR_S, now_s=at_s)
    near = forecast.coming(series, from_s=600.0, to_s=1200.0, now_s=at_s)
    assert far is not None and near is not None
    assert far.rate == pytest.approx(5000.0, rel=0.1) and near.rate == pytest.approx(1000.0)
    assert far.in_s == pytest.approx(1.25 * HOUR_S), "the middle of the first such half-hour"
    assert far.days == pytest.approx(3.0, abs=0.1) and far.trust == 1.0 and far.skill > 0.5
    half = forecast.coming(series, from_s=600.0, to_s=HOUR_S, now_s=at_s)
    assert half is not None and half.rate == pytest.approx(3000.0, rel=0.1), "straight between"


def test_nothing_is_said_of_what_was_never_seen() -> None:
    assert forecast.coming(Series(), from_s=0.0, to_s=DAY_S, now_s=0.0) is None
    young = days_of(DAY[:10], 1)
    assert forecast.coming(young, from_s=2 * HOUR_S, to_s=3 * HOUR_S, now_s=5 * HOUR_S) is None
    assert forecast.coming(young, from_s=9.0, to_s=3.0, now_s=0.0) is None


def test_a_pattern_that_is_none_has_no_skill_and_one_that_failed_gets_it_back() -> None:
    known = days_of(DAY, 4)
    holiday = days_of([1000.0] * DAY_BINS, 1, known)
    noisy = days_of([1000.0, 5000.0, 1000.0, 1000.0, 5000.0] * 96, 2)
    seen = [
        forecast.coming(s, from_s=0.0, to_s=9 * HOUR_S, now_s=s.updated_s)
        for s in (known, holiday, noisy)
    ]
    good, after, none = (s for s in seen if s is not None)
    assert good.skill > 0.6 and none.skill < 0.1
    # The holiday has cost one half-hour: by midnight the day is believed again, nearly as it was.
    assert after.trust > 0.9 and after.skill > 0.1 and after.rate == pytest.approx(4600.0, rel=0.05)
    failed = days_of([1000.0] * 18, 1, known)
    seen_failed = forecast.coming(failed, from_s=0.0, to_s=HOUR_S, now_s=failed.updated_s)
    assert seen_failed is not None and seen_failed.trust == 0.0


def test_the_days_survive_a_change_of_the_planner_and_its_clock() -> None:
    old = days_of(DAY, 3)
    memory = takeover.moved(Memory(work_p=old), 12_345.0)
    assert memory.work_p.begun_s is None and memory.work_p.days.closed == old.days.closed
    now_s = old.updated_s + 12_345.0
    mine = forecast.update(memory.work_p, 1000.0, dt_s=60.0, now_s=now_s, knobs=KNOBS)
    one = forecast.coming(old, from_s=0.0, to_s=9 * HOUR_S, now_s=old.updated_s)
    other = forecast.coming(mine, from_s=0.0, to_s=9 * HOUR_S, now_s=now_s)
    assert one is not None and other is not None
    assert [other.rate, other.in_s] == pytest.approx([one.rate, one.in_s])
    # Who has stood by for a while keeps what it saw itself, but the days of who has seen more.
    kept = takeover.adopted(Memory(work_p=days_of(DAY[:6], 1)), memory)
    assert kept.work_p.begun_s is not None and kept.work_p.days == memory.work_p.days


# -------------------------------------------------------------------------------- decisions

LOW_RPS, HIGH_RPS = 2.0, 8.0
ISL, OSL = 1155.0, 211.0
WORKDAY = [LOW_RPS] * 16 + [HIGH_RPS] * 24 + [LOW_RPS] * 8
HOLIDAY = [LOW_RPS] * DAY_BINS
FROM_BIN = 10
SETTLED = 23
"""Ticks until just before 7:00: the first rates are past, and nothing is done ahead yet."""


@dataclass
class Morning:
    """One morning from 5:00 on, after days that a planner has seen; P workers by hour."""

    run: Run
    ready: list[tuple[float, int]]
    waited: float

    @property
    def night(self) -> int:
        """What it has settled on before anything is done ahead of the day."""
        return int(self.run.decisions[SETTLED - 1].prefill.target)

    def ready_at(self, at_h: float) -> int:
        return next(count for hour, count in self.ready if hour >= at_h)

    def told(self, code: str) -> list[Decision]:
        return [d for d in self.run.decisions if code in {r.code for r in d.why}]

    @property
    def extra_s(self) -> float:
        targets = [int(d.prefill.target) for d in self.run.decisions[SETTLED:]]
        return sum(TICK_S * max(0, target - self.night) for target in targets)


async def morning(
    *before: list[float],
    rise_h: float | None = RISE_H,
    until_h: float = 9.5,
    budget: int | None = None,
    **season: Any,
) -> Morning:
    """Five hours of night and those that follow; `before`: the days, as requests/s by half-hour."""
    clock = HandClock()
    night = [LOW_RPS] * FROM_BIN
    rates = [rate for day in (*before, night) for rate in day]
    clock.now_s = begin_s = len(rates) * HOUR_S / 2

    def rps(t: float) -> float:
        at_h = FROM_BIN / 2 + t / HOUR_S
        return HIGH_RPS if rise_h is not None and at_h >= rise_h else LOW_RPS

    world = World(clock, rps=rps, t_ready_s=lambda _n: T_READY_S)
    world.add(P, 1)
    world.add(D, 2)
    changes: dict[str, Any] = {
        "tick_s": TICK_S,
        "budget_gpus": budget,
        "t_ready_prior": {"p50_s": 1100.0, "p90_s": 1200.0, "p99_s": 1300.0},
        "forecast": {"warmup_s": 1800.0, "window_s": TICK_S, "season": season},
        "down": {"cooldown_s": TICK_S, "window_s": TICK_S, "hold_s": TICK_S},
    }
    run = await planner(world, policy(**changes))
    run.service._memory = Memory(
        work_p=Series(days=days_of([r * ISL for r in rates], 1).days),
        work_d=Series(days=days_of([r * OSL for r in rates], 1).days),
    )
    ready, queues = [], []
    while (at_h := FROM_BIN / 2 + (clock.now_s - begin_s) / HOUR_S) < until_h:
        await run.step(TICK_S, tick_s=TICK_S)
        ready.append((at_h, len(world.members(P, WorkerState.READY))))
        if RISE_H <= at_h < RISE_H + 1.0:
            queues.append(world.queue)
    return Morning(run, ready, sum(queues) / max(1, len(queues)))


async def test_the_third_morning_is_met_earlier_than_the_second() -> None:
    second, third = await morning(WORKDAY), await morning(WORKDAY, WORKDAY)
    assert second.ready_at(RISE_H) == second.night < third.ready_at(RISE_H) <= third.night + 2
    assert third.waited < 0.6 * second.waited
    told = third.told("season")
    text = next(r.text for r in told[0].why if r.code == "season")
    assert "by the day in" in text and "days seen" in text and "skill" in text
    assert not third.told("season_failed")
    record, _ = await third.run.journal.get(next(d for d in told if d.changed).decision_id)
    assert recall(record)["same"]


async def test_before_two_days_and_without_it_every_decision_is_what_it_was() -> None:
    def of(run: Morning) -> list[Decision]:
        return [replace(d, policy_digest="") for d in run.run.decisions]

    young = await morning(WORKDAY, until_h=8.5)
    assert of(young) == of(await morning(WORKDAY, until_h=8.5, mode="off"))
    assert not young.told("season") and not young.told("season_failed")
    off = await morning(WORKDAY, WORKDAY, until_h=8.5, mode="off")
    assert [d.prefill.target for d in off.run.decisions] == [
        d.prefill.target for d in young.run.decisions
    ]


async def test_a_holiday_costs_the_bounded_extra_for_an_hour_or_two_and_is_told() -> None:
    holiday = await morning(WORKDAY, WORKDAY, WORKDAY, rise_h=None, until_h=11.0)
    assert max(d.prefill.target for d in holiday.run.decisions[SETTLED:]) == holiday.night + 2
    assert 0 < holiday.extra_s <= 2 * 2.5 * HOUR_S
    assert len(holiday.told("season_failed")) == 1
    assert holiday.run.decisions[-1].prefill.target == holiday.night
    after = await morning(WORKDAY, WORKDAY, WORKDAY, HOLIDAY, until_h=8.2)
    assert after.ready_at(RISE_H) > after.night, "the next morning is met again"


async def test_a_day_that_begins_two_hours_later_costs_the_extra_and_is_followed() -> None:
    late = await morning(WORKDAY, WORKDAY, rise_h=10.0, until_h=11.0, extra_max=1)
    early = late.run.decisions[SETTLED : round(4.8 * HOUR_S / TICK_S)]
    assert {max(0, d.prefill.target - late.night) for d in early} == {0, 1}
    assert late.told("season_failed")
    assert late.run.decisions[-1].prefill.target > late.night + 1, "the forecast follows"


async def test_the_extra_stays_within_the_budget_and_the_pool() -> None:
    free, tight = [
        await morning(WORKDAY, WORKDAY, until_h=7.9, extra_max=8, budget=budget)
        for budget in (None, 4)
    ]
    most = [max(d.prefill.target + d.decode.target for d in m.run.decisions) for m in (free, tight)]
    assert most[0] > 4 == most[1]
