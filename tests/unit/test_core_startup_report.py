"""Starts in groups: shares sum to T_ready, quantiles, and what a comparison says (R6.2)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.errors import InvalidField
from readyplane.core.startup import Segment, SegmentName
from readyplane.core.startup_report import Start, chosen, compared, grouped, quantile, summed


def start(name: str, wall_s: float, tier: str = "L4", mode: str = "jit", **shares: float) -> Start:
    left_s = wall_s - sum(shares.values())
    segments = (Segment(SegmentName.COMPILE, 0.0, wall_s / 2, modelled=True),)
    return Start(name, wall_s, shares, left_s, segments, "h200", tier, mode, "prefill")


COLD = [
    start("c1", 10.0, weight_transfer=6.0, compile=3.0),
    start("c2", 20.0, weight_transfer=15.0),
]
WARM = [start("w1", 4.0, "L0", compile=3.0, weight_transfer=0.5)]


def test_a_group_for_each_class_tier_and_mode() -> None:
    groups = grouped([*COLD, *WARM, start("a1", 3.0, "L0", "aot")])
    assert [(g.name, g.count) for g in groups] == [
        ("h200, L0, aot", 1),
        ("h200, L0, jit", 1),
        ("h200, L4, jit", 2),
    ]
    far = groups[2]
    assert (far.p50_s, far.p90_s, far.p99_s, far.mean_s) == (10.0, 20.0, 20.0, 15.0)
    assert list(far.exclusive_s) == ["weight_transfer", "compile"] and far.modelled == {"compile"}
    assert far.dominant == "weight_transfer" and far.typical.worker_id == "c1"


def test_starts_of_a_standbys_process_are_a_group_of_their_own() -> None:
    told = replace(start("s1", 2.0, "L0"), from_standby=True)
    assert [(g.name, g.count) for g in grouped([*WARM, told])] == [
        ("h200, L0, jit", 1),
        ("h200, L0, jit, standby", 1),
    ]
    assert chosen([*WARM, told], "standby") == [told]


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0, 1), st.floats(0, 1)), min_size=1))
def test_the_means_and_what_is_unexplained_sum_to_the_mean(
    drawn: list[tuple[float, float, float]],
) -> None:
    starts = [
        start(f"w{i}", wall, compile=wall * a * 0.5, canary=wall * b * 0.5)
        for i, (wall, a, b) in enumerate(drawn)
    ]
    group = summed("all", starts)
    assert sum(group.exclusive_s.values()) + group.unexplained_s == pytest.approx(group.mean_s)
    assert group.p50_s <= group.p90_s <= group.p99_s <= max(s.wall_s for s in starts)


def test_what_nothing_explains_can_be_the_longest() -> None:
    assert summed("x", [start("w", 10.0, compile=2.0)]).dominant == "unexplained"


def test_cold_against_warm() -> None:
    starts = [*COLD, *WARM]
    first, second = (summed(word, chosen(starts, word)) for word in ("cold", "warm"))
    found = {d.segment: d.saved_s for d in compared(first, second)}
    assert found["weight_transfer"] == pytest.approx(10.0)
    assert found["compile"] == pytest.approx(-1.5)
    assert sum(found.values()) == pytest.approx(first.mean_s - second.mean_s)


def test_a_word_that_names_nothing_is_refused_with_those_that_do() -> None:
    with pytest.raises(InvalidField, match="cold"):
        chosen(COLD, "warm")
    with pytest.raises(InvalidField):
        summed("none", [])


@pytest.mark.parametrize(("share", "value"), [(0.5, 2.0), (0.9, 4.0), (0.99, 4.0), (0.25, 1.0)])
def test_quantiles_are_values_that_were_seen(share: float, value: float) -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], share) == value
