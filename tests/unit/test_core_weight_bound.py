"""The least time of the weights beside what they took (R7.1)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.startup import Segment, SegmentName, WeightTier
from readyplane.core.weight_bound import bound_words, weight_bound
from readyplane_agent.source_use import SourceUse

MB = 10**6


def use(start_s: float, took_s: float, size: int, fastest: float, *, chunks: int = 9) -> Segment:
    """A segment as an agent tells it: the last run of chunks came at `fastest` bytes/s."""
    found = SourceUse("peer:w1", WeightTier.L0_PEER_GPU, elapsed_s=took_s)
    each = size / chunks
    for n in range(chunks):
        found.done(round(each), start_s + took_s - (chunks - 1 - n) * each / fastest)
    end_s = start_s + took_s
    return Segment(SegmentName.WEIGHT_TRANSFER, start_s, end_s, detail=found.text())


def test_one_source_takes_at_least_its_bytes_over_its_best_rate() -> None:
    found = weight_bound([use(5.0, 2.0, 900 * MB, 1e9)])
    assert found is not None
    assert found.size_bytes == pytest.approx(900 * MB, rel=0.01)
    assert found.bound_s == pytest.approx(0.9, rel=0.01)
    assert found.measured_s == pytest.approx(2.0)
    assert found.efficiency == pytest.approx(0.45, rel=0.01)


def test_sources_at_once_add_their_bandwidths_and_others_follow() -> None:
    together = [use(0.0, 2.0, 900 * MB, 1e9), use(0.5, 1.0, 450 * MB, 0.5e9)]
    found = weight_bound([*together, use(10.0, 1.0, 90 * MB, 0.1e9)])
    assert found is not None
    assert found.measured_s == pytest.approx(3.0)  # 0 to 2, and 10 to 11; not the pause
    assert found.bound_s == pytest.approx(1350 / 1500 + 0.9, rel=0.01)


def test_a_bound_that_nobody_measured_is_unknown_and_not_zero() -> None:
    silent = Segment(SegmentName.WEIGHT_READ, 0.0, 1.0, detail="L2 cache: 12.0 MB, 2 chunks")
    assert weight_bound([use(0.0, 1.0, 900 * MB, 1e9), silent]) is None
    assert weight_bound([]) is None
    assert bound_words(5, fastest_bytes_per_s=0.0, took_s=1.0) == ""
    empty = Segment(SegmentName.WEIGHT_READ, 0.0, 1.0, detail="L0 peer: 0.0 MB, 0 chunks, gone")
    other = Segment(SegmentName.COMPILE, 0.0, 1.0, detail="x: 12.0 MB, bound 1 s at ")
    assert weight_bound([empty, other]) is None


@given(st.floats(1e-4, 1e3), st.integers(1, 10**12), st.floats(1e3, 1e11), st.integers(8, 40))
def test_what_an_agent_tells_is_read_back(
    took_s: float, size: int, fastest: float, chunks: int
) -> None:
    """Of any size that is told as some MB, and however short."""
    found = weight_bound([use(1.0, took_s, size, fastest, chunks=chunks)])
    if size < 60_000:
        assert found is None or found.efficiency <= 1.0
        return
    assert found is not None
    assert 0.0 < found.efficiency <= 1.0
    assert found.bound_s <= took_s * 1.01
