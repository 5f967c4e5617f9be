"""What a killed supervisor left running, and its end.

Owns the reading of tables that `readyplane_lab.up.processes` wrote in an earlier life, and the rule of
who may be ended: the very processes that were written down, their descendants, and carriers of the
marks of that run. Nobody is ended by name, and nobody whose pid was given away since.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from readyplane.core.errors import Unavailable
from readyplane_lab.up.pids import carriers, descendants, signal_exactly, start_mark
from readyplane_lab.up.processes import KILLED_GONE_S_MAX, POLL_EVERY_S, ProcessRecord

STARTING_S = 2.0

log = logging.getLogger(__name__)


async def reap(run_dir: Path, *, grace_s: float = 10.0, dying_s: float = 0.0) -> tuple[str, ...]:
    """End what earlier supervisors of this folder left running; return the names that were ended.

    Asks each process with its own stop signal, waits `grace_s` for all of them together, then kills
    them, their descendants and every process that carries the run id. Tables of a supervisor that is
    alive, and tables that another user wrote, are left alone. Who knows that the supervisor is dead
    or dying gives it `dying_s` to be gone: a killed process is seen alive for a moment.
    """
    found = [table for path in sorted(run_dir.glob("processes-*.json")) if (table := _read(path))]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(dying_s):
            while any(table.supervisor_lives() and not table.is_ours() for table in found):
                await asyncio.sleep(POLL_EVERY_S)
    tables = [table for table in found if not table.supervisor_lives()]
    records = [record for table in tables for record in table.records]
    left = [record for record in records if start_mark(record.pid) == record.start_mark]
    targets = {(record.pid, record.start_mark) for record in left}
    targets |= descendants(*(record.pid for record in left)) if left else set()
    for record in left:
        signal_exactly(record.pid, record.start_mark, record.stop_signal)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            while any(start_mark(record.pid) == record.start_mark for record in left):
                await asyncio.sleep(POLL_EVERY_S)
    runs = {table.run_id for table in tables}
    logs = {path for table in tables for path in table.log_paths()}
    if any(table.starting for table in tables):
        # A child between fork and exec still shows its parent's environment: look for a while.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STARTING_S):
                while True:
                    targets |= carriers(runs, logs)
                    await asyncio.sleep(POLL_EVERY_S)
    try:
        async with asyncio.timeout(KILLED_GONE_S_MAX):
            while alive := [t for t in targets | carriers(runs, logs) if start_mark(t[0]) == t[1]]:
                for pid, mark in alive:
                    signal_exactly(pid, mark, signal.SIGKILL)
                await asyncio.sleep(POLL_EVERY_S)
    except TimeoutError:
        raise Unavailable(
            f"processes of an earlier run do not end (folder {run_dir})",
            "end them by hand: " + ", ".join(f"{r.name} (pid {r.pid})" for r in left),
        ) from None
    for table in tables:
        table.path.unlink(missing_ok=True)
    return tuple(record.name for record in left)


@dataclass(frozen=True, slots=True)
class _Table:
    path: Path
    run_id: str
    supervisor: tuple[int, str]
    starting: str | None
    records: tuple[ProcessRecord, ...]

    def log_paths(self) -> set[Path]:
        written = {record.log_path for record in self.records}
        return {Path(text) for text in (written | {self.starting or ""}) if text}

    def supervisor_lives(self) -> bool:
        pid, mark = self.supervisor
        return start_mark(pid) == mark

    def is_ours(self) -> bool:
        return self.supervisor[0] == os.getpid()


def _read(path: Path) -> _Table | None:
    """The table, if this user wrote it. One that cannot be read names nothing but its run."""
    try:
        if path.stat(follow_symlinks=False).st_uid != os.geteuid():
            return None
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        supervisor = (int(raw["supervisor"]["pid"]), str(raw["supervisor"]["start_mark"]))
        records = tuple(ProcessRecord(**entry) for entry in raw["processes"])
        return _Table(path, str(raw["run"]), supervisor, raw["starting"], records)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("table of processes %s is not readable (%s) and is dropped", path, error)
        return _Table(path, path.stem.removeprefix("processes-"), (0, ""), None, ())
