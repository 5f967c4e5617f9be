"""The segments of one start, as they happen (R6).

Owns what the agent measures itself and merges what the engine adapter reports; hands
`StartProgress` to the lease renewals and the finished segments to the trace exporter. Seconds on
CLOCK_MONOTONIC, which all processes of this machine share.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from readyplane.core.errors import Unavailable
from readyplane.core.startup import Segment, SegmentName
from readyplane.core.worker import StartProgress
from readyplane.kit.clock import Clock

LOG_TAIL_CHARS = 2000
SEAM_S_MAX = 0.5


def process_start_s(*, now_s: float) -> float:
    """When this process was created, on the monotonic clock, to 10 ms; `now_s` where /proc is not.

    The kernel counts ticks since boot on the boot clock; the two clocks differ by the time the
    machine was suspended, so both are read.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        booted_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        boot_now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, ValueError, IndexError, AttributeError):
        return now_s
    return min(now_s, now_s - (boot_now_s - booted_s))


@dataclass(slots=True)
class Span:
    """A segment that can still grow; `detail` may be asked at any time, from any thread."""

    name: SegmentName
    start_s: float
    end_s: float | None = None
    detail: str | Callable[[], str] = ""

    def segment(self) -> Segment:
        """The value as it stands now."""
        text = self.detail if isinstance(self.detail, str) else self.detail()
        return Segment(self.name, self.start_s, self.end_s, detail=text)


class StartTrace:
    """Spans of one start.

    Args:
        clock: time. process_start_s: when this process was created. ordered_at_s: when the order
            was given, on the same clock; None when nobody said.
    """

    def __init__(
        self, clock: Clock, *, process_start_s: float, ordered_at_s: float | None = None
    ) -> None:
        self._clock = clock
        self._spans: list[Span] = []
        self._engine: Callable[[], Sequence[Segment]] = tuple
        self.process_start_s = process_start_s
        self.ordered_at_s = ordered_at_s
        self.begin_s = process_start_s
        self.failure = self.dead_end = ""
        if ordered_at_s is not None:
            # A process cannot be older than its order; the kernel counts its start in ticks.
            self.process_start_s = max(process_start_s, ordered_at_s)
            self.begin_s = ordered_at_s
            self.add(SegmentName.SCHEDULE, ordered_at_s, self.process_start_s)

    def begin_anew(self) -> None:
        """The start begins now: what was before was a wait; its engine says what that saved."""
        now_s = self._clock.monotonic_s()
        self._spans.clear()
        self.ordered_at_s, self.begin_s, self.process_start_s = None, now_s, now_s

    def add(
        self, name: SegmentName, start_s: float, end_s: float | None = None, detail: str = ""
    ) -> Span:
        """A segment measured elsewhere."""
        span = Span(name, start_s, end_s, detail)
        self._spans.append(span)
        return span

    def forget(self, span: Span) -> None:
        """Take a segment out: of many that say the same the latest are enough."""
        self._spans = [each for each in self._spans if each is not span]

    @contextmanager
    def span(
        self, name: SegmentName, detail: str | Callable[[], str] = "", *, follows: bool = False
    ) -> Iterator[Span]:
        """Time a block; a block that raises leaves its segment open, which shows where it broke.

        With `follows` it begins where the last segment ended, when none runs and that was at most
        SEAM_S_MAX ago: for a step whose preparation is all that lies between. What is longer is no
        preparation, and stays unexplained.
        """
        begin_s = self._clock.monotonic_s()
        idle_s = begin_s - self._idle_since_s(begin_s) if follows else 0.0
        if 0.0 < idle_s <= SEAM_S_MAX:
            begin_s -= idle_s
        span = Span(name, begin_s, None, detail)
        self._spans.append(span)
        yield span
        span.end_s = self._clock.monotonic_s()

    def _idle_since_s(self, now_s: float) -> float:
        """When the last segment ended; now while one runs, or when there was none."""
        ends = [segment.end_s for segment in self.segments()]
        return max((end_s or now_s for end_s in ends), default=now_s)

    def follow_engine(self, segments: Callable[[], Sequence[Segment]]) -> None:
        """Take the engine's own segments in from now on."""
        self._engine = segments

    def segments(self) -> tuple[Segment, ...]:
        """Everything known now, by start time."""
        found = [span.segment() for span in list(self._spans)]
        everything = (*found, *self._engine())
        return tuple(
            sorted(
                everything, key=lambda s: (s.start_s, float("inf") if s.end_s is None else s.end_s)
            )
        )

    def open_segment(self) -> str:
        """Name of the running segment that began last, empty when none runs."""
        running = [s for s in self.segments() if s.end_s is None]
        return str(running[-1].name) if running else ""

    def progress(self, log_tail: str = "") -> StartProgress:
        """What a renewal tells the router."""
        return StartProgress(
            start_s=self.process_start_s,
            now_s=self._clock.monotonic_s(),
            segments=self.segments(),
            log_tail=log_tail[-LOG_TAIL_CHARS:],
            failure=self.failure,
            dead_end=self.dead_end,
        )


async def within(work: Awaitable[None], *, limit_s: float, trace: StartTrace) -> None:
    """Bound a start as a whole. Raises Unavailable naming the segment that blocks."""
    try:
        async with asyncio.timeout(limit_s):
            await work
    except TimeoutError:
        raise Unavailable(
            f"the start took longer than {limit_s:g} s and hangs in {trace.open_segment() or 'nothing'}",
            "see the log's end, or raise --start-limit-s",
        ) from None
