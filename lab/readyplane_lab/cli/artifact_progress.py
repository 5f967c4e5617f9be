"""How far a publication is: a bar on a terminal, a line now and then elsewhere; bytes, rate, time left.

Owns what is shown on stderr while `readyplane artifact publish` works. Handed to `artifact`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from readyplane_lab.cli import output

if TYPE_CHECKING:
    from readyplane.kit.clock import Clock
    from readyplane_registry.ingest import Progress

LINE_EVERY_S = 10.0


def line(step: Progress, *, elapsed_s: float) -> str:
    """One line about a phase: bytes of all, rate, and seconds left at that rate."""
    told = f"{step.phase}: {output.size(step.done_bytes)} of {output.size(step.total_bytes)}"
    if elapsed_s <= 0 or step.done_bytes == 0:
        return told
    rate = step.done_bytes / elapsed_s
    left_s = (step.total_bytes - step.done_bytes) / rate
    return f"{told}, {output.size(round(rate))}/s, {left_s:.0f} s left"


@contextmanager
def shown() -> Iterator[Callable[[Progress], None]]:
    """Takes steps and shows them, in a way that suits stderr."""
    if sys.stderr.isatty():
        with _bars() as moved:
            yield moved
        return
    from readyplane.kit.clock import SystemClock

    yield Lines(SystemClock())


class Lines:
    """A line on stderr for each phase, at most once in `LINE_EVERY_S`; none of short phases."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._phase, self._began_s, self._told_s = "", 0.0, 0.0

    def __call__(self, step: Progress) -> None:
        """Take a step."""
        now_s = self._clock.monotonic_s()
        if step.phase != self._phase:
            self._phase, self._began_s, self._told_s = step.phase, now_s, now_s
        if now_s - self._told_s >= LINE_EVERY_S:
            self._told_s = now_s
            print(line(step, elapsed_s=now_s - self._began_s), file=sys.stderr, flush=True)


@contextmanager
def _bars() -> Iterator[Callable[[Progress], None]]:
    """One bar for hashing and one for uploading, gone at the end."""
    from rich import progress

    bar = progress.Progress(
        progress.TextColumn("{task.description:<10}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=output.console(stderr=True),
        transient=True,
    )
    tasks: dict[str, Any] = {}

    def moved(step: Progress) -> None:
        if step.phase not in tasks:
            tasks[step.phase] = bar.add_task(step.phase, total=step.total_bytes)
        bar.update(tasks[step.phase], completed=step.done_bytes, total=step.total_bytes)

    with bar:
        yield moved
