"""What every byte store promises: in memory, in a folder, on a mount, and in a real S3 server."""

import asyncio
import os
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from readyplane.core.errors import InvalidField, NotFound, Unavailable
from readyplane.core.identity import FileEntry, Manifest
from readyplane.core.startup import WeightTier
from readyplane.kit.clock import SystemClock
from readyplane_registry.blob_objects import PART_BYTES, ObjectBlobs
from readyplane_registry.blob_urls import open_store, removal_of
from readyplane_registry.blobs import ByteStore, MemoryBlobs
from readyplane_registry.collecting import ByteRemoval
from tests.registry_data import document, file_entry, safetensors, sha256

DATA = os.urandom(3 * 1024 * 1024 + 17)
DIGEST = sha256(DATA)
UNKNOWN = "sha256:" + "0" * 64


@pytest.fixture(params=["memory", "file", "mount", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ByteStore:
    if request.param == "memory":
        return MemoryBlobs()
    url = (
        request.getfixturevalue("s3_url")
        if request.param == "s3"
        else f"{request.param}://{tmp_path}/store"
    )
    return open_store(url, clock=SystemClock(), random=lambda: 0.5)


async def sent(data: bytes, size: int = 100_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def read(store: ByteStore, digest: str, begin: int, end: int) -> bytes:
    return b"".join([piece async for piece in store.stream(digest, begin=begin, end=end)])


def entry(data: bytes, path: str = "weights.raw") -> FileEntry:
    return FileEntry(path, len(data), sha256(data), ())


async def test_what_is_stored_is_read_back_by_ranges(store: ByteStore) -> None:
    assert await store.length(DIGEST) is None and not await store.has(DIGEST, len(DATA))
    assert await store.put_stream(DIGEST, sent(DATA)) is True
    assert await store.put_stream(DIGEST, sent(DATA, 7_777)) is False, "it was there"
    assert await store.length(DIGEST) == len(DATA)
    assert await store.has(DIGEST, len(DATA)) and not await store.has(DIGEST, 1)
    for begin, end in [(0, len(DATA)), (5, 9), (len(DATA) - 3, len(DATA)), (17, 17)]:
        assert await read(store, DIGEST, begin, end) == DATA[begin:end]
    pieces = [len(piece) async for piece in store.stream(DIGEST, begin=0, end=len(DATA))]
    assert len(pieces) > 1, "a stream, not a whole blob"


async def test_an_empty_blob_is_a_blob(store: ByteStore) -> None:
    digest = sha256(b"")
    assert await store.put_stream(digest, sent(b"")) is True
    assert await store.length(digest) == 0 and await read(store, digest, 0, 0) == b""


async def test_what_is_not_there_is_not_found_and_no_digest_is_no_name(store: ByteStore) -> None:
    with pytest.raises(NotFound):
        await read(store, UNKNOWN, 0, 1)
    for wrong in ("", "sha256:12", "../../etc/passwd"):
        with pytest.raises(InvalidField):
            await store.length(wrong)
        with pytest.raises(InvalidField):
            await store.put_stream(wrong, sent(b"x"))


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "an empty body with"),
        (DATA[:-1], f"{len(DATA) - 1} bytes with"),
        (b"\n<!DOCTYPE html><title>Sign in</title>", "an HTML page of 38 bytes with"),
        (b"<?xml version='1.0'?><Error/>", "an XML document of 29 bytes with"),
        (DATA[:-1] + b"!", f"{len(DATA)} bytes with"),
        (DATA * 4, f"{4 * len(DATA)} bytes with"),
    ],
    ids=["empty", "early end", "HTML", "XML", "flipped", "longer than a part"],
)
async def test_b115_wrong_bytes_are_never_stored_and_the_right_ones_still_can_be(
    store: ByteStore, body: bytes, kind: str
) -> None:
    """B115, B122: what is not what its name says leaves nothing, and is called by its kind."""
    with pytest.raises(InvalidField, match=kind):
        await store.put_stream(DIGEST, sent(body))
    assert await store.length(DIGEST) is None
    assert await store.put_stream(DIGEST, sent(DATA)) is True
    assert await read(store, DIGEST, 0, 9) == DATA[:9]
    with pytest.raises(InvalidField, match=kind):
        await store.put_stream(DIGEST, sent(body))
    assert await read(store, DIGEST, 0, 9) == DATA[:9], "the right ones stay"


async def test_a_body_that_is_too_long_or_breaks_off_leaves_nothing(store: ByteStore) -> None:
    with pytest.raises(InvalidField, match="over 1000 bytes"):
        await store.put_stream(DIGEST, sent(DATA), size_max=1000)

    async def breaks() -> AsyncIterator[bytes]:
        yield DATA[: 2 * 1024 * 1024]
        raise ConnectionResetError("the sender went away")

    with pytest.raises((ConnectionResetError, Unavailable)):
        await store.put_stream(DIGEST, breaks())
    assert await store.length(DIGEST) is None


async def test_b116_ten_writers_of_one_blob_one_of_them_killed(store: ByteStore) -> None:
    """B116: everybody else ends with a whole blob; nobody waits for the dead one."""
    begun = asyncio.Event()

    async def hangs() -> AsyncIterator[bytes]:
        yield DATA[:1000]
        begun.set()
        await asyncio.sleep(60.0)

    killed = asyncio.create_task(store.put_stream(DIGEST, hangs()))
    await begun.wait()
    others = await asyncio.wait_for(
        asyncio.gather(*(store.put_stream(DIGEST, sent(DATA, 50_000 + n)) for n in range(9))), 20.0
    )
    assert any(others)
    killed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await killed
    assert await read(store, DIGEST, 0, len(DATA)) == DATA


async def test_a_file_is_copied_in_and_a_changed_one_refused(
    store: ByteStore, tmp_path: Path
) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(DATA)
    told: list[int] = []
    assert await store.put_file(DIGEST, path, progress=told.append) is True
    assert sum(told) == len(DATA) and await store.has(DIGEST, len(DATA))
    path.write_bytes(DATA[1:])
    with pytest.raises(InvalidField):
        await store.put_file(DIGEST, path)


async def test_missing_files_are_told_by_the_storage_each_with_the_reason(store: ByteStore) -> None:
    await store.put_stream(DIGEST, sent(DATA))
    other = FileEntry("b", 3, UNKNOWN, ())
    assert await store.missing([entry(DATA)]) == ()
    (told,) = await store.missing([entry(DATA), other])
    assert told.startswith("b: ") and UNKNOWN in told
    (told,) = await store.missing([FileEntry("c", 1, DIGEST, ())])
    assert told.startswith("c: ")


# --------------------------------------------------------- what only a store with real bytes can do


@pytest.fixture(params=["file", "mount", "s3"])
def real(request: pytest.FixtureRequest, tmp_path: Path) -> ByteStore:
    url = (
        request.getfixturevalue("s3_url")
        if request.param == "s3"
        else f"{request.param}://{tmp_path}/store"
    )
    return open_store(url, clock=SystemClock(), random=lambda: 0.5)


def removal(store: ByteStore) -> ByteRemoval:
    return removal_of(store, SystemClock())


async def test_b124_existence_is_asked_of_the_storage_after_a_deletion(real: ByteStore) -> None:
    """B124: collected and published again, it is demanded again, and then can be fetched."""
    await real.put_stream(DIGEST, sent(DATA))
    assert await real.missing([entry(DATA)]) == ()
    (held,) = await removal(real).stored()
    assert (held.sha256, held.size_bytes) == (DIGEST, len(DATA)) and 0 <= held.age_s < 60
    assert await removal(real).remove(DIGEST) == len(DATA)
    assert await removal(real).remove(DIGEST) == 0
    assert await removal(real).stored() == []
    assert len(await real.missing([entry(DATA)])) == 1 and not await real.has(DIGEST, len(DATA))
    with pytest.raises(NotFound):
        await read(real, DIGEST, 0, 1)
    assert await real.put_stream(DIGEST, sent(DATA)) is True, "the upload is demanded"
    assert await read(real, DIGEST, 0, 5) == DATA[:5]


async def test_stored_bytes_are_compared_with_chunks_tensors_and_content(real: ByteStore) -> None:
    tensors = {"a": b"\1" * 9_000, "b": b"\2" * 50}
    data = safetensors(tensors)
    begin = len(data) - 9_050
    wrong = document("m", files=[file_entry("m.safetensors", data)])
    shape = {"dtype": "U8", "file": "m.safetensors"}
    wrong["tensors"] = [
        {"name": "a", "shape": [9_000], "offset_bytes": begin, "size_bytes": 9_000, **shape},
        {"name": "b", "shape": [50], "offset_bytes": begin + 9_000, "size_bytes": 50, **shape},
    ]
    right = Manifest.from_document(wrong)
    (check,) = await real.inspect(right, content=True)
    assert "missing from the store" in check.problem
    await real.put_stream(sha256(data), sent(data))
    (check,) = await real.inspect(right, content=True)
    assert check.problem == ""
    wrong["files"][0]["chunks"][1] = "0" * 32
    (check,) = await real.inspect(Manifest.from_document(wrong), content=False)
    assert check.problem.startswith("chunk 1 (from byte 4096)")
    wrong["files"] = [file_entry("m.safetensors", data)]
    wrong["tensors"][1]["shape"] = [25, 2]
    (check,) = await real.inspect(Manifest.from_document(wrong), content=False)
    assert "tensor 'b': shape is" in check.problem


async def test_more_than_a_part_goes_in_and_out_whole(real: ByteStore) -> None:
    data = os.urandom(2 * PART_BYTES + 3)
    assert await real.put_stream(sha256(data), sent(data, 1_000_003)) is True
    assert await read(real, sha256(data), 0, len(data)) == data
    at = PART_BYTES - 2
    assert await read(real, sha256(data), at, at + 4) == data[at : at + 4], "across two parts"
    exact = data[:PART_BYTES]
    assert await real.put_stream(sha256(exact), sent(exact)) is True
    assert await real.length(sha256(exact)) == PART_BYTES


async def test_each_store_says_its_tier_and_name(real: ByteStore) -> None:
    kind = real.name.partition("://")[0]
    assert real.tier is (WeightTier.L3_RACK if kind == "mount" else WeightTier.L4_OBJECT)
    assert kind in {"file", "mount", "s3"} and "?" not in real.name


async def test_an_object_store_hands_out_urls_that_need_no_credentials(real: ByteStore) -> None:
    await real.put_stream(DIGEST, sent(DATA))
    url = await real.presigned(DIGEST, ttl_s=60.0)
    if not isinstance(real, ObjectBlobs):
        assert url is None
        return
    assert url is not None and "readyplane-test-secret" not in url

    def fetch() -> tuple[int, bytes]:
        asked = urllib.request.Request(url, headers={"range": "bytes=3-9"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return answer.status, answer.read()

    assert await asyncio.to_thread(fetch) == (206, DATA[3:10])
