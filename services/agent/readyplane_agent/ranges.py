"""Byte ranges of an artifact's files, from HTTP sources.

Owns the wire of a fetch: one reader is one connection, used by one thread. Hands `loader` bytes in
the memory it was given, or a `Fault` as a value; never judges content (the loader hashes).
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote, urlsplit

from readyplane.core.errors import Unsupported
from readyplane.core.identity import FileEntry
from readyplane.kit.clock import Clock

HEAD_BYTES_MAX = 64 * 1024
RECEIVE_WAIT_S = 5.0
CHUNK_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What a source did wrong: `dead`, `busy`, `slow` or `corrupt`, and what was seen."""

    kind: str
    detail: str

    def __str__(self) -> str:
        """`kind: detail`, as the registry is told."""
        return f"{self.kind}: {self.detail}"


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
        incarnation: sent along, so that a source that is another process by now refuses (B144).
        token: bearer token, empty for none. chunk_limit_s: longest time for one range.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        incarnation: str = "",
        token: str = "",
        chunk_limit_s: float = CHUNK_LIMIT_S,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise Unsupported(f"weight source {url!r}", "announce http://HOST:PORT/PATH")
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._query = f"?incarnation={quote(incarnation, safe='')}" if incarnation else ""
        self._auth = f"Authorization: Bearer {token}\r\n" if token else ""
        self._clock, self._limit_s = clock, chunk_limit_s
        self._socket: socket.socket | None = None
        self._closed = False

    def read_into(self, entry: FileEntry, start: int, into: memoryview) -> Fault | None:
        fresh = self._socket is None
        fault = self._attempt(entry, start, into)
        if fault is not None and fault.kind == "gone" and not fresh and not self._closed:
            # The server may close an idle connection at any time; that is no fault of its bytes.
            fault = self._attempt(entry, start, into)
        if fault is not None:
            self._drop()
            if fault.kind == "gone":
                return Fault("dead", fault.detail)
        return fault

    def close(self) -> None:
        self._closed = True
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that receives
        self._drop()

    def _drop(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def _attempt(self, entry: FileEntry, start: int, into: memoryview) -> Fault | None:
        until_s = self._clock.monotonic_s() + self._limit_s
        try:
            connection = self._connected()
            target = f"{self._prefix}/{quote(entry.path)}{self._query}"
            connection.sendall(
                f"GET {target} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
                f"Range: bytes={start}-{start + len(into) - 1}\r\n{self._auth}"
                "Accept-Encoding: identity\r\n\r\n".encode()
            )
            head, body = self._head(connection, until_s)
            if isinstance(head, Fault):
                return head
            wrong = _judge(head, entry, start, len(into))
            if wrong is not None:
                return wrong
            if len(body) > len(into):
                return Fault("corrupt", f"{entry.path}: more bytes than asked for")
            into[: len(body)] = body
            return self._body(connection, entry, into, len(body), until_s)
        except OSError as error:
            self._drop()
            return Fault("gone", f"{self._host}:{self._port}: {error.strerror or error}")

    def _connected(self) -> socket.socket:
        if self._closed:
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
                if self._clock.monotonic_s() > until_s:
                    return Fault("slow", f"no answer within {self._limit_s:.0f} s"), b""
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
        entry: FileEntry,
        into: memoryview,
        done: int,
        until_s: float,
    ) -> Fault | None:
        while done < len(into):
            try:
                got = connection.recv_into(into[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                got = -1
            except OSError as error:
                return Fault("dead", f"{entry.path}: {error.strerror or error} after {done} B")
            if got == 0:
                what = f"ended after {done} of {len(into)} B" if done else "empty body"
                return Fault("dead", f"{entry.path}: {what}")
            done += max(0, got)
            if done < len(into) and self._clock.monotonic_s() > until_s:
                return Fault("slow", f"{entry.path}: {done} B within {self._limit_s:.0f} s")
        return None


def _judge(head: Mapping[str, str], entry: FileEntry, start: int, size: int) -> Fault | None:
    """Whether a response head promises exactly the range that was asked for."""
    words = head[""].split(" ", 2)
    status = words[1] if len(words) > 1 else head[""][:40]
    if status in {"429", "503"}:
        return Fault("busy", f"answered {status}")
    if status not in {"200", "206"}:
        return Fault("dead", f"{entry.path}: answered {status}")
    length = head.get("content-length")
    if length is None:
        return Fault("corrupt", f"{entry.path}: no content-length")
    if length == "0":
        return Fault("corrupt", f"{entry.path}: empty body")
    whole = start == 0 and size == entry.size_bytes
    if status == "200" and not whole:
        return Fault("corrupt", f"{entry.path}: ignored the range (200 with {length} B)")
    if length != str(size):
        return Fault("corrupt", f"{entry.path}: {length} B instead of {size}")
    wanted = f"bytes {start}-{start + size - 1}/{entry.size_bytes}"
    if status == "206" and head.get("content-range", "") != wanted:
        got = head.get("content-range", "none")
        return Fault("corrupt", f"{entry.path}: range {got!r} instead of {wanted!r}")
    return None
