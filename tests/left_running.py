"""What tests started and did not stop: found by a variable of the environment that children inherit.

Owns the check at the end of each test process. A child whose parent has gone carries the variable
still; who was given an environment of its own does not, and is not seen here.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

MARK = "TESTS_OF_READYPLANE"  # not READYPLANE_*: services read those as their settings
END_S_MAX = 30.0
# Python's own servants, which end with this process.
OWN = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")


def carriers(token: str) -> dict[int, str]:
    """pid -> command line of the living processes that carry this mark; without this one."""
    found: dict[int, str] = {}
    wanted = f"{MARK}={token}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone, or another user's
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            words = (folder / "cmdline").read_bytes().split(b"\0")
            command = b" ".join(words).decode(errors="replace").strip()
            if command and not any(own in command for own in OWN):
                found[int(folder.name)] = command
    found.pop(os.getpid(), None)
    return found


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails at its end when something that was started within it still runs; ends that, too."""
    token = secrets.token_hex(8)
    os.environ[MARK] = token
    try:
        yield
    finally:
        os.environ.pop(MARK, None)
    end_s = time.monotonic() + END_S_MAX
    while (left := carriers(token)) and time.monotonic() < end_s:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if left:
        shown = "\n".join(f"  {pid} {command[:200]}" for pid, command in left.items())
        pytest.fail(f"tests have left processes running:\n{shown}", pytrace=False)
