"""The data folder of a local stack: one layout, one holder at a time, nothing left of a temporary one.

Owns the folder's format (file `READYPLANE`), its lock, its subfolders and its end. Hands paths to the
stores and services of `readyplane up`. Run as a module it is the warden: a small process that waits for
its supervisor's death by `kill -9` and then ends what that left running, and removes what was temporary.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from readyplane.core.errors import InvalidField
from readyplane.kit.clock import Clock, SystemClock, utc
from readyplane_lab.up.pids import start_mark
from readyplane_lab.up.postgres_segments import drop_segments
from readyplane_lab.up.processes import write_atomically
from readyplane_lab.up.reaping import reap

FORMAT = 1
LAYOUT_FILE = "READYPLANE"
LOCK_FILE = "lock"
OUTSIDE_FILE = "outside-paths.json"
SUBFOLDERS = ("pg", "redis", "logs", "run", "blobs", "cache")
OUTSIDE_PREFIX = "readyplane-"
TEMPORARY_PREFIX = "readyplane-up-"
DYING_S_MAX = 0.3
WARDED_GONE_S_MAX = 10.0
WARDEN_HOLDS_S_MAX = 20.0
WARDEN_ENDS_S_MAX = 5.0
REAP_GRACE_S = 10.0


class DataFolder:
    """An open data folder, locked for this process until `close()`.

    Use `DataFolder.open(path)`, or `open()` for a temporary folder that `close()` removes. Before
    anything is started, `await recover()` ends what an earlier holder left behind, and `guard()`
    makes sure that the same happens soon after this process is killed.
    """

    def __init__(self, path: Path, *, temporary: bool, lock: int) -> None:
        self.path = path
        self.temporary = temporary
        self._lock: int | None = lock
        self._warden: subprocess.Popen[bytes] | None = None

    @classmethod
    def open(cls, path: Path | None = None, *, clock: Clock | None = None) -> Self:
        """Open, or create, the folder at `path`; without one a temporary folder.

        Raises:
            InvalidField: field `data_dir`; not a folder, not ours, not writable, of another format,
                or held by another process, whose pid is named.
        """
        created_s = (clock or SystemClock()).wall_s()
        if path is not None:
            return cls._open(path, created_s, temporary=False)
        made = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX))
        try:
            return cls._open(made, created_s, temporary=True)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise

    @classmethod
    def _open(cls, path: Path, created_s: float, *, temporary: bool) -> Self:
        try:
            path = path.expanduser().absolute()
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_place(path)
            lock = _take_lock(path, "up", dying_s_max=DYING_S_MAX, warden_s_max=WARDEN_HOLDS_S_MAX)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            _check_format(path, created_s, temporary=temporary)
            for name in SUBFOLDERS:
                (path / name).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            os.close(lock)
            raise _unusable(path, error) from error
        except BaseException:
            os.close(lock)
            raise
        return cls(path, temporary=temporary, lock=lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pg(self) -> Path:
        """Where the embedded Postgres keeps its cluster."""
        return self.path / "pg"

    @property
    def redis(self) -> Path:
        """Working folder of the embedded Redis; nothing in it outlives a run."""
        return self.path / "redis"

    @property
    def logs(self) -> Path:
        """What the processes wrote."""
        return self.path / "logs"

    @property
    def run(self) -> Path:
        """Tables of running processes, tokens and addresses of this run."""
        return self.path / "run"

    @property
    def blobs(self) -> Path:
        """Artifacts by digest."""
        return self.path / "blobs"

    @property
    def cache(self) -> Path:
        """What may be deleted at any time."""
        return self.path / "cache"

    async def recover(self) -> tuple[str, ...]:
        """End the processes and remove the outside paths that an earlier holder left; their names."""
        return await _recover(self.path)

    def guard(self) -> None:
        """Start the warden of this process: should it be killed, nothing of it stays for long."""
        if self._warden is not None:
            return
        with (self.logs / "warden.log").open("ab") as output:
            self._warden = subprocess.Popen(
                [sys.executable, "-m", "readyplane_lab.up.folder", str(self.path)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd="/",
                start_new_session=True,
            )

    def close(self) -> None:
        """Let go of the folder; remove it if it is temporary. Stop what runs in it before."""
        if self._lock is None:
            return
        try:
            if self.temporary:
                _remove(self.path)
        finally:
            self._dismiss_warden()
            os.close(self._lock)
            self._lock = None

    def _dismiss_warden(self) -> None:
        warden, self._warden = self._warden, None
        if warden is None or warden.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            warden.stdin.write(b".")
            warden.stdin.close()
        try:
            warden.wait(timeout=WARDEN_ENDS_S_MAX)
        except subprocess.TimeoutExpired:
            warden.kill()
            warden.wait()


async def sweep_abandoned(parent: Path | None = None) -> tuple[Path, ...]:
    """Clean up temporary data folders whose holder was killed; return those that were removed.

    Only folders of this user that nobody holds are touched. `parent` is where temporary files go.
    """
    swept: list[Path] = []
    for path in sorted((parent or Path(tempfile.gettempdir())).glob(f"{TEMPORARY_PREFIX}*")):
        with contextlib.suppress(OSError, InvalidField):
            if _is_own_folder(path) and _layout(path).get("temporary") is True:
                lock = _take_lock(path, "warden", dying_s_max=0.0, warden_s_max=0.0)
                try:
                    await _recover(path)
                    _remove(path)
                    swept.append(path)
                finally:
                    os.close(lock)
    return tuple(swept)


def record_outside(folder: Path, path: Path) -> None:
    """Note in `folder` that `path`, which lies elsewhere, belongs to it and goes with it."""
    assert path.name.startswith(OUTSIDE_PREFIX), path
    write_atomically(folder / OUTSIDE_FILE, json.dumps({"paths": [str(path)]}))


def remove_outside(folder: Path) -> None:
    """Remove what `record_outside` noted, if it is a folder of ours by name and owner."""
    record = folder / OUTSIDE_FILE
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        for text in json.loads(record.read_text(encoding="utf-8"))["paths"]:
            if Path(text).name.startswith(OUTSIDE_PREFIX) and _is_own_folder(Path(text)):
                shutil.rmtree(text, ignore_errors=True)
    record.unlink(missing_ok=True)


# -- checks ---------------------------------------------------------------------------------------


def _check_place(path: Path) -> None:
    """The folder is ours alone, and holds nothing that is not a data folder's."""
    facts = path.stat()
    if facts.st_uid != os.geteuid():
        raise _refusal(
            path,
            f"belongs to user id {facts.st_uid}, this process is {os.geteuid()}",
            "run as its owner, or name a folder that does not exist yet",
        )
    if facts.st_mode & stat.S_IWOTH:
        raise _refusal(
            path,
            "may be written by every user, and it will hold passwords",
            f"run `chmod o-w {path}`, or name another folder",
        )
    known = {LAYOUT_FILE, LOCK_FILE, "lost+found", *SUBFOLDERS}
    foreign = sorted(
        entry.name
        for entry in path.iterdir()
        if entry.name not in known and not entry.name.startswith(f".{LAYOUT_FILE}.")
    )
    if foreign and not (path / LAYOUT_FILE).exists():
        raise _refusal(
            path,
            f"is not a Readyplane data folder and not empty ({foreign[0]!r} is in it)",
            "name an empty folder, or one that does not exist yet",
        )


def _check_format(path: Path, created_s: float, *, temporary: bool) -> None:
    """Write the layout file of a new folder, or refuse one of another format."""
    if not (path / LAYOUT_FILE).exists():
        layout = {
            "format": FORMAT,
            "created": utc(created_s).isoformat(timespec="seconds"),
            "temporary": temporary,
        }
        write_atomically(path / LAYOUT_FILE, json.dumps(layout) + "\n")
        return
    found = _layout(path).get("format")
    if found != FORMAT:
        raise _refusal(
            path,
            f"has format {found!r}, this version of Readyplane reads format {FORMAT}",
            "name another folder, or use the version that wrote it",
        )


def _layout(path: Path) -> dict[str, Any]:
    try:
        layout = json.loads((path / LAYOUT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        layout = None
    return layout if isinstance(layout, dict) else {"format": "unreadable"}


def _unusable(path: Path, error: OSError) -> InvalidField:
    if isinstance(error, FileExistsError | NotADirectoryError):
        what = "is not a folder"
    elif isinstance(error, PermissionError) or error.errno == errno.EROFS:
        what = f"cannot be written ({error.strerror})"
    else:
        what = f"cannot be used ({error.strerror})"
    return _refusal(path, what, "name a folder that this user may write to, on a local disk")


def _refusal(path: Path, what: str, remedy: str) -> InvalidField:
    return InvalidField("data_dir", str(path), remedy, f"data_dir: {path} {what}; {remedy}")


# -- lock -----------------------------------------------------------------------------------------


def _take_lock(path: Path, role: str, *, dying_s_max: float, warden_s_max: float) -> int:
    """Lock the folder and return the descriptor that holds the lock. Children do not inherit it.

    A holder that was just killed keeps the lock, and its life, for a moment longer (`dying_s_max`);
    a warden keeps it while it cleans up after such a one (`warden_s_max`).
    """
    descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    clock = SystemClock()
    began_s = clock.monotonic_s()
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = _holder(descriptor)
                patience_s = dying_s_max if holder.get("role") == "up" else warden_s_max
                if clock.monotonic_s() > began_s + patience_s:
                    raise _held(path, holder) from None
            time.sleep(0.02)  # no coroutine: a folder is opened before anything runs beside it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "role": role}).encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _held(path: Path, holder: dict[str, Any]) -> InvalidField:
    who = f"process {holder['pid']}" if "pid" in holder else "another process"
    return _refusal(path, f"is in use by {who}", f"stop {who}, or name another folder")


def _holder(descriptor: int) -> dict[str, Any]:
    """What the holder wrote; empty while the note is still that of a predecessor that is gone."""
    try:
        holder = json.loads(os.pread(descriptor, 200, 0))
    except ValueError:
        return {}
    known = isinstance(holder, dict) and start_mark(int(holder.get("pid", 0))) is not None
    return holder if known else {}


# -- cleaning -------------------------------------------------------------------------------------


async def _recover(path: Path) -> tuple[str, ...]:
    places = [path / name for name in ("run", "pg", "redis")]
    ended = await asyncio.gather(
        *(reap(place, grace_s=REAP_GRACE_S, dying_s=WARDED_GONE_S_MAX) for place in places)
    )
    for place in places:
        remove_outside(place)
    drop_segments(path / "pg")
    return tuple(name for names in ended for name in names)


def _is_own_folder(path: Path) -> bool:
    facts = path.stat(follow_symlinks=False)
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()


def _remove(path: Path) -> None:
    """Remove the tree, layout file and lock last: an interrupted removal is found by the next sweep."""
    for _attempt in range(3):  # something may still be writing its last file
        for entry in list(path.iterdir()):
            if entry.name in {LAYOUT_FILE, LOCK_FILE}:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    shutil.rmtree(path)


async def _clean_up_after(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        lock = _take_lock(path, "warden", dying_s_max=WARDED_GONE_S_MAX, warden_s_max=0.0)
        try:
            await _recover(path)
            if _layout(path).get("temporary") is True:
                _remove(path)
        finally:
            os.close(lock)


def warden(path: Path) -> None:
    """Wait for the supervisor at the other end of stdin: a byte is a good-bye, an end is its death."""
    if not sys.stdin.buffer.read(1):
        with contextlib.suppress(InvalidField):  # the next supervisor was faster
            asyncio.run(_clean_up_after(path))


if __name__ == "__main__":
    warden(Path(sys.argv[1]))
