"""Byte ranges of an artifact's files, from HTTP sources.

Owns the wire of a fetch: one reader is one connection, used by one thread. Hands `loader` bytes in
the memory it was given, or a `Fault` as a value; never judges content (the loader hashes).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias
from urllib.parse import quote, urlsplit

from readyplane.core.errors import Unsupported
from readyplane.core.identity import FileEntry
from readyplane.core.startup import WHY_HEADER
from readyplane.kit.clock import Clock
from readyplane_agent.offering import DRAINING, PAUSED, READER, echoed

HEAD_BYTES_MAX = 64 * 1024
REFUSAL_BYTES_MAX = 4096
# A peer pauses while those it serves suffer; after this long its reader goes elsewhere.
PAUSED_LIMIT_S = 10.0
PAUSED_TURN_S = 0.2
RECEIVE_WAIT_S = 5.0
CHUNK_LIMIT_S = 60.0
# Without a single byte for this long a source hangs; longer than a peer's pause before it cuts off.
SILENT_LIMIT_S = 8.0
CUT = "somebody else brought it"
# Where `tcp_info` of Linux says how long ago the last segment with data came, in milliseconds.
LAST_DATA_OFFSET = 52
# Answers after which the connection is used again.
STAYS = frozenset({"early", "paused"})


@dataclass(frozen=True, slots=True)
class Fault:
    """What a source did wrong, and what was seen.

    `dead`, `busy` (asks to be left alone), `slow`, `corrupt`, `unfit` (not the source that was
    meant, or in another layout), or `early`, which is no fault: the chunk is not there yet.
    `lasts` when it answered that it has no such file.
    """

    kind: str
    detail: str
    lasts: bool = False

    def __str__(self) -> str:
        """`kind: detail`, as the registry is told."""
        return f"{self.kind}: {self.detail}"


Judge: TypeAlias = Callable[[Mapping[str, str]], "Fault | None"]


class RangeReader(Protocol):
    """One connection to one source."""

    def read_into(self, entry: FileEntry, start: int, into: memoryview) -> Fault | None:
        """Fill `into` with the file's bytes from `start`; None when all of them arrived."""
        ...

    def close(self) -> None:
        """End it, also from another thread while it reads."""
        ...


class HttpReader:
    """Ranges over one HTTP/1.1 connection, received straight into the memory given.

    Args:
        url: `{url}/{path}` serves ranges of every file. clock: for the chunk's time limit.
        incarnation: sent along, so that a source that is another process by now refuses (B144);
            a peer must echo it. layout: likewise, the digest of the layout in memory (B108).
        token: bearer token, empty for none. reader: our own incarnation, which a peer is told.
        chunk_limit_s: longest time for one range.

    Attributes:
        draining: the source has said that it leaves: read on elsewhere where somebody else has it.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        incarnation: str = "",
        layout: str = "",
        token: str = "",
        reader: str = "",
        chunk_limit_s: float = CHUNK_LIMIT_S,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise Unsupported(f"weight source {url!r}", "announce http://HOST:PORT/PATH")
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        given = (("incarnation", incarnation), ("layout", layout if incarnation else ""))
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in given if value)
        self._query = f"?{query}" if query else ""
        # Storage is told neither and echoes neither: its bytes are those of the digest.
        self._incarnation, self._layout = incarnation, layout if incarnation else ""
        auth = f"Authorization: Bearer {token}\r\n" if token else ""
        named = f"{READER}: {reader}\r\n" if reader and incarnation else ""
        self._lines = (
            f"Host: {self._host}:{self._port}\r\n{auth}{named}Accept-Encoding: identity\r\n\r\n"
        )
        self._clock, self._limit_s = clock, chunk_limit_s
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        self._cut = threading.Event()
        self._asked_s: float | None = None
        self._ended_s: float | None = None
        self._brings = False
        self.draining = False

    def read_into(self, entry: FileEntry, start: int, into: memoryview) -> Fault | None:
        target = f"{self._prefix}/{quote(entry.path)}{self._query}"
        head = f"GET {target} HTTP/1.1\r\nRange: bytes={start}-{start + len(into) - 1}\r\n"
        return self.exchange(
            head, lambda found: _judge(found, entry, start, len(into)), into, entry
        )

    def exchange(self, head: str, judge: Judge, into: memoryview, entry: FileEntry) -> Fault | None:
        """One request about a file, asked again while the source pauses."""
        begun_s = self._clock.monotonic_s()
        if self._cut.is_set():  # while its chunk waited for room
            return Fault("dead", CUT)
        while True:
            self._brings = True
            fault = self._again(head, judge, into)
            self._brings = False
            if fault is None or fault.kind != "paused":
                return None if fault is None else _whose(fault, entry)
            if self._cut.is_set():
                return Fault("dead", CUT)
            if self._clock.monotonic_s() - begun_s > PAUSED_LIMIT_S:
                return Fault("busy", f"paused for {PAUSED_LIMIT_S:g} s")
            self._closed.wait(PAUSED_TURN_S)

    def holdings(self, into: memoryview) -> Fault | None:
        """What a peer holds, a byte for each chunk (`Arena.progress`); fills `into` exactly."""
        target = self._prefix.replace("/chunks/", "/holdings/", 1) + self._query
        size = str(len(into))

        def judge(head: Mapping[str, str]) -> Fault | None:
            if status(head) == "200" and head.get("content-length") == size:
                return None
            return Fault("dead", f"holdings: answered {status(head)}")

        return self._again(f"GET {target} HTTP/1.1\r\n", judge, into)

    def cut(self) -> None:
        """End the read that goes on, from another thread: somebody else brought the chunk."""
        self._cut.set()
        self._wake()

    @property
    def reads(self) -> bool:
        """Whether it has asked for something and not got all of it."""
        return self._asked_s is not None

    def silent_s(self) -> float | None:
        """Seconds since it got or asked for something, for another thread; None before it did.

        The reading thread sits in one call for a whole chunk, so the kernel is asked when data
        came last. Where it does not tell: 0, since nobody is called silent on a guess.
        """
        asked_s, connection, now_s = self._asked_s, self._socket, self._clock.monotonic_s()
        if asked_s is None:
            return None if self._ended_s is None else now_s - self._ended_s
        since_s = now_s - asked_s
        if connection is None:
            return since_s
        try:
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_DATA_OFFSET + 4)
            (last_ms,) = struct.unpack_from("<I", told, LAST_DATA_OFFSET)
        except (OSError, struct.error):
            return 0.0
        return min(since_s, float(last_ms) / 1000)

    def resume(self) -> None:
        """Read on after a cut; by the thread that reads, between two chunks."""
        self._cut.clear()

    def close(self) -> None:
        self._closed.set()
        self._wake()
        self._drop()

    def _wake(self) -> None:
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that receives

    def _drop(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def _again(self, head: str, judge: Judge, into: memoryview) -> Fault | None:
        """One exchange, and once more on a new connection if an old one had been closed."""
        fresh = self._socket is None
        fault = self._attempt(head, judge, into)
        ended = self._closed.is_set() or self._cut.is_set()
        if fault is not None and fault.kind == "gone" and not fresh and not ended:
            # The server may close an idle connection at any time; that is no fault of its bytes.
            fault = self._attempt(head, judge, into)
        if fault is not None:
            if fault.kind not in STAYS:
                self._drop()
            if fault.kind == "gone":
                return Fault("dead", fault.detail)
        return fault

    def _attempt(self, head: str, judge: Judge, into: memoryview) -> Fault | None:
        self._asked_s = self._clock.monotonic_s()
        until_s = self._asked_s + self._limit_s
        try:
            connection = self._connected()
            if self._brings and self._cut.is_set():  # while it connected
                raise OSError(CUT)
            connection.sendall(f"{head}{self._lines}".encode())
            found, body = self._head(connection, until_s)
            if isinstance(found, Fault):
                return found
            self.draining = DRAINING.lower() in found
            wrong = judge(found)
            if wrong is None:
                wrong = self._echo(found)
            if wrong is not None:
                return self._past(connection, found, wrong, len(body), until_s)
            if len(body) > len(into):
                return Fault("corrupt", "more bytes than asked for")
            into[: len(body)] = body
            return self._body(connection, into, len(body), until_s)
        except OSError as error:
            self._drop()
            return Fault("gone", f"{self._host}:{self._port}: {error.strerror or error}")
        finally:
            self._ended_s, self._asked_s = self._clock.monotonic_s(), None

    def _echo(self, head: Mapping[str, str]) -> Fault | None:
        """The source's side of the handshake, judged before a byte of the body is taken."""
        wrong = echoed(head, incarnation=self._incarnation, layout=self._layout)
        return Fault("unfit", wrong) if wrong else None

    def _past(
        self,
        connection: socket.socket,
        head: Mapping[str, str],
        fault: Fault,
        done: int,
        until_s: float,
    ) -> Fault:
        """Read a short refusal's text, where the connection is to be used again."""
        if fault.kind in STAYS:
            size = head.get("content-length", "")
            left = int(size) - done if size.isdigit() else -1
            whole = 0 <= left <= REFUSAL_BYTES_MAX
            if not whole or self._body(connection, memoryview(bytearray(left)), 0, until_s):
                self._drop()
        return fault

    def _connected(self) -> socket.socket:
        if self._closed.is_set():
            raise OSError("the load was stopped")
        if self._socket is None:
            connection = socket.create_connection((self._host, self._port), timeout=RECEIVE_WAIT_S)
            # Blocking with the kernel's own time limit: one call can then fill a whole chunk
            # (MSG_WAITALL), where Python's timeout would wake up for every segment.
            connection.settimeout(None)
            limit = struct.pack("ll", int(RECEIVE_WAIT_S), 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._socket = connection
            if self._closed.is_set():  # meanwhile
                raise OSError("the load was stopped")
        return self._socket

    def _head(
        self, connection: socket.socket, until_s: float
    ) -> tuple[Mapping[str, str] | Fault, bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            if len(data) > HEAD_BYTES_MAX:
                return Fault("corrupt", f"a response head above {HEAD_BYTES_MAX} B"), b""
            try:
                part = connection.recv(4096)
            except BlockingIOError:
                now_s, asked_s = self._clock.monotonic_s(), until_s - self._limit_s
                # A peer answers from memory; a store may have to fetch first.
                limit_s = SILENT_LIMIT_S if self._incarnation else self._limit_s
                if now_s - asked_s > limit_s:
                    return Fault("slow", f"no answer within {limit_s:g} s"), b""
                continue
            if not part:
                kind = "corrupt" if data else "gone"
                return Fault(kind, f"{self._host}:{self._port} closed the connection"), b""
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        found = {"": lines[0]}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            found[name.strip().lower()] = value.strip()
        return found, body

    def _body(
        self,
        connection: socket.socket,
        into: memoryview,
        done: int,
        until_s: float,
    ) -> Fault | None:
        moved_s = self._clock.monotonic_s()
        while done < len(into):
            try:
                got = connection.recv_into(into[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                got = -1
            except OSError as error:
                return Fault("dead", f"{error.strerror or error} after {done} B")
            if got == 0:
                what = f"ended after {done} of {len(into)} B" if done else "empty body"
                return Fault("dead", what)
            done += max(0, got)
            if done == len(into):
                break
            now_s = self._clock.monotonic_s()
            moved_s = now_s if got > 0 else moved_s
            if now_s > until_s or now_s - moved_s > SILENT_LIMIT_S:
                return Fault("slow", f"{done} B within {now_s - until_s + self._limit_s:.0f} s")
        return None


def status(head: Mapping[str, str]) -> str:
    """Of an answer, its code in digits."""
    words = head[""].split(" ", 2)
    return words[1] if len(words) > 1 else head[""][:40]


def _whose(fault: Fault, entry: FileEntry) -> Fault:
    """A fault of the bytes names the file."""
    named = fault.kind in {"busy", "early"} or fault.detail.startswith(entry.path)
    return fault if named else replace(fault, detail=f"{entry.path}: {fault.detail}")


def refused(head: Mapping[str, str], entry: FileEntry) -> Fault | None:
    """Why a source gives nothing of this file, None when it does not refuse."""
    code = status(head)
    if code in {"429", "503"}:
        paused = PAUSED.lower() in head
        return Fault("paused", "serving comes first") if paused else Fault("busy", _said(head))
    if code == "425":
        return Fault("early", "not verified there yet")
    if code == "412":
        return Fault("unfit", f"{entry.path}: its layout in memory is another one")
    if code not in {"200", "204", "206"}:
        return Fault("dead", f"{entry.path}: answered {code}", lasts=code in {"404", "410"})
    return None


def _said(head: Mapping[str, str]) -> str:
    why = head.get(WHY_HEADER.lower(), "")
    leaves = ", it leaves" if DRAINING.lower() in head else ""
    return f"answered {status(head)}{leaves}{f': {why}' if why else ''}"


def _judge(head: Mapping[str, str], entry: FileEntry, start: int, size: int) -> Fault | None:
    """Whether a response head promises exactly the range that was asked for."""
    refusal = refused(head, entry)
    if refusal is not None:
        return refusal
    code = status(head)
    if code == "204":
        return Fault("corrupt", f"{entry.path}: answered 204 where bytes were asked for")
    length = head.get("content-length")
    if length is None:
        return Fault("corrupt", f"{entry.path}: no content-length")
    if length == "0":
        return Fault("corrupt", f"{entry.path}: empty body")
    whole = start == 0 and size == entry.size_bytes
    if code == "200" and not whole:
        return Fault("corrupt", f"{entry.path}: ignored the range (200 with {length} B)")
    if length != str(size):
        return Fault("corrupt", f"{entry.path}: {length} B instead of {size}")
    wanted = f"bytes {start}-{start + size - 1}/{entry.size_bytes}"
    if code == "206" and head.get("content-range", "") != wanted:
        got = head.get("content-range", "none")
        return Fault("corrupt", f"{entry.path}: range {got!r} instead of {wanted!r}")
    return None
