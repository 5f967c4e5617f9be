"""Which waiting requests can still be in time, when not all of them can.

Owns one rule, Moore and Hodgson's: served by deadline, whenever one would be late the longest of
those before it steps back. No other choice keeps more of them in time. Served by deadline alone, an
overloaded queue is late for everybody: it works for those whose time has passed while the others'
runs out.

Who steps back is not refused: it goes on waiting behind those that can be in time, within the
bounds of every wait. Priorities come first: a request never steps back for a less important one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True, slots=True)
class Job:
    """A waiting request: seconds of its own prefill on one worker, and until it must have ended."""

    priority: int
    work_s: float
    left_s: float


def too_late(jobs: Iterable[Job], *, workers: float, busy_s: float) -> set[int]:
    """Places of the jobs that step back so that most of the others are in time.

    Args:
        jobs: in the order in which they are served: by priority, then by deadline.
        workers: that serve them, in equivalents of the one whose seconds the jobs are in; all
            step back where there are none. busy_s: until a worker is free, on average.
    """
    late: set[int] = set()
    kept: list[tuple[float, int]] = []  # of the present priority, longest first
    priority: int | None = None
    ahead_s = 0.0  # work before the present job
    for place, job in enumerate(jobs):
        if workers <= 0 or job.work_s > job.left_s:
            late.add(place)
            continue
        if job.priority != priority:
            priority = job.priority
            kept.clear()
        heappush(kept, (-job.work_s, place))
        ahead_s += job.work_s
        # The last of them takes its own time on one worker, the rest is shared by all.
        ends_s = busy_s + (ahead_s - job.work_s) / workers + job.work_s
        if ends_s > job.left_s:
            work_s, longest = heappop(kept)
            late.add(longest)
            ahead_s += work_s
    return late
