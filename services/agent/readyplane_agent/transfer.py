"""The agent's HTTP door: verified weights for peers, health, and this worker's own metrics.

Owns the L1 source that a ready worker is (R9): `GET /v1/chunks/{digest}/{path}?incarnation=…` with
one range a request, straight from the sealed arena by sendfile. Gives nothing that was not
verified, nothing under another digest (B115) or to somebody who thinks we are another process
(B144), and nothing beyond its bounds of readers and rate, so that serving is not harmed.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit

from readyplane.kit.clock import Clock
from readyplane_agent.arena import Arena

log = logging.getLogger("agent.transfer")

HEAD_BYTES_MAX = 16 * 1024
IDLE_LIMIT_S = 30.0
PIECE_BYTES = 2**20
SEND_LIMIT_S = 60.0
# One reader opens a few connections, so that one slow stream does not hold it up.
REQUESTS_PER_READER = 4
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})\Z")


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: status, body, and the part of a file to send instead of a body."""

    status: str
    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    path: str = ""
    start: int = 0
    size: int = 0
    total: int = 0


class TransferServer:
    """The server of one agent.

    Args:
        incarnation: who we are. clock: time. host, port: where to bind, 0 for a free port.
        readers_max: peers at once. bytes_per_s: bound of all of them together, 0 for none.
        token: bearer token asked of peers, empty for none. health: (is well, why not).
        metrics: Prometheus text of this agent.
    """

    def __init__(
        self,
        *,
        incarnation: str,
        clock: Clock,
        host: str = "127.0.0.1",
        port: int = 0,
        readers_max: int = 2,
        bytes_per_s: float = 0.0,
        token: str = "",
        health: Callable[[], tuple[bool, str]] = lambda: (True, "ok"),
        metrics: Callable[[], str] = lambda: "",
    ) -> None:
        self._incarnation, self._clock = incarnation, clock
        self._host, self._port = host, port
        self._requests_max = readers_max * REQUESTS_PER_READER
        self._rate = bytes_per_s
        self._token, self._health, self._metrics = token, health, metrics
        self._arena: Arena | None = None
        self._file: BinaryIO | None = None
        self._digest = ""
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._old: set[asyncio.Task[None]] = set()
        self._active = 0
        self._paid_until_s = 0.0
        self._draining = False
        self.bytes_served = 0
        self.refused: dict[str, int] = {}

    @property
    def url(self) -> str:
        """Base URL, after `start`."""
        return f"http://{self._host}:{self._port}"

    @property
    def active(self) -> int:
        """Requests for weights being answered now."""
        return self._active

    async def start(self) -> None:
        """Bind. Raises OSError when the port is taken."""
        self._server = await asyncio.start_server(
            self._connection, self._host, self._port, limit=HEAD_BYTES_MAX
        )
        self._port = self._server.sockets[0].getsockname()[1]

    def offer(self, arena: Arena) -> None:
        """Give this arena's bytes from now on; it must be sealed, hence verified."""
        assert arena.sealed, "only a sealed arena holds nothing but verified bytes"
        self._arena, self._digest = arena, arena.manifest.digest
        self._file = os.fdopen(os.dup(arena.fd), "rb", buffering=0)

    def drain(self) -> None:
        """Refuse new readers; those that are connected may finish (R22.3)."""
        self._draining = True
        self._old = set(self._connections)

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Let requests that run end within `grace_s`, then close everything."""
        self.drain()
        until_s = self._clock.monotonic_s() + grace_s
        while self._active and self._clock.monotonic_s() < until_s:
            await self._clock.sleep(0.05)
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(list(self._connections), timeout=2.0)
        if self._file is not None:
            self._file.close()
            self._file = None

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= self._requests_max + 8:
            writer.close()
            return
        self._connections.add(task)
        try:
            await self._serve(task, reader, writer)
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the peer went away; whatever it has it verifies itself
        except asyncio.CancelledError:
            pass  # stop() ends connections; the server's own task must not see it as a crash
        finally:
            self._connections.discard(task)
            self._old.discard(task)
            writer.close()

    async def _serve(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            try:
                async with asyncio.timeout(IDLE_LIMIT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                await self._send(writer, Answer("431 Request Header Fields Too Large"), close=True)
                return
            method, target, headers = _parse(head)
            answer = self._answer(method, target, headers, old=task in self._old)
            if answer.status[0] in "45":
                reason = answer.status.split(" ", 1)[0]
                self.refused[reason] = self.refused.get(reason, 0) + 1
            # A request body is never read, so the connection can not be used again after one.
            close = headers.get("connection", "").lower() == "close" or (
                headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
            )
            await self._send(writer, answer, close=close, head_only=method == "HEAD")
            if close:
                return

    def _answer(self, method: str, target: str, headers: Mapping[str, str], *, old: bool) -> Answer:
        parts = urlsplit(target)
        if method not in {"GET", "HEAD"}:
            return Answer("405 Method Not Allowed", b"use GET\n")
        if parts.path == "/healthz":
            well, why = self._health()
            return Answer("200 OK" if well else "503 Service Unavailable", f"{why}\n".encode())
        if parts.path == "/metrics":
            return Answer("200 OK", self._metrics().encode(), "text/plain; version=0.0.4")
        if not parts.path.startswith("/v1/chunks/"):
            return Answer("404 Not Found", b"/v1/chunks/{digest}/{path}, /healthz or /metrics\n")
        if self._token and not _has_token(headers, self._token):
            return Answer("401 Unauthorized", b"send the token as authorization: Bearer TOKEN\n")
        digest, _, path = parts.path.removeprefix("/v1/chunks/").partition("/")
        given = parse_qs(parts.query).get("incarnation", [""])[0]
        return self._chunk(unquote(digest), unquote(path), given, headers.get("range", ""), old=old)

    def _chunk(self, digest: str, path: str, given: str, asked: str, *, old: bool) -> Answer:
        if given != self._incarnation:
            return Answer("409 Conflict", f"this is incarnation {self._incarnation}\n".encode())
        if self._arena is None or digest != self._digest:
            return Answer("404 Not Found", b"this worker does not hold that artifact\n")
        entry = self._arena.entry(path)
        if entry is None:
            return Answer("404 Not Found", b"the artifact has no such file\n")
        if self._draining and not old:
            return Answer("503 Service Unavailable", b"draining: read from another source\n")
        if self._active >= self._requests_max:
            return Answer("503 Service Unavailable", b"all readers' places are taken\n")
        span = _span(asked, entry.size_bytes)
        if span is None:
            return Answer(
                "416 Range Not Satisfiable", f"{path} has {entry.size_bytes} bytes\n".encode()
            )
        status = "206 Partial Content" if asked else "200 OK"
        start, size = span
        return Answer(
            status, kind="application/octet-stream", path=path, start=start, size=size,
            total=entry.size_bytes,
        )  # fmt: skip

    async def _send(
        self, writer: asyncio.StreamWriter, answer: Answer, *, close: bool, head_only: bool = False
    ) -> None:
        size = answer.size if answer.path else len(answer.body)
        lines = [
            f"HTTP/1.1 {answer.status}",
            f"Content-Type: {answer.kind}",
            f"Content-Length: {size}",
            f"Connection: {'close' if close else 'keep-alive'}",
        ]
        if answer.status.startswith("206"):
            end = answer.start + size - 1
            lines.append(f"Content-Range: bytes {answer.start}-{end}/{answer.total}")
        if answer.path:
            lines.append("Accept-Ranges: bytes")
        if answer.status.startswith("503"):
            lines.append("Retry-After: 1")
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + answer.body * (not head_only))
        await writer.drain()
        if answer.path and not head_only and size:
            self._active += 1
            try:
                await self._send_file(writer, answer)
            finally:
                self._active -= 1

    async def _send_file(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        assert self._arena is not None
        assert self._file is not None
        loop = asyncio.get_running_loop()
        at, left = self._arena.offsets[answer.path] + answer.start, answer.size
        while left:
            size = min(left, PIECE_BYTES) if self._rate > 0 else left
            await self._pay(size)
            async with asyncio.timeout(SEND_LIMIT_S):
                sent = await loop.sendfile(writer.transport, self._file, at, size)
            if sent == 0:
                raise ConnectionResetError("the arena ended early")
            at, left = at + sent, left - sent
            self.bytes_served += sent

    async def _pay(self, size: int) -> None:
        """Wait for the shared rate bound; bytes are paid for before they go."""
        if self._rate <= 0:
            return
        now_s = self._clock.monotonic_s()
        begin_s = max(now_s, self._paid_until_s)
        self._paid_until_s = begin_s + size / self._rate
        if begin_s > now_s:
            await self._clock.sleep(begin_s - now_s)


def _parse(head: bytes) -> tuple[str, str, dict[str, str]]:
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3:
        return "BAD", "/", {"connection": "close"}
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return words[0], words[1], headers


def _span(asked: str, total: int) -> tuple[int, int] | None:
    """(start, size) of a range header, None when it cannot be satisfied; absent means all."""
    if not asked:
        return 0, total
    match = _RANGE.match(asked)
    if match is None:
        return None
    start = int(match[1])
    end = min(int(match[2]) if match[2] else total - 1, total - 1)
    return (start, end - start + 1) if start <= end else None


def _has_token(headers: Mapping[str, str], token: str) -> bool:
    given = headers.get("authorization", "").encode()
    return hmac.compare_digest(given, f"Bearer {token}".encode())
