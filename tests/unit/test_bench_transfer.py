"""The figures of pushes beside serving: arms, quantiles, and how far chance takes a ratio."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.transfer_arms import (
    Window,
    kv_quantile_s,
    kv_ratio,
    pushed_bytes_per_s,
    tpot_ratio,
    tpot_s,
)


def arm(seed: int, *, slower: float = 1.0, windows: int = 20, each: int = 80) -> list[Window]:
    """Windows of transfers around 4 ms with a tail, `slower` times as long."""
    draw = np.random.default_rng(seed)
    return [
        Window(
            tpot_sum_s=0.007 * 70 * slower,
            tpot_count=70,
            kv_s=list(slower * (0.004 + draw.exponential(0.0003, each))),
            pushed_bytes=1e8,
            seconds=2.0,
        )
        for _ in range(windows)
    ]


def test_quantiles_are_of_all_transfers_and_means_of_all_requests() -> None:
    windows = [
        Window(tpot_sum_s=1.0, tpot_count=100, kv_s=[0.001, 0.004], seconds=1.0),
        Window(tpot_sum_s=3.0, tpot_count=100, kv_s=[0.003, 0.002], pushed_bytes=6e6, seconds=2.0),
    ]
    assert tpot_s(windows) == pytest.approx(0.02)
    assert [kv_quantile_s(windows, q) for q in (0.25, 0.5, 0.99)] == [0.001, 0.002, 0.004]
    assert pushed_bytes_per_s(windows) == pytest.approx(2e6)


def test_what_was_never_seen_is_not_a_number_and_no_calm() -> None:
    assert math.isnan(tpot_s([Window(seconds=1.0)]))
    assert math.isnan(kv_quantile_s([Window(seconds=1.0)], 0.99))


def test_equal_arms_are_within_chance_and_slower_ones_are_not() -> None:
    same = kv_ratio(arm(1), arm(2), 0.99)
    assert same.low < 1.0 < same.high
    assert same.low <= same.value <= same.high
    slow = kv_ratio(arm(1, slower=1.3), arm(2), 0.99)
    assert slow.low > 1.05
    assert slow.value == pytest.approx(1.3 * same.value)
    assert tpot_ratio(arm(1, slower=1.3), arm(2)).value == pytest.approx(1.3)


def test_one_disturbed_window_is_told_as_chance_not_as_a_sure_difference() -> None:
    disturbed = arm(1)
    disturbed[3].kv_s = [5 * s for s in disturbed[3].kv_s]
    ratio = kv_ratio(disturbed, arm(2), 0.99)
    assert ratio.value > 2.0
    assert ratio.low < 1.1


def test_figures_are_the_same_each_time() -> None:
    assert kv_ratio(arm(1), arm(2), 0.99) == kv_ratio(arm(1), arm(2), 0.99)
