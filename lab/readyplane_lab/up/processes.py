"""Child processes of one run: started, watched and ended by identity, never by name.

Owns the table of what a run has started. A process is known by its pid **and** its start mark (boot,
pid namespace, start tick), so that a pid which the kernel gave to somebody else is never signalled.
Every child also carries two marks, by which those are found that left the process group or were never
written down: `READYPLANE_RUN=<run id>` in its environment, and its log as standard output. The table is
written to the run folder before and after each start, so that the next run can end what a killed
supervisor left behind (`readyplane_lab.up.reaping`).

A child is the leader of its own session: Ctrl-C at the terminal reaches the supervisor alone, which
then stops its children in its own order. Why not `PR_SET_PDEATHSIG`: it needs Python code between fork
and exec (not safe beside threads), is lost when a child changes its user, and fires when the *thread*
that forked ends. `readyplane_lab.up.folder` keeps a small warden process instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from readyplane.core.errors import Conflict, NotFound, Unavailable
from readyplane_lab.up.pids import RUN_VARIABLE, carriers, descendants, signal_exactly, start_mark

TABLE_FORMAT = 1
ENDED_KEPT_MAX = 1024
LOG_BYTES_MAX = 32 * 1024 * 1024
STDIN_BYTES_MAX = 4096
LOG_TAIL_BYTES_MAX = 64 * 1024
KILLED_GONE_S_MAX = 5.0
POLL_EVERY_S = 0.02

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Account:
    """The user that a child runs as, when it is not the supervisor's."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One started process, as the table keeps it.

    `start_mark` comes from `start_mark()`; `argv_digest` tells two starts of one name apart without
    writing down arguments; `stop_signal` asks the process to end in its own way.
    """

    name: str
    pid: int
    start_mark: str
    argv_digest: str
    log_path: str
    stop_signal: int = int(signal.SIGTERM)


class _Child:
    """A process of this table that has not been collected yet: its pid cannot be reused."""

    __slots__ = ("exited", "pidfd", "popen", "record", "stopping")

    def __init__(self, record: ProcessRecord, popen: subprocess.Popen[bytes]) -> None:
        self.record = record
        self.popen = popen
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.pidfd: int | None = None
        self.stopping = False


class ProcessTable:
    """The children of one supervisor, persisted in `run_dir` as `processes-<run id>.json`.

    Args:
        run_dir: existing or new folder; only this user may write to it.
        run_id: the token that children carry; random by default.
        on_exit: called with (name, returncode) when a child ends that nobody asked to stop; the
            return code is negative for a signal, as in `subprocess`.

    Use it as an async context manager, or call `close()`: both end everything that was started.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        run_id: str | None = None,
        on_exit: Callable[[str, int], None] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.run_id = run_id or secrets.token_hex(16)
        self._on_exit = on_exit
        self._path = run_dir / f"processes-{self.run_id}.json"
        self._children: dict[str, _Child] = {}
        self._returncodes: dict[str, int] = {}
        self._log_paths: dict[str, Path] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def spawn(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        *,
        cwd: Path | None = None,
        stdin_text: str | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        account: Account | None = None,
        pass_fds: Sequence[int] = (),
    ) -> int:
        """Start `argv` in its own session and return its pid.

        Args:
            name: unique among the running children of this table.
            argv: program and arguments; secrets belong into `stdin_text` or `env`, as arguments
                are visible to every user.
            env: the whole environment; only `READYPLANE_RUN` is added.
            log_path: receives stdout and stderr, appended; turned over to `*.1` beyond 32 MiB.
                Nothing of another run may write to it.
            cwd: working folder of the child.
            stdin_text: at most 4 KiB, all of it there from the start; without it stdin is empty.
            stop_signal: how the process wants to be asked to end.
            account: run as this user (needs root).
            pass_fds: the only descriptors that the child gets besides its standard streams.

        Raises:
            Conflict: a child of that name runs.
            Unavailable: the program cannot be started, or the table is closed.
        """
        if name in self._children:
            raise Conflict(f"process {name}", "not running", "running", "stop it first")
        if self._closed:
            raise Unavailable(
                f"process {name} was not started: the run is ending", "start a new run"
            )
        self._persist(starting=log_path)  # the marks are on disk before anything carries them
        environment = {**env, RUN_VARIABLE: self.run_id}
        try:
            popen = _start(name, argv, environment, log_path, cwd, stdin_text, account, pass_fds)
        except BaseException:
            self._persist()
            raise
        mark = start_mark(popen.pid, or_zombie=True)
        assert mark is not None, "a child that was not collected always has a start mark"
        record = ProcessRecord(
            name=name,
            pid=popen.pid,
            start_mark=mark,
            argv_digest=hashlib.sha256("\0".join(argv).encode()).hexdigest()[:16],
            log_path=str(log_path),
            stop_signal=int(stop_signal),
        )
        child = _Child(record, popen)
        self._children[name] = child
        self._returncodes.pop(name, None)
        self._log_paths[name] = log_path
        try:
            self._watch(child)
            self._persist()
        except BaseException:
            self._kill(child, ())
            raise
        return popen.pid

    def running(self) -> tuple[ProcessRecord, ...]:
        """The children that have not ended, in the order of their start."""
        return tuple(child.record for child in self._children.values())

    def returncode(self, name: str) -> int | None:
        """How the child ended; None while it runs, if it never did, or 1,024 ends later."""
        return self._returncodes.get(name)

    async def wait(self, name: str) -> int:
        """Wait for the child's end and return its code. Cancelling the wait leaves the child alone."""
        child = self._children.get(name)
        if child is not None:
            return await asyncio.shield(child.exited)
        if name in self._returncodes:
            return self._returncodes[name]
        raise NotFound("process", name)

    async def stop(self, name: str, *, grace_s: float = 10.0) -> int | None:
        """Ask the child to end, wait `grace_s`, then kill its group and all of its descendants.

        May be called again, for an ended child or for one that was never started (None). When the
        wait is cancelled the child is killed at once: whoever interrupts an orderly stop wants it
        to be over, and nothing may stay behind.
        """
        child = self._children.get(name)
        if child is None:
            return self._returncodes.get(name)
        await self._end(child, descendants(child.record.pid), grace_s)
        return self._returncodes.get(name)

    async def close(self, *, grace_s: float = 10.0) -> None:
        """Stop all children side by side, then whatever still carries the run id; drop the table."""
        self._closed = True
        children = list(self._children.values())
        below = descendants(*(child.record.pid for child in children)) if children else set()
        try:
            await asyncio.gather(*(self._end(child, (), grace_s) for child in children))
        finally:
            for child in children:
                self._kill(child, ())
            if self._path.exists():
                for pid, mark in below | carriers({self.run_id}):
                    signal_exactly(pid, mark, signal.SIGKILL)
                self._path.unlink(missing_ok=True)

    def log_tail(self, name: str, lines: int = 20) -> str:
        """The last lines that the child wrote; empty if it was never started or wrote nothing."""
        path = self._log_paths.get(name)
        return "" if path is None else file_tail(path, lines)

    # -- watching and collecting ------------------------------------------------------------------

    def _watch(self, child: _Child) -> None:
        loop = asyncio.get_running_loop()
        try:
            child.pidfd = os.pidfd_open(child.record.pid)
        except OSError:  # a sandbox without pidfd
            task = loop.create_task(self._poll(child))
            self._watches.add(task)
            task.add_done_callback(self._watches.discard)
        else:
            loop.add_reader(child.pidfd, self._collect, child)

    async def _poll(self, child: _Child) -> None:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while not child.exited.done():
            if os.waitid(os.P_PID, child.record.pid, flags) is not None:
                self._collect(child)
            else:
                await asyncio.sleep(POLL_EVERY_S)

    def _collect(self, child: _Child) -> None:
        """The child has ended and still holds its pid as a zombie: end its group, then let go of it."""
        if child.exited.done():
            return
        if child.pidfd is not None:
            asyncio.get_running_loop().remove_reader(child.pidfd)
            os.close(child.pidfd)
            child.pidfd = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.record.pid, signal.SIGKILL)
        try:
            code = child.popen.wait(timeout=KILLED_GONE_S_MAX)
        except subprocess.TimeoutExpired:  # in uninterruptible sleep: nobody can end it
            log.error("%s (pid %d) does not die", child.record.name, child.record.pid)
            code = -int(signal.SIGKILL)
        child.exited.set_result(code)
        name = child.record.name
        self._children.pop(name, None)
        self._returncodes[name] = code
        while len(self._returncodes) > ENDED_KEPT_MAX:
            forgotten = next(iter(self._returncodes))
            del self._returncodes[forgotten]
            self._log_paths.pop(forgotten, None)
        if not self._closed:
            try:
                self._persist()
            except OSError as error:  # a full disk: the record of an ended process harms nobody
                log.warning("the table of processes cannot be written: %s", error)
        if not child.stopping and self._on_exit is not None:
            self._on_exit(name, code)

    async def _end(self, child: _Child, below: Iterable[tuple[int, str]], grace_s: float) -> None:
        child.stopping = True
        try:
            if not child.exited.done():
                os.kill(child.record.pid, child.record.stop_signal)
            async with asyncio.timeout(grace_s):
                await asyncio.shield(child.exited)
        except TimeoutError:
            log.warning("%s did not end within %.1f s and is killed", child.record.name, grace_s)
        finally:
            self._kill(child, below)

    def _kill(self, child: _Child, below: Iterable[tuple[int, str]]) -> None:
        """End the child now, and those of `below` that are still the same processes. Does not await."""
        child.stopping = True
        targets = set(below)
        if not child.exited.done():
            targets |= descendants(child.record.pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.record.pid, signal.SIGKILL)
            self._collect(child)
        for pid, mark in targets:
            signal_exactly(pid, mark, signal.SIGKILL)

    def _persist(self, *, starting: Path | None = None) -> None:
        self.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        table = {
            "format": TABLE_FORMAT,
            "run": self.run_id,
            "supervisor": {"pid": os.getpid(), "start_mark": start_mark(os.getpid())},
            "starting": None if starting is None else str(starting),
            "processes": [asdict(record) for record in self.running()],
        }
        write_atomically(self._path, json.dumps(table, indent=1))


def file_tail(path: Path, lines: int) -> str:
    """The last `lines` lines of a text file, from at most its last 64 KiB."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL_BYTES_MAX))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:]) if lines > 0 else ""


def write_atomically(path: Path, text: str) -> None:
    """Replace the file's content in one step, readable by this user only."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# -- starting -------------------------------------------------------------------------------------

# Another account is taken by the child's own first program. Asked of `subprocess` it would be a real
# fork of this process, in which gRPC has threads at work: the copy may die before it runs anything.
_AS_ACCOUNT = (
    "import os, sys; os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[2]));"
    " os.execv(sys.argv[3], sys.argv[3:])"
)


def _as_account(argv: Sequence[str], account: Account | None) -> list[str]:
    """Raises FileNotFoundError: there is no such program."""
    if account is None:
        return list(argv)
    program = shutil.which(argv[0])
    if program is None:
        raise FileNotFoundError(f"no program {argv[0]}")
    ids = (str(account.gid), str(account.uid))
    return [sys.executable, "-I", "-S", "-c", _AS_ACCOUNT, *ids, program, *argv[1:]]


def _start(
    name: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    log_path: Path,
    cwd: Path | None,
    stdin_text: str | None,
    account: Account | None,
    pass_fds: Sequence[int],
) -> subprocess.Popen[bytes]:
    try:
        with _log_file(log_path) as output, _stdin(stdin_text) as given:
            return subprocess.Popen(
                _as_account(argv, account),
                env=dict(env),
                cwd=cwd,
                stdin=given,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(
            f"process {name} could not be started: {argv[0]}: {error}",
            "check that the program exists and that this user may run it",
        ) from error


@contextlib.contextmanager
def _stdin(text: str | None) -> Iterator[int]:
    """A pipe that holds the whole text before anybody reads: half a configuration is a wrong one."""
    if text is None:
        yield subprocess.DEVNULL
        return
    data = text.encode()
    assert len(data) <= STDIN_BYTES_MAX, "a longer text would wait for its reader"
    read, write = os.pipe()
    try:
        os.write(write, data)
    finally:
        os.close(write)
    try:
        yield read
    finally:
        os.close(read)


@contextlib.contextmanager
def _log_file(path: Path) -> Iterator[int]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES_MAX:
            path.replace(path.with_name(path.name + ".1"))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
