"""What is told of a publication where there is no terminal: bytes, rate, time left, now and then."""

import threading

import pytest

from readyplane.kit.clock import SystemClock
from readyplane_lab.cli import artifact_progress
from readyplane_lab.cli.artifact_progress import LINE_EVERY_S, Lines, line
from readyplane_registry.ingest import Progress


class Clock:
    now = 100.0

    def monotonic_s(self) -> float:
        return self.now

    def wall_s(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def step(done: int, phase: str = "upload") -> Progress:
    return Progress(phase, "f", done, 10_000_000)


def test_a_line_has_bytes_rate_and_time_left() -> None:
    told = line(step(2_500_000), elapsed_s=5.0)
    assert told == "upload: 2.5 MB of 10.0 MB, 500 kB/s, 15 s left"
    assert line(step(0), elapsed_s=5.0) == "upload: 0 B of 10.0 MB", "no rate is no time left"


def test_lines_come_now_and_then_and_rates_are_of_their_phase(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    lines = Lines(clock)
    for phase in ("hash", "upload"):
        for n in range(1, 5):
            lines(step(n * 1_000_000, phase))
            clock.now += LINE_EVERY_S / 2
    told = capsys.readouterr().err.splitlines()
    assert [t.partition(":")[0] for t in told] == ["hash", "upload"]
    assert all("3.0 MB of 10.0 MB, 600 kB/s" in t for t in told)


def test_an_upload_that_stands_still_is_told_of_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    lines = Lines(clock)
    lines.look()
    clock.now += 2 * LINE_EVERY_S
    lines(step(10_000_000))
    assert capsys.readouterr().err == "", "a phase that has just begun"
    for _ in range(3):
        clock.now += LINE_EVERY_S
        lines.look()
        lines.look()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert told[-1].startswith("upload: 10.0 MB of 10.0 MB") and "moved for 15 s" in told[-1]


def test_without_a_terminal_lines_come_by_themselves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_progress, "LINE_EVERY_S", 0.01)
    with artifact_progress.shown() as moved:
        moved(step(5_000_000))
        seen, clock = "", SystemClock()
        until_s = clock.monotonic_s() + 30.0
        while "nothing has moved" not in seen and clock.monotonic_s() < until_s:
            threading.Event().wait(0.01)
            seen += capsys.readouterr().err
    assert "upload: 5.0 MB of 10.0 MB" in seen and "nothing has moved" in seen
    left = [t.name for t in threading.enumerate() if t.name == "publish-progress"]
    assert not left, "nobody tells on after the end"
