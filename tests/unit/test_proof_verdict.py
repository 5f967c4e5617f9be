"""The rules of the comparison, by hand-made points."""

from __future__ import annotations

import math

from readyplane_lab.proof.verdict import (
    OURS,
    STATIC_PEAK,
    Entry,
    Input,
    Point,
    best_tuned,
    next_knob,
    one_knob,
    summary,
    worth_confirming,
)

A = 0.99


def entry(name: str, *points: tuple[float, float, float], event: bool = True) -> Entry:
    """Points as (knob, attainment, GPU-hours), the same in both modes."""
    made = tuple(Point(*p) for p in points)
    return Entry(name, fluid=made, event=made if event else ())


def case(
    *entries: Entry,
    ours: tuple[float, float] = (0.995, 12.0),
    osim: float | None = 10.0,
    **more: str,
) -> Input:
    mine = Point(0.1, *ours)
    all_of = {e.contender: e for e in entries}
    all_of[OURS] = Entry(OURS, (mine,), (mine,))
    return Input(
        key=more.get("scenario", "s"),
        scenario=more.get("scenario", "s"),
        kind=more.get("kind", "scenario"),
        entries=all_of,
        floor_gpu_hours=8.0,
        lower_gpu_hours=9.0,
        osim_gpu_hours=osim,
        ours=mine,
        reversals_per_h=1.5,
        starts=10,
        wasted=1,
    )


def test_the_cheapest_that_the_fluid_mode_lets_through_is_confirmed_first() -> None:
    swept = entry("hpa", (0.9, 0.97, 5.0), (0.7, 0.991, 7.0), (0.5, 0.999, 9.0), event=False)
    assert next_knob(swept, A) == 0.7


def test_a_refused_point_is_followed_by_the_next_dearer() -> None:
    swept = Entry(
        "hpa",
        (Point(0.9, 0.97, 5.0), Point(0.7, 0.991, 7.0), Point(0.5, 0.999, 9.0)),
        (Point(0.7, 0.98, 7.1),),
    )
    assert next_knob(swept, A) == 0.5


def test_a_confirmed_point_is_followed_by_a_cheaper_one_that_was_close() -> None:
    fluid = (Point(0.9, 0.97, 5.0), Point(0.8, 0.985, 6.0), Point(0.7, 0.991, 7.0))
    assert next_knob(Entry("hpa", fluid, (Point(0.7, 0.995, 7.1),)), A) == 0.8
    far = (Point(0.9, 0.97, 5.0), Point(0.7, 0.991, 7.0))
    assert next_knob(Entry("hpa", far, (Point(0.7, 0.995, 7.1),)), A) is None


def test_who_gets_nowhere_is_confirmed_once_at_its_nearest() -> None:
    swept = entry("kpa", (0.9, 0.5, 5.0), (0.4, 0.9, 9.0), event=False)
    assert next_knob(swept, A) == 0.4
    tried = Entry("kpa", swept.fluid, (Point(0.4, 0.91, 9.0),))
    assert next_knob(tried, A) is None


def test_best_tuned_is_the_cheapest_baseline_that_reaches_it() -> None:
    seer = Entry("clairvoyant", (), (Point(1.0, 1.0, 5.0),), bound=True)
    one = case(entry("a", (1, 0.98, 6.0), (2, 0.99, 11.0)), entry("b", (1, 0.995, 10.5)), seer)
    found = best_tuned(one, A)
    assert found is not None and found[0] == "b" and found[1].gpu_hours == 10.5


def test_ratios_of_the_last_line() -> None:
    found = summary([case(entry("a", (1, 0.99, 10.0)), kind="replay")], attainment=A)
    assert found.r_median == found.r_worst == 1.2
    assert found.worst_vs_best_tuned == 1.2
    assert found.worst_vs_one_knob == 1.2
    assert found.reversals_per_h == 1.5
    assert found.wasted_starts == 0.1
    assert found.captured_servegen is None
    assert found.line() == (
        "bench-prove r_median=1.2 r_worst=1.2 worst_vs_best_tuned=1.2 worst_vs_one_knob=1.2 "
        "captured_servegen=none reversals_per_h=1.5 wasted_starts=0.1 azure_code_ratio=none "
        "inputs=1 kept=1 missed=0"
    )


def test_an_input_that_a_baseline_reaches_and_ours_does_not_is_missed() -> None:
    found = summary([case(entry("a", (1, 0.99, 10.0)), ours=(0.98, 3.0))], attainment=A)
    assert found.missed == ("s",)
    assert found.worst_vs_best_tuned == math.inf
    assert found.r_median is None  # no figure below the attainment, however cheap


def test_an_input_that_only_the_clairvoyant_reaches_is_missed() -> None:
    found = summary([case(entry("a", (1, 0.9, 10.0)), ours=(0.98, 3.0))], attainment=A)
    assert found.missed == ("s",) and found.kept == 0


def test_an_input_that_nobody_reaches_counts_for_nothing() -> None:
    found = summary([case(entry("a", (1, 0.9, 10.0)), ours=(0.98, 3.0), osim=None)], attainment=A)
    assert found.missed == () and found.worst_vs_best_tuned is None


def test_one_knob_is_the_one_that_reaches_it_most_often() -> None:
    first = case(entry("a", (0.5, 0.99, 24.0), (0.9, 0.99, 8.0)), scenario="x")
    second = case(entry("a", (0.5, 0.99, 20.0), (0.9, 0.90, 8.0)), scenario="y")
    knob, ratio = one_knob([first, second], attainment=A)["a"]
    assert knob == 0.5
    assert ratio == (12 / 24 + 12 / 20) / 2


def test_captured_saving_and_the_code_ratio() -> None:
    static = entry(STATIC_PEAK, (1.0, 1.0, 20.0))
    found = summary(
        [case(static, scenario="servegen-large-day"), case(static, scenario="az-code")],
        attainment=A,
    )
    assert found.captured_servegen == 0.8  # (20 - 12) / (20 - 10)
    assert found.azure_code_ratio == 0.6


def test_only_who_may_be_the_cheapest_is_worth_an_event_run() -> None:
    swept = [
        entry("cheap", (1, 0.985, 10.0), event=False),  # within the slack of the fluid mode
        entry("near", (1, 0.995, 12.4), event=False),
        entry("dear", (1, 0.999, 12.6), event=False),
        entry("hopeless", (1, 0.5, 1.0), event=False),
        entry(OURS, (1, 0.2, 99.0), event=False),
        Entry("seer", (), (), bound=True),
    ]
    assert worth_confirming(swept, A) == {"cheap", "near", OURS, "seer"}


def test_where_nobody_gets_there_the_nearest_are_looked_at() -> None:
    swept = [
        entry(name, (1, a, 5.0), event=False)
        for name, a in zip("abc", (0.5, 0.9, 0.7), strict=True)
    ]
    assert worth_confirming(swept, A) == {"b", "c"}
