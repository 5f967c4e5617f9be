"""`readyplane up` as a person runs it: killed with everything it started, run again, stopped by Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from readyplane_lab.cli.__main__ import main

READY = "a first pair is routable"
WITHIN_S = 180.0


class Up:
    """One `readyplane up` process with its output."""

    def __init__(self, data_dir: Path, state: Path, *arguments: str) -> None:
        self.data_dir = data_dir
        command = [sys.executable, "-m", "readyplane_lab.cli", "up", "--plain"]
        self.process = subprocess.Popen(
            [*command, "--data-dir", str(data_dir), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "XDG_STATE_HOME": str(state), "COLUMNS": "160"},
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def end(self) -> int:
        """Wait for the process and for the last of its output."""
        returncode = self.process.wait(120.0)
        self._reader.join(10.0)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return returncode

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, needle: str) -> None:
        deadline = time.monotonic() + WITHIN_S
        while needle not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.2)

    def children(self) -> set[int]:
        """Pids of everything that belongs to this run, by its folder or its table."""
        tables = (self.data_dir / "run").glob("processes-*.json")
        run_ids = {t.stem.removeprefix("processes-") for t in tables}
        return {pid for pid in map(int, _pids()) if _environment(pid) & run_ids}


def _pids() -> list[str]:
    return [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]


def _file_of(pid: int, name: str) -> bytes:
    """A file of a process under /proc, empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _environment(pid: int) -> set[str]:
    raw = _file_of(pid, "environ").split(b"\0")
    return {v.partition(b"=")[2].decode() for v in raw if v.startswith(b"READYPLANE_RUN=")}


def _published(text: str) -> str:
    return next(word for word in text.split() if word.startswith("sha256:"))


def short_requests(folder: Path) -> Path:
    """A trace of one request a second, of which none is long: the end waits for those in flight."""
    rows = [f"2026-01-01 00:{n // 60:02}:{n % 60:02}.0,40,8" for n in range(600)]
    trace = folder / "short.csv"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return trace


@pytest.mark.timeout(600)
def test_killed_with_everything_run_again_and_stopped(tmp_path: Path) -> None:
    data, state = tmp_path / "data", tmp_path / "state"
    first = Up(data, state, "--no-load")
    first.wait_for(READY)
    agents = [pid for pid in first.children() if b"readyplane_agent" in _file_of(pid, "cmdline")]
    assert agents
    for pid in agents:  # an agent asks services: no store's password is in its environment
        told = _file_of(pid, "environ")
        assert b"READYPLANE_TOKEN=" in told
        assert b"READYPLANE_DATABASE_URL=" not in told
        assert b"READYPLANE_REDIS_URL=" not in told
    book = json.loads((state / "readyplane" / "up.json").read_text())
    assert book["pid"] == first.process.pid
    killed = first.children()
    assert len(killed) >= 6  # four services, two agents and their engines
    for pid in [first.process.pid, *killed]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert first.end() == -signal.SIGKILL

    second = Up(data, state, "--trace", str(short_requests(tmp_path)))
    second.wait_for(READY)
    assert _published(second.text) == _published(first.text)
    own = second.children()
    assert not own & killed
    second.wait_for("requests, attainment")
    time.sleep(6.0)
    second.process.send_signal(signal.SIGINT)
    assert second.end() == 0, second.text
    assert "summary" in second.text
    assert "requests:" in second.text
    assert second.children() == set()
    assert not any(Path(f"/proc/{pid}").exists() for pid in own)
    assert not (state / "readyplane" / "up.json").exists()


def test_bad_arguments_start_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "160")
    broken = tmp_path / "trace.csv"
    broken.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,5\n")
    cases = [
        (["--trace", str(broken)], "line 2"),
        (["--trace", str(tmp_path / "absent.csv")], "absent.csv"),
        (["--speed", "0"], "--speed"),
        (["--data-dir", "/proc/readyplane"], "data_dir"),
        (["--page-port", "70000"], "--page-port"),
    ]
    for arguments, needle in cases:
        code = main(["up", *arguments])
        said = "".join(capfd.readouterr())
        assert code == 2, (arguments, said)
        assert needle in said, (arguments, said)
        assert "Traceback" not in said
    assert not (tmp_path / "state").exists() or not any((tmp_path / "state").rglob("up.json"))
