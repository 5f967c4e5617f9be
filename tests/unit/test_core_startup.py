"""The critical path sums to the wall, and quantiles with few samples do not promise too much."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.startup import (
    Segment,
    SegmentName,
    StartMode,
    StartQuantiles,
    StartSample,
    WeightTier,
    critical_path,
    start_quantiles,
)

N = SegmentName
times = st.floats(-50, 150, allow_nan=False)
spans = st.builds(
    lambda name, start, length: Segment(name, start, None if length is None else start + length),
    st.sampled_from(SegmentName),
    times,
    st.none() | st.floats(-1, 80),
)


@given(st.lists(spans, max_size=12), st.floats(0, 100))
def test_exclusive_shares_sum_to_the_wall(segments: list[Segment], end_s: float) -> None:
    found = critical_path(segments, start_s=0.0, end_s=end_s)
    assert found.wall_s == end_s
    total = sum(found.exclusive_s.values()) + found.unexplained_s
    assert total == pytest.approx(end_s, abs=1e-9)
    assert all(share > 0 for share in found.exclusive_s.values())
    assert 0 <= found.unexplained_fraction <= 1 + 1e-9
    for name, share in found.exclusive_s.items():
        assert share <= found.inclusive_s[name] + 1e-9
    if found.exclusive_s:
        assert found.dominant is not None
        assert found.exclusive_s[found.dominant] == max(found.exclusive_s.values())


@given(st.lists(spans, max_size=8), st.randoms(use_true_random=False))
def test_order_does_not_matter(segments: list[Segment], random: object) -> None:
    mixed = sorted(segments, key=lambda s: hash((s.name, s.start_s)))
    one = critical_path(segments, start_s=0.0, end_s=60.0)
    other = critical_path(mixed, start_s=0.0, end_s=60.0)
    assert one.exclusive_s == pytest.approx(dict(other.exclusive_s))
    assert one.unexplained_s == pytest.approx(other.unexplained_s)


def test_where_segments_overlap_the_one_that_ends_last_owns_the_time() -> None:
    found = critical_path(
        [
            Segment(N.WEIGHT_TRANSFER, 1.0, 5.0),
            Segment(N.RUNTIME_IMPORT, 0.0, 2.0),
            Segment(N.HOST_TO_DEVICE, 3.0, 6.0),
        ],
        start_s=0.0,
        end_s=8.0,
    )
    assert found.exclusive_s == {
        N.RUNTIME_IMPORT: 1.0,
        N.WEIGHT_TRANSFER: 2.0,
        N.HOST_TO_DEVICE: 3.0,
    }
    assert found.inclusive_s == {
        N.RUNTIME_IMPORT: 2.0,
        N.WEIGHT_TRANSFER: 4.0,
        N.HOST_TO_DEVICE: 3.0,
    }
    assert found.unexplained_s == 2.0
    assert found.unexplained_fraction == 0.25
    assert found.dominant is N.HOST_TO_DEVICE


def test_a_running_segment_lasts_until_now() -> None:
    found = critical_path([Segment(N.COMPILE, 2.0, None)], start_s=0.0, end_s=5.0)
    assert found.exclusive_s == {N.COMPILE: 3.0}
    assert found.unexplained_s == 2.0


def test_nothing_is_known_of_an_empty_start() -> None:
    found = critical_path([], start_s=0.0, end_s=3.0)
    assert (found.dominant, found.unexplained_fraction) == (None, 1.0)
    assert critical_path([], start_s=3.0, end_s=3.0).unexplained_fraction == 0.0


PRIOR = StartQuantiles(p50_s=20.0, p90_s=40.0, p99_s=60.0, count=0, age_s=0.0)


def sample(ready_s: float, seen_at_s: float = 0.0) -> StartSample:
    return StartSample("h200", WeightTier.L4_OBJECT, StartMode.JIT, 1.0, ready_s, seen_at_s)


def test_without_samples_the_prior_speaks() -> None:
    assert start_quantiles([], now_s=9.0, prior=PRIOR) == PRIOR


def test_few_samples_do_not_shorten_the_tail_at_once() -> None:
    few = start_quantiles([sample(4.0, 2.0), sample(4.0, 5.0)], now_s=9.0, prior=PRIOR)
    assert few.p50_s == 5.0
    assert (few.count, few.age_s) == (2, 4.0)
    assert few.p90_s == pytest.approx(0.6 * 40 + 0.4 * 5)
    many = start_quantiles([sample(4.0)] * 5, now_s=9.0, prior=PRIOR)
    assert (many.p50_s, many.p90_s, many.p99_s) == (5.0, 5.0, 5.0)


def test_a_slow_start_is_believed_at_once() -> None:
    found = start_quantiles([sample(300.0)], now_s=0.0, prior=PRIOR)
    assert found.p90_s == 301.0


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=30))
def test_quantiles_are_in_order(values: list[float]) -> None:
    found = start_quantiles([sample(v) for v in values], now_s=1.0, prior=PRIOR)
    assert found.p50_s <= found.p90_s + 1e-9
    assert found.p90_s <= found.p99_s + 1e-9
    assert found.count == len(values)
