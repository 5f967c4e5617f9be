"""Doctor's look at this machine: Python, processors, memory, folders and ports."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from readyplane_lab.cli import doctor_left, output
from readyplane_lab.cli.finding import Finding

AREA = "machine"
SHM = "/dev/shm"  # noqa: S108 - looked at, not written to
PYTHON_OLDEST = (3, 11)
CPUS_WANTED = 2
MEMORY_WANTED_BYTES = 4e9
MEMORY_LEAST_BYTES = 1.5e9
SHM_WANTED_BYTES = 64e6
DISK_WANTED_BYTES = 3e9
DISK_LEAST_BYTES = 1e9
FILES_WANTED = 1024
PORTS_WANTED = 16


def findings(ports: Sequence[int], data_dir: Path | None) -> Iterator[Finding]:
    """Every finding about this machine; nothing is changed."""
    yield _python()
    yield _processors()
    yield _memory()
    yield _shm()
    yield _files()
    yield _folder("temporary folder", Path(tempfile.gettempdir()), "set TMPDIR to another folder")
    yield _state_folder()
    if data_dir is not None:
        yield _data_folder(data_dir.expanduser())
    yield _ports()
    for port in ports:
        yield _port(port)
    yield from doctor_left.findings(data_dir)


def _python() -> Finding:
    found = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info[:2] < PYTHON_OLDEST:
        return Finding(AREA, "Python", "fail", found, "use Python 3.11 or later")
    return Finding(AREA, "Python", "ok", f"{found} in {sys.prefix}")


def _processors() -> Finding:
    count = len(os.sched_getaffinity(0))
    if count < CPUS_WANTED:
        remedy = f"`up` needs {CPUS_WANTED}; with fewer, run it with --no-load or a low --rate"
        return Finding(AREA, "processors", "warn", str(count), remedy)
    return Finding(AREA, "processors", "ok", str(count))


def _memory() -> Finding:
    import psutil

    free = min(psutil.virtual_memory().available, _cgroup_room())
    found = f"{output.size(free)} available"
    if free < MEMORY_LEAST_BYTES:
        remedy = "free some: every worker of the demo holds its model (--model-mb, --workers-max)"
        return Finding(AREA, "memory", "fail", found, remedy)
    if free < MEMORY_WANTED_BYTES:
        remedy = "run `up` with a smaller --model-mb, or fewer --workers-max"
        return Finding(AREA, "memory", "warn", found, remedy)
    return Finding(AREA, "memory", "ok", found)


def _cgroup_room() -> float:
    """Bytes that the container may still take; infinite where no limit is known."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        return float("inf") if limit == "max" else max(0.0, float(limit) - float(used))
    except (OSError, ValueError):
        return float("inf")


def _shm() -> Finding:
    try:
        free = shutil.disk_usage(SHM).free
    except OSError:
        remedy = "mount a tmpfs there: PostgreSQL keeps shared memory in it"
        return Finding(AREA, SHM, "fail", "not there", remedy)
    found = f"{output.size(free)} free"
    if free < SHM_WANTED_BYTES:
        return Finding(AREA, SHM, "warn", found, "enlarge it (docker: --shm-size=256m)")
    return Finding(AREA, SHM, "ok", found)


def _files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < FILES_WANTED:
        remedy = f"raise it: ulimit -n {FILES_WANTED}"
        return Finding(AREA, "open files", "warn", f"{limit} at most", remedy)
    return Finding(AREA, "open files", "ok", f"{limit} at most")


def _folder(name: str, path: Path, remedy: str) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Finding(AREA, name, "fail", f"{path}: {error.strerror}", remedy)
    found = f"{path}, {output.size(free)} free"
    if free < DISK_LEAST_BYTES:
        return Finding(AREA, name, "fail", found, f"free some space, or {remedy}")
    if free < DISK_WANTED_BYTES:
        return Finding(AREA, name, "warn", found, f"the demo may fill it: {remedy}")
    return Finding(AREA, name, "ok", found)


def _state_folder() -> Finding:
    """Where the address book goes; made by `up`, so its nearest existing parent is looked at."""
    from readyplane_lab.up.address_book import book_path

    path = book_path().parent
    place = _existing(path)
    if os.access(place, os.W_OK | os.X_OK):
        return Finding(AREA, "state folder", "ok", str(path))
    remedy = "set XDG_STATE_HOME to a folder that this user may write to"
    return Finding(AREA, "state folder", "fail", f"{path} cannot be written", remedy)


def _data_folder(path: Path) -> Finding:
    place = _existing(path)
    remedy = "give another --data-dir"
    if not os.access(place, os.W_OK | os.X_OK):
        return Finding(AREA, "data folder", "fail", f"{path} cannot be written", remedy)
    if path.exists() and not path.is_dir():
        return Finding(AREA, "data folder", "fail", f"{path} is not a folder", remedy)
    if path.is_dir() and any(path.iterdir()) and not (path / "READYPLANE").exists():
        found = f"{path} holds other files"
        return Finding(AREA, "data folder", "fail", found, "give an empty folder, or a new one")
    if doctor_left.held(path):
        found = f"{path} is in use by a running `up`"
        return Finding(AREA, "data folder", "warn", found, f"stop that one, or {remedy}")
    return _folder("data folder", place, remedy)


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _ports() -> Finding:
    held: list[socket.socket] = []
    try:
        for _ in range(PORTS_WANTED):
            probe = socket.socket()
            held.append(probe)
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        remedy = "allow this user to bind ports on 127.0.0.1"
        return Finding(AREA, "free ports", "fail", f"127.0.0.1: {error.strerror}", remedy)
    finally:
        for probe in held:
            probe.close()
    return Finding(AREA, "free ports", "ok", "127.0.0.1 gives them")


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            remedy = f"stop what listens there (`ss -ltnp 'sport = :{port}'`), or use another port"
            return Finding(AREA, f"port {port}", "fail", error.strerror or "in use", remedy)
    return Finding(AREA, f"port {port}", "ok", "free")
