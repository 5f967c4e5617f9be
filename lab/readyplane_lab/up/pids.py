"""Who a pid is: the facts of /proc by which a process is told from the next one with its number.

Owns the start mark, the search for descendants and for carriers of a run id, and the signal that hits
nobody but the process that was meant. Hands them to `readyplane_lab.up.processes`. Linux only.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

RUN_VARIABLE = "READYPLANE_RUN"


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    parent: int
    start_tick: str


def start_mark(pid: int, *, or_zombie: bool = False) -> str | None:
    """What tells this life of `pid` from every other one; None when nothing lives there.

    `psutil`'s create_time is wall-clock time, which moves when the clock is set; ticks since boot
    do not. Boot id and pid namespace keep a data folder that travels between machines and containers
    from naming somebody else's process. A zombie does not live, but its parent may still ask for it.
    """
    stat = _stat(pid)
    if stat is None or (stat.state in "ZXx" and not or_zombie):
        return None
    return _mark(stat)


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return _Stat(state=fields[0], parent=int(fields[1]), start_tick=fields[19])


def _mark(stat: _Stat) -> str:
    return f"{_kernel()}/{stat.start_tick}"


@functools.cache
def _kernel() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def descendants(*pids: int) -> set[tuple[int, str]]:
    """(pid, start mark) of all below these, in other sessions as well (Postgres backends are)."""
    stats = {each: stat for each in _all_pids() if (stat := _stat(each)) is not None}
    below: set[int] = set()
    level = set(pids)
    while level:
        level = {each for each, stat in stats.items() if stat.parent in level} - below
        below |= level
    return {(each, _mark(stats[each])) for each in below}


def carriers(run_ids: set[str], log_paths: Iterable[Path] = ()) -> set[tuple[int, str]]:
    """(pid, start mark) of the processes that carry a mark of one of the runs; never ourselves.

    The mark is the run id in the environment, or a log of the run as the place where standard output
    is written to: servers that set their title (Postgres, Valkey) write it over their environment.
    """
    wanted = {f"{RUN_VARIABLE}={run_id}".encode() for run_id in run_ids}
    logs = {facts for path in log_paths if (facts := _file(path)) is not None}
    own_line = _own_line()
    found: set[tuple[int, str]] = set()
    for pid in _all_pids() if wanted else ():
        mark = start_mark(pid)
        if mark is None or pid in own_line:
            continue
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if not wanted.isdisjoint(environment) or (logs and _writes_to(pid, logs)):
                found.add((pid, mark))
    return found


def _file(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _writes_to(pid: int, logs: set[tuple[int, int]]) -> bool:
    """Whether its standard output is one of these files; who only reads a log does not count."""
    if _file(Path(f"/proc/{pid}/fd/1")) not in logs:
        return False
    facts = Path(f"/proc/{pid}/fdinfo/1").read_text(encoding="ascii").split()
    return int(facts[facts.index("flags:") + 1], 8) & os.O_ACCMODE != os.O_RDONLY


def holders(path: Path) -> set[tuple[int, str]]:
    """(pid, start mark) of the processes that have the file open; never ourselves."""
    wanted = path.stat()
    found: set[tuple[int, str]] = set()
    for pid in set(_all_pids()) - {os.getpid()}:
        mark = start_mark(pid)
        with contextlib.suppress(OSError):
            facts = [entry.stat() for entry in Path(f"/proc/{pid}/fd").iterdir()]
            if mark is not None and any(os.path.samestat(wanted, each) for each in facts):
                found.add((pid, mark))
    return found


def _own_line() -> set[int]:
    line: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in line:
        line.add(pid)
        stat = _stat(pid)
        pid = stat.parent if stat is not None else 0
    return line


def signal_exactly(pid: int, mark: str, signum: int) -> bool:
    """Signal the process if it still is the one that was recorded: the pidfd pins it while we look."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError as error:
        if error.errno not in {errno.ENOSYS, errno.EPERM}:
            return False
        pidfd = None
    try:
        if start_mark(pid) != mark:
            return False
        if pidfd is None:
            os.kill(pid, signum)
        else:
            signal.pidfd_send_signal(pidfd, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if pidfd is not None:
            os.close(pidfd)
    return True
