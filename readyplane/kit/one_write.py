"""uvicorn's HTTP/1.1 with one write where it makes several: head, body and end go out together.

Owns nothing but the moment of writing. uvicorn hands head, chunk and closing chunk to the transport
one by one, and uvloop sends each at once: three system calls, and a reader that wakes for each.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class OneWriteProtocol(HttpToolsProtocol):
    """Give it to uvicorn as `http`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Stand between uvicorn and its transport."""
        super().connection_made(cast("asyncio.Transport", _Gathering(transport, self.loop)))


class _Gathering:
    """A transport that writes what it was given in one turn of the loop in one piece."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and not self._transport.is_closing():
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
