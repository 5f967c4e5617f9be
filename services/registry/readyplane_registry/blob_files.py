"""The byte store in a folder or a mount: immutable files, each named by the sha256 of its content.

Owns where bytes lie, that they appear whole or not at all, and that nothing outside its folder is
ever read or written (B116, B117, B138, B180). A `ByteStore` for the service, for `blob_http`
(ranges and uploads) and for `ingest` (publishing a folder).

On disk: `sha256/ab/ab12…` (64 hex digits, mode 0444), `tmp/` for writers, `corrupt/` for files
that a later check found changed. Every step below the root refuses symbolic links.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from readyplane.core.errors import InvalidField, Refused, Unavailable
from readyplane.core.identity import FileEntry, Manifest, TensorEntry, check_digest, chunk_hash
from readyplane.core.startup import WeightTier
from readyplane_registry.blob_checks import (
    Content,
    chunk_fault,
    content_fault,
    has_tensors,
    size_fault,
    tensor_fault,
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
from readyplane_registry.safetensors import PREFIX_BYTES, header_bytes, tensors_of

log = logging.getLogger(__name__)
READ_BYTES = 4 * 1024 * 1024
WRITE_BATCH_BYTES = 1024 * 1024


def hash_file(
    descriptor: int,
    *,
    chunk_bytes: int,
    content: bool = True,
    progress: Callable[[int], None] | None = None,
) -> tuple[int, str, tuple[str, ...]]:
    """(size, sha256 or empty, chunk hashes) of an open file, read once from its beginning."""
    whole = hashlib.sha256()
    chunks: list[str] = []
    buffer = bytearray(chunk_bytes)
    view = memoryview(buffer)
    size = 0
    while True:
        filled = 0
        while filled < chunk_bytes:
            got = os.preadv(descriptor, [view[filled : filled + READ_BYTES]], size + filled)
            if got == 0:
                break
            if content:
                whole.update(view[filled : filled + got])
            filled += got
            if progress is not None:
                progress(got)
        if filled == 0:
            break
        chunks.append(chunk_hash(view[:filled]))
        size += filled
        if filled < chunk_bytes:
            break
    return size, "sha256:" + whole.hexdigest() if content else "", tuple(chunks)


def tensors_in(descriptor: int, *, size_bytes: int, file: str) -> tuple[TensorEntry, ...]:
    """The tensors of an open safetensors file. Raises InvalidField naming file and tensor."""
    prefix = os.pread(descriptor, PREFIX_BYTES, 0)
    length = header_bytes(prefix, size_bytes=size_bytes, file=file)
    return tensors_of(os.pread(descriptor, length, PREFIX_BYTES), size_bytes=size_bytes, file=file)


class FileBlobs:
    """Blobs in a folder of this machine, or of a shared mount: writers need no lock.

    Args:
        root: the folder; made when it is not there. Everything below it is the store's.
        tier: L4 for the registry's own disk, L3 for a mount that all nodes have.
    """

    def __init__(self, root: Path, *, tier: WeightTier = WeightTier.L4_OBJECT) -> None:
        self.root = Path(os.path.realpath(root))
        self.tier = tier
        self.name = f"{'mount' if tier is WeightTier.L3_RACK else 'file'}://{self.root}"
        try:
            for name in ("sha256", "tmp", "corrupt"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidField(
                "blob_dir", str(root), f"give a folder that can be written ({error.strerror})"
            ) from error
        if not os.access(self.root / "tmp", os.W_OK | os.X_OK):
            raise InvalidField("blob_dir", str(root), "give a folder that can be written")
        self._sweep()

    def _sweep(self) -> None:
        """Remove what killed writers left: a living one holds a lock on its file."""
        with self._folder("tmp") as folder:
            for name in os.listdir(folder):  # noqa: PTH208 - a folder is held by its descriptor
                with contextlib.suppress(OSError):
                    descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(name, dir_fd=folder)
                    finally:
                        os.close(descriptor)

    # ------------------------------------------------------------------------ folders and files

    @contextmanager
    def _folder(self, *names: str, make: bool = False) -> Iterator[int]:
        """A descriptor of a folder below the root, reached without following any link."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        descriptor = os.open(self.root, flags)
        try:
            for name in names:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=descriptor)
                inner = os.open(name, flags, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    def open(self, sha256: str) -> int | None:
        """A read descriptor of a blob, or None when it is not here. The caller closes it.

        Raises:
            InvalidField: not a digest.
            Refused: a link or something else stands where a file should be (B180).
        """
        name = check_digest(sha256, where="sha256").removeprefix("sha256:")
        try:
            with self._folder("sha256", name[:2]) as folder:
                descriptor = os.open(
                    name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder
                )
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENOTDIR, errno.EMLINK}:
                raise Refused(
                    f"blob {sha256}",
                    ["a symbolic link or a foreign file stands in the store"],
                    "remove it from the store's folder and publish the bytes again",
                ) from error
            raise Unavailable(
                f"blob {sha256} cannot be read ({error.strerror})", "look at the store's folder"
            ) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise Refused(f"blob {sha256}", ["it is not a regular file"], "remove it")
        return descriptor

    def size(self, sha256: str) -> int | None:
        """Bytes of a stored blob, None when it is not here. See `open` for errors."""
        descriptor = self.open(sha256)
        if descriptor is None:
            return None
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    # ------------------------------------------------------------------------------- writing

    @contextmanager
    def writer(self, sha256: str) -> Iterator[BlobWriter]:
        """A place to write one blob; what is not committed by the end leaves no trace.

        Raises:
            InvalidField: not a digest.
            Unavailable: the store's disk is full or cannot be written.
        """
        name = check_digest(sha256, where="sha256").removeprefix("sha256:")
        try:
            with (
                self._folder("tmp") as tmp,
                self._folder("sha256", name[:2], make=True) as shard,
                BlobWriter(name, tmp, shard) as writer,
            ):
                yield writer
        except OSError as error:
            full = error.errno in {errno.ENOSPC, errno.EDQUOT}
            what = f"{self.name}: blob {sha256} cannot be written ({error.strerror})"
            log.error("the byte store cannot be written", extra={"why": what})
            raise Unavailable(
                what,
                f"free disk space at {self.root}" if full else f"look at the folder {self.root}",
                retry_after_s=30.0,
            ) from error

    async def put_stream(
        self, sha256: str, pieces: AsyncIterator[bytes], *, size_max: int = BLOB_BYTES_MAX
    ) -> bool:
        """Write a blob from a stream, hashing on the way; True when it was not here before.

        Raises:
            InvalidField: the content is not what its name says, or is longer than `size_max`;
                nothing is kept.
        """
        with self.writer(sha256) as writer:
            batch: list[bytes] = []
            held = 0
            async for piece in pieces:
                batch.append(piece)
                held += len(piece)
                if writer.size_bytes + held > size_max:
                    raise too_long(size_max)
                if held >= WRITE_BATCH_BYTES:
                    await asyncio.to_thread(writer.write, *batch)
                    batch, held = [], 0
            await asyncio.to_thread(writer.write, *batch)
            return await asyncio.to_thread(writer.commit)

    async def put_file(
        self, sha256: str, path: Path, *, progress: Callable[[int], None] | None = None
    ) -> bool:
        """Copy a file in, hashing on the way; True when it was not here before.

        Raises:
            InvalidField: the file's content is not (any more) what the digest says.
        """

        def copy() -> bool:
            with path.open("rb", buffering=0) as source, self.writer(sha256) as writer:
                buffer = memoryview(bytearray(READ_BYTES))
                while got := source.readinto(buffer):
                    writer.write(buffer[:got])
                    if progress is not None:
                        progress(got)
                return writer.commit()

        return await asyncio.to_thread(copy)

    async def length(self, sha256: str) -> int | None:
        """See `ByteStore`."""
        return await asyncio.to_thread(self.size, sha256)

    async def has(self, sha256: str, size_bytes: int) -> bool:
        """True when the blob is here in its full length."""
        return await self.length(sha256) == size_bytes

    async def stream(self, sha256: str, *, begin: int, end: int) -> AsyncIterator[bytes]:
        """See `ByteStore`."""
        descriptor = await asyncio.to_thread(self.open, sha256)
        if descriptor is None:
            raise not_stored(sha256)
        try:
            at = begin
            while at < end:
                piece = await _read(descriptor, min(PIECE_BYTES, end - at), at)
                if not piece:  # the file is shorter: break off rather than send other bytes
                    raise ended_early(self.name, sha256, at, end)
                at += len(piece)
                yield piece
        finally:
            os.close(descriptor)

    async def presigned(self, sha256: str, *, ttl_s: float) -> str | None:
        """See `ByteStore`: a folder has no URL of its own."""
        del sha256, ttl_s
        return None

    # ------------------------------------------------------------------------------ checking

    async def missing(self, files: Sequence[FileEntry]) -> tuple[str, ...]:
        """See `Blobs`."""
        return await asyncio.to_thread(self._missing, files)

    def _missing(self, files: Sequence[FileEntry]) -> tuple[str, ...]:
        reasons: list[str] = []
        for entry in files:
            size = self.size(entry.sha256)
            if size is None:
                reasons.append(f"{entry.path}: no bytes of {entry.sha256} are stored")
            elif size != entry.size_bytes:
                reasons.append(
                    f"{entry.path}: {size} bytes of {entry.sha256} are stored, not "
                    f"{entry.size_bytes}"
                )
        return tuple(reasons)

    async def inspect(self, manifest: Manifest, *, content: bool) -> tuple[FileCheck, ...]:
        """See `Blobs`."""
        return tuple(
            [
                await asyncio.to_thread(self._inspect_file, entry, manifest, content=content)
                for entry in manifest.files
            ]
        )

    def _inspect_file(self, entry: FileEntry, manifest: Manifest, *, content: bool) -> FileCheck:
        def found(problem: str) -> FileCheck:
            return FileCheck(entry.path, entry.size_bytes, problem)

        try:
            descriptor = self.open(entry.sha256)
        except Refused as refusal:
            return found(str(refusal))
        if descriptor is None:
            return found("missing from the store")
        try:
            size, sha256, chunks = hash_file(
                descriptor, chunk_bytes=manifest.chunk_bytes, content=content
            )
            fault = content_fault(entry, Content(size, sha256, chunks))
            if fault:
                self._take_out(entry.sha256, descriptor)
                return found(fault)
            return found(
                size_fault(entry, size)
                or chunk_fault(entry, chunks, manifest.chunk_bytes)
                or _tensor_fault(entry, descriptor, manifest)
            )
        finally:
            os.close(descriptor)

    def _take_out(self, sha256: str, descriptor: int) -> None:
        """Move the file that was read away, unless another one has taken its place meanwhile."""
        name = sha256.removeprefix("sha256:")
        with self._folder("sha256", name[:2]) as shard, self._folder("corrupt") as corrupt:
            with contextlib.suppress(FileNotFoundError):
                held = os.stat(name, dir_fd=shard, follow_symlinks=False)
                if os.path.samestat(held, os.fstat(descriptor)):
                    os.rename(name, name, src_dir_fd=shard, dst_dir_fd=corrupt)
            os.fsync(shard)


def _tensor_fault(entry: FileEntry, descriptor: int, manifest: Manifest) -> str:
    """The tensors that a safetensors file says it has, against those of the manifest."""
    if not has_tensors(entry):
        return ""
    try:
        held = tensors_in(descriptor, size_bytes=entry.size_bytes, file=entry.path)
    except InvalidField as error:
        return str(error)
    return tensor_fault(entry, held, manifest)


async def _read(descriptor: int, size: int, at: int) -> bytes:
    """Read in a thread; the descriptor stays open while one reads, whoever is cancelled."""
    reading = asyncio.get_running_loop().run_in_executor(None, os.pread, descriptor, size, at)
    try:
        return await asyncio.shield(reading)
    finally:
        if not reading.done():
            await asyncio.wait([reading])


class BlobWriter:
    """One blob on its way in: hashed while it is written, published by one rename."""

    def __init__(self, name: str, tmp: int, shard: int) -> None:
        self._name, self._tmp, self._shard = name, tmp, shard
        self._hash = hashlib.sha256()
        self._part = ""
        self._descriptor = -1
        self._head = b""
        self.size_bytes = 0

    def __enter__(self) -> Self:
        while True:
            self._part = f"{self._name[:16]}.{os.getpid()}.{os.urandom(8).hex()}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self._descriptor = os.open(self._part, flags, 0o600, dir_fd=self._tmp)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            # A sweeper may have come between the two steps; then the file has no name any more.
            if os.fstat(self._descriptor).st_nlink:
                return self
            os.close(self._descriptor)

    def write(self, *pieces: bytes | memoryview) -> None:
        """Append."""
        for piece in pieces:
            self._hash.update(piece)
            if len(self._head) < HEAD_BYTES:
                self._head += bytes(piece[:HEAD_BYTES])
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            self.size_bytes += len(piece)

    def commit(self) -> bool:
        """Make it visible under its name; False when the same bytes were there already.

        Raises:
            InvalidField: the content's sha256 is another one; nothing is kept.
        """
        found = self._hash.hexdigest()
        if found != self._name:
            raise other_content(
                f"sha256:{self._name}", f"sha256:{found}", self._head, self.size_bytes
            )
        with contextlib.suppress(OSError):
            held = os.stat(self._name, dir_fd=self._shard, follow_symlinks=False)
            if stat.S_ISREG(held.st_mode) and held.st_size == self.size_bytes:
                return False
        os.fchmod(self._descriptor, 0o444)
        os.fsync(self._descriptor)
        os.rename(self._part, self._name, src_dir_fd=self._tmp, dst_dir_fd=self._shard)
        self._part = ""
        os.fsync(self._shard)
        return True

    def __exit__(self, *_exception: object) -> None:
        if self._part:
            with contextlib.suppress(OSError):
                os.unlink(self._part, dir_fd=self._tmp)
        os.close(self._descriptor)
