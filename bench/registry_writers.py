"""Writers of a registry that is being killed, and what each of them was told is stored.

Owns the account of what was accepted (`Accepted`) and its comparison with what is there afterwards.
Handed to `bench.registry_kills`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from readyplane.client import RegistryClient
from readyplane.core.errors import Conflict, ReadyplaneError
from readyplane.core.identity import Manifest, chunk_hash, digest_of
from readyplane.core.trust import envelope_of, payload_of, read_envelope, signed_message
from readyplane.kit.signing import SigningKey, verify_ed25519
from readyplane_registry.blob_files import FileBlobs
from readyplane_registry.ingest import RemoteBlobs

CHUNK_BYTES = 4096
BLOB_BYTES = 48 * 1024
CALL_S_MAX = 10.0
READERS = 16
PREFIX = "kills-"
"""Of the models that writers publish with bytes; others may lie elsewhere."""


@dataclass
class Accepted:
    """What the registry said it had stored: a loss is whatever of it is not there."""

    manifests: dict[str, dict[str, Any]] = field(default_factory=dict)
    tags: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    unknown: int = 0

    @property
    def count(self) -> int:
        """Writes that were accepted."""
        moves = sum(len(moved) for moved in self.tags.values())
        return len(self.manifests) + moves + len(self.signatures) + len(self.origins)


def document_of(model: str, data: bytes, salt: str) -> dict[str, Any]:
    """A manifest of one file with one tensor."""
    pieces = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    return {
        "schema": "readyplane/manifest/1",
        "kind": "weights",
        "model": model,
        "files": [
            {
                "path": "weights.raw",
                "size_bytes": len(data),
                "sha256": "sha256:" + hashlib.sha256(data).hexdigest(),
                "chunks": [chunk_hash(piece) for piece in pieces],
                "purpose": "weights",
            }
        ],
        "tensors": [
            {
                "name": "w",
                "dtype": "U8",
                "shape": [len(data)],
                "file": "weights.raw",
                "offset_bytes": 0,
                "size_bytes": len(data),
            }
        ],
        "chunk_bytes": CHUNK_BYTES,
        "config": {"max_model_len": 4096, "vocab_size": 512, "salt": salt},
    }


class Writer:
    """One publisher: bytes, manifest, origin, signature, tag, again and again."""

    def __init__(
        self, name: str, *, grpc: str, http: str, folder: Path, key: SigningKey, told: Accepted
    ) -> None:
        self._name, self._grpc, self._http = name, grpc, http
        self._folder, self._key, self._told = folder, key, told
        self._count = 0

    async def write(self) -> None:
        """Until cancelled; a call without an answer is neither accepted nor refused."""
        client = RegistryClient(self._grpc, timeout_s=CALL_S_MAX)
        blobs = RemoteBlobs(self._http)
        try:
            while True:
                try:
                    await self._publish(client, blobs)
                except (ReadyplaneError, OSError):
                    self._told.unknown += 1
                    await asyncio.sleep(0.01)
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await client.aclose()

    async def _publish(self, client: RegistryClient, blobs: RemoteBlobs) -> None:
        self._count += 1
        data = os.urandom(BLOB_BYTES)
        document = document_of(self._name, data, str(self._count))
        digest = digest_of(Manifest.from_document(document).document())
        path = self._folder / f"{self._name}.bin"
        path.write_bytes(data)
        sha256 = document["files"][0]["sha256"]
        await client.hold_upload(f"{self._name}/{self._count}", [sha256])
        await blobs.put_file(sha256, path)
        found, _created = await client.publish_manifest(document)
        assert found == digest
        self._told.manifests[digest] = document
        await client.record_origin(digest, {"commit": sha256[-40:]})
        self._told.origins[digest] = sha256[-40:]
        await client.sign_manifest(
            digest, public_key=self._key.public_key, envelope=self._key.envelope(digest)
        )
        self._told.signatures[digest] = self._key.key_id
        await self._move(client, f"{self._name}/latest", digest)
        await client.hold_upload(f"{self._name}/{self._count}", (), release=True)

    async def _move(self, client: RegistryClient, tag: str, digest: str) -> None:
        """By compare-and-set, from where it really points: the last answer may have been lost."""
        history = []
        if tag in self._told.tags or self._count > 1:
            with contextlib.suppress(ReadyplaneError):
                history = await client.list_tags(tag)
        expected = history[0].digest if history else ""
        with contextlib.suppress(Conflict):
            moved = await client.set_tag(tag, digest, expected_digest=expected)
            self._told.tags.setdefault(tag, []).append((moved.version, moved.digest))


@dataclass
class Findings:
    """What is wrong afterwards: `lost` was accepted and is not there, `half` is there in part."""

    lost: list[str] = field(default_factory=list)
    half: list[str] = field(default_factory=list)


async def compare(told: Accepted, *, grpc: str, blob_dir: Path) -> Findings:
    """Read everything back and compare it with what was accepted, and with itself."""
    found = Findings()
    async with _reader(grpc) as client:
        await _in_turns([_manifest(client, d, told, found) for d in sorted(told.manifests)])
        for tag, moves in sorted(told.tags.items()):
            history = {t.version: t.digest for t in await client.list_tags(tag)}
            found.lost += [f"{tag} {v}" for v, digest in moves if history.get(v) != digest]
            if sorted(history) != list(range(1, len(history) + 1)):
                found.half.append(f"versions of {tag}: {sorted(history)}")
        listed = [s for s in await client.list_manifests() if s.model.startswith(PREFIX)]
        await _in_turns([_whole(client, s.digest, blob_dir, found) for s in listed])
    found.half += await asyncio.to_thread(_wrong_blobs, blob_dir)
    return found


@contextlib.asynccontextmanager
async def _reader(grpc: str) -> AsyncIterator[RegistryClient]:
    client = RegistryClient(grpc, timeout_s=CALL_S_MAX)
    try:
        yield client
    finally:
        await client.aclose()


async def _in_turns(work: list[Any]) -> None:
    gate = asyncio.Semaphore(READERS)

    async def one(each: Any) -> None:
        async with gate:
            await each

    await asyncio.gather(*(one(each) for each in work))


async def _manifest(client: RegistryClient, digest: str, told: Accepted, found: Findings) -> None:
    try:
        manifest = await client.get_manifest(digest)
        trail = await client.trail(digest)
    except ReadyplaneError as error:
        found.lost.append(f"{digest}: {error}")
        return
    if manifest != Manifest.from_document(told.manifests[digest]):
        found.lost.append(f"{digest}: another document")
    if digest in told.origins and trail.origin.get("commit") != told.origins[digest]:
        found.lost.append(f"{digest}: origin")
    if digest in told.signatures:
        held = {s.key_id: s for s in trail.signatures}.get(told.signatures[digest])
        if held is None:
            found.lost.append(f"{digest}: signature")


async def _whole(client: RegistryClient, digest: str, blob_dir: Path, found: Findings) -> None:
    """What is listed, accepted or not, can be read, verifies, and has its bytes."""
    try:
        manifest = await client.get_manifest(digest)
        trail = await client.trail(digest)
    except ReadyplaneError as error:
        found.half.append(f"{digest}: listed, but {error}")
        return
    message = signed_message(payload_of(digest))
    for held in trail.signatures:
        if envelope_of(digest, held.public_key, _raw(held.envelope)) != held.envelope:
            found.half.append(f"{digest}: envelope")
        if not verify_ed25519(held.public_key, _raw(held.envelope), message):
            found.half.append(f"{digest}: signature does not verify")
    for entry in manifest.files:
        name = entry.sha256.removeprefix("sha256:")
        path = blob_dir / "sha256" / name[:2] / name
        if not path.is_file() or path.stat().st_size != entry.size_bytes:
            found.half.append(f"{digest}: bytes of {entry.path}")


def _raw(envelope: str) -> bytes:
    return read_envelope(envelope)[2]


def _wrong_blobs(blob_dir: Path) -> list[str]:
    FileBlobs(blob_dir)  # sweeps what killed writers left, as each start does
    wrong = [
        f"blob {path.name}"
        for path in blob_dir.glob("sha256/*/*")
        if hashlib.sha256(path.read_bytes()).hexdigest() != path.name
    ]
    return wrong + [f"left over: {path.name}" for path in blob_dir.glob("tmp/*")]
