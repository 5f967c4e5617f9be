"""How far a publication is: a bar on a terminal, a line now and then elsewhere; bytes, rate, time left.

Owns what is shown on stderr while `readyplane artifact publish` works. Handed to `artifact`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from readyplane_lab.cli import output

if TYPE_CHECKING:
    from readyplane.kit.clock import Clock
    from readyplane_registry.ingest import Progress

LINE_EVERY_S = 5.0
JOIN_S_MAX = 10.0


WAITS = ("ask", "check")
"""Phases in which nothing is read or sent here: the registry and its byte store have to answer."""


def line(step: Progress, *, elapsed_s: float) -> str:
    """One line about a phase: bytes of all, rate, and seconds left at that rate; or who is waited for."""
    if step.phase == "check":
        return (
            "check: waiting for the registry, which looks at what its byte store holds of "
            f"{output.size(step.total_bytes)} before it takes the name"
        )
    if step.phase == "ask":
        return (
            "ask: waiting for the registry's byte store to say whether it holds "
            f"{step.file}; it has answered for {output.size(step.done_bytes)} of "
            f"{output.size(step.total_bytes)}"
        )
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

    lines, ended = Lines(SystemClock()), threading.Event()

    def look() -> None:
        while not ended.wait(LINE_EVERY_S):
            lines.look()

    # Of its own, since a store that answers nothing moves nothing: that is told, too.
    teller = threading.Thread(target=look, name="publish-progress", daemon=True)
    teller.start()
    try:
        yield lines
    finally:
        ended.set()
        teller.join(JOIN_S_MAX)


class Lines:
    """A line on stderr once in `LINE_EVERY_S`, also where nothing moves; none of short phases.

    `look` may come from another thread than the steps do.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._step: Progress | None = None
        self._began_s, self._moved_s, self._told_s = 0.0, 0.0, 0.0

    def __call__(self, step: Progress) -> None:
        """Take a step."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            if self._step is None or step.phase != self._step.phase:
                self._began_s = self._told_s = now_s
            self._step, self._moved_s = step, now_s
        self.look()

    def look(self) -> None:
        """Tell how far it is, where it is time to; and since when nothing has moved."""
        with self._lock:
            now_s, step = self._clock.monotonic_s(), self._step
            if step is None or now_s - self._told_s < LINE_EVERY_S:
                return
            self._told_s = now_s
            told = line(step, elapsed_s=now_s - self._began_s)
            still_s = now_s - self._moved_s
            if still_s >= LINE_EVERY_S:
                quiet = "no answer" if step.phase in WAITS else "nothing has moved"
                told += f"; {quiet} for {still_s:.0f} s"
            print(told, file=sys.stderr, flush=True)


@contextmanager
def _bars() -> Iterator[Callable[[Progress], None]]:
    """A bar for hashing, one for asking what is there, one for uploading, gone at the end."""
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
            words = {"ask": "ask the byte store", "check": "await registry"}
            name = words.get(step.phase, step.phase)
            tasks[step.phase] = bar.add_task(name, total=step.total_bytes)
        bar.update(tasks[step.phase], completed=step.done_bytes, total=step.total_bytes)

    with bar:
        yield moved
