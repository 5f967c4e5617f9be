"""Which waiting requests can still be in time, when not all of them can, and whose they are.

Owns one rule, Moore and Hodgson's: served by deadline, whenever one would be late the longest of
those before it steps back. No other choice keeps more of them in time. Served by deadline alone, an
overloaded queue is late for everybody: it works for those whose time has passed while the others'
runs out.

Between tenants, whoever has the most work among those before it steps back, so that a tenant that
floods the queue is late by itself: nobody steps back for another's work while its own is no more
than an equal share of what fits. With one tenant this is the rule above.

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
    tenant: str = ""


class _Kept:
    """Those of one priority that are in time so far, each tenant's longest first."""

    def __init__(self) -> None:
        self._of: dict[str, list[tuple[float, int]]] = {}
        self._work_s: dict[str, float] = {}

    def add(self, job: Job, place: int) -> None:
        heappush(self._of.setdefault(job.tenant, []), (-job.work_s, place))
        self._work_s[job.tenant] = self._work_s.get(job.tenant, 0.0) + job.work_s

    def pop(self) -> tuple[float, int]:
        """Take out the longest of whoever has the most."""
        who = max(self._of, key=lambda tenant: (self._work_s[tenant], self._of[tenant][0][0]))
        negative_s, place = heappop(self._of[who])
        self._work_s[who] += negative_s
        if not self._of[who]:
            del self._of[who], self._work_s[who]
        return negative_s, place


def too_late(jobs: Iterable[Job], *, workers: float, busy_s: float) -> set[int]:
    """Places of the jobs that step back so that most of the others are in time.

    Args:
        jobs: in the order in which they are served: by priority, then by deadline.
        workers: that serve them, in equivalents of the one whose seconds the jobs are in; all
            step back where there are none. busy_s: until a worker is free, on average.
    """
    late: set[int] = set()
    kept = _Kept()  # of the present priority
    priority: int | None = None
    ahead_s = 0.0  # work before the present job
    for place, job in enumerate(jobs):
        if workers <= 0 or job.work_s > job.left_s:
            late.add(place)
            continue
        if job.priority != priority:
            priority = job.priority
            kept = _Kept()
        kept.add(job, place)
        ahead_s += job.work_s
        # The last of them takes its own time on one worker, the rest is shared by all.
        while busy_s + (ahead_s - job.work_s) / workers + job.work_s > job.left_s:
            negative_s, longest = kept.pop()
            late.add(longest)
            ahead_s += negative_s
            if longest == place:
                break  # without it they were in time, and some of them have gone since
    return late


class Shares:
    """Turns between tenants among those that stepped back: start-time fair queueing in work.

    A tenant's next request begins where its last one ends, and nobody's before what is being served:
    whoever asks for little is served before the rest of whoever asks for much.
    """

    TENANTS_MAX = 4_096

    def __init__(self) -> None:
        """Nobody has had anything."""
        self._served: dict[int, float] = {}
        self._ends: dict[tuple[int, str], float] = {}

    def turn(self, priority: int, tenant: str, work_s: float) -> float:
        """The turn of one more request of a tenant."""
        begin = max(self._served.get(priority, 0.0), self._ends.get((priority, tenant), 0.0))
        if len(self._ends) >= self.TENANTS_MAX:
            self._ends.clear()
        self._ends[priority, tenant] = begin + work_s
        return begin

    def served(self, priority: int, turn: float) -> None:
        """A request has been placed, in its turn."""
        self._served[priority] = max(self._served.get(priority, 0.0), turn)

    def clear(self) -> None:
        """Nobody waits any more: what was had before counts no longer."""
        self._served.clear()
        self._ends.clear()
