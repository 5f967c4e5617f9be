"""The byte store in an object store: S3 and what speaks like it, GCS, Azure, by one library.

Owns how a `ByteStore` is kept there: one object a blob, `sha256/ab/ab12…` below the prefix, written
in parts that become visible only when all bytes are there and their sha256 is the object's name
(B115, B116); ranges are streamed; a call that fails is tried again within a bound and a budget that
all calls share, and then ends in an error that names the store and the remedy. Never more than
`PARTS_AT_ONCE` + 2 parts of an upload lie in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import (
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)

from readyplane.core.errors import BytesMissing, InvalidField, ReadyplaneError, Unavailable
from readyplane.core.identity import FileEntry, Manifest, check_digest
from readyplane.core.startup import WeightTier
from readyplane.kit.clock import Clock
from readyplane_registry import retrying
from readyplane_registry.blob_checks import (
    chunk_fault,
    content_fault,
    content_of,
    has_tensors,
    header_fault,
    header_length,
    size_fault,
)
from readyplane_registry.blobs import (
    BLOB_BYTES_MAX,
    HEAD_BYTES,
    PIECE_BYTES,
    FileCheck,
    ended_early,
    not_stored,
    other_content,
    too_long,
)
from readyplane_registry.collecting import StoredBlob
from readyplane_registry.fetching import NoTally, Tally
from readyplane_registry.retrying import RetryPolicy
from readyplane_registry.safetensors import PREFIX_BYTES

PART_BYTES = 8 * 1024 * 1024
PARTS_AT_ONCE = 4
UPLOADS_AT_ONCE = 8
ASKED_AT_ONCE = 16
CALL_TIMEOUT_S = 30.0
STORE_SILENT_S_MAX = 50.0
"""No try begins after the store gave nothing for so long; so much longer may the last one take."""

LOOK_EVERY_S = 1.0
PART_SILENT_S_MAX = 90.0
"""So long a store may take no further part of an upload. Whoever sends has no bound here."""

FOLDER = "sha256"
# Another try would be answered alike: all of 4xx but request timeout and too many requests.
ASKED_WRONGLY = re.compile(r"status code: 4(?!08|29)\d\d")
# The library answers with the built-in errors where there is one for the case.
ABSENT = (NotFoundError, FileNotFoundError)
FORBIDDEN = (PermissionDeniedError, UnauthenticatedError, PermissionError)
T = TypeVar("T")


class ObjectBlobs:
    """See `ByteStore`.

    Args:
        store: of `obstore.store`, its own retries off: they are made here.
        name: for messages, without credentials.
        clock, random: time, and a number from 0 to 1 for the waits between tries.
        signs: the store can make URLs that need no credentials.
    """

    tier = WeightTier.L4_OBJECT

    def __init__(
        self,
        store: Any,
        *,
        name: str,
        clock: Clock,
        random: Callable[[], float],
        retry: RetryPolicy | None = None,
        tally: Tally | None = None,
        signs: bool = True,
    ) -> None:
        self._store, self.name, self._signs = store, name, signs
        self._clock, self._random = clock, random
        self._retry, self._tally = retry or RetryPolicy(), tally or NoTally()
        self._budget = retrying.full(self._retry, now_s=clock.monotonic_s())
        self._uploads = asyncio.Semaphore(UPLOADS_AT_ONCE)

    # ------------------------------------------------------------------------------- reading

    async def length(self, sha256: str) -> int | None:
        """See `ByteStore`."""
        path = _path(sha256)
        try:
            meta = await self._call("asked", lambda: obstore.head_async(self._store, path))
        except ABSENT:
            return None
        return int(meta["size"])

    async def has(self, sha256: str, size_bytes: int) -> bool:
        """See `ByteStore`."""
        return await self.length(sha256) == size_bytes

    async def stream(self, sha256: str, *, begin: int, end: int) -> AsyncGenerator[bytes, None]:
        """See `ByteStore`. A read that breaks off goes on where it was, within the same bounds."""
        at, tries, gave_s = begin, 0, self._clock.monotonic_s()
        while at < end:
            try:
                async for piece in self._read(sha256, at, end):
                    at += len(piece)
                    yield piece
                    gave_s = self._clock.monotonic_s()
                if at < end:
                    raise ended_early(self.name, sha256, at, end)
            except (BaseError, OSError, TimeoutError) as error:
                tries += 1
                if not await self._again("read", tries, since_s=gave_s):
                    raise self._unavailable("read", error) from error

    async def _read(self, sha256: str, begin: int, end: int) -> AsyncIterator[bytes]:
        path = _path(sha256)
        try:
            found = await self._call(
                "read",
                lambda: obstore.get_async(self._store, path, options={"range": (begin, end)}),
                blob=sha256,
            )
        except ABSENT:
            raise not_stored(sha256) from None
        except Unavailable as error:
            # A range beyond the end is an error to an object store; say what it means.
            size = await self.length(sha256) if "416" in str(error) else None
            if size is None:
                raise
            raise ended_early(self.name, sha256, size, end) from error
        if tuple(found.range) != (begin, end):
            raise ended_early(self.name, sha256, int(found.meta["size"]), end)
        pieces = aiter(found.stream(min_chunk_size=PIECE_BYTES))
        while True:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            yield bytes(piece)

    async def presigned(self, sha256: str, *, ttl_s: float) -> str | None:
        """See `ByteStore`."""
        if not self._signs:
            return None
        path = _path(sha256)
        ttl = timedelta(seconds=ttl_s)
        url: str = await self._call(
            "signed", lambda: obstore.sign_async(self._store, "GET", path, ttl)
        )
        return url

    # ------------------------------------------------------------------------------- writing

    async def put_stream(
        self, sha256: str, pieces: AsyncIterator[bytes], *, size_max: int = BLOB_BYTES_MAX
    ) -> bool:
        """See `ByteStore`."""
        path = _path(sha256)
        async with self._uploads:
            stored = await self.length(sha256)
            checked = _Checked(sha256, pieces, size_max=size_max)
            if stored is not None:
                async for (
                    _part
                ) in checked.parts():  # it has to be the blob of that name all the same
                    pass
                if stored == checked.size_bytes:
                    return False
                raise await self._damaged(sha256, stored, checked.size_bytes)
            await self._upload(path, checked)
            return True

    async def _upload(self, path: str, checked: _Checked) -> None:
        """The object appears with its last part, which is held back until the sha256 is right."""
        taken = _Taken(checked.parts(), self._clock)
        parts = taken.parts()
        writing = asyncio.ensure_future(self._written(path, parts))
        try:
            while not writing.done():
                await asyncio.wait({writing}, timeout=LOOK_EVERY_S)
                if not writing.done() and taken.silent_s() > PART_SILENT_S_MAX:
                    raise TimeoutError(f"it has taken nothing for {PART_SILENT_S_MAX:.0f} s")
            await writing
        except (BaseError, OSError, TimeoutError) as error:
            if error is checked.fault:
                raise
            self._tally.count("store_calls", what="written", outcome="failed")
            raise self._unavailable("written", error) from error
        finally:
            if not writing.done():
                writing.cancel()
                await asyncio.wait({writing}, timeout=CALL_TIMEOUT_S)
            await parts.aclose()

    async def _written(self, path: str, parts: AsyncGenerator[bytes, None]) -> None:
        first = await anext(parts, b"")
        second = await anext(parts, None)
        if second is None:
            await self._call("written", lambda: obstore.put_async(self._store, path, first))
            return
        await obstore.put_async(
            self._store,
            path,
            _chain(first, second, parts),
            use_multipart=True,
            chunk_size=PART_BYTES,
            max_concurrency=PARTS_AT_ONCE,
        )

    async def _damaged(self, sha256: str, stored: int, size_bytes: int) -> BytesMissing:
        """An object of another length than its content has cannot have come from here."""
        await self.remove(sha256)
        told = f"{self.name} held {stored} bytes of its {size_bytes} bytes, removed now"
        return BytesMissing(f"blob {sha256}", [told], "send it again")

    async def put_file(
        self, sha256: str, path: Path, *, progress: Callable[[int], None] | None = None
    ) -> bool:
        """See `ByteStore`."""

        async def pieces() -> AsyncIterator[bytes]:
            with path.open("rb", buffering=0) as source:
                while piece := await asyncio.to_thread(source.read, PIECE_BYTES):
                    yield piece
                    if progress is not None:
                        progress(len(piece))

        return await self.put_stream(sha256, pieces())

    # ------------------------------------------------------------------------------ checking

    async def missing(self, files: Sequence[FileEntry]) -> tuple[str, ...]:
        """See `Blobs`; asked of the storage, each blob once and some at once."""
        places = asyncio.Semaphore(ASKED_AT_ONCE)

        async def one(sha256: str) -> tuple[str, int | None]:
            async with places:
                return sha256, await self.length(sha256)

        sizes = dict(await asyncio.gather(*(one(name) for name in {f.sha256 for f in files})))
        return tuple(
            f"{entry.path}: no bytes of {entry.sha256} are stored"
            if sizes[entry.sha256] is None
            else f"{entry.path}: {sizes[entry.sha256]} bytes of {entry.sha256} are stored, not "
            f"{entry.size_bytes}"
            for entry in files
            if sizes[entry.sha256] != entry.size_bytes
        )

    async def inspect(self, manifest: Manifest, *, content: bool) -> tuple[FileCheck, ...]:
        """See `Blobs`."""
        return tuple(
            [
                FileCheck(
                    entry.path,
                    entry.size_bytes,
                    await self._fault(entry, manifest, content=content),
                )
                for entry in manifest.files
            ]
        )

    async def _fault(self, entry: FileEntry, manifest: Manifest, *, content: bool) -> str:
        size = await self.length(entry.sha256)
        if size is None:
            return "missing from the store"
        found = await content_of(
            self.stream(entry.sha256, begin=0, end=size),
            chunk_bytes=manifest.chunk_bytes,
            content=content,
        )
        fault = content_fault(entry, found)
        if fault:
            await self.remove(entry.sha256)
            return fault
        return (
            size_fault(entry, size)
            or chunk_fault(entry, found.chunks, manifest.chunk_bytes)
            or (await self._header_fault(entry, manifest) if has_tensors(entry) else "")
        )

    async def _header_fault(self, entry: FileEntry, manifest: Manifest) -> str:
        try:
            prefix = await self._bytes(entry.sha256, 0, min(PREFIX_BYTES, entry.size_bytes))
            length = header_length(prefix, entry)
        except InvalidField as error:
            return str(error)
        header = await self._bytes(entry.sha256, PREFIX_BYTES, PREFIX_BYTES + length)
        return header_fault(header, entry, manifest)

    async def _bytes(self, sha256: str, begin: int, end: int) -> bytes:
        return b"".join([piece async for piece in self.stream(sha256, begin=begin, end=end)])

    # ---------------------------------------------------------------------------- collecting

    async def stored(self) -> Sequence[StoredBlob]:
        """Every blob that is stored; see `collecting.ByteRemoval`."""
        now_s = self._clock.wall_s()
        found: list[StoredBlob] = []
        try:
            async for batch in obstore.list(self._store, prefix=FOLDER):
                for meta in batch:
                    name = meta["path"].rpartition("/")[2]
                    if len(name) == 64:
                        age_s = max(0.0, now_s - meta["last_modified"].timestamp())
                        found.append(StoredBlob(f"sha256:{name}", meta["size"], age_s))
        except (BaseError, OSError) as error:
            raise self._unavailable("listed", error) from error
        return found

    async def remove(self, sha256: str) -> int:
        """Delete a blob; the bytes that it took, 0 when it was gone."""
        path = _path(sha256)
        size = await self.length(sha256)
        if size is None:
            return 0
        with contextlib.suppress(*ABSENT):
            await self._call("deleted", lambda: obstore.delete_async(self._store, path))
        return size

    # ----------------------------------------------------------------------------- the calls

    async def _call(self, what: str, call: Callable[[], Awaitable[T]], *, blob: str = "") -> T:
        """One call, tried again within its bounds.

        Raises:
            FileNotFoundError, NotFoundError: there is no such object, which is an answer.
            Unavailable: all else.
        """
        tries, begun_s = 0, self._clock.monotonic_s()
        self._budget = retrying.called(self._budget, self._retry, now_s=begun_s)
        while True:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    found = await call()
            except ABSENT:
                self._tally.count("store_calls", what=what, outcome="ok")
                raise
            except FORBIDDEN as error:
                self._tally.count("store_calls", what=what, outcome="failed")
                raise self._unavailable(what, error, blob) from error
            except (BaseError, OSError, TimeoutError) as error:
                tries += 1
                if ASKED_WRONGLY.search(str(error)) or not await self._again(
                    what, tries, since_s=begun_s
                ):
                    raise self._unavailable(what, error, blob) from error
            else:
                self._tally.count("store_calls", what=what, outcome="ok")
                return found

    async def _again(self, what: str, tries: int, *, since_s: float) -> bool:
        """Wait for the next try; False when there is none to make.

        Args:
            since_s: when the store gave something last, or was asked first.
        """
        now_s = self._clock.monotonic_s()
        more = tries < self._retry.tries_max and now_s - since_s < STORE_SILENT_S_MAX
        left = retrying.retried(self._budget, self._retry, now_s=now_s) if more else None
        if left is None:
            self._tally.count("store_calls", what=what, outcome="failed")
            return False
        self._budget = left
        self._tally.count("store_calls", what=what, outcome="retried")
        await self._clock.sleep(retrying.wait_s(self._retry, tries=tries, share=self._random()))
        return True

    def _unavailable(self, what: str, error: BaseException, blob: str = "") -> Unavailable:
        refused = isinstance(error, FORBIDDEN)
        remedy = (
            "give the registry credentials that may read and write there"
            if refused
            else "look whether the object store is up, and at --blob-store"
        )
        about = f" (blob {blob})" if blob else ""
        return Unavailable(
            f"{self.name} cannot be {what}{about}: {_told(error)}", remedy, retry_after_s=5.0
        )


class _Checked:
    """A body on its way in, regrouped into parts; the last one comes out only when all is right.

    Attributes:
        size_bytes: that came so far. fault: what the sender's side raised.
    """

    def __init__(self, sha256: str, pieces: AsyncIterator[bytes], *, size_max: int) -> None:
        self._sha256, self._pieces, self._size_max = sha256, pieces, size_max
        self._hash, self._head = hashlib.sha256(), b""
        self.size_bytes = 0
        self.fault: BaseException | None = None

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Parts of `PART_BYTES`, the last one shorter and not before the sha256 was compared.

        Raises:
            InvalidField: the content is another one, or too long.
        """
        held = bytearray()
        async for piece in self._received():
            self.size_bytes += len(piece)
            if self.size_bytes > self._size_max:
                raise too_long(self._size_max)
            if len(self._head) < HEAD_BYTES:
                self._head += piece[:HEAD_BYTES]
            self._hash.update(piece)
            held += piece
            while len(held) > PART_BYTES:
                yield bytes(held[:PART_BYTES])
                del held[:PART_BYTES]
        found = "sha256:" + self._hash.hexdigest()
        if found != self._sha256:
            raise other_content(self._sha256, found, self._head, self.size_bytes)
        yield bytes(held)

    async def _received(self) -> AsyncIterator[bytes]:
        """The sender's pieces; its fault is kept apart from those of the store."""
        try:
            async for piece in self._pieces:
                yield piece
        except Exception as error:
            self.fault = error
            raise


class _Taken:
    """Parts on their way to the store, and since when it has taken none of them."""

    def __init__(self, parts: AsyncGenerator[bytes, None], clock: Clock) -> None:
        self._parts, self._clock = parts, clock
        self._since_s: float | None = None

    def silent_s(self) -> float:
        """Seconds since a part was there for the store, or all were; 0 while the sender is awaited."""
        return 0.0 if self._since_s is None else self._clock.monotonic_s() - self._since_s

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The same parts. Raises whatever they raise."""
        try:
            async for part in self._parts:
                self._since_s = self._clock.monotonic_s()
                yield part
                self._since_s = None
            self._since_s = self._clock.monotonic_s()
        finally:
            await self._parts.aclose()


async def _chain(
    first: bytes, second: bytes, rest: AsyncIterator[bytes]
) -> AsyncGenerator[bytes, None]:
    yield first
    yield second
    async for part in rest:
        yield part


def _path(sha256: str) -> str:
    name = check_digest(sha256, where="sha256").removeprefix("sha256:")
    return f"{FOLDER}/{name[:2]}/{name}"


def _told(error: BaseException) -> str:
    """The first line of what the library says; the rest is its inside."""
    if isinstance(error, ReadyplaneError):
        return str(error)
    lines = str(error).strip().splitlines()
    return (lines[0].partition(": <?xml")[0].partition("?X-")[0][:300] if lines else "") or type(
        error
    ).__name__
