"""What a test leaves running is found, named and ended, also when its parent is gone."""

import subprocess
import sys
import time

import psutil
import pytest

from tests import left_running

ORPHAN = (
    "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', "
    "'import time; time.sleep(600)'], stdout=subprocess.DEVNULL).pid)"
)


def test_an_orphan_is_named_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(left_running.MARK, "")  # the session's own mark is back afterwards
    monkeypatch.setattr(left_running, "END_S_MAX", 0.3)
    pid = 0
    with (
        pytest.raises(pytest.fail.Exception, match=r"time\.sleep") as failed,
        left_running.nothing_left(),
    ):
        pid = int(subprocess.check_output([sys.executable, "-c", ORPHAN]))
    assert f" {pid} " in str(failed.value)
    end_s = time.monotonic() + 20.0
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_what_ends_in_time_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(left_running.MARK, "")
    with left_running.nothing_left():
        subprocess.run([sys.executable, "-c", "pass"], check=True)
