"""Doctor's look at what killed runs left behind: folders that nobody holds, processes below nobody.

Owns whose they are: a run is known by its data folder. What a running `up` holds is not left behind,
whoever started it; what another folder or installation left is named as that one's.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from readyplane_lab.cli.finding import Finding

if TYPE_CHECKING:
    import psutil

AREA = "machine"
NAME = "left behind"
NAMED_MAX = 6


@dataclass(frozen=True, slots=True)
class Orphan:
    """A process of a run whose supervisor is gone.

    Attributes:
        folder: the run's data folder; None where it is not known.
        installation: of which Python environment it is, where that is not this one; else empty.
    """

    pid: int
    name: str
    folder: Path | None = None
    installation: str = ""

    def __str__(self) -> str:
        """As a person reads it."""
        whose = f" of the installation {self.installation}" if self.installation else ""
        return f"process {self.pid} ({self.name}){whose}"


def findings(data_dir: Path | None) -> Iterator[Finding]:
    """What the next `up` clears away, what one elsewhere would, and what nobody will."""
    swept = abandoned(Path(tempfile.gettempdir()))
    own = {*swept, *([] if data_dir is None else [data_dir.expanduser().resolve()])}
    left = [f"folder {path}" for path in swept]
    elsewhere: dict[Path, list[Orphan]] = {}
    nobodys: list[Orphan] = []
    for orphan in orphans():
        if orphan.folder is None:
            nobodys.append(orphan)
        elif orphan.folder in own:
            left.append(str(orphan))
        else:
            elsewhere.setdefault(orphan.folder, []).append(orphan)
    if left:
        remedy = "start `readyplane up` once more (with the same --data-dir): it clears them away"
        yield Finding(AREA, NAME, "warn", _some(left), remedy)
    for folder, found in elsewhere.items():
        again = f"readyplane up --data-dir {shlex.quote(str(folder))}"
        remedy = f"if nobody needs them, `{again}` clears them away"
        yield Finding(AREA, f"{NAME} in {folder}", "warn", _some(found), remedy)
    if nobodys:
        pids = " ".join(str(orphan.pid) for orphan in nobodys)
        remedy = f"their run is not known; if nobody needs them: kill {pids}"
        yield Finding(AREA, f"{NAME} by others", "warn", _some(nobodys), remedy)
    if not (left or elsewhere or nobodys):
        yield Finding(AREA, NAME, "ok", "nothing of a killed run")


def _some(things: Sequence[object]) -> str:
    shown = ", ".join(str(thing) for thing in things[:NAMED_MAX])
    return shown + (f" and {len(things) - NAMED_MAX} more" if len(things) > NAMED_MAX else "")


def abandoned(parent: Path) -> list[Path]:
    """Temporary data folders of this user that nobody holds."""
    from readyplane_lab.up.folder import TEMPORARY_PREFIX

    found = []
    for path in sorted(parent.glob(f"{TEMPORARY_PREFIX}*")):
        try:
            if path.stat(follow_symlinks=False).st_uid == os.geteuid() and not held(path):
                found.append(path)
        except OSError:
            continue
    return found


def held(path: Path) -> bool:
    """Whether a running `up`, or the warden that cleans up after one, has the folder's lock."""
    from readyplane_lab.up.folder import LOCK_FILE

    try:
        descriptor = os.open(path / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def orphans() -> list[Orphan]:
    """Processes of runs that nobody holds any more: of those, the ones with nobody above them."""
    import psutil

    from readyplane_lab.up.pids import RUN_VARIABLE

    carriers: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if RUN_VARIABLE in process.environ():
                carriers[process.pid] = process
        except (psutil.Error, OSError):
            continue
    found = []
    for pid, process in carriers.items():
        try:
            parent = process.ppid()
            if parent in carriers or parent > 1 or process.status() == psutil.STATUS_ZOMBIE:
                continue
            folder = _folder_of(pid)
            if folder is None or not held(folder):  # else its `up` runs, as the first process
                found.append(Orphan(pid, process.name(), folder, _installation(process)))
        except psutil.Error:
            continue
    return found


def _folder_of(pid: int) -> Path | None:
    """The data folder of its run: that above the log that it writes to."""
    from readyplane_lab.up.folder import LAYOUT_FILE

    try:
        log = Path(f"/proc/{pid}/fd/1").readlink()
        return next((path for path in log.parents if (path / LAYOUT_FILE).is_file()), None)
    except OSError:
        return None


def _installation(process: psutil.Process) -> str:
    """The Python environment that it runs in, where it is another one than ours."""
    command = process.cmdline()
    program = Path(command[0]) if command else Path()
    ours = program == Path(sys.executable) or program.is_relative_to(sys.prefix)
    if ours or not program.is_absolute() or not program.name.startswith("python"):
        return ""
    return str(program.parent.parent)
