"""Bytes over HTTP: ranges out, uploads in, both straight from and to the byte store.

Whatever the store is made of, a reader gets ranges here; where the store has URLs of its own, a
reader who says `?redirect=allow` is sent there.

Owns the wire of `GET /v1/blobs/{digest}/{path}` (what a fetch plan's storage source points at) and
of `/v1/blobs/sha256/{hex}` (how a publisher brings bytes). Handed to `api`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from readyplane.core.errors import InvalidField, NotFound, ReadyplaneError, Unavailable
from readyplane.core.identity import FileEntry
from readyplane.core.startup import WHY_HEADER
from readyplane.kit.http import error_response
from readyplane_registry.blobs import ByteStore, not_stored
from readyplane_registry.fetching import Tally
from readyplane_registry.service import RegistryService

PRESIGNED_TTL_S = 900.0
INDEXES_CACHED_MAX = 64
OCTETS = "application/octet-stream"
WHY_CHARS_MAX = 200


def wanted_range(header: str, size_bytes: int) -> tuple[int, int] | None:
    """The half-open byte range of a `Range` header; None when the whole file is to be sent.

    Several ranges, and units other than bytes, may be ignored by a server (RFC 9110), and are.

    Raises:
        InvalidField: no byte of the file lies in the range (416).
    """
    unit, _, text = header.partition("=")
    first, dash, last = (part.strip() for part in text.strip().partition("-"))
    if unit.strip().lower() != "bytes" or not dash or "," in text:
        return None
    if not all(part == "" or (part.isascii() and part.isdigit()) for part in (first, last)):
        return None
    if max(len(first), len(last)) > 18 or not (first or last):
        return None
    if first:
        begin = int(first)
        end = min(size_bytes, int(last) + 1) if last else size_bytes
        if last and int(last) < begin:
            return None
    else:
        begin, end = max(0, size_bytes - int(last)), size_bytes
    if begin >= end:
        raise InvalidField("range", header[:100], f"ask for bytes 0 to {size_bytes - 1}")
    return begin, end


class BlobResponse(Response):
    """Streams bytes of a blob; the next piece is read while the last one is sent.

    Args:
        first: the beginning, read before anything was answered.
        pieces: the rest, closed at the end.
        size_bytes: of all together.
    """

    def __init__(
        self,
        first: bytes,
        pieces: AsyncGenerator[bytes, None] | None,
        *,
        size_bytes: int,
        status: int,
        headers: dict[str, str],
    ) -> None:
        self._first, self._pieces, self._size_bytes = first, pieces, size_bytes
        self.status_code = status
        self.media_type = OCTETS
        self.background = None
        self.body = b""
        self.init_headers({**headers, "content-length": str(size_bytes)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; a client that leaves ends it at the next piece."""
        del scope
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            if self._pieces is None or await self._send_pieces(self._pieces, receive, send):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if self._pieces is not None:
                await self._pieces.aclose()

    async def _send_pieces(
        self, pieces: AsyncGenerator[bytes, None], receive: Receive, send: Send
    ) -> bool:
        """False when the client left before the end."""
        at, piece = len(self._first), self._first
        reading: asyncio.Task[bytes] | None = None
        # The server drops what is sent to a client that has left, and says so only here.
        leaving = asyncio.ensure_future(_left(receive))
        try:
            while not leaving.done():
                if at < self._size_bytes:
                    reading = asyncio.create_task(_next(pieces))
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                if reading is None:
                    return True
                piece = await reading
                at, reading = at + len(piece), None
            return False
        finally:
            leaving.cancel()
            if reading is not None:
                reading.cancel()
                await asyncio.wait([reading])


async def _next(pieces: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(pieces)


async def _left(receive: Receive) -> None:
    """Wait until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class BlobRoutes:
    """The routes; `router` is included by `api`."""

    def __init__(self, service: RegistryService, blobs: ByteStore, tally: Tally) -> None:
        self._service, self._blobs, self._tally = service, blobs, tally
        self._indexes: OrderedDict[str, dict[str, FileEntry]] = OrderedDict()
        self.router = APIRouter(prefix="/v1/blobs", tags=["bytes"])
        add = self.router.add_api_route
        named = {"response_class": Response, "responses": {200: {"content": {OCTETS: {}}}}}
        add("/sha256/{hex}", self.get_blob, methods=["GET", "HEAD"], **named)  # type: ignore[arg-type]
        add("/sha256/{hex}", self.put_blob, methods=["PUT"])
        add("/{digest}/{path:path}", self.get_file, methods=["GET", "HEAD"], **named)  # type: ignore[arg-type]

    async def get_file(self, digest: str, path: str, request: Request) -> Response:
        """Bytes of one file of an artifact; `Range` gives 206, outside of the file 416.

        With `?redirect=allow` an object store answers with 307 and a URL that is good for a while.
        """
        entry = (await self._index(digest)).get(path)
        if entry is None:
            raise NotFound("file", path, f"name a file of manifest {digest}")
        return await self._answer(entry.sha256, request, size_bytes=entry.size_bytes)

    async def get_blob(self, hex: str, request: Request) -> Response:  # noqa: A002 - as in the path
        """Bytes of one stored blob by its sha256."""
        return await self._answer(f"sha256:{hex}", request)

    async def put_blob(self, hex: str, request: Request) -> JSONResponse:  # noqa: A002
        """Store a blob: 201 when it is new, 200 when it was here; refused when it is another.

        Nothing of a body that is cut off, or whose sha256 is not the one in the path, is kept.
        """

        async def pieces() -> AsyncIterator[bytes]:
            async for piece in request.stream():
                yield piece

        try:
            created = await self._blobs.put_stream(f"sha256:{hex}", pieces())
        except ClientDisconnect:
            self._tally.count("uploads", outcome="broken_off")
            return JSONResponse({}, status_code=400)
        except ReadyplaneError:
            self._tally.count("uploads", outcome="refused")
            raise
        self._tally.count("uploads", outcome="stored" if created else "known")
        return JSONResponse(
            {"sha256": f"sha256:{hex}", "created": created}, status_code=201 if created else 200
        )

    async def _index(self, digest: str) -> dict[str, FileEntry]:
        held = self._indexes.get(digest)
        if held is None:
            manifest = await self._service.get_manifest(digest)
            held = self._indexes[digest] = {entry.path: entry for entry in manifest.files}
            if len(self._indexes) > INDEXES_CACHED_MAX:
                self._indexes.popitem(last=False)
        return held

    async def _answer(
        self, sha256: str, request: Request, *, size_bytes: int | None = None
    ) -> Response:
        """As `_bytes`; a byte store that is away is named in the head too, where agents look."""
        try:
            return await self._bytes(sha256, request, size_bytes=size_bytes)
        except Unavailable as error:
            answer = error_response(error)
            said = " ".join(str(error).split())[:WHY_CHARS_MAX]
            answer.headers[WHY_HEADER] = said.encode("ascii", "replace").decode()
            return answer

    async def _bytes(
        self, sha256: str, request: Request, *, size_bytes: int | None = None
    ) -> Response:
        """One blob or a range of it; `size_bytes` when the manifest tells it.

        Existence is asked of the storage: by its length, or by reading the first piece before
        anything is answered, so that what is not there is a 404 and not a broken connection.
        """
        etag = f'"{sha256}"'
        headers = {
            "accept-ranges": "bytes",
            "etag": etag,
            "cache-control": "public, max-age=31536000, immutable",
        }
        if size_bytes is None or request.method == "HEAD":
            size_bytes = await self._blobs.length(sha256)
            if size_bytes is None:
                raise not_stored(sha256)
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        header = request.headers.get("range", "")
        if request.headers.get("if-range", etag) != etag:
            header = ""
        try:
            found = wanted_range(header, size_bytes)
        except InvalidField as error:
            body = {"error": {"reason": error.reason, "message": str(error), "field": error.field}}
            return JSONResponse(body, 416, headers={"content-range": f"bytes */{size_bytes}"})
        begin, end = found or (0, size_bytes)
        if found:
            headers["content-range"] = f"bytes {begin}-{end - 1}/{size_bytes}"
        status = 206 if found else 200
        if request.method == "HEAD":
            return BlobResponse(b"", None, size_bytes=end - begin, status=status, headers=headers)
        if request.query_params.get("redirect") == "allow":
            url = await self._blobs.presigned(sha256, ttl_s=PRESIGNED_TTL_S)
            if url is not None:
                self._tally.count("redirects")
                held = {"location": url, "cache-control": f"max-age={PRESIGNED_TTL_S / 2:.0f}"}
                return Response(status_code=307, headers=held)
        pieces = _generator(self._blobs.stream(sha256, begin=begin, end=end))
        first = await anext(pieces, b"")
        self._tally.count("served_bytes", float(end - begin))
        return BlobResponse(first, pieces, size_bytes=end - begin, status=status, headers=headers)


async def _generator(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The stream as something that can be closed, whatever a store made it of."""
    try:
        async for piece in pieces:
            yield piece
    finally:
        close = getattr(pieces, "aclose", None)
        if close is not None:
            await close()
