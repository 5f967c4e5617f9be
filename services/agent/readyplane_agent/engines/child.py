"""Engine processes of others: started so that they never outlive the agent.

Owns one child: its command line, log, and end. The engine is not our code, so the kernel is asked
before it is executed: a small Python start sets the death signal and becomes the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from readyplane.core.errors import Unavailable
from readyplane_agent.engines.exit_status import status_text

LOG_TAIL_BYTES = 8192
TAIL_LINES = 5
ENDED = "ended with"
"""What every adapter says of a process that is gone: such an error needs no second reason."""

KILL_LIMIT_S = 10.0
# PR_SET_PDEATHSIG (1) survives execvp; a parent that is gone already is noticed by its pid.
_BOUND = (
    "import ctypes,os,sys;"
    "ctypes.CDLL(None).prctl(1,9);"
    "os.getppid()==int(sys.argv[1]) or sys.exit(0);"
    "os.execvp(sys.argv[2],sys.argv[2:])"
)


class EngineProcess:
    """One child in a process group of its own, in the agent's session.

    Where sessions share the processors (autogroups), the agent's threads that are to yield to the
    engine can do so within one session only (`sending`).
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._log: Path | None = None

    @property
    def returncode(self) -> int | None:
        """Exit status once it is gone, else None."""
        return None if self._process is None else self._process.returncode

    @property
    def pid(self) -> int:
        """Process id, 0 before the start."""
        return 0 if self._process is None else self._process.pid

    async def start(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        environment: Mapping[str, str],
        folder: Path | None = None,
        told: bool = False,
    ) -> None:
        """Start it in a folder; `told` keeps its standard input open for `tell`.

        Raises:
            Unavailable: the program is not there or cannot be run.
        """
        found = shutil.which(command[0])
        if found is None:
            raise Unavailable(
                f"the engine's program {command[0]!r} is not on PATH", "install it, or extend PATH"
            )
        self._log = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log_path.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid())),
                    *(str(Path(found).absolute()), *command[1:]),
                    stdin=asyncio.subprocess.PIPE if told else asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **environment},
                    cwd=folder,
                    process_group=0,
                )
        except OSError as error:
            raise Unavailable(f"cannot start {command[0]} ({error})", "install it") from error

    async def tell(self, line: bytes) -> None:
        """Its whole standard input. Raises Unavailable when it is gone or was started without."""
        pipe = None if self._process is None else self._process.stdin
        if pipe is None:
            raise Unavailable("the engine's standard input is closed", "start it anew")
        try:
            pipe.write(line)
            await pipe.drain()
            pipe.close()
            await pipe.wait_closed()
        except OSError as error:
            gone = Unavailable(f"the engine takes no order ({error})", "see the engine's log")
            raise self.died() or gone from error

    def end_session(self) -> None:
        """SIGKILL to whatever is left of its process group after its own end."""
        if self._process is not None and self._process.returncode is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def died(self) -> Unavailable | None:
        """Why it is gone, with the end of its log; None while it runs."""
        if self.returncode is None:
            return None
        return Unavailable(ended(self.returncode, self.tail(TAIL_LINES)), "see the engine's log")

    async def stop(self, *, grace_s: float) -> None:
        """SIGTERM, after the grace SIGKILL to its whole process group; returns when it is gone."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            async with asyncio.timeout(KILL_LIMIT_S):
                await process.wait()

    def tail(self, lines: int) -> str:
        """End of its log."""
        if self._log is None:
            return ""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


def log_end(tail: str) -> str:
    """How the end of an engine's log is told; one that has said nothing is not quoted."""
    return f"its log ends: {tail}" if tail.strip() else "it has logged nothing"


def ended(code: int | None, tail: str) -> str:
    """How an engine ended, with the end of its log: the same words, whoever sees it first."""
    return f"the engine {ENDED} {status_text(code)}; {log_end(tail)}"


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger holds a process still (proc(5), stat); False when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in ("T", "t")
