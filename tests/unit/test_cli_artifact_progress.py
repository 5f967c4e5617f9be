"""What is told of a publication where there is no terminal: bytes, rate, time left, now and then."""

import threading
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import Unavailable
from readyplane.kit.clock import SystemClock
from readyplane_lab.cli import artifact_progress
from readyplane_lab.cli.artifact_progress import LINE_EVERY_S, Lines, line
from readyplane_registry.ingest import Progress, publish_directory
from tests.registry_data import model_folder
from tests.unit.test_cli_artifact import World


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


def test_a_byte_store_that_says_nothing_is_who_is_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    lines = Lines(clock)
    lines(step(10_000_000, "hash"))
    lines(Progress("ask", "model-1.safetensors", 2_000_000, 10_000_000))
    clock.now += 114.0
    lines.look()
    lines(Progress("check", "", 0, 10_000_000))
    clock.now += 20.0
    lines.look()
    asked, checked = capsys.readouterr().err.splitlines()
    assert asked == (
        "ask: waiting for the registry's byte store to say whether it holds model-1.safetensors; "
        "it has answered for 2.0 MB of 10.0 MB; no answer for 114 s"
    )
    assert checked.startswith("check: waiting for the registry") and "for 20 s" in checked


async def test_asking_what_is_stored_is_a_phase_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was told last before the byte store hangs is not that something is hashed."""
    registry = World(tmp_path / "blobs", monkeypatch)
    steps: list[Progress] = []

    class Hung:
        async def has(self, sha256: str, size_bytes: int) -> bool:
            raise Unavailable("the byte store hangs", "wait")

    def publish(sink: Any) -> Any:
        return publish_directory(
            folder, model="m", registry=registry.service, sink=sink, progress=steps.append
        )

    folder = model_folder(tmp_path / "model")
    with pytest.raises(Unavailable):
        await publish(Hung())
    assert (steps[-1].phase, steps[-1].done_bytes) == ("ask", 0) and steps[-1].file
    assert steps[0].phase == "hash"
    steps.clear()
    await publish(registry)
    phases = list(dict.fromkeys(s.phase for s in steps))
    assert phases == ["hash", "ask", "upload", "check"]


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
