"""Chunks of a peer over NIXL, behind the port that TCP has (`RangeReader`).

Owns the handshake with a source about this way, and what happens without it: bytes come over TCP
and it is said why. Each chunk is asked for at the source's door, which answers with an address
instead of bytes; `nixl_way` brings them to the arena. The pipeline hashes what lies there.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from readyplane.core.identity import FileEntry
from readyplane_agent.arena import Arena
from readyplane_agent.nixl_way import Ended, ReadingWay, Transport
from readyplane_agent.offering import AT, NIXL, VIA
from readyplane_agent.ranges import CUT, Fault, HttpReader, refused, status

log = logging.getLogger("agent.loader")


class SharedWay:
    """The way to one source, opened once by whoever of its connections reads first.

    Args:
        arena: filled. transport: what is wished. name: unlike any other process's.
    """

    def __init__(self, arena: Arena, *, transport: Transport, name: str) -> None:
        self.arena, self._transport, self._name = arena, transport, name
        self._opening = threading.Lock()
        self._way: ReadingWay | None = None
        self._opened = False
        self.nixl_bytes = 0
        self.why_tcp = ""

    def get(self, reader: NixlReader) -> ReadingWay | None:
        """The way, None when there is none (any more); `why_tcp` says why."""
        with self._opening:
            if not self._opened:
                self._opened = True
                self._open(reader)
            return self._way

    def _open(self, reader: NixlReader) -> None:
        metadata = reader.offered()
        if isinstance(metadata, Fault):
            self.give_up(str(metadata))
            return
        try:
            self._way = ReadingWay(
                self.arena, transport=self._transport, name=self._name, metadata=metadata
            )
        except Ended as error:
            self._transport.why_not = str(error)
            self.give_up(str(error))

    def give_up(self, why: str) -> None:
        """From now on over TCP."""
        self._way = None
        if not self.why_tcp:
            self.why_tcp = why
            level = logging.WARNING if self._transport.wish == "nixl" else logging.INFO
            log.log(level, "read over TCP, not NIXL: %s", why)

    def close(self) -> None:
        """End its process; nothing is written to the arena any more. Idempotent."""
        way, self._way = self._way, None
        if way is not None:
            way.close()

    def text(self) -> str:
        """How the bytes came, for the segment's detail."""
        if self.nixl_bytes:
            return f"{self.nixl_bytes / 1e6:.1f} MB over NIXL"
        return f"over TCP ({self.why_tcp})" if self.why_tcp else ""


class NixlReader(HttpReader):
    """One connection to a peer whose bytes may come over NIXL.

    Args:
        way: shared by all connections to this source. Others as of `HttpReader`.
    """

    def __init__(self, url: str, *, way: SharedWay, **more: Any) -> None:
        super().__init__(url, **more)
        self._way = way
        self._aside = False

    def silent_s(self) -> float | None:
        """See `HttpReader`; nobody can say it of bytes that come over NIXL."""
        return 0.0 if self._aside else super().silent_s()

    def offered(self) -> str | Fault:
        """What the source tells of its NIXL agent, or why it tells nothing."""
        found: list[str] = []

        def judge(head: Mapping[str, str]) -> Fault | None:
            if status(head) != "204":
                return Fault("dead", f"the source answered {status(head)}, it has no NIXL")
            found.append(head.get(NIXL.lower(), ""))
            return None

        target = self._prefix.replace("/chunks/", "/nixl/", 1) + self._query
        fault = self._again(f"GET {target} HTTP/1.1\r\n", judge, memoryview(bytearray()))
        return fault or found[-1] or Fault("dead", f"the source names no {NIXL}")

    def read_into(self, entry: FileEntry, start: int, into: memoryview) -> Fault | None:
        to = _offset(self._way.arena, into)
        way = None if to is None else self._way.get(self)
        if way is None or to is None:
            return super().read_into(entry, start, into)
        found: list[int] = []

        def judge(head: Mapping[str, str]) -> Fault | None:
            fault = refused(head, entry)
            if fault is None and (status(head) != "204" or not head.get(AT.lower(), "").isdigit()):
                fault = Fault("dead", f"{entry.path}: told no address")
            if fault is None:
                found.append(int(head[AT.lower()]))
            return fault

        target = f"{self._prefix}/{quote(entry.path)}{self._query}"
        ranged = f"Range: bytes={start}-{start + len(into) - 1}\r\n{VIA}: nixl\r\n"
        fault = self.exchange(
            f"GET {target} HTTP/1.1\r\n{ranged}", judge, memoryview(bytearray()), entry
        )
        if fault is not None:
            return fault
        self._aside = True
        try:
            fault = way.read(found[-1], to, len(into), cut=self._cut)
        except Ended as error:
            if self._cut.is_set() or self._closed.is_set():
                return Fault("dead", CUT)
            return Fault("dead", f"{entry.path}: {error}")
        finally:
            self._aside = False
        if fault is None:
            self._way.nixl_bytes += len(into)
        return fault

    def close(self) -> None:
        super().close()
        self._way.close()


def _offset(arena: Arena, into: memoryview) -> int | None:
    """Where in the arena's memory this buffer lies, None when it lies elsewhere."""
    if into.readonly or arena.sealed:
        return None
    base = ctypes.addressof(ctypes.c_char.from_buffer(arena.memory.view))
    at = ctypes.addressof(ctypes.c_char.from_buffer(into)) - base
    return at if 0 <= at <= arena.size_bytes - len(into) else None
