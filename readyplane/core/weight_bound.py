"""The least time that a start's weights can take, M / B_min, beside what they took (R7.1). Pure.

Owns the words in which an agent tells the bound of one source in a segment's detail, and the reading of
them. B is measured: the fastest run of chunks that the way from that source has shown in this load,
from asking until the bytes were verified, so that it is the narrowest part of the way as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from readyplane.core.startup import Segment, SegmentName

WEIGHTS = frozenset({SegmentName.WEIGHT_READ, SegmentName.WEIGHT_TRANSFER})
_SIZE = re.compile(r": ([\d.]+) MB, ")
_BOUND = re.compile(r"\bbound ([\d.e+-]+) s at ")


@dataclass(frozen=True, slots=True)
class WeightBound:
    """Bytes of one start's weights, their least seconds, and the seconds in which they came.

    Several sources at once could have given all of it in bytes over the sum of their bandwidths.
    """

    size_bytes: float
    bound_s: float
    measured_s: float

    @property
    def efficiency(self) -> float:
        """Bound over measured, 0 to 1."""
        return min(1.0, self.bound_s / self.measured_s) if self.measured_s > 0 else 1.0


def bound_words(size_bytes: int, *, fastest_bytes_per_s: float, took_s: float) -> str:
    """What an agent tells of one source; empty where no bandwidth was measured."""
    if fastest_bytes_per_s <= 0 or took_s <= 0:
        return ""
    bound_s = size_bytes / fastest_bytes_per_s
    return (
        f"bound {bound_s:.4g} s at the fastest measured {fastest_bytes_per_s / 1e9:.2f} GB/s, "
        f"efficiency {bound_s / took_s:.2f}"
    )


def weight_bound(segments: Iterable[Segment]) -> WeightBound | None:
    """The bound of a whole start; None where a source that gave bytes told none."""
    found: list[tuple[float, float, float, float]] = []
    for segment in segments:
        size = _SIZE.search(segment.detail)
        if segment.name not in WEIGHTS or segment.end_s is None or size is None:
            continue
        size_bytes = float(size[1]) * 1e6
        if not size_bytes:
            continue
        bound = _BOUND.search(segment.detail)
        bound_s = 0.0 if bound is None else float(bound[1])
        if bound_s <= 0:
            return None
        found.append((segment.start_s, segment.end_s, size_bytes, bound_s))
    return _joined(sorted(found)) if found else None


def _joined(uses: list[tuple[float, float, float, float]]) -> WeightBound:
    """Uses that overlap shared the time: their bandwidths add up; others came one after another."""
    size_bytes = bound_s = measured_s = 0.0
    at = 0
    while at < len(uses):
        start_s, end_s, size, rate = uses[at][0], uses[at][1], 0.0, 0.0
        while at < len(uses) and uses[at][0] <= end_s:
            _, until_s, bytes_of_it, own_s = uses[at]
            end_s = max(end_s, until_s)
            size, rate = size + bytes_of_it, rate + bytes_of_it / own_s
            at += 1
        size_bytes, bound_s, measured_s = (
            size_bytes + size,
            bound_s + size / rate,
            measured_s + end_s - start_s,
        )
    return WeightBound(size_bytes, bound_s, measured_s)
