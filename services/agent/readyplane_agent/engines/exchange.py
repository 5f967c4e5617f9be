"""One HTTP exchange with an engine, over asyncio streams.

Owns the bytes only: a request with a bounded answer, JSON on both sides. The adapters and probes
build on it; a full HTTP client would cost a start a quarter of a second of imports (R6).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from readyplane.core.errors import InvalidField, Unavailable, Unsupported

ANSWER_BYTES_MAX = 32 * 2**20
HEAD_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class Answered:
    """Status and body of an answer."""

    status: int
    body: bytes

    def document(self, what: str) -> Any:
        """The body as JSON. Raises Unavailable when it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            shown = self.body[:80].decode("utf-8", "replace")
            raise Unavailable(f"{what} answered {shown!r}, no JSON", "check the address") from None


async def exchange(
    base_url: str,
    target: str,
    *,
    body: Mapping[str, Any] | None = None,
    timeout_s: float = 10.0,
    token: str = "",
) -> Answered:
    """GET, or POST when there is a body.

    Raises:
        Unavailable: not reachable, too slow, or an answer that ends early or has no end.
    """
    parts = urlsplit(base_url)
    if parts.scheme != "http" or not parts.hostname:
        raise InvalidField("engine_url", base_url, "write http://HOST:PORT")
    host, port = parts.hostname, parts.port or 80
    where = f"{base_url}{target}"
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, limit=HEAD_BYTES_MAX)
            try:
                path = parts.path.rstrip("/") + target
                writer.write(_request(path, f"{host}:{port}", body, token))
                await writer.drain()
                return await _answer(reader, where)
            finally:
                writer.close()
    except TimeoutError:
        raise Unavailable(
            f"{where}: no answer within {timeout_s:g} s", "check the engine"
        ) from None
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        raise Unavailable(f"{where}: {error}", "check that the engine runs there") from error


def _request(path: str, host: str, body: Mapping[str, Any] | None, token: str) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        f"Host: {host}",
        "Connection: close",
        "Accept: application/json, text/plain",
    ]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


async def _answer(reader: asyncio.StreamReader, where: str) -> Answered:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    words = head[0].split(" ")
    if len(words) < 2:
        raise Unavailable(f"{where}: answered {head[0][:40]!r}, no HTTP", "check the address")
    status = int(words[1])
    headers = {}
    for line in head[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if "chunked" in headers.get("transfer-encoding", "").lower():
        parts: list[bytes] = []
        total = 0
        while size := int((await reader.readline()).split(b";")[0], 16):
            total += size
            if total > ANSWER_BYTES_MAX:
                raise Unavailable(f"{where}: an answer above {ANSWER_BYTES_MAX} B", "ask for less")
            parts.append(await reader.readexactly(size))
            await reader.readline()
        return Answered(status, b"".join(parts))
    if "content-length" in headers:
        size = int(headers["content-length"])
        if size > ANSWER_BYTES_MAX:
            raise Unavailable(f"{where}: an answer above {ANSWER_BYTES_MAX} B", "ask for less")
        return Answered(status, await reader.readexactly(size))
    return Answered(status, await reader.read(ANSWER_BYTES_MAX))


class EngineFailed(Unavailable):
    """The engine was reached and failed at what it was asked (500, 502, 504)."""


def refused(answer: Answered, what: str) -> InvalidField | Unsupported | Unavailable | None:
    """The core error of an OpenAI-style error body, None for a good answer."""
    if answer.status < 400:
        return None
    try:
        doc = json.loads(answer.body)
        error = doc.get("error", doc) if isinstance(doc, dict) else {}
        text = str(error.get("message", doc)) if isinstance(error, dict) else str(error)
    except ValueError:
        text = answer.body[:200].decode("utf-8", "replace")
    if answer.status in {404, 405, 501}:
        return Unsupported(f"{what}: {text}", "use an engine that offers it")
    if answer.status < 500 and answer.status not in {408, 425, 429}:
        return InvalidField("engine request", what, "send what the engine accepts", text)
    kind = EngineFailed if answer.status in {500, 502, 504} else Unavailable
    return kind(f"{what}: engine answered {answer.status}: {text}", "see the engine's log")
