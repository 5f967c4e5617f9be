"""NIXL as another way for the bytes of chunks, in a process of its own that may be killed.

Owns that process on both sides: who gives has one that maps the arena read-only (`GivingWay`), who
reads has one for each source (`ReadingWay`). Which chunk may go, and when, is asked over HTTP as
always, so the door's verdicts, the pace, the lease and the hash of the receiver hold for both ways;
only the bytes go elsewhere. Used by `nixl_reader` and `transfer`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from readyplane_agent.arena import Arena
from readyplane_agent.ranges import SILENT_LIMIT_S, Fault

CHILD: Final = Path(__file__).with_name("nixl_child.py")
START_LIMIT_S = 20.0
WAIT_S = 0.05


@dataclass(slots=True)
class Transport:
    """How bytes are to come and go.

    Attributes:
        wish: `tcp`, `auto` (NIXL where both sides have it), or `nixl` (the same, and whatever goes
            over TCP is warned of). python: interpreter in which NIXL can be imported; empty: ours.
        why_not: why NIXL cannot be had here, once that has been seen; empty when it can.
    """

    wish: str = "tcp"
    python: str = ""
    why_not: str = ""

    @property
    def wanted(self) -> bool:
        """Whether NIXL is to be tried."""
        return self.wish != "tcp" and not self.why_not


class Ended(Exception):
    """The process is gone, and with it everything that it might still have written."""


@dataclass(slots=True, eq=False)
class _Call:
    done: threading.Event = field(default_factory=threading.Event)
    answer: dict[str, Any] = field(default_factory=dict)


class NixlProcess:
    """One process with NIXL and an arena; blocking calls, from any thread.

    Args:
        arena: mapped there. gives: read-only, for others to read. name: unlike any other's.

    Raises:
        Ended: it cannot be had; the text says why.
    """

    def __init__(self, arena: Arena, *, python: str, name: str, gives: bool) -> None:
        if not arena.memory.one_file:
            raise Ended("an arena of mapped files is given over TCP")
        way = "give" if gives else "read"
        words = [python or sys.executable, "-I", str(CHILD), str(arena.fd), str(arena.size_bytes)]
        try:
            self._process = subprocess.Popen(
                [*words, way, name],
                pass_fds=(arena.fd,),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise Ended(f"{words[0]}: {error.strerror or error}") from error
        self._numbers, self._lock = count(), threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._first = _Call()
        self._over = threading.Event()
        threading.Thread(target=self._listen, name="nixl", daemon=True).start()
        self._first.done.wait(START_LIMIT_S)
        told = self._first.answer
        if "ready" not in told:
            self.kill()
            raise Ended(str(told.get("failed") or f"no answer within {START_LIMIT_S:g} s"))
        self.metadata, self.base = str(told["ready"]), int(told["base"])

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return not self._over.is_set() and self._process.poll() is None

    def call(
        self, limit_s: float, *, cut: threading.Event | None = None, **asked: Any
    ) -> dict[str, Any]:
        """Its answer; killed when there is none in time, or when `cut` is set meanwhile.

        Raises:
            Ended: it is gone.
        """
        number, call = next(self._numbers), _Call()
        with self._lock:
            if self._over.is_set():
                raise Ended("the NIXL process has ended")
            self._calls[number] = call
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps({"id": number, **asked}) + "\n")
                self._process.stdin.flush()
            except (OSError, ValueError) as error:
                raise Ended("the NIXL process has ended") from error
        left_s = limit_s
        while not call.done.wait(min(WAIT_S, limit_s)):
            left_s -= WAIT_S
            if left_s <= 0 or (cut is not None and cut.is_set()):
                self.kill()
        if "over" in call.answer:
            late = f"no answer within {limit_s:g} s" if left_s <= 0 else "it has ended"
            raise Ended(f"the NIXL process: {late}")
        return call.answer

    def kill(self) -> None:
        """End it now; when this returns it writes no more."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                answer = json.loads(line)
                call = self._calls.pop(answer["id"], None) if "id" in answer else self._first
                if call is not None:
                    call.answer = answer
                    call.done.set()
        self._process.wait()
        with self._lock:
            self._over.set()
            left = [self._first, *self._calls.values()]
            self._calls.clear()
        for call in left:
            if not call.done.is_set():
                call.answer = {"over": True}
                call.done.set()


class GivingWay:
    """The giving side: an arena's memory, open to readers that were let in.

    Attributes:
        metadata: what a reader's process needs to find it. base: address of the arena there.
    """

    def __init__(self, arena: Arena, *, transport: Transport, name: str) -> None:
        self._process = NixlProcess(arena, python=transport.python, name=name, gives=True)
        self.metadata, self.base = self._process.metadata, self._process.base

    @property
    def alive(self) -> bool:
        """Whether bytes can be had this way."""
        return self._process.alive

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def close(self) -> None:
        """End it; readers meet a fault, verify nothing, and read elsewhere."""
        self._process.kill()


class ReadingWay:
    """The reading side of one source: shared by all connections to it.

    Args:
        metadata: what the source told. name: unlike any other's.

    Raises:
        Ended: it cannot be had here.
    """

    def __init__(self, arena: Arena, *, transport: Transport, name: str, metadata: str) -> None:
        self._process = NixlProcess(arena, python=transport.python, name=name, gives=False)
        try:
            told = self._process.call(START_LIMIT_S, peer=metadata)
        except Ended:
            self._process.kill()
            raise
        if "peer" not in told:
            self._process.kill()
            raise Ended(str(told.get("failed", told)))
        self._of = str(told["peer"])

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def read(self, at: int, to: int, size: int, *, cut: threading.Event) -> Fault | None:
        """Bytes from an address of the source to an offset of the arena.

        Raises:
            Ended: the process is gone, for this or another chunk's sake.
        """
        answer = self._process.call(SILENT_LIMIT_S, cut=cut, at=at, to=to, size=size, of=self._of)
        failed = answer.get("failed")
        return Fault("dead", f"NIXL: {failed}") if failed else None

    def close(self) -> None:
        """End it; nothing is written to the arena any more."""
        self._process.kill()
