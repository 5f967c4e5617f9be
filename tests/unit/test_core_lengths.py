"""R4.1: what remains of answers that still run, when the long ones have not ended yet."""

import random

import numpy as np
import pytest

from readyplane.core.work import (
    ISL_EDGES,
    OSL_EDGES,
    LengthStats,
    expected_remaining,
    place_of,
    with_running,
)
from readyplane_router.signals import Lengths

ISL = 800


def table(lengths: list[tuple[int, int]]) -> np.ndarray:
    counts = np.zeros((len(ISL_EDGES), len(OSL_EDGES)))
    for isl, osl in lengths:
        counts[place_of(isl, osl)] += 1.0
    return counts


def remaining(counts: np.ndarray, emitted: int) -> float:
    return expected_remaining(counts, isl=ISL, emitted=emitted, cap=None)


def test_without_running_requests_nothing_changes() -> None:
    counts = table([(ISL, 100), (ISL, 700)] * 20)
    assert (with_running(counts, table([])) == counts).all()


def test_it_is_the_product_limit_estimate() -> None:
    """By hand: of 10 at risk 4 end in bin 32-63, 2 are censored in bin 256-383, 4 end in 768-1023.

    S after the first is 0.6; nobody ends before the censored leave; the last 4 carry all of it.
    """
    counts = with_running(table([(ISL, 40)] * 4 + [(ISL, 800)] * 4), table([(ISL, 300)] * 2))
    assert counts[place_of(ISL, 40)] == pytest.approx(4.0)
    assert counts[place_of(ISL, 800)] == pytest.approx(6.0)
    assert counts.sum() == pytest.approx(10.0)


def test_a_running_answer_takes_its_shape_from_prompts_like_it_else_from_all() -> None:
    other = 20_000
    counts = with_running(table([(other, 3000)] * 10), table([(ISL, 50)] * 5))
    assert counts[place_of(ISL, 3000)] == pytest.approx(5.0)
    alone = with_running(table([(ISL, 20)] * 10), table([(ISL, 5000)] * 3))
    assert alone[place_of(ISL, 5000)] == pytest.approx(3.0), (
        "longer than anybody: it is where it is"
    )


def test_the_long_ones_count_before_they_have_ended() -> None:
    """Load began 10 s ago: what has finished is short, and a tenth writes 2,000 tokens."""
    rng = random.Random(3)
    lengths = [2000 if rng.random() < 0.1 else rng.randint(20, 200) for _ in range(400)]
    seen = [(osl, rng.uniform(0.0, 10.0) / 0.02) for osl in lengths]  # 20 ms a token
    finished = table([(ISL, osl) for osl, made in seen if made >= osl])
    running = table([(ISL, int(made)) for osl, made in seen if made < osl])
    left = [(int(made), osl - made) for osl, made in seen if made < osl]
    truth = sum(rest for _made, rest in left)
    naive = sum(remaining(finished, made) for made, _rest in left)
    better = sum(remaining(with_running(finished, running), made) for made, _rest in left)
    assert naive < 0.5 * truth, "finished ones alone tell of the short"
    assert abs(better - truth) < abs(naive - truth)


def test_early_ends_and_long_reasoning_are_both_normal() -> None:
    stats = LengthStats()
    for _ in range(90):
        stats.add(ISL, 12)
    for _ in range(10):
        stats.add(ISL, 3000)
    at_first, later = remaining(stats.counts, 0), remaining(stats.counts, 100)
    assert at_first == pytest.approx(0.9 * 8 + 0.1 * 3072, rel=0.1)
    assert later > 2000.0, "who passes the early end writes on"


def test_the_router_counts_who_still_runs() -> None:
    """Answers grow fifteen times as long: those that run say so before one of them has ended."""
    lengths = Lengths(half_life=2000, quantile=0.9)
    for _ in range(400):
        lengths.add(ISL, 130)
    few = lengths.remaining_in_all([(ISL, 100, None)])
    assert few < 100.0
    many = lengths.remaining_in_all([(ISL, 600, None)] * 200)
    for _ in range(Lengths.REBUILD_EVERY):
        many = lengths.remaining_in_all([(ISL, 600, None)] * 200)
    assert many / 200 > 400.0, "as long again"
    assert lengths.remaining(ISL, 0, None)[0] < 200.0, "what is reserved follows the ended ones"
    assert lengths.remaining_in_all([(ISL, 600, 610)]) <= 10.0, "within the cap"
