"""Heads of HTTP/1.1 as the agent's door needs them: requests read, answers written. No I/O.

Owns the parsing of a request head and the shape of an answer. Handed to `transfer`, which reads
and writes the bytes.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})\Z")


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: status, body, and the part of a file to send instead of a body.

    Attributes:
        retry_after_s: on a 503, when to ask again; 0 says nothing.
        extra: further header lines, each with its line end.
    """

    status: str
    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    path: str = ""
    start: int = 0
    size: int = 0
    total: int = 0
    retry_after_s: int = 0
    extra: str = ""

    def head(self, *, close: bool) -> bytes:
        """The head with its empty line."""
        size = self.size if self.path else len(self.body)
        lines = (
            f"HTTP/1.1 {self.status}\r\nContent-Type: {self.kind}\r\nContent-Length: {size}\r\n"
            f"Connection: {'close' if close else 'keep-alive'}\r\n"
        )
        if self.status.startswith("206"):
            end = self.start + size - 1
            lines += f"Content-Range: bytes {self.start}-{end}/{self.total}\r\n"
        if self.path:
            lines += "Accept-Ranges: bytes\r\n"
        if self.retry_after_s:
            lines += f"Retry-After: {self.retry_after_s}\r\n"
        return f"{lines}{self.extra}\r\n".encode()


@dataclass(frozen=True, slots=True)
class Request:
    """A request head; header names in lower case. `method` is `BAD` when it cannot be read."""

    method: str
    target: str
    headers: Mapping[str, str]

    @property
    def closes(self) -> bool:
        """Whether the connection ends with the answer: asked for, or a body that nobody reads."""
        return (
            self.headers.get("connection", "").lower() == "close"
            or self.headers.get("content-length", "0") != "0"
            or "transfer-encoding" in self.headers
        )

    def has_token(self, token: str) -> bool:
        """Whether it carries this bearer token."""
        given = self.headers.get("authorization", "").encode()
        return hmac.compare_digest(given, f"Bearer {token}".encode())


def parse(head: bytes) -> Request:
    """A request head with its empty line."""
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3:
        return Request("BAD", "/", {"connection": "close"})
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return Request(words[0], words[1], headers)


def span(asked: str, total: int) -> tuple[int, int] | None:
    """(start, size) of a range header, None when it cannot be satisfied; absent means all."""
    if not asked:
        return 0, total
    match = _RANGE.match(asked)
    if match is None:
        return None
    start = int(match[1])
    end = min(int(match[2]) if match[2] else total - 1, total - 1)
    return (start, end - start + 1) if start <= end else None
